"""Supervised runs: the loss falls, a resumed run equals an uninterrupted one, every row is used as documented."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from areal import SFTTrainer
from areal.trainer.hooks import RunHooks
from areal.trainer.sft.learner import LMLearner
from areal.trainer.sft_trainer import collate_tokens
from areal.utils import stats_tracker
from areal.utils.errors import ConfigError, DataError
from tests.trainer_runs import (
    assert_same_weights,
    checkpoints,
    log_dir,
    run_sft,
    seeded,
    sft_config,
    sft_rows,
    stats_of,
    weights,
)

RECOVER = ("recover.mode=on", "recover.freq_steps=2")
VALID = "valid_dataset={path: arithmetic, type: sft, batch_size: 4, dataset_kwargs: {start: 50, size: 10}}"


def valid_rows(config: Any) -> Any:
    """Ten rows that are not trained on."""
    return list(sft_rows(config))[:10]


def row(*tokens: int) -> dict[str, list[int]]:
    """A record whose tokens after the first are learnt."""
    return {"input_ids": list(tokens), "loss_mask": [0] + [1] * (len(tokens) - 1)}


def test_loss_goes_down(model: str, tmp_path: Path) -> None:
    config = sft_config(tmp_path, model, "total_train_epochs=5", "total_train_steps=20")
    stats = run_sft(config)
    assert len(stats) == 20
    losses = [step["sft/loss/avg"] for step in stats]
    assert losses[-1] < 0.8 * losses[0]
    assert all(math.isfinite(value) for step in stats for value in step.values())


def test_run_repeats_bit_for_bit_and_leaves_its_files(model: str, tmp_path: Path) -> None:
    configs = [sft_config(tmp_path / name, model, "saver.freq_epochs=1") for name in ("a", "b")]
    first, second = (run_sft(config) for config in configs)
    assert [seeded(s) for s in first] == [seeded(s) for s in second]
    assert_same_weights(*(checkpoints(config)[-1] for config in configs))
    names = {path.name for path in log_dir(configs[0]).iterdir()}
    assert {"stats.jsonl", "manifest.json", "config.yaml", "tensorboard"} <= names


def test_ledger_sums_to_the_wall_time_of_each_step(model: str, tmp_path: Path) -> None:
    for step in run_sft(sft_config(tmp_path, model)):
        shares = sum(value for key, value in step.items() if key.startswith("ledger/") and key != "ledger/wall")
        assert shares == pytest.approx(step["ledger/wall"], rel=1e-9)


class Crash(Exception):
    """Stands for a kill."""


@pytest.mark.parametrize("crash_step", [1, 2])
def test_resumed_run_equals_the_uninterrupted_one(crash_step: int, model: str, tmp_path: Path) -> None:
    overrides = ("total_train_steps=6", "saver.freq_steps=6", "evaluator.freq_steps=3", VALID)
    whole = sft_config(tmp_path / "whole", model, *overrides)
    run_sft(whole, valid=valid_rows(whole))
    config = sft_config(tmp_path / "cut", model, *overrides, *RECOVER)
    original = RunHooks.commit

    def commit(self: RunHooks, step: Any, *args: Any, **kwargs: Any) -> None:
        original(self, step, *args, **kwargs)
        if step.global_step == crash_step + 2:
            raise Crash

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunHooks, "commit", commit)
        with pytest.raises(Crash):
            run_sft(config, valid=valid_rows(config))
    run_sft(config, valid=valid_rows(config))
    assert [seeded(s) for s in stats_of(config)] == [seeded(s) for s in stats_of(whole)]
    assert_same_weights(checkpoints(config)[-1], checkpoints(whole)[-1])


def test_validation_runs_once_per_evaluation_over_each_row(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = sft_config(tmp_path, model, "evaluator.freq_steps=2", "evaluator.eval_before_train=true", VALID)
    seen: list[int] = []
    original = LMLearner.evaluate_lm

    def evaluate(self: LMLearner, data: Any) -> Any:
        seen.append(len(data))
        return original(self, data)

    monkeypatch.setattr(LMLearner, "evaluate_lm", evaluate)
    stats = run_sft(config, valid=valid_rows(config))
    assert seen == [4, 4, 2] * 3  # before training, after steps 1 and 3
    assert ["sft-eval/loss/avg" in step for step in stats] == [False, True, False, True]
    assert all(step["sft-eval/n_seqs"] == 10 for step in stats if "sft-eval/n_seqs" in step)


def test_validation_loss_is_the_token_mean_over_all_rows(model: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    config = sft_config(tmp_path, model, "evaluator.eval_before_train=true", "actor.optimizer.lr=0", VALID)
    config.evaluator.freq_steps = 1
    rows = valid_rows(config)
    stats = run_sft(config, valid=rows)
    reference, total, count = AutoModelForCausalLM.from_pretrained(model), 0.0, 0
    for record in rows:
        ids, mask = torch.tensor([record["input_ids"]]), torch.tensor(record["loss_mask"][1:]).bool()
        with torch.no_grad():
            log_probs = reference(ids).logits[0, :-1].log_softmax(-1)
        total -= float(log_probs.gather(-1, ids[0, 1:, None])[:, 0][mask].sum())
        count += int(mask.sum())
    assert stats[0]["sft-eval/loss/avg"] == pytest.approx(total / count, rel=1e-5)


@pytest.mark.parametrize(
    ("rows", "batch", "drop_last", "epochs", "steps", "sizes"),
    [
        (5, 4, True, 2, 2, [4, 4]),
        (5, 4, False, 2, 4, [4, 1, 4, 1]),
        (3, 4, False, 2, 2, [3, 3]),
        (4, 4, True, 1, 1, [4]),
    ],
)
def test_steps_and_rows_of_small_datasets(  # noqa: PLR0913 - one argument per column of the table
    rows: int, batch: int, drop_last: bool, epochs: int, steps: int, sizes: list[int], model: str, tmp_path: Path
) -> None:
    overrides = (
        f"train_dataset.dataset_kwargs.size={rows}",
        f"train_dataset.batch_size={batch}",
        f"train_dataset.drop_last={drop_last}",
        f"total_train_epochs={epochs}",
        "total_train_steps=null",
    )
    stats = run_sft(sft_config(tmp_path, model, *overrides))
    assert len(stats) == steps
    assert [int(step["sft/n_seqs"]) for step in stats] == sizes


def test_dataset_smaller_than_a_batch_with_drop_last_is_refused(tmp_path: Path) -> None:
    config = sft_config(tmp_path, str(tmp_path / "no-such-model"))
    with pytest.raises(DataError, match="fewer than batch_size=8"):
        SFTTrainer(config, train_dataset=[row(4, 5)] * 7)


def test_no_dataset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="train_dataset"):
        SFTTrainer(sft_config(tmp_path, "anything"))


def test_batch_without_a_token_to_learn_changes_nothing_but_is_no_error(model: str, tmp_path: Path) -> None:
    config = sft_config(tmp_path, model, "total_train_steps=1", "saver.freq_steps=1")
    stats_tracker.export_all(reset=True)
    with SFTTrainer(config, train_dataset=[{"input_ids": [4, 5, 6], "loss_mask": [0, 0, 0]}] * 8) as trainer:
        trainer.train()
    assert_same_weights(checkpoints(config)[-1], model)
    assert all(math.isfinite(value) for value in stats_of(config)[0].values())


def test_collate_adds_the_attention_mask_and_never_returns_nothing() -> None:
    (table,) = collate_tokens([row(4, 5, 6)])
    assert table["input_ids"].tolist() == [[4, 5, 6]]
    assert table["loss_mask"].tolist() == [[0, 1, 1]]
    assert table["attention_mask"].dtype is torch.bool
    assert bool(table["attention_mask"].all())
    assert [t["loss_mask"].sum() for t in collate_tokens([])] == [0]


SCRIPT = """
import sys
from pathlib import Path
from tests.sft.test_sft_inline import valid_rows
from tests.trainer_runs import run_sft, sft_config
config = sft_config(Path(sys.argv[1]), sys.argv[2], *sys.argv[3:])
run_sft(config, valid=valid_rows(config)[:9])
"""


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("backend", ["fsdp:d2", "archon:p2"])  # ranks with rows of their own, and with the same rows
def test_two_ranks_under_torchrun_equal_one(backend: str, model: str, tmp_path: Path) -> None:
    overrides = (
        "train_dataset.dataset_kwargs.size=17",  # the last step has one row: rank 1 gets none
        "train_dataset.drop_last=false",
        "total_train_epochs=2",
        "total_train_steps=6",
        "saver.freq_steps=6",
        "evaluator.freq_steps=3",
        VALID,
    )
    single = sft_config(tmp_path / "one", model, *overrides)
    run_sft(single, valid=valid_rows(single)[:9])
    script = tmp_path / "sft.py"
    script.write_text(SCRIPT)
    root = Path(__file__).parents[2]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    (tmp_path / "two").mkdir()
    command = [*launch, str(tmp_path / "two"), model, *overrides, f"actor.backend={backend}"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "tests")])}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-4000:]
    double = sft_config(tmp_path / "two", model, *overrides, f"actor.backend={backend}")
    one, two = stats_of(single), stats_of(double)
    assert len(one) == len(two) == 6
    for key in ("sft/loss/avg", "sft/grad_norm", "sft/lr", "sft/n_seqs", "sft/n_valid_tokens", "sft/ppl/avg"):
        assert [s[key] for s in two] == pytest.approx([s[key] for s in one], rel=1e-4), key
    assert two[2]["sft-eval/loss/avg"] == pytest.approx(one[2]["sft-eval/loss/avg"], rel=1e-4)
    expected = weights(checkpoints(single)[-1])
    for name, tensor in weights(checkpoints(double)[-1]).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-5)
