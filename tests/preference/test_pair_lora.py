"""DPO and reward models on adapters: what is trained and saved is the adapter alone, and runs resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.pair_runs import dpo_config, planted_pairs, run_pairs, rw_config
from tests.trainer_runs import assert_same_weights, checkpoints, stats_of

LORA = ("actor.use_lora=true", "actor.lora_rank=4", "actor.lora_alpha=8", "actor.optimizer.lr=2.0e-2")
HEAD = "base_model.model.score.weight"


def saved_adapter(config: Any) -> dict[str, torch.Tensor]:
    """The tensors of the last checkpoint, which holds nothing but an adapter."""
    path = checkpoints(config)[-1]
    assert sorted(file.name for file in path.glob("*.safetensors")) == ["adapter_model.safetensors"]
    return load_file(path / "adapter_model.safetensors")


def recover_keys(config: Any) -> set[str]:
    """Names of the weights and of the optimizer's state in the run's recover point."""
    (metadata,) = Path(config.cluster.fileroot).glob("**/.metadata")
    keys = torch.distributed.checkpoint.FileSystemReader(metadata.parent).read_metadata().state_dict_metadata
    return {key for key in keys if key.startswith(("model.", "optim."))}


def test_dpo_on_adapters_starts_at_the_reference_and_learns(model: str, tmp_path: Path) -> None:
    steps = ("total_train_steps=4", "saver.freq_steps=4", "recover.mode=on", "recover.freq_steps=4")
    config = dpo_config(tmp_path, model, *LORA, *steps)

    stats = run_pairs(config, planted_pairs(16))

    assert stats[0]["dpo/reward_margin/avg"] == pytest.approx(0, abs=1e-5)
    assert stats[-1]["dpo/loss/avg"] < stats[0]["dpo/loss/avg"] - 0.01
    assert all(".lora_" in name for name in saved_adapter(config))
    assert all(".lora_" in name for name in recover_keys(config))
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), str(checkpoints(config)[-1]))
    assert any(p.abs().max() > 1e-3 for name, p in adapted.named_parameters() if "lora_B" in name)


def test_reward_model_on_adapters_learns_and_what_is_saved_scores_by_it(model: str, tmp_path: Path) -> None:
    long = ("total_train_epochs=3", "total_train_steps=24", "train_dataset.batch_size=8", "evaluator.freq_steps=24")
    valid = "valid_dataset={path: pairs, type: rw, batch_size: 4}"
    recover = ("recover.mode=on", "recover.freq_steps=24")
    config = rw_config(tmp_path, model, *LORA, *long, "saver.freq_steps=24", valid, *recover)
    unseen = planted_pairs(30, seed=1)

    stats = run_pairs(config, planted_pairs(64), valid=unseen)

    assert stats[-1]["rw-eval/correct_ratio/avg"] >= 0.95
    tensors = saved_adapter(config)
    assert HEAD in tensors
    assert all(".lora_" in name or name == HEAD for name in tensors)
    assert all(".lora_" in name or name.split(".")[1] == "score" for name in recover_keys(config))
    base = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
    saved = PeftModel.from_pretrained(base, str(checkpoints(config)[-1])).eval()
    with torch.no_grad():
        margins = [
            float(
                saved(input_ids=torch.tensor([pair["chosen_ids"]])).logits
                - saved(input_ids=torch.tensor([pair["rejected_ids"]])).logits
            )
            for pair in unseen
        ]
    assert sum(margins) / 30 == pytest.approx(stats[-1]["rw-eval/margin/avg"], rel=1e-3)
    assert json.loads((checkpoints(config)[-1] / "adapter_config.json").read_text())["task_type"] == "SEQ_CLS"


@pytest.mark.parametrize("make", [dpo_config, rw_config], ids=["dpo", "rw"])
def test_resumed_run_on_adapters_equals_the_uninterrupted_one(make: Any, model: str, tmp_path: Path) -> None:
    pairs = planted_pairs(18)
    extra = (*LORA, "saver.freq_steps=4", "recover.mode=on", "recover.freq_steps=2")
    whole = make(tmp_path / "whole", model, *extra, "total_train_steps=4")
    run_pairs(whole, pairs)
    run_pairs(make(tmp_path / "cut", model, *extra, "total_train_steps=2"), pairs)
    resumed = make(tmp_path / "cut", model, *extra, "total_train_steps=4")
    run_pairs(resumed, pairs)

    assert len(stats_of(resumed)) == 4
    assert_same_weights(checkpoints(resumed)[-1], checkpoints(whole)[-1])
