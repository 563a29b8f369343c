"""Roles on several ranks, a reference model, evaluation, background saves and supervised runs in worker processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.controller.runs import LOCAL, assert_same_groups, record_tables, worker_config
from tests.trainer_runs import (
    checkpoints,
    rl_config,
    rl_rows,
    run_sft,
    sft_config,
    stats_of,
    tiny_policy,
    weights,
)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Hugging Face directory of the initial policy."""
    return tiny_policy(tmp_path_factory.mktemp("policy"))


@pytest.mark.slow
@pytest.mark.ci
def test_two_train_ranks_with_reference_and_evaluation_equal_inline(policy: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    common = (
        "saver.freq_steps=3",
        "actor.kl_ctl=0.1",
        f"ref.path={policy}",
        "actor.recompute_logprob=true",
        "evaluator.freq_steps=2",
        "valid_dataset={path: arithmetic, type: rl, batch_size: 4, dataset_kwargs: {start: 100, size: 6}}",
    )
    inline_config = rl_config(tmp_path / "inline", policy, "native.num_threads=1", *common)
    local_config = worker_config(tmp_path / "local", policy, "actor.backend='fsdp:d2'", "saver.mode=async", *common)

    runs = [
        record_tables(
            config,
            valid=list(rl_rows(inline_config))[:6],
            eval_workflow="areal.workflow.rlvr.RLVRWorkflow",
            eval_workflow_kwargs={
                "reward_fn": "tests.trainer_runs.digit_share",
                "gconfig": config.gconfig,
                "tokenizer": config.tokenizer_path,
            },
        )
        for config in (inline_config, local_config)
    ]

    assert_same_groups(*runs)
    for mine, theirs in zip(stats_of(inline_config), stats_of(local_config), strict=True):
        for key in ("ppo_actor/update/grad_norm", "ppo_actor/update/actor_loss/avg", "ppo_actor/kl_rewards/avg"):
            assert mine[key] == pytest.approx(theirs[key], abs=1e-4), key
        assert mine.get("eval-rollout/reward") == pytest.approx(theirs.get("eval-rollout/reward"), abs=1e-4)
    one, other = weights(checkpoints(inline_config)[-1]), weights(checkpoints(local_config)[-1])
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.ci
def test_supervised_run_on_two_ranks_equals_inline(policy: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    inline_config = sft_config(tmp_path / "inline", policy, "saver.freq_steps=4")
    names = f"cluster.name_resolve.nfs_record_root={tmp_path}/names"
    local_config = sft_config(
        tmp_path / "local", policy, "saver.freq_steps=4", "actor.backend='fsdp:d2'", names, LOCAL[0], LOCAL[1]
    )
    mine, theirs = run_sft(inline_config), run_sft(local_config)
    for a, b in zip(mine, theirs, strict=True):
        assert a["sft/loss/avg"] == pytest.approx(b["sft/loss/avg"], abs=1e-4)
        assert a["sft/n_valid_tokens"] == b["sft/n_valid_tokens"]
    one, other = weights(checkpoints(inline_config)[-1]), weights(checkpoints(local_config)[-1])
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=0, atol=1e-4)
