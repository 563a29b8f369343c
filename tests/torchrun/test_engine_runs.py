"""Whole runs with Archon and Megatron in worker processes, compared with the FSDP engine in one process."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.controller.runs import LOCAL, TableTrainer, assert_same_groups, record_tables, worker_config
from tests.trainer_runs import (
    checkpoints,
    rl_config,
    run_sft,
    seeded,
    sft_config,
    sft_rows,
    stats_of,
    tiny_policy,
    weights,
)

# Of a value that sums of floats in another order can move.
STATS = {
    "ppo_actor/update/actor_loss/avg",
    "ppo_actor/update/entropy/avg",
    "ppo_actor/update/grad_norm",
    "ppo_actor/update/importance_weight/max",
    "ppo_actor/mismatch/abs_diff_mean",
    "ppo_actor/task_reward/avg",
    "ppo_actor/n_seqs",
}
EVALUATION = (
    "evaluator.freq_steps=2",
    "valid_dataset={path: arithmetic, type: sft, batch_size: 4, dataset_kwargs: {start: 50, size: 10}}",
)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Hugging Face directory of the initial policy; its embedding is its head too."""
    return tiny_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def inline(policy: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, TableTrainer]:
    """Config and tables of three steps of the FSDP engine in this process."""
    torch.set_num_threads(1)
    config = rl_config(tmp_path_factory.mktemp("inline"), policy, "native.num_threads=1", "saver.freq_steps=3")
    return config, record_tables(config)


def _assert_close_weights(one: Any, other: Any) -> None:
    mine, theirs = weights(checkpoints(one)[-1]), weights(checkpoints(other)[-1])
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=1e-4)


def _in_ci(*values: Any) -> Any:
    return pytest.param(*values, marks=[pytest.mark.ci, *_needs(values[0])])


def _megatron(*values: Any) -> Any:
    return pytest.param(*values, marks=_needs(values[0]))


def _needs(backend: str) -> list[pytest.MarkDecorator]:
    missing = backend.startswith("megatron") and importlib.util.find_spec("megatron") is None
    return [pytest.mark.skipif(missing, reason="megatron-core is not installed; pip install 'areal[megatron]'")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "mode", "schedule"),
    [
        _in_ci("archon:p2", "xccl", "1F1B"),
        ("archon:p2", "shm", "Interleaved1F1B"),
        ("archon:p2", "disk", "ZBVZeroBubble"),
        _in_ci("archon:d2", "shm", "1F1B"),
        ("archon:d2", "xccl", "1F1B"),
        ("archon:d2", "disk", "1F1B"),
        _in_ci("megatron:p2", "xccl", "1F1B"),
        _megatron("megatron:p2", "shm", "1F1B"),
        _megatron("megatron:t2", "disk", "1F1B"),
        _megatron("megatron:d2", "shm", "1F1B"),
    ],
)
def test_three_grpo_steps_equal_the_fsdp_engine(  # noqa: PLR0913 - one argument per column, and the fixtures
    backend: str, mode: str, schedule: str, policy: str, inline: tuple[Any, TableTrainer], tmp_path: Path
) -> None:
    config = worker_config(
        tmp_path,
        policy,
        f"actor.backend='{backend}'",
        f"actor.weight_update_mode={mode}",
        f"actor.archon.pp_schedule={schedule}",
        "saver.freq_steps=3",
        "rollout.weight_probe_interval=1",
    )

    found = record_tables(config)

    expected_config, expected = inline
    assert_same_groups(expected, found)
    for mine, theirs in zip(stats_of(expected_config), stats_of(config), strict=True):
        assert {key for key in seeded(mine) if key.startswith("ppo_actor/")} <= theirs.keys()
        assert any(key.startswith("memory/train/") for key in theirs)
        for key in STATS:
            assert theirs[key] == pytest.approx(mine[key], abs=1e-4), key
    _assert_close_weights(expected_config, config)


@pytest.mark.slow
@pytest.mark.parametrize("backend", [_in_ci("archon:p2"), "archon:d2", _megatron("megatron:p2")])
def test_supervised_run_equals_the_fsdp_engine(backend: str, policy: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    common = ("saver.freq_steps=4", *EVALUATION)
    expected = sft_config(tmp_path / "inline", policy, *common)
    names = f"cluster.name_resolve.nfs_record_root={tmp_path}/names"
    config = sft_config(tmp_path / "local", policy, *common, f"actor.backend='{backend}'", names, *LOCAL[:2])
    valid = list(sft_rows(expected))[:10]

    one, other = run_sft(expected, valid=valid), run_sft(config, valid=valid)

    for mine, theirs in zip(one, other, strict=True):
        assert seeded(mine).keys() <= theirs.keys()
        for key, value in seeded(mine).items():
            assert math.isclose(theirs[key], value, rel_tol=1e-3, abs_tol=1e-4) or key.endswith("__count"), key
    _assert_close_weights(expected, config)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["archon:p2", _megatron("megatron:p2")])
def test_reference_and_recomputed_log_probs_of_a_pipeline_equal_the_fsdp_engine(
    backend: str, policy: str, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    common = ("total_train_steps=2", "actor.kl_ctl=0.1", f"ref.path={policy}", "actor.recompute_logprob=true")
    expected = rl_config(tmp_path / "inline", policy, "native.num_threads=1", *common)
    config = worker_config(tmp_path / "local", policy, f"actor.backend='{backend}'", *common)

    one, other = record_tables(expected), record_tables(config)

    assert_same_groups(one, other)
    for mine, theirs in zip(stats_of(expected), stats_of(config), strict=True):
        for key in (*STATS, "ppo_actor/kl_rewards/avg"):
            assert theirs[key] == pytest.approx(mine[key], abs=1e-4), key
