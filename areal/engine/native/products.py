"""Matrix products with a weight, in the form that is fastest on the device.

A :class:`Product` is one linear layer. On a CPU a large weight is kept in oneDNN's blocked layout beside the plain
one: for 64 rows it is 1.2 to 2 times as fast as the plain product. Small weights stay plain: there the call itself
costs more than it saves. Made by ``weights``, called by ``model``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_PACK_FROM = 2**17  # elements of a weight from which the blocked layout pays
_REPACK_UP_TO = 32 << 20  # bytes; the plain copy on the way is of new memory from here on, and then costs more
_PACK_ROWS = 64  # rows the layout is chosen for; any number works


def packs(weight: Tensor) -> bool:
    """Whether products with a weight like this one use the blocked layout."""
    return (
        weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.bfloat16)
        and weight.numel() >= _PACK_FROM
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    )


class LowRank(NamedTuple):
    """What an adapter adds to a product: ``x @ down @ up``, with ``[in, r]`` and ``[r, out]``."""

    down: Tensor
    up: Tensor


class Product:
    """``x @ weight.T + bias``, plus what an adapter adds.

    Args:
        weight: ``[out, in]``; filled later, by reference, or given to :meth:`refresh`.
        bias: ``[out]`` or None.
    """

    __slots__ = ("_packed", "_transposed", "adapter", "bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias
        self._transposed = weight.t()
        self._packed: Tensor | None = None
        self.adapter: LowRank | None = None

    @property
    def packs(self) -> bool:
        """Whether it is computed in the blocked layout."""
        return packs(self.weight)

    def take_memory(self, other: Product) -> None:
        """Take over the memory of the blocked layout of ``other``, which is not used any more."""
        if self._packed is None:
            self._packed, other._packed = other._packed, None

    def refresh(self, weight: Tensor | None = None) -> None:
        """Take over the weight's current values, or those of ``weight``; needed after every change.

        Memory of the blocked layout is filled again where that is cheaper than new memory.
        """
        source = self.weight if weight is None else weight
        if not packs(source):
            return
        if self._packed is None or source.numel() * source.element_size() > _REPACK_UP_TO:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(source, _PACK_ROWS)
        else:
            self._packed.copy_(source.to_mkldnn())

    def __call__(self, x: Tensor) -> Tensor:
        """``[n, in]`` -> ``[n, out]``."""
        if self._packed is None:
            out = F.linear(x, self.weight, self.bias)
        else:
            out = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return out if self.adapter is None else out.addmm_(torch.mm(x, self.adapter.down), self.adapter.up)

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """The product added to ``residual`` ``[n, out]``; a new tensor."""
        if self._packed is not None:
            out = torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._packed, self.bias, "add")
        else:
            out = torch.addmm(residual, x, self._transposed)
            out = out if self.bias is None else out.add_(self.bias)
        return out if self.adapter is None else out.addmm_(torch.mm(x, self.adapter.down), self.adapter.up)
