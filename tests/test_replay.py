"""Failing steps are captured whole, in bounded number, and ``areal replay`` runs them again."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from areal.api.config.fields import DefaultStr
from areal.api.config.optimizer import OptimizerConfig
from areal.api.config.ppo import PPOActorConfig
from areal.api.config.train import FailureCaptureConfig
from areal.api.io_struct import FinetuneSpec
from areal.cli import main
from areal.engine.core.failure_capture import FailureCapture, StepFindings
from areal.engine.core.replay import read_failure, replay_step
from areal.engine.fsdp_engine import FSDPEngine
from areal.trainer.ppo.actor import PPOActor
from areal.trainer.sft.learner import LMLearner
from areal.utils import stats_tracker
from areal.utils.errors import CheckpointError, ConfigError
from tests.engine_fakes import ADAM, batch, build_engine, loss_fn, weight_fn
from tests.fakes import tiny_model
from tests.trainer_runs import log_dir, run_sft, sft_config, tiny_policy

SPEC = FinetuneSpec(1, 40, 4)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("models") / "qwen2"
    tiny_model("qwen2").save_pretrained(path)
    return str(path)


def bad_rows_loss(logprobs: Tensor, entropy: Tensor, packed_input: dict[str, Any]) -> Tensor:
    """The usual loss, times a factor per token: NaN or huge where a test says so."""
    return loss_fn(logprobs, entropy, packed_input) * packed_input["poison"].max()


def poisoned(value: float, row: int = 3) -> list[dict[str, Tensor]]:
    """The reference batch with ``value`` in one trajectory."""
    rows = batch()
    for index, trajectory in enumerate(rows):
        fill = value if index == row else 1.0
        trajectory["poison"] = torch.full(trajectory["input_ids"].shape, fill)
    return rows


def _capture(tmp_path: Path, **settings: Any) -> FailureCaptureConfig:
    return FailureCaptureConfig(directory=str(tmp_path / "failures"), **settings)


def _engine(model_dir: str, tmp_path: Path, **settings: Any) -> FSDPEngine:
    capture = _capture(tmp_path, **settings.pop("capture", {}))
    return build_engine(model_dir, ft_spec=SPEC, failure_capture=capture, mb_spec={"n_mbs": 3}, **settings)


def test_train_batch_nan_loss_is_captured_and_replay_reproduces_it(model_dir: str, tmp_path: Path) -> None:
    engine = _engine(model_dir, tmp_path, optimizer={**ADAM, "lr_scheduler_type": "cosine"})
    for _ in range(2):
        engine.train_batch(poisoned(1.0), bad_rows_loss, weight_fn)
        engine.lr_scheduler_step()
    engine.set_version(2)
    before = {name: tensor.clone() for name, tensor in engine.named_full_tensors()}

    result = engine.train_batch(poisoned(math.nan), bad_rows_loss, weight_fn)

    failure = tmp_path / "failures" / "step_2"
    assert result["update_successful"] == 0.0
    assert [p.name for p in failure.parent.iterdir()] == ["step_2"]
    document = read_failure(failure)
    assert document["reason"] == "loss is nan"
    assert document["findings"]["first_bad_parameter"] is None
    assert document["findings"]["first_bad_gradient"] == "model.embed_tokens.weight"
    report = replay_step(failure)
    assert report.reproduced, report.lines()
    assert not report.update_successful
    losses = [c.replayed for c in report.comparisons if c.name.startswith("loss of micro-batch")]
    assert len(losses) == 3
    assert sum(math.isnan(loss) for loss in losses) == 1
    for name, tensor in engine.named_full_tensors():
        assert torch.equal(tensor, before[name])


def test_train_batch_divergent_norm_is_captured_before_the_step(model_dir: str, tmp_path: Path) -> None:
    engine = _engine(model_dir, tmp_path, capture={"grad_norm_factor": 50.0})
    for _ in range(9):
        engine.train_batch(poisoned(1.0), bad_rows_loss, weight_fn)
    result = engine.train_batch(poisoned(1e6), bad_rows_loss, weight_fn)

    failure = tmp_path / "failures" / "step_0"
    assert "more than 50 times its running median" in read_failure(failure)["reason"]
    report = replay_step(failure, tolerance=1e-6)
    assert report.reproduced, report.lines()
    assert report.update_successful
    assert result["grad_norm"] == pytest.approx(report.comparisons[1].replayed, rel=1e-6)


def test_replay_of_dropout_restores_the_random_state_of_before_the_step(model_dir: str, tmp_path: Path) -> None:
    tiny_model("qwen2", attention_dropout=0.3).save_pretrained(tmp_path / "dropout")
    engine = _engine(str(tmp_path / "dropout"), tmp_path, attn_impl="eager", capture={"grad_norm_factor": 50.0})
    torch.manual_seed(3)
    for _ in range(9):
        engine.train_batch(poisoned(1.0), bad_rows_loss, weight_fn)
    engine.train_batch(poisoned(1e6), bad_rows_loss, weight_fn)
    after = torch.rand(4)
    torch.manual_seed(99)
    report = replay_step(tmp_path / "failures" / "step_0", tolerance=1e-6)
    assert report.reproduced, report.lines()

    torch.manual_seed(3)
    other = _engine(str(tmp_path / "dropout"), tmp_path, attn_impl="eager", capture={"max_captures": 0})
    torch.manual_seed(3)
    for value in (*[1.0] * 9, 1e6):
        other.train_batch(poisoned(value), bad_rows_loss, weight_fn)
    assert torch.equal(after, torch.rand(4))  # capturing moved no random number


def test_train_batch_captures_are_bounded_and_named_apart(model_dir: str, tmp_path: Path) -> None:
    engine = _engine(model_dir, tmp_path, capture={"max_captures": 2})
    for _ in range(3):
        engine.train_batch(poisoned(math.nan), bad_rows_loss, weight_fn)
    assert sorted(p.name for p in (tmp_path / "failures").iterdir()) == ["step_0", "step_0.2"]


def test_train_batch_nan_weights_name_the_first_bad_parameter(model_dir: str, tmp_path: Path) -> None:
    engine = _engine(model_dir, tmp_path)
    with torch.no_grad():
        engine.module.model.layers[1].mlp.up_proj.weight[0, 0] = math.nan
    engine.train_batch(batch(), loss_fn, weight_fn)
    failure = tmp_path / "failures" / "step_0"
    assert read_failure(failure)["findings"]["first_bad_parameter"] == "model.layers.1.mlp.up_proj.weight"
    assert replay_step(failure).reproduced


def test_replay_of_another_outcome_is_reported_as_different(model_dir: str, tmp_path: Path) -> None:
    engine = _engine(model_dir, tmp_path)
    engine.train_batch(poisoned(math.nan), bad_rows_loss, weight_fn)
    report = replay_step(tmp_path / "failures" / "step_0", loss_fn=loss_fn)
    assert not report.reproduced
    assert "NOT reproduced" in report.lines()


def test_replay_of_a_local_loss_needs_one_that_can_be_imported(model_dir: str, tmp_path: Path) -> None:
    engine = _engine(model_dir, tmp_path)
    engine.train_batch(poisoned(math.nan), lambda *args: bad_rows_loss(*args), weight_fn)
    failure = tmp_path / "failures" / "step_0"
    with pytest.raises(ConfigError, match="--loss pkg.module.name"):
        replay_step(failure)
    assert replay_step(failure, loss_fn=bad_rows_loss).reproduced


def test_capture_that_cannot_be_written_leaves_nothing_and_training_goes_on(
    model_dir: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "failures").write_text("a file where the directory should be")
    engine = _engine(model_dir, tmp_path)
    result = engine.train_batch(poisoned(math.nan), bad_rows_loss, weight_fn)
    assert result["update_successful"] == 0.0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["failures"]
    assert engine.train_batch(batch(), loss_fn, weight_fn)["update_successful"] == 1.0


def test_sft_role_nan_step_replays_without_its_model_directory(tmp_path: Path) -> None:
    path = tmp_path / "gone"
    tiny_model("qwen2").save_pretrained(path)
    engine = _engine(str(path), tmp_path)
    with torch.no_grad():
        engine.module.model.norm.weight[0] = math.inf
    LMLearner(engine).train_lm(batch())
    stats_tracker.export_all()
    path.rename(tmp_path / "moved")
    document = read_failure(tmp_path / "failures" / "step_0")
    assert document["loss"] == {"import": "areal.trainer.sft.learner:SFTLoss", "arguments": {"role": "sft"}}
    report = replay_step(tmp_path / "failures" / "step_0")
    assert report.reproduced, report.lines()


def test_ppo_role_nan_advantage_replays(model_dir: str, tmp_path: Path) -> None:
    config = PPOActorConfig(
        experiment_name="test",
        trial_name="test",
        path=model_dir,
        backend="fsdp:d1",
        dtype="float32",
        attn_impl=DefaultStr("flash_attention_2"),
        optimizer=OptimizerConfig(**ADAM),
        failure_capture=_capture(tmp_path),
        kl_ctl=0.0,
        eps_clip=0.3,
    )
    engine = FSDPEngine(config)
    engine.create_process_group()
    engine.initialize(None, SPEC)
    engine.set_version(5)
    rows = batch()
    for index, row in enumerate(rows):
        row["logprobs"] = torch.full(row["input_ids"].shape, -1.0) * row["loss_mask"]
        row["versions"] = torch.where(row["loss_mask"].bool(), 5, -1)
        row["rewards"] = torch.tensor([float(index % 2)])
    actor = PPOActor(config, engine)
    ready = actor.compute_advantages(actor.annotate(actor.pack(rows), "prox_logp"))
    ready.tokens["advantages"][ready.tokens["loss_mask"] != 0] = math.nan
    actor.ppo_update(ready)
    stats_tracker.export_all()

    failure = tmp_path / "failures" / "step_5"
    document = read_failure(failure)
    assert document["loss"]["arguments"] == {"role": "ppo_actor", "current_version": 5}
    assert json.loads((failure / "config.json").read_text())["eps_clip"] == 0.3
    report = replay_step(failure)
    assert report.reproduced, report.lines()


def test_replay_command_exit_status_and_output(
    model_dir: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = _engine(model_dir, tmp_path)
    engine.train_batch(poisoned(math.nan), bad_rows_loss, weight_fn)
    failure = tmp_path / "failures" / "step_0"
    assert main(["replay", str(failure), "--json", str(tmp_path / "report.json")]) == 0
    assert capsys.readouterr().out.endswith("optimizer step: skipped, weights unchanged\nreproduced\n")
    assert json.loads((tmp_path / "report.json").read_text())["reproduced"] is True
    assert main(["replay", str(failure), "--loss", "tests.engine_fakes.loss_fn"]) == 1
    assert main(["replay", str(tmp_path)]) == 2
    assert "is no captured step" in capsys.readouterr().err


def test_read_failure_of_a_half_written_directory_raises(tmp_path: Path) -> None:
    (tmp_path / "failure.json").write_text('{"format": 99}')
    with pytest.raises(CheckpointError, match="format 99"):
        read_failure(tmp_path)


def test_failure_capture_norms_decide_after_eight_steps(model_dir: str, tmp_path: Path) -> None:
    watch = FailureCapture(build_engine(model_dir), tmp_path)
    watch._norms.extend([1.0] * 7)
    assert watch._why(StepFindings(1.0, 1e6)) is None
    watch._norms.append(1.0)
    assert watch._why(StepFindings(1.0, 99.0)) is None
    assert watch._why(StepFindings(1.0, 101.0)) is not None
    assert watch._why(StepFindings(math.inf, 1.0)) == "loss is inf"
    assert watch._why(StepFindings(1.0, math.inf)) == "gradient norm is inf"


def test_sft_run_keeps_its_failing_step_beside_its_logs(tmp_path: Path) -> None:
    model = tiny_policy(tmp_path / "model")
    weights_file = Path(model) / "model.safetensors"
    weights = load_file(weights_file)
    weights["model.norm.weight"][0] = math.nan
    save_file(weights, weights_file, metadata={"format": "pt"})
    config = sft_config(tmp_path, model, "total_train_steps=2", "actor.failure_capture.max_captures=1")

    run_sft(config)

    failures = log_dir(config) / "failures"
    assert [p.name for p in failures.iterdir()] == ["step_0"]
    assert read_failure(failures / "step_0")["findings"]["first_bad_parameter"] == "model.norm.weight"
    report = replay_step(failures / "step_0")
    assert report.reproduced, report.lines()
