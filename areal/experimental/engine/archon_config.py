"""What the ``archon`` section of a config asks for, checked, and in the terms of the functions that do it.

In: the config of one engine, the model's shape, the device and the parallel dimensions. Out: ``TrainingOptions``, or an
error that names key, value and remedy before a model is built. Called by the Archon engine.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from areal.api.config.fields import FieldError, check_fields
from areal.engine.core.determinism import use_deterministic_algorithms
from areal.engine.core.model import refuse_later_features
from areal.experimental.models.archon.activation_checkpoint import AcOptions
from areal.experimental.models.archon.compile import CompileOptions
from areal.utils import logging
from areal.utils.errors import ConfigError, UnsupportedFeatureError

if TYPE_CHECKING:
    from areal.api.cli_args import TrainEngineConfig
    from areal.api.config.archon import ArchonEngineConfig
    from areal.experimental.engine.archon_dims import ArchonParallelDims
    from areal.experimental.models.archon.base import ModelArgs

__all__ = ["TrainingOptions", "prepare_training_config"]

logger = logging.getLogger("ArchonConfig")

ZERO_BUBBLE = ("InterleavedZeroBubble", "ZBVZeroBubble")
"""Schedules that run the backward pass of a stage in two halves: gradients of inputs, and later those of weights."""


@dataclass(frozen=True)
class TrainingOptions:
    """How the model is trained.

    Attributes:
        ac: which activations are computed again in the backward pass; None: none.
        compile: how layers are compiled; None: not at all.
    """

    ac: AcOptions | None = None
    compile: CompileOptions | None = None


def prepare_training_config(
    config: TrainEngineConfig, args: ModelArgs, device: torch.device, *, dims: ArchonParallelDims
) -> TrainingOptions:
    """Check every setting that ``dims`` and the model's own checks do not, and turn deterministic algorithms on.

    Raises:
        ConfigError: a value is not allowed, or two contradict each other.
        UnsupportedFeatureError: the feature cannot run here, or not in this version.
    """
    archon = config.archon
    try:
        check_fields(archon)
    except FieldError as exc:
        raise exc.under("archon") from None
    every = _every(archon)
    if archon.attn_type == "tree" and not config.enable_tree_training:
        logger.warning("archon.attn_type=tree means varlen without enable_tree_training=true, which brings its own")
    refuse_later_features(config)
    _refuse_unavailable(archon, device, dims)
    _check_compile(archon, dims)
    compiled = None
    if archon.enable_compile:
        kernel = device.type == "cuda" and config.dtype in ("bfloat16", "float16")
        budget = archon.ac_memory_budget if config.gradient_checkpointing and archon.ac_mode == "memory_budget" else 1.0
        compiled = CompileOptions(flash=kernel, memory_budget=budget)
    if archon.use_deterministic_algorithms:
        use_deterministic_algorithms()
    ac = _ac_options(archon, args, dims, every) if config.gradient_checkpointing else None
    return TrainingOptions(ac, compiled)


def _every(archon: ArchonEngineConfig) -> int | None:
    """N of ``selective_ac_option``; None for ``op``."""
    text = archon.selective_ac_option
    if text == "op":
        return None
    if not re.fullmatch(r"[1-9][0-9]*", text):
        raise ConfigError(
            f"archon.selective_ac_option={text!r} must be 'op' or a positive integer N, to checkpoint every N-th layer"
        )
    return int(text)


def _refuse_unavailable(archon: ArchonEngineConfig, device: torch.device, dims: ArchonParallelDims) -> None:
    if archon.fp8_config.enabled:
        why = "fp8 training is not available in this version"
        if device.type != "cuda":
            why = f"fp8 matrix products need a Hopper GPU, and this device is {device.type}"
        elif importlib.util.find_spec("torchao") is None:
            why = "fp8 matrix products need the package torchao, which is not installed"
        raise UnsupportedFeatureError(f"archon.fp8_config.mode={archon.fp8_config.mode}: {why}; set it to disabled")
    sharded = dims.fsdp_enabled or dims.tp_enabled
    if archon.offload_params and (device.type == "cpu" or not sharded):
        why = "torch's CPU offload does not run on a CPU" if device.type == "cpu" else "one rank shards nothing"
        raise ConfigError(f"archon.offload_params=true: {why}; set it to false")


def _check_compile(archon: ArchonEngineConfig, dims: ArchonParallelDims) -> None:
    if archon.enable_compile and _zero_bubble(archon, dims):
        raise ConfigError(
            f"archon.enable_compile=true: compiled layers have one backward pass, and archon.pp_schedule="
            f"{archon.pp_schedule} runs it in two halves; set it to false, or use 1F1B or Interleaved1F1B"
        )


def _ac_options(
    archon: ArchonEngineConfig, args: ModelArgs, dims: ArchonParallelDims, every: int | None
) -> AcOptions | None:
    if archon.ac_mode == "none":
        return None
    if archon.ac_mode == "memory_budget" and not archon.enable_compile:
        raise ConfigError(
            "archon.ac_mode=memory_budget: the compiler spends the budget; set archon.enable_compile=true, or use "
            "full or selective"
        )
    if archon.ac_debug and archon.enable_compile:
        raise ConfigError("archon.ac_debug=true cannot look into compiled layers; set archon.enable_compile=false")
    preserve = archon.ac_preserve_rng_state or archon.use_deterministic_algorithms
    if archon.ac_mode != "selective":
        return AcOptions(archon.ac_mode, None, archon.ac_memory_budget, preserve, archon.ac_debug)
    if every is not None and every > args.n_layers:
        raise ConfigError(
            f"archon.selective_ac_option={every} checkpoints every {every}-th layer, the model has {args.n_layers}, "
            "so none would be; use a smaller N or op"
        )
    if every is None and _zero_bubble(archon, dims):
        # What is kept of a layer can be taken out once, and each half of its backward pass computes it again.
        logger.warning(f"archon.pp_schedule={archon.pp_schedule}: activation checkpointing by op becomes full")
        return AcOptions("full", None, archon.ac_memory_budget, preserve, archon.ac_debug)
    if every is None and archon.ac_debug:
        raise ConfigError(
            "archon.ac_debug=true cannot follow a choice by op; set archon.ac_mode=full, or archon.selective_ac_option "
            "to an integer"
        )
    return AcOptions("selective", every, archon.ac_memory_budget, preserve, archon.ac_debug)


def _zero_bubble(archon: ArchonEngineConfig, dims: ArchonParallelDims) -> bool:
    return dims.pp_enabled and archon.pp_schedule in ZERO_BUBBLE
