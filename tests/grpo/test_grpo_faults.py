"""What must not end in silence: workflows, rewards and samplers that fail, and settings that cannot run."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import pytest

from areal import PPOTrainer
from areal.api.workflow_api import RolloutWorkflow
from areal.infra.rollout.failures import RolloutFailedError
from areal.utils.errors import ConfigError, DataError, UnsupportedFeatureError
from tests.trainer_runs import WORKFLOW, record_rl, rl_config, rl_rows, run_rl, workflow_kwargs


class BrokenWorkflow(RolloutWorkflow):
    """Always raises."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, Any]:
        raise KeyError("the column that is not there")


def test_workflow_that_always_raises_stops_the_run_with_its_traceback(policy: str, tmp_path: Path) -> None:
    with pytest.raises(RolloutFailedError) as caught:
        run_rl(rl_config(tmp_path, policy), workflow=BrokenWorkflow, workflow_kwargs={})
    cause = caught.value.__cause__
    assert isinstance(cause, KeyError)
    frames = traceback.extract_tb(cause.__traceback__)
    assert frames[-1].name == "arun_episode"
    assert frames[-1].filename == __file__


def sometimes_bad(prompt: str, completion: str, prompt_ids: Any, completion_ids: Any, **row: Any) -> Any:
    """Raises, returns NaN, None or text for some rows; the length for the others."""
    kind = int(row["answer"]) % 8
    if kind == 0:
        raise RuntimeError("the judge is out")
    return {1: math.nan, 2: None, 3: "abc"}.get(kind, float(len(completion_ids)))


sometimes_bad.areal_inline = True  # type: ignore[attr-defined]


def bad_for_the_first_row(prompt: str, completion: str, prompt_ids: Any, completion_ids: Any, **row: Any) -> float:
    """Raises for the row that comes first."""
    if row.get("bad"):
        raise RuntimeError("this row cannot be scored")
    return float(len(completion_ids))


bad_for_the_first_row.areal_inline = True  # type: ignore[attr-defined]


def test_one_bad_row_at_the_start_does_not_stop_the_run(policy: str, tmp_path: Path) -> None:
    config = rl_config(tmp_path, policy, "gconfig.n_samples=8", "train_dataset.shuffle=false")
    rows = [{**row, "bad": i == 0} for i, row in enumerate(rl_rows(config))]
    trainer = record_rl(config, reward_fn=bad_for_the_first_row, dataset=rows)
    assert len(trainer.groups) == 12
    assert all(group.row.index != 0 for _, group in trainer.groups)


def test_bad_rewards_cost_only_their_own_samples(policy: str, tmp_path: Path) -> None:
    config = rl_config(tmp_path, policy, "rollout.max_failure_share=1.0", "rollout.max_row_retries=0")
    trainer = record_rl(config, reward_fn=sometimes_bad)
    assert [version for version, _ in trainer.groups] == [k for k in range(3) for _ in range(4)]
    assert all(math.isfinite(reward) for _, group in trainer.groups for reward in group.rewards)


_calls = iter(range(10**9))


def fails_once_in_four(prompt: str, completion: str, prompt_ids: Any, completion_ids: Any, **row: Any) -> float:
    """Not a number for every fourth sample."""
    return math.nan if next(_calls) % 4 == 0 else float(len(completion_ids))


fails_once_in_four.areal_inline = True  # type: ignore[attr-defined]


def test_partial_groups_train_and_are_counted(policy: str, tmp_path: Path) -> None:
    config = rl_config(tmp_path, policy)
    stats = run_rl(config, reward_fn=fails_once_in_four)
    assert sum(row.get("rollout/dropped/reward", 0) for row in stats) > 0
    assert all(4 <= row["ppo_actor/n_seqs"] < 16 for row in stats)
    assert all(math.isfinite(value) for row in stats for value in row.values())


def never_a_number(prompt: str, completion: str, prompt_ids: Any, completion_ids: Any, **row: Any) -> Any:
    """None for everyone."""
    return None


never_a_number.areal_inline = True  # type: ignore[attr-defined]


def test_reward_that_never_works_stops_the_run(policy: str, tmp_path: Path) -> None:
    with pytest.raises(RolloutFailedError, match="returned None"):
        run_rl(rl_config(tmp_path, policy), reward_fn=never_a_number)


def test_sampler_that_dies_stops_the_run(policy: str, tmp_path: Path) -> None:
    config = rl_config(tmp_path, policy, "total_train_steps=6")
    with PPOTrainer(config, train_dataset=rl_rows(config)) as trainer:
        scheduler = trainer.parts.rollout.sampler._scheduler
        original, calls = scheduler.step, iter(range(10**6))

        def step() -> None:
            if next(calls) >= 8:
                raise MemoryError("out of cache")
            original()

        scheduler.step = step
        with pytest.raises(Exception, match="out of cache") as caught:
            trainer.train(workflow=WORKFLOW, workflow_kwargs=workflow_kwargs(config))
    chain, error = [], caught.value
    while error is not None:
        chain.append(type(error))
        error = error.__cause__
    assert MemoryError in chain


def test_dataset_smaller_than_a_batch_is_refused_before_a_model_loads(policy: str, tmp_path: Path) -> None:
    config = rl_config(tmp_path, str(tmp_path / "no-such-model"))
    with pytest.raises(DataError, match="fewer than batch_size=4"):
        PPOTrainer(config, train_dataset=[{"messages": []}] * 3)


@pytest.mark.parametrize(
    ("override", "word"),
    [
        ("critic={}", "critic"),
        ("actor.use_kernels=true", "use_kernels"),
        ("rollout.backend=sglang:d1", "rollout.backend"),
        ("rollout.backend=native:d2", "rollout.backend"),
    ],
)
def test_unavailable_feature_is_refused_before_a_model_loads(override: str, word: str, tmp_path: Path) -> None:
    config = rl_config(tmp_path, str(tmp_path / "no-such-model"), override)
    with pytest.raises(UnsupportedFeatureError, match=word):
        PPOTrainer(config, train_dataset=[{"messages": []}] * 8)


def test_two_ranks_inline_name_the_scheduler_that_has_them(policy: str, tmp_path: Path) -> None:
    config = rl_config(tmp_path, policy, "actor.backend=fsdp:d2")
    with pytest.raises(ValueError, match="scheduler.type=local"):
        PPOTrainer(config, train_dataset=rl_rows(config))


def test_nothing_is_left_running_after_a_run_or_a_failure(policy: str, tmp_path: Path) -> None:
    names = {"NativeEngine", "rollout", "eval-rollout"}
    before = set(threading.enumerate())
    run_rl(rl_config(tmp_path / "a", policy, "total_train_steps=1"))
    with pytest.raises(RolloutFailedError):
        run_rl(rl_config(tmp_path / "b", policy), workflow=BrokenWorkflow, workflow_kwargs={})
    with pytest.raises(KeyboardInterrupt), PPOTrainer(config := rl_config(tmp_path / "c", policy), rl_rows(config)):
        raise KeyboardInterrupt
    assert [thread for thread in set(threading.enumerate()) - before if thread.name in names] == []


def test_no_workflow_is_refused(policy: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs a workflow"):
        run_rl(rl_config(tmp_path, policy), workflow=None)


def test_no_dataset_is_refused(policy: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="train_dataset"):
        PPOTrainer(rl_config(tmp_path, policy))


FAILING_SCRIPT = """
import sys
from tests.grpo.test_grpo_faults import BrokenWorkflow
from tests.trainer_runs import rl_config, run_rl
from pathlib import Path
run_rl(rl_config(Path(sys.argv[1]), sys.argv[2]), workflow=BrokenWorkflow, workflow_kwargs={})
"""


@pytest.mark.slow
@pytest.mark.ci
def test_failed_run_exits_non_zero_with_the_original_traceback(policy: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAILING_SCRIPT, str(tmp_path), policy],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode != 0
    assert "the column that is not there" in done.stderr
    assert "in arun_episode" in done.stderr
