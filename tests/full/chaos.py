"""Chaos cells: short asynchronous runs in which workflows, rewards, prompts, disks and other threads misbehave.

Each seed draws sizes, limits and a handful of faults (``chaos_faults.py``). Whatever they are, the run must end with
the steps asked for, every one on a full batch and within the bound of staleness; its counters must be exactly those
that the injected faults make; every row must have one end; and nothing may be left running.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal.utils import stats_tracker
from areal.utils.process_pool import close_pools
from tests.full.cell import CellContext
from tests.full.chaos_faults import FAULTS, FaultPlan, expected_counts
from tests.full.chaos_workflow import ChaosWorkflow
from tests.trainer_runs import RecordingTrainer, log_dir, rl_config, rl_rows, stats_of, tiny_policy

EPISODE_TIMEOUT_S = 8
FULL_DISK = Path("/dev/full")  # every write to it fails as on a full disk
THREAD_GRACE_S = 5.0


@dataclass(frozen=True)
class Scenario:
    """What one seed draws."""

    faults: tuple[str, ...]
    share: float
    bad_rows: float
    eta: int
    steps: int
    batch: int
    samples: int
    retries: int
    filtering: str  # "", "refuses" or "raises"
    disturbing: bool
    full_disk: bool
    evaluating: bool
    overrides: tuple[str, ...]


def draw(seed: int) -> Scenario:
    """The scenario of a seed; seed by seed, every fault gets its turn."""
    rng = random.Random(seed)
    names = list(FAULTS)
    faults = {names[(5 * seed + k) % len(names)] for k in range(3)} | set(rng.sample(names, 3))
    batch = rng.choice([2, 4, 6])
    overrides = (
        f"rollout.max_concurrent_rollouts={rng.choice([batch, 2 * batch, 4 * batch])}",
        f"rollout.on_stale={rng.choice(['wait', 'wait', 'drop'])}",
        f"actor.ppo_n_minibatches={rng.choice([1, 2])}",
        f"gconfig.max_new_tokens={rng.choice([4, 8, 24])}",
        *(("recover.mode=on", "recover.freq_steps=3", "saver.freq_steps=4") if rng.random() < 0.4 else ()),
    )
    return Scenario(
        faults=tuple(sorted(faults)),
        share=rng.choice([0.1, 0.2, 0.35]),
        bad_rows=rng.choice([0.0, 0.05, 0.15]),
        eta=rng.choice([1, 1, 2, 3]),
        steps=rng.choice([8, 12]),
        batch=batch,
        samples=rng.choice([2, 4, 8]),
        retries=rng.choice([0, 1, 2]),
        filtering=rng.choice(["", "refuses", "raises"]),
        disturbing=rng.random() < 0.5,
        full_disk=rng.random() < 0.5,
        evaluating=rng.random() < 0.3,
        overrides=overrides,
    )


def build_config(scenario: Scenario, work: Path) -> Any:
    """The scenario as a configuration."""
    return rl_config(
        work / "run",
        tiny_policy(work / "policy"),
        f"rollout.max_head_offpolicyness={scenario.eta}",
        f"total_train_steps={scenario.steps}",
        "total_train_epochs=20",
        f"train_dataset.batch_size={scenario.batch}",
        f"gconfig.n_samples={scenario.samples}",
        f"actor.reward_norm.group_size={scenario.samples}",
        f"rollout.max_row_retries={scenario.retries}",
        "rollout.max_failure_share=1.0",
        f"rollout.episode_timeout_s={EPISODE_TIMEOUT_S}",
        "rollout.wait_timeout_s=120",
        "rollout.dump_to_file=true",
        *(
            (
                "evaluator.freq_steps=3",
                "valid_dataset={path: arithmetic, type: rl, batch_size: 4, dataset_kwargs: {start: 100, size: 6}}",
            )
            if scenario.evaluating
            else ()
        ),
        *scenario.overrides,
    )


def run(context: CellContext, seed: int) -> None:
    """Run the scenario of ``seed`` and check everything that must hold whatever happened."""
    scenario = draw(seed)
    config = build_config(scenario, context.work)
    (scratch := context.work / "scratch").mkdir()
    full = fill_disk(log_dir(config)) if scenario.full_disk and FULL_DISK.exists() else []
    plan = FaultPlan(seed, list(scenario.faults), scenario.share, scenario.bad_rows)
    refuses = {row for row in range(32) if scenario.filtering == "refuses" and row % 5 == 0}
    raises = {row for row in range(32) if scenario.filtering == "raises" and row % 7 == 0}
    before = set(threading.enumerate())
    stats_tracker.export_all(reset=True)
    kwargs = {"gconfig": config.gconfig, "tokenizer": config.tokenizer_path, "scratch": scratch}
    evaluation = FaultPlan(seed + 1000, list(scenario.faults), scenario.share, scenario.bad_rows)
    valid = rl_rows(config)[:6] if scenario.evaluating else None
    with RecordingTrainer(config, train_dataset=rl_rows(config), valid_dataset=valid) as trainer:
        with Disturber(trainer, seed, scenario.disturbing) as disturber:
            trainer.train(
                workflow=ChaosWorkflow(plan=plan, **kwargs),
                eval_workflow=ChaosWorkflow(plan=evaluation, **kwargs) if scenario.evaluating else None,
                dynamic_filter_fn=lambda table: _accept(int(table["row_id"][0]), refuses, raises),
            )
        rows = trainer.rollout.executor.state_dict()["rows"]
    close_pools()
    context.facts |= {
        "steps": scenario.steps,
        "eta": scenario.eta,
        "batch": f"{scenario.batch}x{scenario.samples}",
        "injected": dict(plan.injected),
        "disturbances": disturber.count,
        "filter": scenario.filtering or "none",
        "full_disk": bool(full),
    }
    _check_steps(context, scenario, trainer, config)
    expected = expected_counts(plan, refuses, raises, scenario.retries)
    _check_counts(context, scenario, stats_of(config), expected)
    _check_rows(context, scenario, trainer, rows, expected)
    context.expect(not plan.surprises, f"samples failed without a fault: {plan.surprises[:3]}")
    _check_dumps(context, log_dir(config), full)
    _check_threads(context, before)


def _accept(row: int, refuses: set[int], raises: set[int]) -> bool:
    if row in raises:
        raise ZeroDivisionError("the filter cannot judge this group")
    return row not in refuses


def fill_disk(directory: Path) -> list[Path]:
    """Make some of the files that the run will want to write lie on a full disk; returns them."""
    files = [directory / "samples.jsonl"]
    for version in range(12):
        (directory / "rollout" / str(version)).mkdir(parents=True)
        files += [directory / "rollout" / str(version) / f"{task}.jsonl" for task in range(version % 3, 200, 3)]
    for file in files:
        file.symlink_to(FULL_DISK)
    return files


class Disturber:
    """Pauses and resumes from another thread while a run goes on, as a user's own code may."""

    def __init__(self, trainer: Any, seed: int, active: bool) -> None:
        self._rollout = trainer.rollout
        self._rng = random.Random(seed)
        self._active = active
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="disturber")
        self.count = 0

    def __enter__(self) -> Disturber:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        pairs = [
            (self._rollout.pause, self._rollout.resume),
            (self._rollout.pause_generation, self._rollout.continue_generation),
        ]
        while self._active and not self._stop.wait(self._rng.uniform(0.005, 0.15)):
            pause, resume = self._rng.choice(pairs)
            pause()
            self._stop.wait(self._rng.uniform(0.0, 0.1))
            resume()
            self.count += 1


def _check_steps(context: CellContext, scenario: Scenario, trainer: Any, config: Any) -> None:
    stats = stats_of(config)
    context.expect(len(stats) == scenario.steps, f"{len(stats)} of {scenario.steps} steps in stats.jsonl")
    sizes = Counter(step for step, _ in trainer.groups)
    wrong = {step: sizes[step] for step in range(scenario.steps) if sizes[step] != scenario.batch}
    context.expect(not wrong, f"steps without a full batch of {scenario.batch} groups: {wrong}")
    norms = [row["ppo_actor/update/grad_norm"] for row in stats]
    context.expect(all(math.isfinite(norm) for norm in norms), f"gradient norms are not finite: {norms}")
    oldest = 0
    for step, group in trainer.groups:
        drawn = group.data["versions"][group.data["loss_mask"].bool()]
        oldest = max(oldest, step - int(drawn.min()))
        context.expect(int(drawn.max()) <= step, f"step {step} trained on tokens of version {int(drawn.max())}")
        context.expect(1 <= len(group.lengths) <= scenario.samples, f"a group of {len(group.lengths)} samples")
    context.facts["staleness_max"] = oldest
    context.expect(oldest <= scenario.eta, f"tokens of age {oldest} at eta={scenario.eta}")


def _check_counts(context: CellContext, scenario: Scenario, stats: list[dict[str, float]], expected: Any) -> None:
    """The counters of the run equal what the injected faults make."""
    total: Counter[str] = Counter()
    for row in stats:
        total.update({k.removeprefix("rollout/"): int(v) for k, v in row.items() if k.startswith("rollout/")})
    dropped = {k.removeprefix("dropped/"): v for k, v in total.items() if k.startswith("dropped/") and v}
    context.facts["dropped"] = dropped
    context.expect(dropped == dict(expected.dropped), f"dropped samples {dropped}, injected {dict(expected.dropped)}")
    for name in ("accepted", "filtered", "failed", "lost", "retried"):
        context.expect(
            total[name] == expected.groups[name], f"groups {name}: {total[name]}, expected {expected.groups[name]}"
        )
    trained = scenario.steps * scenario.batch
    context.expect(
        total["accepted"] - total["stale"] == trained,
        f"{total['accepted']} groups accepted, {total['stale']} of them too old, {trained} trained",
    )


def _check_rows(context: CellContext, scenario: Scenario, trainer: Any, rows: dict[str, Any], expected: Any) -> None:
    """Every dispensed row has exactly one end."""
    trained = [(group.row.epoch, group.row.position) for _, group in trainer.groups]
    context.expect(len(trained) == len(set(trained)), "a row was trained twice in one epoch")
    cursor, steps_per_epoch = rows["cursor"], trainer.plan.steps_per_epoch
    dispensed = cursor["epoch"] * steps_per_epoch * scenario.batch + cursor["position"]
    ends = {"trained": scenario.steps * scenario.batch, **{k: expected.ended[k] for k in ("filtered", "failed")}}
    context.facts["rows"] = rows["counts"]
    context.expect(rows["counts"] == ends, f"rows ended as {rows['counts']}, expected {ends}")
    context.expect(rows["open_rows"] == [], f"rows without an end: {rows['open_rows']}")
    context.expect(sum(ends.values()) == dispensed, f"{dispensed} rows dispensed, {sum(ends.values())} ended")


def _check_dumps(context: CellContext, directory: Path, full: list[Path]) -> None:
    """Trajectories that could be written were written whole."""
    written = [file for file in directory.glob("rollout/*/*.jsonl") if not file.is_symlink()]
    context.expect(all(file.read_text().endswith("}\n") for file in written), "a dumped trajectory is torn")
    context.expect(bool(written), "no trajectory was dumped")
    context.expect(bool(full) or (directory / "samples.jsonl").is_file(), "no samples.jsonl")


def _check_threads(context: CellContext, before: set[threading.Thread]) -> None:
    deadline = time.monotonic() + THREAD_GRACE_S
    while (left := set(threading.enumerate()) - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    context.expect(not left, f"threads left: {sorted(thread.name for thread in left)}")
