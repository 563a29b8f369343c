"""The ``areal`` command: ``train`` a script, look at a run (``status``, ``stack``, ``plot``), ``replay`` a step, build
the environment of inference servers (``install-server``), and ``doctor`` an installation.

Start-up imports nothing heavy; each command imports what it needs.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path


def build_parser() -> argparse.ArgumentParser:
    """The parser of every sub-command."""
    parser = argparse.ArgumentParser(
        prog="areal", description="Asynchronous reinforcement learning for language models."
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    train = commands.add_parser(
        "train", help="run a training script", description="Run a training script; what follows it is passed on."
    )
    train.add_argument("script", help="the training script, such as examples/math/gsm8k_rl.py")
    train.add_argument("arguments", nargs=argparse.REMAINDER, help="--config FILE, key=value overrides, --dry-run")

    plot = commands.add_parser("plot", help="draw the reward curve of a run")
    plot.add_argument("run", type=Path, help="log directory of a run, or its stats.jsonl")
    plot.add_argument("--output", "-o", type=Path, help="PNG to write; default: reward_curve.png beside stats.jsonl")
    plot.add_argument("--key", default=None, help="statistic to draw; default: the training reward")

    status = commands.add_parser("status", help="show what a run is doing, or how it ended")
    status.add_argument("run", type=Path, help="log directory of a run, or the fileroot of exactly one run")
    status.add_argument("--json", action="store_true", help="print everything as one line of JSON")
    status.add_argument("--timeout", type=float, default=5.0, help="seconds to wait for the controller")

    stack = commands.add_parser("stack", help="show the Python stacks of a run's processes, even if it is stuck")
    stack.add_argument("run", type=Path, help="log directory of a run, or the fileroot of exactly one run")
    stack.add_argument("--timeout", type=float, default=10.0, help="seconds to wait for each way to get them")

    replay = commands.add_parser(
        "replay",
        help="run a captured failing step again and compare",
        description="Run a step that a run captured under failures/step_N; exits with 0 if it fails the same way.",
    )
    replay.add_argument("failure", type=Path, help="directory of the captured step")
    replay.add_argument("--tolerance", type=float, default=1e-4, help="largest relative difference that is the same")
    replay.add_argument(
        "--loss", help="pkg.module.name of the loss function, where the captured one has no import path"
    )
    replay.add_argument("--weight", help="the same for the loss weight function")
    replay.add_argument("--json", type=Path, help="write the report there, too")

    server = commands.add_parser("install-server", help="build the environment that vLLM or SGLang servers run in")
    server.add_argument("backend", choices=("vllm", "sglang"), help="which server")
    server.add_argument("directory", type=Path, help="directory of the environment; made by the command")
    server.add_argument("--device", choices=("cpu", "cuda"), help="what it shall run on; default: cuda if there is one")
    server.add_argument("--python", default=sys.executable, help="interpreter to build it with; default: this one")

    commands.add_parser("doctor", help="show versions, devices and optional parts, and what a missing one disables")
    return parser


def train(script: str, arguments: list[str]) -> int:
    """Run ``script`` as ``__main__`` with ``arguments``; ``--dry-run`` stops it once its plan is printed."""
    dry_run = "--dry-run" in arguments
    path = Path(script)
    if not path.is_file():
        sys.stderr.write(f"areal train: no such script: {script}\n")
        return 2
    sys.argv = [script, *[a for a in arguments if a != "--dry-run"]]
    sys.path.insert(0, str(path.resolve().parent))
    from areal.api.config_loader import DRY_RUN

    token = DRY_RUN.set(dry_run)
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        DRY_RUN.reset(token)
    return 0


def plot(run: Path, output: Path | None, key: str | None) -> int:
    """Draw a statistic of ``run`` over its steps and print the path of the picture."""
    from areal.utils.errors import DataError
    from areal.utils.plotting import plot_curve

    stats = run if run.is_file() else run / "stats.jsonl"
    if not stats.is_file():
        sys.stderr.write(f"areal plot: no stats.jsonl at {run}\n")
        return 2
    target = output or stats.with_name("reward_curve.png")
    try:
        plot_curve(stats, target, key=key)
    except DataError as exc:
        sys.stderr.write(f"areal plot: {exc}\n")
        return 2
    sys.stdout.write(f"{target}\n")
    return 0


def replay(failure: Path, options: argparse.Namespace, arguments: list[str]) -> int:
    """Run a captured step again: 0 it failed in the same way, 1 it did not, 2 it cannot be run here."""
    from areal.engine.core.replay import ranks_to_start, replay_step, start_ranks
    from areal.utils import environ, fs
    from areal.utils.dynamic_import import import_from_string
    from areal.utils.errors import ArealError

    try:
        ranks = ranks_to_start(failure)
        if ranks:
            return start_ranks(ranks, arguments)
        loss_fn, weight_fn = (import_from_string(path) if path else None for path in (options.loss, options.weight))
        report = replay_step(failure, loss_fn=loss_fn, weight_fn=weight_fn, tolerance=options.tolerance)
    except ArealError as exc:
        sys.stderr.write(f"areal replay: {exc}\n")
        return 2
    if environ.rank() == 0:
        sys.stdout.write("\n".join(report.lines()) + "\n")
        if options.json is not None:
            fs.atomic_write_json(options.json, report.as_dict())
    return 0 if report.reproduced else 1


def doctor() -> int:
    """Show what is installed; non-zero when a core part is missing."""
    from areal.tools.validate_installation import main as validate

    return validate([])


def main(argv: list[str] | None = None) -> int:
    """Entry point of the console script."""
    parser = build_parser()
    options = parser.parse_args(argv)
    if options.version:
        from areal import __version__

        sys.stdout.write(f"areal {__version__}\n")
        return 0
    if options.command == "train":
        return train(options.script, options.arguments)
    if options.command == "plot":
        return plot(options.run, options.output, options.key)
    if options.command == "replay":
        return replay(options.failure, options, sys.argv[1:] if argv is None else argv)
    if options.command in ("status", "stack"):
        from areal.tools import run_inspector

        if options.command == "status":
            return run_inspector.status(options.run, as_json=options.json, timeout_s=options.timeout)
        return run_inspector.stack(options.run, timeout_s=options.timeout)
    if options.command == "install-server":
        from areal.tools.install_server import main as install_server

        return install_server(options)
    if options.command == "doctor":
        return doctor()
    parser.print_help()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
