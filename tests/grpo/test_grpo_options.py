"""Settings that change how a GRPO run goes: staleness policies, dynamic batches, traces, recover options, closing."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from areal import PPOTrainer
from areal.engine.fsdp_engine import FSDPEngine
from areal.infra import workflow_context
from areal.infra.rollout.failures import RolloutFailedError
from areal.trainer import builder
from areal.trainer.hooks import RunHooks
from areal.utils import perf_tracer
from areal.utils.errors import ArealError
from areal.utils.saver import Saver
from areal.utils.stats_logger import StatsLogger
from areal.workflow.rlvr import RLVRWorkflow
from tests.trainer_runs import (
    RecordingTrainer,
    assert_same_weights,
    checkpoints,
    log_dir,
    record_rl,
    rl_config,
    rl_rows,
    run_rl,
    seeded,
    stats_of,
    weights,
)

# --- on_stale ---------------------------------------------------------------------------------------------------------

STEPS, STRAGGLERS = 8, (1, 2, 5)  # places in the epoch's order of the rows that come back late


class StragglingWorkflow(RLVRWorkflow):
    """The first time, some rows come back ``lag`` versions after they were drawn."""

    tried: Counter[tuple[int, int]]
    lag: int

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, Any] | None:
        episode = workflow_context.get().episode
        assert episode is not None
        version = engine.get_version()
        table = await super().arun_episode(engine, data)
        self.tried[episode.position, episode.sample] += 1
        if episode.position in STRAGGLERS and self.tried[episode.position, episode.sample] == 1:
            while engine.get_version() < version + self.lag:  # noqa: ASYNC110 - versions come from another thread
                await asyncio.sleep(0.005)
        return table


def straggling_run(
    root: Path, policy: str, on_stale: str, *overrides: str, lag: int = 3, **train: Any
) -> RecordingTrainer:
    """Eight steps, one epoch, with stragglers under a bound of 1."""
    StragglingWorkflow.tried, StragglingWorkflow.lag = Counter(), lag
    settings = (f"rollout.on_stale={on_stale}", "rollout.max_head_offpolicyness=1", f"total_train_steps={STEPS}")
    return record_rl(rl_config(root, policy, *settings, *overrides), workflow=StragglingWorkflow, **train)


def drawn_at(group: Any) -> tuple[int, int]:
    """Oldest and newest version among the trained tokens of a group."""
    versions = group.data["versions"][group.data["loss_mask"].bool()]
    return int(versions.min()), int(versions.max())


def assert_each_row_trained_once(trainer: RecordingTrainer) -> None:
    """Eight full steps over the 32 rows of one epoch."""
    assert [version for version, _ in trainer.groups] == [k for k in range(STEPS) for _ in range(4)]
    assert sorted(group.row.index for _, group in trainer.groups) == list(range(32))
    assert trainer.versions == [(k, k, k) for k in range(1, STEPS + 1)]


def test_on_stale_wait_holds_back_for_groups_that_are_due(policy: str, tmp_path: Path) -> None:
    trainer = straggling_run(tmp_path, policy, "wait", lag=1)
    assert_each_row_trained_once(trainer)
    ages = {group.row.position: version - drawn_at(group)[0] for version, group in trainer.groups}
    assert max(ages.values()) == 1
    assert [ages[position] for position in STRAGGLERS] == [1, 1, 1]
    assert sum(row["rollout/accepted"] for row in stats_of(trainer.config)) == 32


def test_on_stale_train_uses_the_late_groups(policy: str, tmp_path: Path) -> None:
    trainer = straggling_run(tmp_path, policy, "train")
    assert_each_row_trained_once(trainer)
    late = {group.row.position for version, group in trainer.groups if version - drawn_at(group)[0] > 1}
    assert set(STRAGGLERS) <= late
    stats = stats_of(trainer.config)
    assert max(row["rollout/staleness/max"] for row in stats) >= 3
    assert sum(row["rollout/accepted"] for row in stats) == 32
    assert not any("rollout/stale" in row for row in stats)


def test_on_stale_drop_generates_the_late_rows_again(policy: str, tmp_path: Path) -> None:
    trainer = straggling_run(tmp_path, policy, "drop")
    assert_each_row_trained_once(trainer)
    for version, group in trainer.groups:
        assert version - 1 <= drawn_at(group)[0]
        assert drawn_at(group)[1] <= version
    stats = stats_of(trainer.config)
    assert max(row["rollout/staleness/max"] for row in stats) == 1
    dropped = sum(row.get("rollout/stale", 0) for row in stats)
    assert dropped >= len(STRAGGLERS)
    assert sum(row["rollout/accepted"] for row in stats) == 32 + dropped
    assert sum(StragglingWorkflow.tried.values()) == 4 * (32 + dropped)


def refuse_odd_rows(table: dict[str, Any]) -> bool:
    """A filter that depends on the row alone."""
    return int(table["row_id"][0]) % 2 == 0


@pytest.mark.parametrize(
    "on_stale",
    [
        "drop",
        "train",
    ],
)
def test_on_stale_with_a_dynamic_batch_counts_every_attempt_once(on_stale: str, policy: str, tmp_path: Path) -> None:
    trainer = straggling_run(tmp_path, policy, on_stale, "dynamic_bs=true", dynamic_filter_fn=refuse_odd_rows)
    assert sorted(group.row.index for _, group in trainer.groups) == list(range(0, 32, 2))
    assert trainer.versions[-1] == (STEPS, STEPS, STEPS)


# --- presets and dynamic batches --------------------------------------------------------------------------------------


def test_reinforce_pp_baseline_subtracts_the_group_mean_and_standardises_over_the_batch(
    policy: str, tmp_path: Path
) -> None:
    overrides = (
        "actor.reward_norm.std_level=null",
        "actor.adv_norm={mean_level: batch, std_level: batch}",
        "actor.kl_ctl=0.001",
        "actor.kl_estimator=k2",
        "ref={}",
    )
    stats = run_rl(rl_config(tmp_path, policy, *overrides))
    for row in stats:
        assert all(math.isfinite(value) for value in row.values())
        assert "timeperf/ref_logp" in row
        assert row["ppo_actor/advantages/avg"] == pytest.approx(0, abs=1e-4)  # token-weighted, as the loss sees it
        assert row["ppo_actor/advantages/max"] > 0.5
    assert stats[0]["ppo_actor/kl_rewards/min"] == pytest.approx(0, abs=1e-6)
    assert stats[2]["ppo_actor/kl_rewards/max"] <= 0 < -stats[2]["ppo_actor/kl_rewards/min"]  # k2 never rewards


DAPO = (
    "dynamic_bs=true",
    "actor.eps_clip=0.2",
    "actor.eps_clip_higher=0.28",
    "actor.overlong_reward_penalty=true",
    "actor.overlong_tokens=2",
    "actor.overlong_penalty_factor=1.0",
    "actor.adv_norm={mean_level: batch, std_level: batch}",
)


def share_of_even_rows(prompt: str, completion: str, prompt_ids: Any, completion_ids: list[int], **row: Any) -> float:
    """Varied rewards for even answers, the same for the others: the usual filter refuses those groups."""
    return len(set(completion_ids)) / 6 if int(row["answer"]) % 2 == 0 else 1.0


share_of_even_rows.areal_inline = True  # type: ignore[attr-defined]


def keep_varied(table: dict[str, Any]) -> bool:
    """The dynamic filter of DAPO: a group whose rewards are all the same teaches nothing."""
    return bool(table["rewards"].max() > table["rewards"].min())


@pytest.mark.parametrize("bound", [0, 1])
def test_dapo_batches_hold_what_the_filter_kept_and_every_row_is_accounted_for(
    bound: int, policy: str, tmp_path: Path
) -> None:
    overrides = ("total_train_steps=8", f"rollout.max_head_offpolicyness={bound}")
    config = rl_config(tmp_path, policy, *DAPO, *overrides)
    odd = {i for i, row in enumerate(rl_rows(config)) if int(row["answer"]) % 2}
    trainer = record_rl(config, reward_fn=share_of_even_rows, dynamic_filter_fn=keep_varied)
    kept = [group.row.index for _, group in trainer.groups]
    stats = stats_of(config)
    assert len(stats) == STEPS
    assert len(kept) == len(set(kept)) > 0
    assert odd.isdisjoint(kept)
    sizes = Counter(version for version, _ in trainer.groups)
    assert max(sizes.values()) <= 4
    assert min(sizes.values()) < 4
    for step, row in enumerate(stats):
        assert row.get("ppo_actor/n_seqs", 0) == 4 * sizes[step]
        assert all(math.isfinite(value) for value in row.values())
    assert trainer.rollout.executor.ledger.counts == {"trained": len(kept), "filtered": 32 - len(kept), "failed": 0}
    assert sum(row["rollout/accepted"] for row in stats) == len(kept)
    assert sum(row["rollout/rejected"] for row in stats) == 32 - len(kept)


def keep_nothing(table: dict[str, Any]) -> bool:
    """Refuses every group."""
    return False


@pytest.mark.parametrize("bound", [0, 2])
def test_filter_that_refuses_everything_ends_the_run_with_an_error(bound: int, policy: str, tmp_path: Path) -> None:
    config = rl_config(tmp_path, policy, "gconfig.max_new_tokens=1", f"rollout.max_head_offpolicyness={bound}")
    with pytest.raises(RolloutFailedError, match="rows in a row ended without a trajectory.*should_accept_fn"):
        run_rl(config, dynamic_filter_fn=keep_nothing)


# --- traces -----------------------------------------------------------------------------------------------------------

TRACED = "perf_tracer={enabled: true, save_interval: 2, profile_steps: [1]}"


def trace_of(config: Any) -> list[dict[str, Any]]:
    """Events of the run's trace, each line a JSON object on its own."""
    file = log_dir(config) / "perf_tracer" / "master" / "traces-r0.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory, policy: str) -> Any:
    """Config of a traced run with a reference model and two checkpoints."""
    overrides = (TRACED, "saver.freq_steps=2", "actor.kl_ctl=0.01", "ref={}", "actor.recompute_logprob=true")
    config = rl_config(tmp_path_factory.mktemp("traced"), policy, *overrides)
    run_rl(config)
    return config


def test_trace_holds_the_phases_of_every_step_in_order(traced: Any) -> None:
    spans = [e for e in trace_of(traced) if e["ph"] == "X" and e["tid"] > 0]
    order = ["rollout", "ref_logp", "recompute_logp", "compute_advantage", "train_step", "update_weights", "save"]
    for step in range(3):
        own = [e for e in spans if e["args"].get("global_step") == step]
        assert [e["name"] for e in own] == [*order, "checkpoint_for_recover"]
        for one, following in pairwise(own):
            assert one["ts"] + one["dur"] <= following["ts"] + 1  # phases exclude each other
    by_name = {e["name"]: e["cat"] for e in spans}
    assert (by_name["rollout"], by_name["train_step"]) == ("scheduler", "compute")
    assert (by_name["update_weights"], by_name["save"]) == ("comm", "io")
    for step, row in enumerate(stats_of(traced)):
        (span,) = (e for e in spans if e["args"].get("global_step") == step and e["name"] == "train_step")
        assert 0 < span["dur"] <= row["timeperf/train_step"] * 1e6 + 1


def test_trace_profiles_the_compute_phases_of_the_chosen_steps(traced: Any) -> None:
    events = trace_of(traced)
    operators = [e for e in events if e["ph"] == "X" and e["tid"] < 0]
    assert any(e["name"].startswith("aten::") for e in operators)
    steps = {e["args"]["global_step"]: e for e in events if e.get("name") == "train_step"}
    inside = [e for e in operators if steps[1]["ts"] <= e["ts"] < steps[1]["ts"] + steps[1]["dur"]]
    assert inside
    assert not [e for e in operators if e["ts"] < steps[0]["ts"] + steps[0]["dur"]]


def test_traced_run_leaves_the_process_free_for_the_next(traced: Any, policy: str, tmp_path: Path) -> None:
    assert not perf_tracer.is_configured()
    run_rl(rl_config(tmp_path, policy, TRACED, "total_train_steps=1"))
    assert not perf_tracer.is_configured()


# --- closing ----------------------------------------------------------------------------------------------------------


class Broken(Exception):
    """Stands for a device that is gone."""


@pytest.mark.parametrize("part", ["build_train_engine", "build_rollout", "WeightUpdater"])
def test_engines_that_cannot_be_built_leave_nothing_open(
    part: str, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = rl_config(tmp_path, policy, TRACED)
    closed: list[str] = []
    close = RunHooks.close
    monkeypatch.setattr(RunHooks, "close", lambda self: (closed.append("hooks"), close(self)))
    destroy = FSDPEngine.destroy
    monkeypatch.setattr(FSDPEngine, "destroy", lambda self: (closed.append("engine"), destroy(self)))
    before = threads()
    with monkeypatch.context() as patch:
        patch.setattr(builder, part, broken)
        with pytest.raises(Broken):
            PPOTrainer(config, train_dataset=rl_rows(config))
    assert closed == (["hooks"] if part == "build_train_engine" else ["hooks", "engine"])
    assert not perf_tracer.is_configured()
    assert threads() <= before
    run_rl(rl_config(tmp_path, policy, TRACED, "total_train_steps=1"))  # the process is as good as new


def broken(*args: Any, **kwargs: Any) -> None:
    """Takes anything, gives nothing."""
    raise Broken


def threads() -> set[str]:
    """Our background threads by name."""
    return {thread.name for thread in threading.enumerate()} & {"NativeEngine", "rollout", "eval-rollout"}


def test_close_goes_on_after_a_part_that_fails(policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = rl_config(tmp_path, policy, TRACED, "total_train_steps=1")
    monkeypatch.setattr(Saver, "finalize", broken)
    closed: list[bool] = []
    monkeypatch.setattr(StatsLogger, "close", lambda self: closed.append(True))
    with pytest.raises(Broken):
        run_rl(config)
    assert closed == [True]
    assert not perf_tracer.is_configured()
    assert (log_dir(config) / "reward_curve.png").is_file()


def test_second_traced_run_beside_the_first_is_refused_and_leaves_the_first_alone(policy: str, tmp_path: Path) -> None:
    config = rl_config(tmp_path / "a", policy, TRACED)
    with PPOTrainer(config, train_dataset=rl_rows(config)):
        tracer = perf_tracer.get_tracer()
        other = rl_config(tmp_path / "b", policy, TRACED)
        with pytest.raises(RuntimeError, match="perf_tracer is configured already"):
            PPOTrainer(other, train_dataset=rl_rows(other))
        run_rl(rl_config(tmp_path / "c", policy, "total_train_steps=1"))  # not traced
        assert perf_tracer.get_tracer() is tracer


# --- recover options --------------------------------------------------------------------------------------------------

RUN = (
    "total_train_steps=6",
    "saver.freq_steps=6",
    "actor.optimizer.lr_scheduler_type=linear",
    "train_dataset.dataset_kwargs.size=8",  # two steps an epoch: recover points and resumes lie on its boundary
    "total_train_epochs=3",
)
RECOVER = ("recover.mode=on", "recover.freq_epochs=1")


class Crash(Exception):
    """Stands for a kill."""


def crashed(config: Any, step: int) -> None:
    """Run until ``step`` is in stats.jsonl, and die before its recover point (if any) is written."""
    commit = RunHooks.commit

    def commit_and_die(self: RunHooks, info: Any, *args: Any, **kwargs: Any) -> None:
        commit(self, info, *args, **kwargs)
        if info.global_step == step:
            raise Crash

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunHooks, "commit", commit_and_die)
        with pytest.raises(Crash):
            run_rl(config)


def assert_same_run(one: Any, other: Any) -> None:
    """Two configs left the same statistics and the same last checkpoint."""
    assert [seeded(row) for row in stats_of(one)] == [seeded(row) for row in stats_of(other)]
    assert_same_weights(checkpoints(one)[-1], checkpoints(other)[-1])


REFERENCE = ("actor.kl_ctl=0.1", "ref={}")
STATELESS = ("actor.optimizer.type=sgd", "actor.optimizer.lr=0.1")


@pytest.mark.parametrize("crash_step", [2, 3, 4])
@pytest.mark.parametrize("overrides", [REFERENCE, (*STATELESS, "recover.no_save_optim=true")], ids=["ref", "sgd"])
def test_resumed_run_equals_the_uninterrupted_one(
    overrides: tuple[str, ...], crash_step: int, policy: str, tmp_path: Path
) -> None:
    whole = rl_config(tmp_path / "whole", policy, *RUN, *overrides)
    run_rl(whole)
    cut = rl_config(tmp_path / "cut", policy, *RUN, *RECOVER, *overrides)
    crashed(cut, crash_step)
    trainer = record_rl(cut)
    assert trainer.start_step == 2 * (crash_step // 2)
    assert {group.row.epoch for _, group in trainer.groups} == {1, 2} if crash_step < 4 else {2}
    assert_same_run(cut, whole)
    if "ref={}" in overrides:  # the reference is what the run began with, not what it resumed from
        assert stats_of(cut)[-1]["ppo_actor/kl_rewards/avg"] != 0


@pytest.mark.parametrize("option", ["no_save_optim", "no_load_optim"])
def test_resume_without_optimizer_state_starts_its_moments_afresh_and_keeps_the_schedule(
    option: str, policy: str, tmp_path: Path
) -> None:
    whole = rl_config(tmp_path / "whole", policy, *RUN)
    run_rl(whole)
    cut = rl_config(tmp_path / "cut", policy, *RUN, *RECOVER, f"recover.{option}=true")
    crashed(cut, 4)
    point = next((Path(cut.cluster.fileroot) / "checkpoints").glob("**/recover/globalstep3"))
    size = sum(file.stat().st_size for file in point.glob("default/*.distcp"))
    run_rl(cut)
    expected, found = stats_of(whole), stats_of(cut)
    assert [seeded(row) for row in found[:4]] == [seeded(row) for row in expected[:4]]
    key = "ppo_actor/update/{}".format
    assert [row[key("lr")] for row in found] == [row[key("lr")] for row in expected]
    assert found[4][key("grad_norm")] == expected[4][key("grad_norm")]  # the same weights and rows ...
    assert found[5][key("grad_norm")] != expected[5][key("grad_norm")]  # ... but another step
    weights_only = size < 2 * sum(tensor.nbytes for tensor in weights(policy).values())
    assert weights_only == (option == "no_save_optim")


def test_resume_that_wants_optimizer_state_the_point_does_not_hold_says_so(policy: str, tmp_path: Path) -> None:
    crashed(rl_config(tmp_path, policy, *RUN, *RECOVER, "recover.no_save_optim=true"), 4)
    with pytest.raises(ArealError, match="recover.no_load_optim=true"):
        run_rl(rl_config(tmp_path, policy, *RUN, *RECOVER))
    run_rl(rl_config(tmp_path, policy, *RUN, *RECOVER, "recover.no_load_optim=true"))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ("train_dataset.dataset_kwargs.size=4", "dataset_size"),
        ("train_dataset.batch_size=2", "batch_size"),
        ("seed=2", "seed"),
    ],
)
def test_resume_on_other_rows_is_refused(change: str, word: str, policy: str, tmp_path: Path) -> None:
    crashed(rl_config(tmp_path, policy, *RUN, *RECOVER), 4)
    with pytest.raises(ValueError, match=word):
        run_rl(rl_config(tmp_path, policy, *RUN, *RECOVER, change))
