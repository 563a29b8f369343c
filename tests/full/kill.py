"""Kill-while-saving cells: a run that is killed inside a save and started again ends with the bits it would have had.

The reference is the same synchronous run, never interrupted; it is made once. A cell kills the run once to three times,
at a file operation of a save (or a moment after it, or at any time), and looks at what is on the disk after each kill:
whatever has the name of a complete checkpoint or recover point must be one.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from areal.utils import fs
from areal.utils.recover import INFO_DIR, RecoverInfo
from areal.utils.stats_logger import read_stats
from tests.full.cell import ROOT, CellContext
from tests.full.kill_child import STEPS
from tests.trainer_runs import seeded, tiny_policy, weights

CHILD_LIMIT_S = 120
MAX_DELAY_MS = 40.0
POLICY_SEED = 5


@dataclass(frozen=True)
class Reference:
    """The uninterrupted run: its directory, and how long and how many file operations it took."""

    root: Path
    policy: str
    operations: int
    seconds: float


def reference(shared: Path) -> Reference:
    """The uninterrupted run, made by the first cell that asks."""
    place = shared / "kill-reference"
    if not place.is_dir():
        with fs.atomic_directory(place) as aside:
            tiny_policy(aside / "policy", seed=POLICY_SEED)
            done = start(aside / "run", str(aside / "policy"), "--report", str(aside / "report.json"))
            if done.returncode != 0:
                raise RuntimeError(f"the uninterrupted run failed: {done.stderr[-2000:]}")
    report = json.loads((place / "report.json").read_text())
    return Reference(place / "run", str(place / "policy"), report["operations"], report["seconds"])


def start(root: Path, policy: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the child until it ends, one way or another."""
    command = [sys.executable, "-m", "tests.full.kill_child", str(root), policy, *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=CHILD_LIMIT_S, check=False)


def draw_kill(rng: random.Random, whole: Reference, first: bool) -> list[str]:
    """Options of the child that say when it dies; a resumed run is killed early, or it would end before."""
    kind = rng.choice(["operation", "operation", "delayed", "time"])
    share = 1.0 if first else 0.4
    if kind == "time":
        return ["--after-s", f"{rng.uniform(0.4, 0.4 + 0.6 * share) * whole.seconds:.3f}"]
    options = ["--at-operation", str(rng.randint(1, max(1, int(share * whole.operations))))]
    return options if kind == "operation" else [*options, "--delay-ms", f"{rng.uniform(0, MAX_DELAY_MS):.2f}"]


def run(context: CellContext, seed: int) -> None:
    """Kill, look, start again, until the run has ended; then compare everything with the reference."""
    rng = random.Random(seed)
    whole = reference(context.shared)
    root = context.work / "run"
    kills = [draw_kill(rng, whole, first=k == 0) for k in range(rng.choice([1, 1, 1, 2, 2, 3]))]
    context.facts |= {"kills": [" ".join(kill) for kill in kills], "resumed_after": []}
    for options in [*kills, []]:
        expected = newest_point(root)
        done = start(root, whole.policy, *options)
        killed = done.returncode == -signal.SIGKILL
        _check_start(context, done.stderr, expected, killed)
        if not killed:
            context.expect(done.returncode == 0, f"exit code {done.returncode}: {done.stderr[-1500:]}")
        check_disk(context, root, whole)
    context.facts["steps"] = STEPS
    _check_end(context, root, whole)


def _check_start(context: CellContext, log: str, expected: int | None, killed: bool) -> None:
    """The run resumed from the newest complete recover point, and from nothing else."""
    resumed = [line for line in log.splitlines() if "resumed after step" in line]
    context.facts["resumed_after"].append(expected)
    if expected is None:
        context.expect(not resumed, f"there was no complete recover point, yet: {resumed}")
    elif resumed or not killed:  # a kill may come before the line is written
        context.expect(
            any(f"resumed after step {expected} " in line for line in resumed),
            f"the newest point was step {expected}, but the log says: {resumed}",
        )


def newest_point(root: Path) -> int | None:
    """Step of the newest recover point by name, or None."""
    return max((int(path.name.removeprefix("globalstep")) for path in recover_points(root)), default=None)


def recover_points(root: Path) -> list[Path]:
    """Whatever has the name of a complete recover point."""
    return sorted(root.glob("checkpoints/*/tests/grpo/recover/globalstep*"))


def checkpoints(root: Path) -> dict[str, Path]:
    """Whatever has the name of a complete Hugging Face checkpoint."""
    return {path.name: path for path in root.glob("checkpoints/*/tests/grpo/default/epoch*")}


def leftovers(root: Path) -> list[str]:
    """Temporary names among the checkpoints, relative to ``root``."""
    return sorted(str(path.relative_to(root)) for path in (root / "checkpoints").rglob(".*.aside-*"))


def check_disk(context: CellContext, root: Path, whole: Reference) -> None:
    """Every checkpoint holds the reference's bits, every recover point can be read and belongs to its step."""
    known = checkpoints(whole.root)
    for name, path in checkpoints(root).items():
        problem = _difference(path, known[name]) if name in known else "the reference has no such checkpoint"
        context.expect(problem is None, f"{name}: {problem}")
    for point in recover_points(root):
        try:
            step = RecoverInfo.load(point / INFO_DIR).last_step_info.global_step
        except Exception as error:  # noqa: BLE001 - whatever it is, the point is not complete
            context.expect(False, f"{point.name} cannot be read: {type(error).__name__}: {error}")
        else:
            context.expect(point.name == f"globalstep{step}", f"{point.name} holds step {step}")


def _difference(path: Path, expected: Path) -> str | None:
    try:
        found, right = weights(path), weights(expected)
    except Exception as error:  # noqa: BLE001 - a torn file raises many types
        return f"it cannot be read: {type(error).__name__}: {error}"
    if found.keys() != right.keys():
        return f"it holds {len(found)} tensors, expected {len(right)}"
    different = [name for name in right if not torch.equal(found[name], right[name])]
    files = sorted(p.name for p in expected.iterdir()) == sorted(p.name for p in path.iterdir())
    if different:
        return f"{len(different)} tensors differ from the uninterrupted run's, {different[0]} first"
    return None if files else "it has other files than the uninterrupted run's"


def _check_end(context: CellContext, root: Path, whole: Reference) -> None:
    context.expect(
        checkpoints(root).keys() == checkpoints(whole.root).keys(),
        f"checkpoints at the end: {sorted(checkpoints(root))}",
    )
    stats, right = read_steps(root), read_steps(whole.root)
    context.expect([row["global_step"] for row in stats] == list(range(STEPS)), "stats.jsonl has other steps")
    equal = [seeded(row["stats"]) for row in stats] == [seeded(row["stats"]) for row in right]
    context.expect(equal, "statistics differ from the uninterrupted run's")
    context.facts["temporary_names_left"] = left = leftovers(root)
    context.expect(not left, f"temporary names are left: {left}")


def read_steps(root: Path) -> list[dict[str, Any]]:
    """Rows of the run's stats.jsonl."""
    return read_stats(next(root.glob("logs/*/tests/grpo/stats.jsonl")))
