"""Short real runs of the trainers on a tiny model, arithmetic rows and the embedded engine; for the trainer tests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from areal import PPOTrainer, SFTTrainer
from areal.api.cli_args import GRPOConfig, SFTConfig, load_expr_config
from areal.dataset import get_custom_dataset
from areal.dataset.char_tokenizer import VOCAB_SIZE
from areal.utils import stats_tracker
from areal.utils.hf_utils import load_hf_tokenizer
from areal.utils.stats_logger import StatsLogger, read_stats
from tests.fakes import save_tiny_model

WORKFLOW = "areal.workflow.rlvr.RLVRWorkflow"
REWARD = "tests.trainer_runs.digit_share"
# Statistics that depend on the clock, not on the seed.
CLOCK_PREFIXES = ("timeperf/", "ledger/", "throughput/", "memory/")

RL_BASE = """
experiment_name: tests
trial_name: grpo
total_train_epochs: 2
total_train_steps: 3
scheduler: {type: inline}
cluster: {fileroot: outputs}
rollout: {backend: "native:d1", max_concurrent_rollouts: 8, max_head_offpolicyness: 0, wait_timeout_s: 60}
gconfig: {n_samples: 4, max_new_tokens: 6}
actor:
  backend: fsdp:d1
  dtype: float32
  kl_ctl: 0.0
  ppo_n_minibatches: 1
  recompute_logprob: false
  optimizer: {lr: 1.0e-3, weight_decay: 0.0, lr_scheduler_type: constant, warmup_steps_proportion: 0.0}
  reward_norm: {mean_level: group, std_level: group, group_size: 4}
train_dataset: {path: arithmetic, type: rl, batch_size: 4, dataset_kwargs: {size: 32}}
"""
SFT_BASE = """
experiment_name: tests
trial_name: sft
total_train_epochs: 2
total_train_steps: 4
scheduler: {type: inline}
cluster: {fileroot: outputs}
actor:
  backend: fsdp:d1
  dtype: float32
  optimizer: {lr: 5.0e-3, weight_decay: 0.0, lr_scheduler_type: cosine, warmup_steps_proportion: 0.0}
train_dataset: {path: arithmetic, type: sft, batch_size: 8, dataset_kwargs: {size: 32}}
"""


def digit_share(prompt: str, completion: str, prompt_ids: Any, completion_ids: list[int], **row: Any) -> float:
    """Share of digits among the sampled tokens: varied rewards that even a random model earns."""
    return sum(4 <= token < 14 for token in completion_ids) / max(1, len(completion_ids))


digit_share.areal_inline = True  # type: ignore[attr-defined]  # takes microseconds


def tiny_policy(path: Path, seed: int = 0) -> str:
    """A tiny Qwen2 whose vocabulary is the character tokenizer's, as a Hugging Face directory."""
    return save_tiny_model(path, seed=seed, vocab_size=VOCAB_SIZE)


def rl_config(root: Path, model: str, *overrides: str, base: str = RL_BASE) -> GRPOConfig:
    """The base config under ``root`` with ``key=value`` overrides."""
    return load_config(root, base, GRPOConfig, f"actor.path={model}", *overrides)


def sft_config(root: Path, model: str, *overrides: str) -> SFTConfig:
    """The base config of supervised runs under ``root`` with overrides."""
    return load_config(root, SFT_BASE, SFTConfig, f"actor.path={model}", *overrides)


def load_config(root: Path, base: str, cls: type, *overrides: str) -> Any:
    """A config of the YAML text ``base`` under ``root`` with overrides."""
    root.mkdir(parents=True, exist_ok=True)
    file = root / "config-in.yaml"
    file.write_text(base)
    return load_expr_config(["--config", str(file), f"cluster.fileroot={root}", *overrides], cls)[0]


def rl_rows(config: GRPOConfig) -> Any:
    """The configured training rows."""
    return get_custom_dataset(dataset_config=config.train_dataset, tokenizer=load_hf_tokenizer(config.tokenizer_path))


def workflow_kwargs(config: GRPOConfig, reward_fn: Any = REWARD) -> dict[str, Any]:
    """Constructor arguments of the RLVR workflow."""
    return {"reward_fn": reward_fn, "gconfig": config.gconfig, "tokenizer": config.tokenizer_path}


def run_rl(config: GRPOConfig, *, reward_fn: Any = REWARD, dataset: Any = None, **train: Any) -> list[dict[str, float]]:
    """Run to the end; the statistics of every step."""
    stats_tracker.export_all(reset=True)
    with PPOTrainer(config, train_dataset=rl_rows(config) if dataset is None else dataset) as trainer:
        trainer.train(**{"workflow": WORKFLOW, "workflow_kwargs": workflow_kwargs(config, reward_fn), **train})
    return stats_of(config)


def run_sft(config: SFTConfig, valid: Any = None) -> list[dict[str, float]]:
    """Run a supervised config to the end; the statistics of every step."""
    stats_tracker.export_all(reset=True)
    with SFTTrainer(config, train_dataset=sft_rows(config), valid_dataset=valid) as trainer:
        trainer.train()
    return stats_of(config)


def sft_rows(config: SFTConfig) -> Any:
    """The configured training rows, tokenized."""
    tokenizer = load_hf_tokenizer(config.tokenizer_path)
    return get_custom_dataset(dataset_config=config.train_dataset, tokenizer=tokenizer)


def log_dir(config: Any) -> Path:
    """Where the run leaves its files."""
    return Path(StatsLogger.get_log_path(config))


def stats_of(config: Any) -> list[dict[str, float]]:
    """Statistics of every step from ``stats.jsonl``."""
    return [row["stats"] for row in read_stats(log_dir(config))]


def seeded(stats: dict[str, float]) -> dict[str, float]:
    """The statistics that a seed fixes."""
    return {key: value for key, value in stats.items() if not key.startswith(CLOCK_PREFIXES)}


def checkpoints(config: Any) -> list[Path]:
    """Hugging Face checkpoints of the run, oldest first."""
    user_root = Path(config.cluster.fileroot) / "checkpoints"
    found = user_root.glob(f"*/{config.experiment_name}/{config.trial_name}/default/epoch*")
    return sorted(found, key=lambda path: int(path.name.rpartition("globalstep")[2]))


def weights(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """Every tensor of a Hugging Face checkpoint."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def assert_same_weights(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> None:
    """Both checkpoints hold the same bits."""
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    assert first
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), f"{name} differs"


class RecordingTrainer(PPOTrainer):
    """Keeps the groups of every step, as ``(version trained at, group)``, and where each step left the trainer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.groups: list[tuple[int, Any]] = []
        self.versions: list[tuple[int, int, int]] = []
        super().__init__(*args, **kwargs)

    def _train_step(self, step: Any, *args: Any) -> Any:
        refs = super()._train_step(step, *args)
        self.groups += [(step.global_step, ref) for ref in refs]
        self.versions.append(
            (self.actor.engine.get_version(), self.rollout.get_version(), self.parts.rollout.sampler.get_version())
        )
        return refs


def record_rl(
    config: GRPOConfig,
    *,
    reward_fn: Any = REWARD,
    dataset: Any = None,
    valid: Any = None,
    trainer_class: Any = RecordingTrainer,
    **train: Any,
) -> Any:
    """Like ``run_rl``, with the (closed) trainer as the result."""
    stats_tracker.export_all(reset=True)
    with trainer_class(
        config, train_dataset=rl_rows(config) if dataset is None else dataset, valid_dataset=valid
    ) as trainer:
        trainer.train(**{"workflow": WORKFLOW, "workflow_kwargs": workflow_kwargs(config, reward_fn), **train})
    return trainer
