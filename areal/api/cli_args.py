"""Configuration: the classes that a YAML file is made of, and the functions that load one.

In: ``argv`` such as ``["--config", "grpo.yaml", "actor.optimizer.lr=1e-6"]``. Out: a checked config object. Called by
the users' scripts, the command line and the launchers. The classes live in ``areal.api.config``, the loader's inner
parts in ``areal.api.config_loader``.

Overrides: ``a.b=1`` (also ``+a.b=1``, ``++a.b=1``) sets any declared key, whether the file has it or not; ``~a.b``
takes a key out of the file, so that its default holds; lists are written ``a=[1,2]`` and indexed ``a.0.b=1``;
``a=null`` empties. ``${a.b}`` stands for the value of another key. An undeclared key is an error that names the nearest
one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from areal.api.config.archon import ArchonEngineConfig, ArchonFP8Config
from areal.api.config.cluster import ClusterSpecConfig, NameResolveConfig, SchedulerConfig
from areal.api.config.convert import UnknownKeyError, to_plain, without_marks
from areal.api.config.dataset import TrainDatasetConfig, ValidDatasetConfig, _DatasetConfig
from areal.api.config.experiment import (
    BaseExperimentConfig,
    DPOConfig,
    GRPOConfig,
    PPOConfig,
    RWConfig,
    SFTConfig,
)
from areal.api.config.fields import MISSING, FieldError, MissingValueError, is_default
from areal.api.config.fsdp import FSDPEngineConfig, FSDPWrapPolicy
from areal.api.config.inference import NativeConfig, SGLangConfig, vLLMConfig
from areal.api.config.logging import (
    MemoryProfilerConfig,
    PerfTracerConfig,
    SessionTracerConfig,
    StatsLoggerConfig,
    SwanlabConfig,
    TensorBoardConfig,
    TrackioConfig,
    WandBConfig,
)
from areal.api.config.megatron import DistributedDataParallelConfig, FP8EngineConfig, MegatronEngineConfig
from areal.api.config.optimizer import OptimizerConfig
from areal.api.config.ppo import (
    MismatchConfig,
    NormConfig,
    PPOActorConfig,
    PPOCriticConfig,
    RejectionSamplingConfig,
    TeacherConfig,
)
from areal.api.config.preference import DPOEngineConfig
from areal.api.config.rollout import AgentConfig, GenerationHyperparameters, InferenceEngineConfig
from areal.api.config.scheduling import SchedulingSpec, SchedulingStrategy
from areal.api.config.server_args import command
from areal.api.config.timers import EvaluatorConfig, RecoverConfig, SaverConfig, _Timer
from areal.api.config.train import FailureCaptureConfig, MicroBatchSpec, TrainEngineConfig
from areal.api.config_loader import DRY_RUN, ConfigFileError, make_config, parse_argv, write_config
from areal.utils.errors import ConfigError, UnsupportedFeatureError

if TYPE_CHECKING:
    from omegaconf import DictConfig

ConfigT = TypeVar("ConfigT")

__all__ = [
    "MISSING",
    "AgentConfig",
    "ArchonEngineConfig",
    "ArchonFP8Config",
    "BaseExperimentConfig",
    "ClusterSpecConfig",
    "ConfigError",
    "ConfigFileError",
    "DPOConfig",
    "DPOEngineConfig",
    "DistributedDataParallelConfig",
    "EvaluatorConfig",
    "FP8EngineConfig",
    "FSDPEngineConfig",
    "FSDPWrapPolicy",
    "FailureCaptureConfig",
    "FieldError",
    "GRPOConfig",
    "GenerationHyperparameters",
    "InferenceEngineConfig",
    "MegatronEngineConfig",
    "MemoryProfilerConfig",
    "MicroBatchSpec",
    "MismatchConfig",
    "MissingValueError",
    "NameResolveConfig",
    "NativeConfig",
    "NormConfig",
    "OptimizerConfig",
    "PPOActorConfig",
    "PPOConfig",
    "PPOCriticConfig",
    "PerfTracerConfig",
    "RWConfig",
    "RecoverConfig",
    "RejectionSamplingConfig",
    "SFTConfig",
    "SGLangConfig",
    "SaverConfig",
    "SchedulerConfig",
    "SchedulingSpec",
    "SchedulingStrategy",
    "SessionTracerConfig",
    "StatsLoggerConfig",
    "SwanlabConfig",
    "TeacherConfig",
    "TensorBoardConfig",
    "TrackioConfig",
    "TrainDatasetConfig",
    "TrainEngineConfig",
    "UnknownKeyError",
    "UnsupportedFeatureError",
    "ValidDatasetConfig",
    "WandBConfig",
    "_DatasetConfig",
    "_Timer",
    "conf_as_dict",
    "get_py_cmd",
    "is_default",
    "load_config",
    "load_expr_config",
    "parse_cli_args",
    "save_config",
    "to_structured_cfg",
    "vLLMConfig",
]


def parse_cli_args(argv: Sequence[str]) -> tuple[DictConfig, Path]:
    """Read ``--config FILE`` and apply the overrides; everything else in ``argv`` is an override.

    Args:
        argv: arguments; a first one that ends in ``.py`` is dropped.
    Returns: the merged tree, interpolations unresolved, and the path of the file.
    Raises:
        ConfigError: no such file, no YAML, or an argument that is no override.
        SystemExit: ``--config`` is missing.
    """
    from omegaconf import OmegaConf

    tree, path = parse_argv(argv)
    cfg: DictConfig = OmegaConf.create(tree)
    return cfg, path


def to_structured_cfg(cfg: DictConfig, cls: type) -> DictConfig:
    """Check a tree (or one section of it) against ``cls`` and return it with all defaults filled in.

    ``OmegaConf.to_object`` of the result is an instance of ``cls``.

    Raises:
        ConfigError: unknown key, wrong type, choice or range, missing mandatory value.
    """
    from omegaconf import OmegaConf

    structured: DictConfig = OmegaConf.structured(without_marks(make_config(_raw(cfg), cls)))
    return structured


def load_config(argv: Sequence[str], cls: type[ConfigT]) -> tuple[ConfigT, Path]:
    """Load a config without any side effect: nothing is written and no store is contacted.

    Raises:
        ConfigError: with the full key, the value and what is allowed.
    """
    tree, path = parse_argv(argv)
    return make_config(tree, cls), path


def load_expr_config(argv: Sequence[str], cls: type[ConfigT]) -> tuple[ConfigT, str]:
    """Load the config of a run; what a training script calls first.

    Selects the key-value store of ``cluster.name_resolve`` and, on rank 0, writes the resolved ``config.yaml`` to the
    log path of the run (a dry run writes nothing).

    Args:
        argv: arguments of the script, e.g. ``sys.argv[1:]``.
        cls: experiment class, e.g. ``GRPOConfig`` or a subclass with sections of its own.
    Returns: the config and the path of its file.
    Raises:
        ConfigError: with the full key, the value and what is allowed.
    """
    from areal.utils import environ

    config, path = load_config(argv, cls)
    if isinstance(config, BaseExperimentConfig):
        from areal.utils import fs, name_resolve

        with contextlib.suppress(UnsupportedFeatureError):  # building a run refuses it; reading the file does not
            name_resolve.reconfigure(config.cluster.name_resolve)
        if environ.rank() == 0 and not DRY_RUN.get():
            log_path = fs.get_log_path(config.cluster.fileroot, config.experiment_name, config.trial_name)
            save_config(config, log_path)
    return config, str(path)


def save_config(cfg: Any, log_dir: str | Path) -> None:
    """Write ``config.yaml`` into ``log_dir`` in declaration order; keys, tokens and passwords are masked."""
    write_config(cfg, Path(log_dir) / "config.yaml")


def conf_as_dict(cfg: Any) -> Any:
    """Return a config object or an OmegaConf node as nested dicts and lists of plain values."""
    if hasattr(cfg, "_get_node"):  # an OmegaConf container, told without importing omegaconf
        from omegaconf import OmegaConf

        return OmegaConf.to_container(cfg, resolve=True)
    return to_plain(cfg)


def get_py_cmd(module: str, args: dict[str, Any]) -> list[str]:
    """Return the command that runs ``module`` with ``args`` as flags.

    Underscores become dashes; None, False, empty strings and empty lists are left out; True is a bare flag; a list is
    its flag followed by its items.
    """
    return ["python3", *command("", module, args)[1:]]


def _raw(cfg: Any) -> dict[str, Any]:
    """Return a node as plain data; a section's interpolations look at the whole tree, so they are resolved here."""
    from omegaconf import OmegaConf

    if not OmegaConf.is_config(cfg):
        return dict(cfg)
    tree = OmegaConf.to_container(cfg, resolve=cfg._get_parent() is not None)
    if not isinstance(tree, dict):
        raise ConfigError(f"expected a section, found a {type(tree).__name__}")
    return {str(key): value for key, value in tree.items()}
