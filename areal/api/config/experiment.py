"""Experiment roots: what a YAML file describes. Users subclass them for sections of their own.

The trainers in ``areal.trainer`` take one of these; ``areal.api.cli_args.load_expr_config`` makes it from a file.
"""

from __future__ import annotations

from dataclasses import dataclass

from areal.api.config.cluster import ClusterSpecConfig, SchedulerConfig
from areal.api.config.dataset import TrainDatasetConfig, ValidDatasetConfig
from areal.api.config.fields import MISSING, ConfigSection, opt, section
from areal.api.config.inference import NativeConfig, SGLangConfig, vLLMConfig
from areal.api.config.inherit import inherit
from areal.api.config.logging import MemoryProfilerConfig, PerfTracerConfig, StatsLoggerConfig
from areal.api.config.ppo import PPOActorConfig, PPOCriticConfig, TeacherConfig
from areal.api.config.preference import DPOEngineConfig
from areal.api.config.rollout import GenerationHyperparameters, InferenceEngineConfig
from areal.api.config.timers import EvaluatorConfig, RecoverConfig, SaverConfig
from areal.api.config.train import TrainEngineConfig


@dataclass
class BaseExperimentConfig(ConfigSection):
    """What every experiment has; the roots derive from it."""

    experiment_name: str = opt(MISSING, "Name of the experiment; no slash.")
    trial_name: str = opt(MISSING, "Name of this trial of it; no slash.")
    cluster: ClusterSpecConfig = section(ClusterSpecConfig, "Machines and shared storage.")
    allocation_mode: str = opt("", "Layout of all roles, for SPMD launchers (deprecated).")
    seed: int = opt(1, "Seed from which all others of the run derive.", ge=0)
    total_train_epochs: int = opt(1, "Passes over the training data.", unit="epochs", gt=0)
    total_train_steps: int | None = opt(None, "Stop early after n steps.", unit="steps", ge=1)
    tokenizer_path: str = opt("", "Tokenizer directory or hub id; the actor's model path when empty.")
    train_dataset: TrainDatasetConfig = section(TrainDatasetConfig, "The training data.")
    valid_dataset: ValidDatasetConfig | None = section(None, "The evaluation data; null = no evaluation.")
    saver: SaverConfig = section(SaverConfig, "When Hugging Face checkpoints are written.")
    evaluator: EvaluatorConfig = section(EvaluatorConfig, "When evaluation runs.")
    stats_logger: StatsLoggerConfig = section(StatsLoggerConfig, "Where metrics go.")
    recover: RecoverConfig = section(RecoverConfig, "Recover points and resuming.")
    sglang: SGLangConfig = section(SGLangConfig, "Server options.")
    vllm: vLLMConfig = section(vLLMConfig, "Server options.")
    scheduler: SchedulerConfig = section(SchedulerConfig, "Who hosts the engines.")
    enable_offload: bool = opt(False, "Let models leave the device between phases.")
    total_train_n_seqs: int | None = opt(None, "Not read (kept for 1.x files).", unit="sequences", ge=1)
    perf_tracer: PerfTracerConfig | None = section(None, "Performance traces; null = off.")
    memory_profiler: MemoryProfilerConfig | None = section(None, "Device memory snapshots; null = off.")
    native: NativeConfig = section(NativeConfig, "Options of the embedded inference engine.")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("experiment_name", "trial_name"):
            if "/" in getattr(self, name):
                raise self.fail(name, "a name without a slash; it becomes a directory")
        inherit(self)


@dataclass
class SFTConfig(BaseExperimentConfig):
    """Supervised fine-tuning."""

    actor: TrainEngineConfig = section(TrainEngineConfig, "The model that is trained.")


@dataclass
class RWConfig(BaseExperimentConfig):
    """Reward model training; ``actor.is_critic`` must be true."""

    actor: TrainEngineConfig = section(TrainEngineConfig, "The reward model; is_critic must be true.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.actor.is_critic:
            raise self.actor.fail("is_critic", "true: a reward model has a scalar head").under(
                f"{type(self).__name__}.actor"
            )


@dataclass
class DPOConfig(BaseExperimentConfig):
    """Direct preference optimisation."""

    actor: DPOEngineConfig = section(DPOEngineConfig, "Policy (is_critic must be false).")
    ref: DPOEngineConfig = section(DPOEngineConfig, "The frozen reference model.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.actor.is_critic:
            raise self.actor.fail("is_critic", "false: DPO trains a language model").under(
                f"{type(self).__name__}.actor"
            )


@dataclass
class PPOConfig(BaseExperimentConfig):
    """Reinforcement learning with the PPO family (PPO, GRPO and relatives)."""

    gconfig: GenerationHyperparameters = section(GenerationHyperparameters, "How training samples are drawn.")
    eval_gconfig: GenerationHyperparameters | None = section(
        None, "How evaluation samples are drawn; null = like gconfig."
    )
    rollout: InferenceEngineConfig = section(InferenceEngineConfig, "Inference backend and rollout control.")
    actor: PPOActorConfig = section(PPOActorConfig, "The policy that is trained.")
    ref: PPOActorConfig | None = section(None, "Reference policy for the KL penalty; null = none.")
    critic: PPOCriticConfig | None = section(None, "Value model (is_critic is always true); null = none.")
    teacher: TeacherConfig | None = section(None, "Distillation teacher; null = none.")
    dynamic_bs: bool = opt(False, "Batches end after batch_size attempts, accepted or not.")

    def __post_init__(self) -> None:
        if self.critic is not None:
            self.critic.is_critic = True
        if self.eval_gconfig is None:
            self.eval_gconfig = self.gconfig.new()
        super().__post_init__()
        for name, gconfig in (("gconfig", self.gconfig), ("eval_gconfig", self.eval_gconfig)):
            if gconfig.min_new_tokens > gconfig.max_new_tokens:
                allowed = f"<= max_new_tokens ({gconfig.max_new_tokens})"
                raise gconfig.fail("min_new_tokens", allowed).under(f"{type(self).__name__}.{name}")


@dataclass
class GRPOConfig(PPOConfig):
    """Same as ``PPOConfig``; the name that scripts use."""
