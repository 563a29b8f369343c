"""GRPO on adapters with the embedded sampler: merged weights and adapters alone, checkpoints, resuming."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from areal import PPOTrainer
from areal.utils.errors import UnsupportedFeatureError
from tests.trainer_runs import assert_same_weights, checkpoints, record_rl, rl_config, run_rl, stats_of

LORA = (
    "actor.use_lora=true",
    "actor.lora_rank=4",
    "actor.lora_alpha=8",
    "actor.optimizer.lr=1.0e-2",
    "saver.freq_steps=1",
)
PROBED = ("rollout.weight_probe_interval=1", "rollout.weight_probe_tolerance=1.0e-4")


@pytest.mark.parametrize("alone", [False, True], ids=["merged", "adapter"])
def test_grpo_lora_sampler_draws_from_what_was_trained(policy: str, tmp_path: Path, alone: bool) -> None:
    config = rl_config(tmp_path, policy, *LORA, *PROBED, f"rollout.use_lora={str(alone).lower()}")

    stats = run_rl(config)  # a probe that differs from the trainer's own log-probs ends it

    assert [row["weight_probe/abs_diff_max"] <= 1e-4 for row in stats] == [True] * 3
    saved = checkpoints(config)
    assert len(saved) == 3
    first, last = (load_file(path / "adapter_model.safetensors") for path in (saved[0], saved[-1]))
    assert not (saved[0] / "model.safetensors").exists()
    assert all(".lora_" in name for name in first)
    assert max((last[name] - tensor).abs().max().item() for name, tensor in first.items()) > 1e-3


def test_grpo_lora_merged_and_alone_train_on_the_same_tokens(policy: str, tmp_path: Path) -> None:
    runs = [
        record_rl(rl_config(tmp_path / str(alone), policy, *LORA, f"rollout.use_lora={str(alone).lower()}"))
        for alone in (False, True)
    ]

    groups = [
        [(step, ref.row, ref.data["input_ids"], ref.data["logprobs"]) for step, ref in run.groups] for run in runs
    ]
    assert len(groups[0]) == len(groups[1]) == 12
    for (step, row, ids, logprobs), (other_step, other_row, other_ids, other_logprobs) in zip(*groups, strict=True):
        assert (step, row) == (other_step, other_row)
        assert torch.equal(ids, other_ids)
        torch.testing.assert_close(logprobs, other_logprobs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("alone", [False, True], ids=["merged", "adapter"])
def test_grpo_lora_resumed_run_equals_the_whole_one(policy: str, tmp_path: Path, alone: bool) -> None:
    recover = ("recover.mode=on", "recover.freq_steps=1", f"rollout.use_lora={str(alone).lower()}")
    whole = rl_config(tmp_path / "whole", policy, *LORA, *recover)
    run_rl(whole)
    run_rl(rl_config(tmp_path / "cut", policy, *LORA, *recover, "total_train_steps=1"))
    resumed = rl_config(tmp_path / "cut", policy, *LORA, *recover, *PROBED)
    run_rl(resumed)

    assert len(stats_of(resumed)) == 3
    assert_same_weights(checkpoints(resumed)[-1], checkpoints(whole)[-1])


def test_grpo_sent_adapters_without_a_trained_one_are_refused_before_a_model_loads(tmp_path: Path) -> None:
    config = rl_config(tmp_path, str(tmp_path / "no-such-model"), "rollout.use_lora=true")
    with pytest.raises(UnsupportedFeatureError, match=r"actor\.use_lora=true"):
        PPOTrainer(config, train_dataset=[{"messages": []}] * 8)


def test_grpo_lora_with_a_critic_and_a_reference_runs(policy: str, tmp_path: Path) -> None:
    overrides = (
        "critic={use_lora: true, lora_rank: 4, optimizer: {lr: 1.0e-2}}",
        "ref={}",
        "actor.kl_ctl=0.1",
        "total_train_steps=2",
    )
    config = rl_config(tmp_path, policy, *LORA, *overrides)

    stats = run_rl(config)

    assert len(stats) == 2
    directory = checkpoints(config)[-1].parents[1] / "critic" / checkpoints(config)[-1].name
    names = set(load_file(directory / "adapter_model.safetensors"))
    assert {name for name in names if ".lora_" not in name} == {"base_model.model.score.weight"}
    assert len(names) > 1
