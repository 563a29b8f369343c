"""Gradients of FSDP2 parameters."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def local_gradient(parameter: Tensor) -> Tensor | None:
    """This rank's shard of a parameter's reduced gradient, in float32; None where no backward reached it."""
    grad = parameter.grad
    if grad is None:
        return None
    local = grad.to_local() if isinstance(grad, DTensor) else grad
    return local.float()
