"""What a run will do, before anything starts; and the dry run that prints it and stops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from areal import PPOTrainer, SFTTrainer
from areal.api.config_loader import DRY_RUN
from areal.trainer import builder
from areal.trainer.plan import add_memory, build_plan, count_parameters, sampler_memory_gib, train_memory_gib
from areal.utils.dataloader import create_dataloader
from areal.utils.errors import ConfigError
from tests.trainer_runs import rl_config, rl_rows, sft_config, sft_rows, tiny_policy

GIB = 1024**3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_policy(tmp_path_factory.mktemp("plan"))


@pytest.fixture
def dry_run() -> Any:
    token = DRY_RUN.set(True)
    yield
    DRY_RUN.reset(token)


def plan_of(config: Any, rows: int) -> Any:
    loader = create_dataloader([{}] * rows, 0, 1, config.train_dataset)
    return build_plan(config, loader, getattr(config, "gconfig", None)), loader


def test_plan_counts_steps_sequences_and_tokens(tmp_path: Path) -> None:
    config = rl_config(tmp_path, "nowhere", "total_train_steps=null", "train_dataset.batch_size=8")
    plan, loader = plan_of(config, 35)
    assert (plan.rows_per_step, plan.sequences_per_step, plan.max_tokens_per_step) == (8, 32, 32 * 6)
    assert (plan.steps_per_epoch, plan.total_steps) == (4, 8)
    assert plan.total_rows(loader) == 64


def test_plan_with_a_short_last_step_counts_its_rows(tmp_path: Path) -> None:
    config = rl_config(tmp_path, "nowhere", "total_train_steps=5", "train_dataset.drop_last=false")
    plan, loader = plan_of(config, 10)
    assert (plan.steps_per_epoch, plan.total_steps) == (3, 5)
    assert plan.total_rows(loader) == 10 + 8


def test_plan_is_cut_by_total_train_steps(tmp_path: Path) -> None:
    plan, _ = plan_of(rl_config(tmp_path, "nowhere", "total_train_steps=3"), 100)
    assert plan.total_steps == 3


def test_memory_counts_weights_gradients_and_adam(tmp_path: Path, model: str) -> None:
    config = rl_config(tmp_path, model, "actor.kl_ctl=0.1", "ref={}")
    n_parameters, hf_config = count_parameters(model)
    assert train_memory_gib(config.actor, n_parameters, 1) == pytest.approx(16 * n_parameters / GIB)
    assert train_memory_gib(config.actor, n_parameters, 2) == pytest.approx(8 * n_parameters / GIB)
    assert train_memory_gib(config.ref, n_parameters, 1) == pytest.approx(4 * n_parameters / GIB)
    config.actor.dtype = "bfloat16"
    assert train_memory_gib(config.actor, n_parameters, 1) == pytest.approx(18 * n_parameters / GIB)
    assert sampler_memory_gib(config, n_parameters, hf_config) > 2 * 2 * n_parameters / GIB
    plan = add_memory(plan_of(config, 32)[0], config)
    assert list(plan.memory_gib) == ["actor", "ref", "rollout"]


def test_dry_run_prints_the_plan_and_starts_nothing(
    dry_run: Any, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "build_train_engine", _must_not_be_called)
    config = rl_config(tmp_path, model)
    with pytest.raises(SystemExit) as stopped:
        PPOTrainer(config, train_dataset=rl_rows(config))
    printed = capsys.readouterr().out
    assert stopped.value.code == 0
    for piece in (
        "experiment_name: tests",
        "steps: 3 (8 per epoch)",
        "per step: 4 rows, 16 sequences, at most 96 generated tokens",
        "memory of actor: about",
        "memory of rollout: about",
        "the run can start",
    ):
        assert piece in printed
    assert not (tmp_path / "logs").exists()
    assert not (tmp_path / "checkpoints").exists()


def test_dry_run_lists_every_refusal(
    dry_run: Any, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = rl_config(tmp_path, model, "memory_profiler={}", "actor.use_kernels=true", "critic={}")
    with pytest.raises(SystemExit) as stopped:
        PPOTrainer(config, train_dataset=rl_rows(config))
    printed = capsys.readouterr().out
    assert stopped.value.code == 2
    for words in ("refused: memory_profiler", "refused: actor.use_kernels", "refused: critic.optimizer=null"):
        assert words in printed
    assert "the run can start" not in printed


def test_dry_run_with_a_critic_and_a_teacher_shows_their_memory(
    dry_run: Any, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = rl_config(tmp_path, model, "critic={optimizer: {lr: 1.0e-3}}", f"teacher={{path: '{model}'}}")
    with pytest.raises(SystemExit) as stopped:
        PPOTrainer(config, train_dataset=rl_rows(config))
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    assert "memory of critic: about" in printed
    assert "memory of teacher: about" in printed


def test_dry_run_without_the_model_still_shows_the_rest(
    dry_run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = rl_config(tmp_path, str(tmp_path / "no-such-model"))
    with pytest.raises(SystemExit):
        PPOTrainer(config, train_dataset=[{}] * 32)
    printed = capsys.readouterr().out
    assert "steps: 3 (8 per epoch)" in printed
    assert "memory: unknown" in printed


def test_dry_run_of_supervised_training(
    dry_run: Any, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = sft_config(tmp_path, model)
    with pytest.raises(SystemExit):
        SFTTrainer(config, train_dataset=sft_rows(config))
    printed = capsys.readouterr().out
    assert "per step: 8 rows, 8 sequences\n" in printed
    assert "memory of rollout" not in printed


def test_dry_run_masks_secrets(dry_run: Any, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = rl_config(tmp_path, model, "stats_logger.wandb.wandb_api_key=very-secret")
    with pytest.raises(SystemExit):
        PPOTrainer(config, train_dataset=rl_rows(config))
    assert "very-secret" not in capsys.readouterr().out


def test_unavailable_feature_raises_when_the_run_is_built_naming_all(tmp_path: Path) -> None:
    config = rl_config(tmp_path, str(tmp_path / "none"), "actor.use_kernels=true", "memory_profiler={}")
    with pytest.raises(ConfigError) as caught:
        PPOTrainer(config, train_dataset=[{}] * 32)
    assert "actor.use_kernels" in str(caught.value)
    assert "memory_profiler" in str(caught.value)


def _must_not_be_called(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("a dry run must start nothing")
