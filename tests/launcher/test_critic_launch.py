"""A critic and a reference under an SPMD launcher, where they share the actor's ranks; the same numbers as inline."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from areal.utils.stats_logger import read_stats
from tests.launcher.test_launcher_runs import Launched, launcher
from tests.trainer_runs import checkpoints, rl_config, run_rl, tiny_policy, weights

pytestmark = [pytest.mark.slow, pytest.mark.ci]


def test_local_launcher_ranks_host_critic_and_reference_and_equal_inline(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    policy = tiny_policy(tmp_path / "policy")
    common = (
        "critic={optimizer: {lr: 1.0e-2, weight_decay: 0.0, warmup_steps_proportion: 0.0}, ppo_n_minibatches: 1}",
        "actor.kl_ctl=0.1",
        f"ref.path={policy}",
        "actor.gae_lambda=0.9",
        "saver.freq_steps=3",
    )
    config = rl_config(tmp_path / "inline", policy, "native.num_threads=1", *common)
    expected = run_rl(config)
    root = tmp_path / "launched"

    run = Launched(launcher("local"), root, policy, "actor.backend='fsdp:d2'", *common)
    output = run.finish()

    assert run.process.returncode == 0, output
    (log,) = root.glob("logs/*/tests/grpo/stats.jsonl")
    found = [row["stats"] for row in read_stats(log.parent)]
    for mine, theirs in zip(expected, found, strict=True):
        for key in ("ppo_critic/critic_loss/avg", "ppo_critic/n_valid_tokens", "ppo_actor/update/grad_norm"):
            assert theirs[key] == pytest.approx(mine[key], rel=1e-3, abs=1e-4), key
    name = checkpoints(config)[-1].name
    inline_critic = weights(checkpoints(config)[-1].parent.parent / "critic" / name)
    (directory,) = root.glob(f"checkpoints/*/tests/grpo/critic/{name}")
    launched_critic = weights(directory)
    assert inline_critic.keys() == launched_critic.keys()
    for key, tensor in inline_critic.items():
        torch.testing.assert_close(launched_critic[key], tensor, rtol=0, atol=2e-4)
