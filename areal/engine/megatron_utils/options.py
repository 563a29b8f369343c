"""What the ``megatron`` section of a config asks for, checked before anything is built.

In: the config of one engine and its device. Out: nothing, or an error that names key, value and remedy. Called by the
Megatron engine.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import torch

from areal.api.config.fields import FieldError, check_fields
from areal.api.config.support import MEGATRON, missing_settings
from areal.engine.core.model import refuse_later_features
from areal.engine.megatron_utils.device import uses_transformer_engine
from areal.engine.megatron_utils.quantization import check_fp8
from areal.utils.errors import ConfigError, UnsupportedFeatureError

if TYPE_CHECKING:
    from areal.api.cli_args import TrainEngineConfig

__all__ = ["check_options"]

_MODULES = ("core_attn", "mlp", "moe")
_TE_MODULES = ("layernorm", "moe_act")
"""What ``recompute_modules`` can name: everywhere, and in Transformer Engine's layers only."""


def check_options(config: TrainEngineConfig, device: torch.device) -> None:
    """Check every setting that does not depend on the layout.

    Raises:
        ConfigError: a value is not allowed, or two contradict each other.
        UnsupportedFeatureError: the feature cannot run here, or not in this version.
    """
    megatron = config.megatron
    try:
        check_fields(megatron)
    except FieldError as exc:
        raise exc.under("megatron") from None
    if config.use_lora:
        raise UnsupportedFeatureError(
            "use_lora=true: the Megatron engine trains all weights; set it to false, or use backend fsdp"
        )
    refuse_later_features(config)
    if not config.path:
        raise ConfigError("path is empty; set it to a Hugging Face model directory or hub id")
    missing = missing_settings(config, MEGATRON)
    if missing:
        raise UnsupportedFeatureError("\n".join(missing))
    if config.optimizer is not None and config.optimizer.type == "adam_bf16":
        raise UnsupportedFeatureError(
            "optimizer.type=adam_bf16: the Megatron engine keeps float32 states; use adam, or backend fsdp or archon"
        )
    _check_transformer_engine(config, device)
    _check_recomputation(config, device)
    if config.grad_reduce_dtype != "float32":
        raise UnsupportedFeatureError(
            f"grad_reduce_dtype={config.grad_reduce_dtype}: megatron takes it from megatron.ddp.grad_reduce_in_fp32; "
            "set that to false, and grad_reduce_dtype to float32"
        )
    if megatron.moe_router_dtype not in (None, "fp32", "fp64"):
        raise ConfigError(f"megatron.moe_router_dtype={megatron.moe_router_dtype!r} must be fp32, fp64 or null")
    if megatron.fp8_config is not None:
        check_fp8(config, device)


def _check_transformer_engine(config: TrainEngineConfig, device: torch.device) -> None:
    """Features of Transformer Engine's kernels."""
    installed = importlib.util.find_spec("transformer_engine") is not None
    if config.megatron.moe_permute_fusion and (device.type != "cuda" or not installed):
        why = f"this device is {device.type}" if device.type != "cuda" else "transformer_engine is not installed"
        raise UnsupportedFeatureError(
            f"megatron.moe_permute_fusion=true needs Transformer Engine on a GPU: {why}; leave it out"
        )


def _check_recomputation(config: TrainEngineConfig, device: torch.device) -> None:
    megatron = config.megatron
    if megatron.distribute_saved_activations:
        raise UnsupportedFeatureError(
            "megatron.distribute_saved_activations=true: tensor-parallel ranks share the tokens between the layers "
            "already; leave it out"
        )
    if not config.gradient_checkpointing:
        return
    if megatron.recompute_granularity is None:
        raise ConfigError(
            "megatron.recompute_granularity=null with gradient_checkpointing=true: nothing would be recomputed; set it "
            "to full or selective, or gradient_checkpointing to false"
        )
    modules = megatron.recompute_modules
    if megatron.recompute_granularity == "selective":
        allowed = [*_MODULES, *(_TE_MODULES if uses_transformer_engine(device, getattr(torch, config.dtype)) else ())]
        unknown = sorted(set(modules or ()) - set(allowed))
        if unknown:
            raise ConfigError(
                f"megatron.recompute_modules={unknown} cannot be recomputed here; allowed: {', '.join(allowed)}"
                + ("" if len(allowed) > len(_MODULES) else f", and with Transformer Engine {', '.join(_TE_MODULES)}")
            )
        return
    if modules is not None:
        raise ConfigError(
            f"megatron.recompute_modules={modules} acts with recompute_granularity=selective only; leave it out"
        )
    for name in ("recompute_method", "recompute_num_layers"):
        if getattr(megatron, name) is None:
            raise ConfigError(f"megatron.{name}=null: recompute_granularity=full needs it; set it, or use selective")
