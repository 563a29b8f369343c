"""fp8 training of the Megatron engine: ``megatron.fp8_config`` in megatron-core's terms, and where it can run.

In: an ``FP8EngineConfig``. Out: fields of ``TransformerConfig``, or an error that names key, value and rule. Called by
``options.py`` and ``model.py``. What the numbers are worth only a GPU can show; the mapping is tested without one.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import torch

from areal.api.config.fields import FieldError, check_fields
from areal.utils.errors import ConfigError, UnsupportedFeatureError

if TYPE_CHECKING:
    from areal.api.cli_args import TrainEngineConfig
    from areal.api.config.megatron import FP8EngineConfig

__all__ = ["check_fp8", "fp8_settings"]

# Field -> field of TransformerConfig.
_FIELDS = {
    "mode": "fp8",
    "recipe": "fp8_recipe",
    "param": "fp8_param",
    "margin": "fp8_margin",
    "amax_history_len": "fp8_amax_history_len",
    "amax_compute_algo": "fp8_amax_compute_algo",
    "wgrad": "fp8_wgrad",
    "dot_product_attention": "fp8_dot_product_attention",
    "multi_head_attention": "fp8_multi_head_attention",
    "tp_only_amax_red": "tp_only_amax_red",
    "first_last_layers_bf16": "first_last_layers_bf16",
    "num_layers_at_start_in_bf16": "num_layers_at_start_in_bf16",
    "num_layers_at_end_in_bf16": "num_layers_at_end_in_bf16",
}
_HOPPER, _BLACKWELL = (9, 0), (10, 0)


def fp8_settings(fp8: FP8EngineConfig) -> dict[str, Any]:
    """``fp8`` as fields of megatron's ``TransformerConfig``."""
    return {theirs: getattr(fp8, ours) for ours, theirs in _FIELDS.items()}


def check_fp8(config: TrainEngineConfig, device: torch.device) -> None:
    """Refuse fp8 settings that contradict each other, and fp8 where the device or its packages cannot.

    Raises:
        ConfigError: names key, value and rule.
        UnsupportedFeatureError: no GPU that multiplies fp8 matrices, or no Transformer Engine.
    """
    fp8 = config.megatron.fp8_config
    assert fp8 is not None
    try:
        check_fields(fp8)
    except FieldError as exc:
        raise exc.under("megatron.fp8_config") from None
    _check_values(config, fp8)
    _check_device(fp8, device)


def _check_values(config: TrainEngineConfig, fp8: FP8EngineConfig) -> None:
    prefix = "megatron.fp8_config"
    if config.dtype != "bfloat16":
        raise ConfigError(f"{prefix} with dtype={config.dtype}: what is not fp8 must be bfloat16; set dtype=bfloat16")
    if fp8.recipe != "delayed":
        for name, default in (("margin", 0), ("amax_history_len", 1), ("amax_compute_algo", "most_recent")):
            value = getattr(fp8, name)
            if value != default:
                raise ConfigError(f"{prefix}.{name}={value} acts on recipe=delayed only; the recipe is {fp8.recipe}")
    if not fp8.first_last_layers_bf16:
        for name in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
            if getattr(fp8, name) != 1:
                raise ConfigError(
                    f"{prefix}.{name}={getattr(fp8, name)} has no effect without {prefix}.first_last_layers_bf16=true"
                )
    elif fp8.recipe == "delayed":
        raise ConfigError(
            f"{prefix}.first_last_layers_bf16=true does not work with recipe=delayed; use tensorwise, blockwise or "
            "mxfp8"
        )
    if fp8.multi_head_attention and not fp8.dot_product_attention:
        raise ConfigError(
            f"{prefix}.multi_head_attention=true needs {prefix}.dot_product_attention=true; set both or neither"
        )
    if fp8.param:
        raise UnsupportedFeatureError(f"{prefix}.param=true: weights kept in fp8 are not available; set it to false")


def _check_device(fp8: FP8EngineConfig, device: torch.device) -> None:
    needed = _BLACKWELL if fp8.recipe == "mxfp8" else _HOPPER
    name = "Blackwell" if needed == _BLACKWELL else "Hopper"
    if device.type != "cuda":
        why = f"fp8 matrix products need a {name} GPU, and this device is {device.type}"
    elif torch.cuda.get_device_capability(device) < needed:
        why = f"recipe={fp8.recipe} needs a {name} GPU, and this one has capability "
        why += ".".join(map(str, torch.cuda.get_device_capability(device)))
    elif importlib.util.find_spec("transformer_engine") is None:
        why = "fp8 matrix products need Transformer Engine, which is not installed"
    else:
        return
    raise UnsupportedFeatureError(f"megatron.fp8_config.mode={fp8.mode}: {why}; set megatron.fp8_config=null")
