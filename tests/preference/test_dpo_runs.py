"""DPO runs: a planted preference is learnt, runs resume, and every way of running them gives the same numbers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from areal import DPOTrainer
from areal.trainer.hooks import RunHooks
from areal.utils import stats_tracker
from areal.utils.errors import ConfigError, DataError
from tests.pair_runs import dpo_config, planted_pairs, run_pairs
from tests.trainer_runs import assert_same_weights, checkpoints, seeded, stats_of, tiny_policy, weights

VALID = "valid_dataset={path: pairs, type: dpo, batch_size: 4}"
RECOVER = ("recover.mode=on", "recover.freq_steps=2")


def test_two_steps_start_at_the_reference_and_move_away_from_it(model: str, tmp_path: Path) -> None:
    config = dpo_config(tmp_path, model, "saver.freq_steps=2")

    first, second = run_pairs(config, planted_pairs(8))

    assert first["dpo/loss/avg"] == pytest.approx(math.log(2), abs=1e-5)
    assert first["dpo/reward_margin/avg"] == pytest.approx(0, abs=1e-5)
    assert first["dpo/n_pairs"] == second["dpo/n_pairs"] == 4
    assert second["dpo/reward_margin/avg"] > 0.05
    assert second["dpo/loss/avg"] < first["dpo/loss/avg"]
    assert {"dpo/chosen_reward/avg", "dpo/rejected_reward/avg", "dpo/reward_accuracy/avg"} <= second.keys()
    assert all(math.isfinite(value) for step in (first, second) for value in step.values())
    assert {"timeperf/ref_logp", "timeperf/train_step", "ledger/ref_logp"} <= first.keys()
    before, after = weights(model), weights(checkpoints(config)[-1])
    assert any(not torch.equal(before[name], after[name]) for name in after)


@pytest.mark.parametrize("options", [(), ("actor.loss_type=ipo",), ("actor.reference_free=true",)])
def test_planted_preference_is_learnt_on_unseen_pairs(options: tuple[str, ...], model: str, tmp_path: Path) -> None:
    long = ("total_train_epochs=3", "total_train_steps=24", "train_dataset.batch_size=8", "evaluator.freq_steps=24")
    config = dpo_config(tmp_path, model, *long, "evaluator.eval_before_train=true", VALID, *options)

    stats = run_pairs(config, planted_pairs(64), valid=planted_pairs(30, seed=1))

    assert stats[-1]["dpo-eval/n_pairs"] == 30
    assert stats[-1]["dpo-eval/reward_accuracy/avg"] >= 0.95
    assert stats[0]["before_train/dpo-eval/reward_accuracy/avg"] < 0.8
    assert stats[-1]["dpo-eval/loss/avg"] < stats[0]["before_train/dpo-eval/loss/avg"]


def test_reference_of_its_own_path_is_the_one_compared_with(model: str, tmp_path: Path) -> None:
    other = tiny_policy(tmp_path / "other", seed=5)
    config = dpo_config(tmp_path, model, f"ref.path={other}", "total_train_steps=1", "actor.optimizer.lr=0")

    (stats,) = run_pairs(config, planted_pairs(4))

    assert abs(stats["dpo/reward_margin/max"] - stats["dpo/reward_margin/min"]) > 0.05


def test_reference_free_run_builds_no_reference(model: str, tmp_path: Path) -> None:
    config = dpo_config(tmp_path, model, "actor.reference_free=true", f"ref.path={tmp_path / 'no-such-model'}")
    stats_tracker.export_all(reset=True)

    with DPOTrainer(config, train_dataset=planted_pairs(8)) as trainer:
        trainer.train()

    assert trainer.ref is None
    assert "timeperf/ref_logp" not in stats_of(config)[0]


class Crash(Exception):
    """Stands for a kill."""


def test_resumed_run_equals_the_uninterrupted_one(model: str, tmp_path: Path, monkeypatch: Any) -> None:
    pairs = planted_pairs(18)
    overrides = ("total_train_steps=4", "saver.freq_steps=4", "evaluator.freq_steps=2", VALID)
    whole = dpo_config(tmp_path / "whole", model, *overrides)
    run_pairs(whole, pairs, valid=pairs[:5])
    config = dpo_config(tmp_path / "cut", model, *overrides, *RECOVER)
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
        dpo_config(tmp_path, model, "actor.is_critic=true")
    with pytest.raises(ConfigError, match="train_dataset"):
        DPOTrainer(dpo_config(tmp_path, model))
    with (
        DPOTrainer(dpo_config(tmp_path, model), train_dataset=[{"input_ids": [1]}] * 4) as trainer,
        pytest.raises(DataError, match="lacks chosen_ids"),
    ):
        trainer.train()


def test_dry_run_plans_the_reference_too(model: str, tmp_path: Path, capsys: Any) -> None:
    from areal.api.config_loader import DRY_RUN

    config = dpo_config(tmp_path, model)
    token = DRY_RUN.set(True)
    try:
        with pytest.raises(SystemExit) as stop:
            DPOTrainer(config, train_dataset=planted_pairs(8))
    finally:
        DRY_RUN.reset(token)

    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert "per step: 4 rows, 8 sequences" in shown
    assert "memory of ref" in shown
