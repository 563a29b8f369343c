"""Supervised training of adapters."""

from __future__ import annotations

from pathlib import Path

from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.trainer_runs import assert_same_weights, checkpoints, run_sft, sft_config, stats_of, weights

LORA = ("actor.use_lora=true", "actor.lora_rank=8", "actor.lora_alpha=16", "actor.optimizer.lr=2.0e-2")


def test_sft_lora_lowers_the_loss_and_saves_what_peft_loads(model: str, tmp_path: Path) -> None:
    config = sft_config(tmp_path, model, *LORA, "total_train_steps=8", "saver.freq_steps=8")

    losses = [row["sft/loss/avg"] for row in run_sft(config)]

    assert losses[-1] < losses[0] - 0.1
    assert all(".lora_" in name for name in weights(checkpoints(config)[-1]))
    base = AutoModelForCausalLM.from_pretrained(model)
    adapted = PeftModel.from_pretrained(base, str(checkpoints(config)[-1]))
    assert any(parameter.abs().max() > 1e-3 for name, parameter in adapted.named_parameters() if "lora_B" in name)


def test_sft_lora_resumed_run_equals_the_whole_one(model: str, tmp_path: Path) -> None:
    extra = (*LORA, "saver.freq_steps=4", "recover.mode=on", "recover.freq_steps=2")
    extra = (*extra, "actor.optimizer.lr_scheduler_type=constant")
    whole = sft_config(tmp_path / "whole", model, *extra)
    run_sft(whole)
    run_sft(sft_config(tmp_path / "cut", model, *extra, "total_train_steps=2"))
    resumed = sft_config(tmp_path / "cut", model, *extra)
    run_sft(resumed)

    assert len(stats_of(resumed)) == 4
    assert_same_weights(checkpoints(resumed)[-1], checkpoints(whole)[-1])
