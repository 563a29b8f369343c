"""Where megatron-core runs: on its GPU as it is, on a CPU inside a context that stands in for CUDA's functions.

The only place that asks; called by the Megatron engine around everything that runs megatron-core.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from contextlib import AbstractContextManager, nullcontext

import torch

from areal.utils.errors import UnsupportedFeatureError

__all__ = ["check_installed", "optimizer_context", "runs_on", "uses_transformer_engine"]


VERSION = "0.16."
"""Start of the megatron-core versions whose inner functions the engine knows."""


def check_installed() -> None:
    """Raises UnsupportedFeatureError: no megatron-core, or not the right release; the message says what to install."""
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
        raise UnsupportedFeatureError(
            "backend megatron needs megatron-core, which is not installed; pip install 'areal[megatron]', or use "
            "backend fsdp or archon"
        )
    try:
        found = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        raise UnsupportedFeatureError(
            "backend megatron: megatron.core can be imported, but no package megatron-core is installed, so nothing "
            "tells its version; take a Megatron-LM checkout off PYTHONPATH and pip install 'areal[megatron]'"
        ) from None
    if not found.startswith(VERSION):
        raise UnsupportedFeatureError(
            f"backend megatron works with megatron-core {VERSION}*, {found} is installed; pip install 'areal[megatron]'"
        )


def uses_transformer_engine(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the layers are Transformer Engine's; not for float32, whose products it may round to TF32."""
    on_gpu = device.type == "cuda" and dtype == torch.bfloat16
    return on_gpu and importlib.util.find_spec("transformer_engine") is not None


def runs_on(device: torch.device) -> AbstractContextManager[None]:
    """Context for calls of megatron-core whose tensors are on ``device``; may be nested."""
    if device.type == "cuda":
        return torch.cuda.device(device)  # megatron-core makes tensors on the current one
    from areal.engine.megatron_utils.cpu_compat import cpu_compat

    return cpu_compat()


def optimizer_context(device: torch.device) -> AbstractContextManager[None]:
    """Context, inside :func:`runs_on`, in which an optimizer is built."""
    if device.type == "cuda":
        return nullcontext()
    from areal.engine.megatron_utils.cpu_compat import tensor_types_of_cuda

    return tensor_types_of_cuda()
