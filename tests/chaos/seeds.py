"""One seed of the chaos runs, from what it draws to what must hold: a cell of the nightly tier.

python -m tests.chaos.seeds SEED [SEED ...]       plays seeds by hand and prints what was found
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from areal.utils import fs
from areal.utils.stats_logger import read_stats
from tests.chaos import books, traces
from tests.chaos.play import LIMIT_S, Play
from tests.chaos.scenario import BATCH, SAVE_EVERY, STEPS, Scenario, draw, run_settings
from tests.full.cell import ROOT, CellContext
from tests.trainer_runs import tiny_policy, weights

ROWS_PER_EPOCH = 32
TAIL = 4000


def undisturbed(shared: Path, policy: str) -> books.Lineage:
    """The run that nobody strikes, in one process; made by the first who asks. Without a filter."""
    place = shared / "chaos-undisturbed"
    if not place.is_dir():
        with fs.atomic_directory(place) as aside:
            command = [sys.executable, "-m", "tests.chaos.controller", str(aside / "run"), policy]
            (aside / "run").mkdir()
            settings = [*run_settings(filtering=False), "scheduler.type=inline"]
            subprocess.run([*command, *settings], cwd=ROOT, check=True, timeout=LIMIT_S, capture_output=True)
    return books.follow(books.read_diary(place / "run" / "diary.jsonl"), ROWS_PER_EPOCH)


def policy_of(shared: Path) -> str:
    """The initial model of all seeds."""
    place = shared / "chaos-policy"
    if not place.is_dir():
        with fs.atomic_directory(place) as aside:
            tiny_policy(aside)
    return str(place)


def run(context: CellContext, seed: int) -> None:
    """Play ``seed`` and check everything that must hold whatever was struck."""
    scenario = draw(seed)
    policy = policy_of(context.shared)
    play = Play(scenario, context.work / "run", policy)
    with traces.stranger() as other:
        code = play.run()
        context.expect(other.poll() is None, "a process of another run was ended")
    context.facts |= {
        "eta": scenario.eta,
        "replicas": scenario.replicas,
        "ranks": scenario.ranks,
        "recover_every": scenario.freq_steps,
        "filter": scenario.filtering,
        "strikes": play.strikes,
        "gone_s": [round(seconds, 1) for seconds in play.gone_s],
    }
    context.failures += play.problems
    context.expect(bool(play.strikes) and not play.strikes[0].startswith("missed"), "the run ended before any strike")
    if not context.expect(code == 0, f"the controller ended with {code}: {_tail(play.log_file)}"):
        return
    _check_books(context, scenario, play.root, policy)


def _check_books(context: CellContext, scenario: Scenario, root: Path, policy: str) -> None:
    lineage = books.follow(books.read_diary(root / "diary.jsonl"), ROWS_PER_EPOCH)
    context.facts["went_on_at"] = lineage.opened
    context.facts["rows"] = lineage.finished["counts"] if lineage.finished is not None else None
    context.failures += lineage.problems
    context.expect(sorted(lineage.steps) == list(range(STEPS)), f"steps trained: {sorted(lineage.steps)}")
    sizes = {step: len(rows) for step, rows in lineage.steps.items() if len(rows) != BATCH}
    context.expect(not sizes, f"steps without a full batch of {BATCH}: {sizes}")
    if not scenario.filtering:
        expected = undisturbed(context.shared, policy).trained()
        more, less = lineage.trained() - expected, expected - lineage.trained()
        context.expect(not more and not less, f"trained more often than undisturbed: {more}, less often: {less}")
    stats = read_stats(next(root.glob("logs/*/tests/grpo/stats.jsonl")))
    numbers = [row["global_step"] for row in stats]
    context.expect(numbers == list(range(STEPS)), f"steps in stats.jsonl: {numbers}")
    oldest = max(row["stats"].get("rollout/staleness/max", 0.0) for row in stats)
    context.expect(oldest <= scenario.eta, f"samples of age {oldest:g} at eta={scenario.eta}")
    _check_checkpoints(context, root / "checkpoints")
    tokens = list(root.glob("logs/*/tests/grpo/.token-*"))
    context.expect(not tokens, f"tokens of runs are left: {tokens}")


def _check_checkpoints(context: CellContext, directory: Path) -> None:
    found = sorted(int(path.name.rpartition("globalstep")[2]) for path in directory.glob("*/tests/grpo/default/epoch*"))
    expected = [step for step in range(STEPS) if (step + 1) % SAVE_EVERY == 0 or step == STEPS - 1]
    context.expect(found == expected, f"checkpoints of steps {found}, expected {expected}")
    for path in directory.glob("*/tests/grpo/default/epoch*"):
        context.expect((path / "manifest.json").is_file() and bool(weights(path)), f"{path.name} is not complete")
    context.expect(not list(directory.glob("**/.*aside*")), "temporary names are left among the checkpoints")


def _tail(path: Path) -> str:
    return path.read_text(errors="replace")[-TAIL:]


def main(argv: list[str]) -> int:
    """Play seeds; 0 if all held."""
    failed = 0
    with tempfile.TemporaryDirectory(prefix="chaos") as shared:
        for number, seed in enumerate(map(int, argv)):
            context = CellContext(Path(shared) / f"play-{number}", Path(shared))
            context.work.mkdir()
            began = time.monotonic()
            run(context, seed)
            failed += bool(context.failures)
            facts: dict[str, Any] = {"seconds": round(time.monotonic() - began), **context.facts}
            sys.stdout.write(f"seed {seed}: {'FAILED' if context.failures else 'held'} {facts}\n")
            sys.stdout.writelines(f"  {failure}\n" for failure in context.failures)
            sys.stdout.flush()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
