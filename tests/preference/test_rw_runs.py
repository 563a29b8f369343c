"""Reward-model runs: a planted preference is learnt, what is saved is a classifier, runs resume."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from areal import RWTrainer
from areal.trainer.hooks import RunHooks
from areal.utils.errors import ConfigError, DataError
from tests.pair_runs import planted_pairs, run_pairs, rw_config
from tests.trainer_runs import assert_same_weights, checkpoints, seeded, stats_of

VALID = "valid_dataset={path: pairs, type: rw, batch_size: 4}"
RECOVER = ("recover.mode=on", "recover.freq_steps=2")


def test_two_steps_lower_the_loss_of_the_same_pairs(model: str, tmp_path: Path) -> None:
    first, second = run_pairs(rw_config(tmp_path, model), planted_pairs(4))

    assert second["rw/loss/avg"] < first["rw/loss/avg"]
    assert first["rw/n_pairs"] == second["rw/n_pairs"] == 4
    assert {"rw/correct_ratio/avg", "rw/pos_score/avg", "rw/neg_score/avg", "rw/margin/avg"} <= first.keys()
    assert all(math.isfinite(value) for step in (first, second) for value in step.values())


def test_planted_preference_is_learnt_and_the_saved_model_scores_by_it(model: str, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    long = ("total_train_epochs=3", "total_train_steps=24", "train_dataset.batch_size=8", "evaluator.freq_steps=24")
    config = rw_config(tmp_path, model, *long, "evaluator.eval_before_train=true", "saver.freq_steps=24", VALID)
    unseen = planted_pairs(30, seed=1)

    stats = run_pairs(config, planted_pairs(64), valid=unseen)

    assert stats[-1]["rw-eval/n_pairs"] == 30
    assert stats[-1]["rw-eval/correct_ratio/avg"] >= 0.95
    assert stats[0]["before_train/rw-eval/correct_ratio/avg"] < 0.8
    saved = AutoModelForSequenceClassification.from_pretrained(checkpoints(config)[-1]).eval()
    with torch.no_grad():
        margins = [
            float(saved(torch.tensor([pair["chosen_ids"]])).logits - saved(torch.tensor([pair["rejected_ids"]])).logits)
            for pair in unseen
        ]
    assert sum(margins) / 30 == pytest.approx(stats[-1]["rw-eval/margin/avg"], rel=1e-3)


class Crash(Exception):
    """Stands for a kill."""


def test_resumed_run_equals_the_uninterrupted_one(model: str, tmp_path: Path, monkeypatch: Any) -> None:
    pairs = planted_pairs(18)
    overrides = ("total_train_steps=4", "saver.freq_steps=4", "evaluator.freq_steps=2", VALID)
    whole = rw_config(tmp_path / "whole", model, *overrides)
    run_pairs(whole, pairs, valid=pairs[:5])
    config = rw_config(tmp_path / "cut", model, *overrides, *RECOVER)
    original = RunHooks.commit

    def commit(self: RunHooks, step: Any, *args: Any, **kwargs: Any) -> None:
        original(self, step, *args, **kwargs)
        if step.global_step == 2:
            raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(RunHooks, "commit", commit)
        with pytest.raises(Crash):
            run_pairs(config, pairs, valid=pairs[:5])
    run_pairs(config, pairs, valid=pairs[:5])

    assert [seeded(s) for s in stats_of(config)] == [seeded(s) for s in stats_of(whole)]
    assert_same_weights(checkpoints(config)[-1], checkpoints(whole)[-1])


def test_bad_config_and_rows_are_refused(model: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is_critic"):
        rw_config(tmp_path, model, "actor.is_critic=false")
    with (
        RWTrainer(rw_config(tmp_path, model), train_dataset=[{"chosen_ids": [1]}] * 4) as trainer,
        pytest.raises(DataError, match="lacks rejected_ids"),
    ):
        trainer.train()
