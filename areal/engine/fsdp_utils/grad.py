"""Gradients of FSDP2 parameters."""

from __future__ import annotations

import math

from torch import Tensor
from torch.distributed.tensor import DTensor

from areal.engine.core.model_layout import NamedParameters


def local_gradient(parameter: Tensor) -> Tensor | None:
    """This rank's shard of a parameter's reduced gradient, in float32; None where no backward reached it."""
    grad = parameter.grad
    if grad is None:
        return None
    local = grad.to_local() if isinstance(grad, DTensor) else grad
    return local.float()


def shard_copies(module: NamedParameters) -> dict[str, int]:
    """Ranks that hold each parameter's local shard; norms and some biases are whole on every tensor-parallel rank."""
    copies = {}
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            sizes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
            copies[name] = math.prod(size for placement, size in sizes if placement.is_replicate())
    return copies
