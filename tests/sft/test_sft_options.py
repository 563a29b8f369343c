"""Settings that change how a supervised run goes, and what is left behind when it cannot start or resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from areal import SFTTrainer
from areal.trainer import supervised
from areal.trainer.hooks import RunHooks
from areal.utils import perf_tracer
from areal.utils.saver import Saver
from tests.trainer_runs import assert_same_weights, checkpoints, log_dir, run_sft, sft_config, sft_rows, stats_of

TRACED = "perf_tracer={enabled: true}"
RECOVER = ("recover.mode=on", "recover.freq_steps=2")


def broken(*args: Any, **kwargs: Any) -> None:
    """Takes anything, gives nothing."""
    raise MemoryError


def test_engine_that_cannot_be_built_leaves_nothing_open(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = sft_config(tmp_path, model, TRACED)
    closed: list[bool] = []
    close = RunHooks.close
    monkeypatch.setattr(RunHooks, "close", lambda self: (closed.append(True), close(self)))
    with monkeypatch.context() as patch:
        patch.setattr(supervised, "build_learner", broken)
        with pytest.raises(MemoryError):
            SFTTrainer(config, train_dataset=sft_rows(config))
    assert closed == [True]
    assert not perf_tracer.is_configured()
    run_sft(sft_config(tmp_path, model, TRACED, "total_train_steps=1"))  # the process is as good as new


def test_trace_holds_the_phases_of_every_step(model: str, tmp_path: Path) -> None:
    config = sft_config(tmp_path, model, TRACED, "saver.freq_steps=2")
    run_sft(config)
    lines = (log_dir(config) / "perf_tracer" / "master" / "traces-r0.jsonl").read_text().splitlines()
    spans = [event for event in map(json.loads, lines) if event["ph"] == "X"]
    expected = ["load_bcast", "train_step", "save", "checkpoint_for_recover"]
    for step in range(4):
        assert [e["name"] for e in spans if e["args"].get("global_step") == step] == expected


def test_resume_with_fewer_rows_is_refused(model: str, tmp_path: Path) -> None:
    run_sft(sft_config(tmp_path, model, *RECOVER, "total_train_steps=2"))
    with pytest.raises(ValueError, match="dataset_size"):
        run_sft(sft_config(tmp_path, model, *RECOVER, "train_dataset.dataset_kwargs.size=24"))


def test_finished_run_goes_on_when_it_is_given_more_steps(model: str, tmp_path: Path) -> None:
    constant = ("actor.optimizer.lr_scheduler_type=constant", "saver.freq_steps=100")
    whole = sft_config(tmp_path / "whole", model, *constant)
    run_sft(whole)
    cut = sft_config(tmp_path / "cut", model, *constant, *RECOVER, "total_train_steps=2")
    run_sft(cut)
    longer = sft_config(tmp_path / "cut", model, *constant, *RECOVER)
    run_sft(longer)
    assert len(stats_of(longer)) == 4
    assert_same_weights(checkpoints(longer)[-1], checkpoints(whole)[-1])


def test_checkpoint_that_cannot_be_written_ends_the_run_with_its_error(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Saver, "save", broken)
    with pytest.raises(MemoryError):
        run_sft(sft_config(tmp_path, model, TRACED, "saver.freq_steps=1"))
    assert not perf_tracer.is_configured()
