"""A teacher in worker processes of its own, or in those of the actor; the same numbers as inline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.controller.runs import worker_config
from tests.trainer_runs import checkpoints, rl_config, run_rl, stats_of, tiny_policy, weights

ONE_THREAD = tuple(
    f"{role}.scheduling_spec=[{{cpu: 1, mem: 1, env_vars: {{OMP_NUM_THREADS: '1'}}}}]" for role in ("teacher", "critic")
)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Hugging Face directory of the initial policy."""
    return tiny_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def common(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Settings of every run: the teacher's numbers travel beside those of a critic."""
    path = tiny_policy(tmp_path_factory.mktemp("teacher"), seed=7)
    return (
        f"teacher={{path: '{path}', rl_loss_weight: 0.5, distill_loss_weight: 0.5, distill_estimator: k2}}",
        "critic={optimizer: {lr: 1.0e-2, weight_decay: 0.0, warmup_steps_proportion: 0.0}, ppo_n_minibatches: 1}",
        "saver.freq_steps=3",
    )


@pytest.fixture(scope="module")
def inline(tmp_path_factory: pytest.TempPathFactory, policy: str, common: tuple[str, ...]) -> Any:
    """The same run in one process."""
    torch.set_num_threads(1)
    config = rl_config(tmp_path_factory.mktemp("inline"), policy, "native.num_threads=1", *common)
    run_rl(config)
    return config


def _assert_same_run(config: Any, inline: Any) -> None:
    for mine, theirs in zip(stats_of(inline), stats_of(config), strict=True):
        for key in (
            "ppo_actor/update/rkl_loss/avg",
            "ppo_actor/update/grad_norm",
            "ppo_critic/critic_loss/avg",
            "ppo_actor/n_valid_tokens",
        ):
            assert theirs[key] == pytest.approx(mine[key], rel=1e-3, abs=1e-4), key
        assert theirs["timeperf/teacher_logp"] > 0
    expected, found = (weights(checkpoints(each)[-1]) for each in (inline, config))
    assert expected.keys() == found.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor, rtol=0, atol=2e-4)


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize(
    "settings",
    [
        ("actor.backend='fsdp:d2'", "teacher.backend='archon:d1'", "enable_offload=true", "teacher.offload=true"),
        (
            "actor.backend='fsdp:d2'",
            "teacher.backend='fsdp:d2'",
            "teacher.scheduling_strategy={type: colocation, target: actor, fork: false}",
        ),
    ],
    ids=["own ranks", "same processes"],
)
def test_teacher_in_worker_processes_equals_inline(
    settings: tuple[str, ...], inline: Any, policy: str, common: tuple[str, ...], tmp_path: Path
) -> None:
    config = worker_config(tmp_path, policy, *common, "critic.backend='fsdp:d1'", *settings, *ONE_THREAD)

    run_rl(config)

    _assert_same_run(config, inline)
    assert ("timeperf/teacher_offload" in stats_of(config)[1]) == config.enable_offload
