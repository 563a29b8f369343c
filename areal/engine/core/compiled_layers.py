"""``torch.compile`` for the decoder layers of a Hugging Face model.

In: a model, sharded already where it will be. Out: the same model whose layers run compiled code; parameters keep
their names. Called by the engines that offer it.

The forward of a layer is compiled, not the layer: hooks around it (sharding, checkpointing) stay outside of the graph,
and layers of one kind share their graphs. Token counts are dynamic from the start. Our attention functions plan in
Python over the lengths, so they run between two graphs instead of inside one.
"""

from __future__ import annotations

import importlib.util
import inspect
import shutil
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from areal.engine.core.parallel_dims import ParallelGroups
from areal.utils import environ, logging
from areal.utils.errors import ConfigError, UnsupportedFeatureError

logger = logging.getLogger("CompiledLayers")
_CPU_COMPILERS = ("g++", "clang++", "c++")
_GPU_COMPILERS = ("gcc", "clang", "cc")


def compile_layers(model: PreTrainedModel, *, key: str) -> int:
    """Compile every decoder layer of ``model``; returns their number. Compiling happens at the first batch.

    Args:
        key: setting that asked for it, for messages.

    Raises:
        ConfigError: the model names no decoder layers.
    """
    names = set(model._no_split_modules or ())
    layers: list[Any] = [m for m in model.modules() if type(m).__name__.removeprefix("FSDP") in names]
    if not layers:
        raise ConfigError(f"{key}=true: {type(model).__name__} names no decoder layers to compile; set it to false")
    _keep_attention_out(model.config._attn_implementation)
    compiled: dict[type, Callable[..., Any]] = {}
    for layer in layers:
        for part in layer.modules():
            _drop_deprecation_wrapper(part)
        kind = type(layer)
        if kind not in compiled:
            compiled[kind] = torch.compile(inspect.unwrap(kind.forward), dynamic=True)
        layer.forward = partial(_forward, layer, compiled[kind])
    logger.info(f"{len(layers)} layers will be compiled at the first batch")
    return len(layers)


def check_compile(device: torch.device, groups: ParallelGroups, *, key: str) -> None:
    """Refuse where torch.compile would fail at the first batch; called before a model is loaded.

    Raises:
        ConfigError: names what has to be installed.
        UnsupportedFeatureError: tensor parallelism, whose DTensors torch 2.13 cannot compile with dynamic lengths.
    """
    if groups.tensor is not None:
        raise UnsupportedFeatureError(
            f"{key}=true does not work with tensor parallelism (t) in this version; set it to false or use d and c"
        )
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        raise ConfigError(f"{key}=true needs the package triton on a GPU; install it or set {key}=false")
    variable, candidates = ("CC", _GPU_COMPILERS) if device.type == "cuda" else ("CXX", _CPU_COMPILERS)
    wanted = environ.get_env(variable)
    if not any(shutil.which(name) for name in ([wanted] if wanted else candidates)):
        found = f"{variable}={wanted} is none" if wanted else f"none of {', '.join(candidates)} is on PATH"
        language = "C" if device.type == "cuda" else "C++"
        raise ConfigError(f"{key}=true needs a {language} compiler, and {found}; install one or set {key}=false")


def _forward(layer: Any, compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What transformers' layers do around their own forward: recompute it in backward where that is asked for."""
    checkpointing = getattr(layer, "gradient_checkpointing", False)
    if checkpointing and layer.training and torch.is_grad_enabled():
        return layer._gradient_checkpointing_func(partial(compiled, layer, **kwargs), *args)
    return compiled(layer, *args, **kwargs)


def _drop_deprecation_wrapper(module: Any) -> None:
    """Every forward behind transformers' renaming of old arguments is one function to the compiler: too many graphs."""
    forward = type(module).forward
    if getattr(forward, "__globals__", {}).get("__name__") == "transformers.utils.deprecation":
        module.forward = types.MethodType(inspect.unwrap(forward), module)


def _keep_attention_out(name: str) -> None:
    """Run an attention function of ours as it is between two graphs; transformers' own are traced."""
    function = ALL_ATTENTION_FUNCTIONS.get(name)
    if function is None or not getattr(function, "__module__", "").startswith("areal."):
        return

    def untraced(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    untraced.__module__ = "untraced"  # a second engine of this process finds it done
    ALL_ATTENTION_FUNCTIONS.register(name, torch.compiler.disable(untraced))
