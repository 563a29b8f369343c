"""Elementwise results that backward computes again instead of keeping them: ``silu(gate)``, products, scaled norms (of
float32 models: a cast behind them ends the chain).

In: a forward pass under :class:`rebuilding`. Out: the same results and gradients, bit for bit; the graph keeps the
operands, which it needs anyway. Used by engines that train adapters, whose step has little else in memory than weights
and what layers keep: of layers with gated activations a third less, for arithmetic that costs little.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from areal.engine.core.memory import return_memory

__all__ = ["rebuilding"]

RETURN_BYTES = 1 << 28
"""On a CPU freed memory goes back to the system whenever so much was not kept: the holes that it leaves between kept
tensors fit no other tensor of their size, as ``posix_memalign`` asks for more than it gives."""


class rebuilding(torch.autograd.graph.saved_tensors_hooks):  # noqa: N801 - a context, as its base
    """Context of a forward pass whose backward runs once, without gradients of gradients.

    Autograd does not see here whether a kept tensor is changed in place before backward; models do not.
    """

    def __init__(self) -> None:
        super().__init__(self._pack, _unpack)
        self._freed = 0

    def _pack(self, saved: Tensor) -> Tensor | tuple[Any, torch.Size, torch.dtype]:
        """The node that made a tensor and the tensor's form, or the tensor where it has to be kept."""
        base = saved if saved._base is None else saved._base
        whole = saved.numel() == base.numel() and saved.is_contiguous() and base.is_contiguous()
        if not (whole and saved.requires_grad and _can_rebuild(base.grad_fn)):
            # A node that kept its own output with its graph would never be freed without a backward pass.
            return saved if saved.grad_fn is None else saved.detach()
        self._freed += saved.nbytes if saved.device.type == "cpu" else 0
        if self._freed >= RETURN_BYTES:
            self._freed = 0
            return_memory(saved.device)
        return base.grad_fn, saved.shape, saved.dtype


def _unpack(packed: Tensor | tuple[Any, torch.Size, torch.dtype]) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    node, shape, dtype = packed
    with torch.no_grad():
        return _rebuild(node).to(dtype).view(shape)


def _can_rebuild(node: Any) -> bool:
    """Whether the operands of a node are kept by the graph, or can be rebuilt themselves."""
    kind = None if node is None else node.name()
    if kind == "MulBackward0" and len(node.next_functions) == 2:  # not a product with a number
        (left, _), (right, _) = node.next_functions
        # Each factor is kept for the gradient of the other one.
        return (right is not None or _can_rebuild(left)) and (left is not None or _can_rebuild(right))
    return kind == "SiluBackward0"


def _rebuild(node: Any) -> Tensor:
    if node.name() == "SiluBackward0":
        return F.silu(node._saved_self)
    (left, _), (right, _) = node.next_functions
    return (_rebuild(left) if right is None else node._saved_self) * (
        _rebuild(right) if left is None else node._saved_other
    )
