"""An adapter in the native engine: low-rank terms beside the products of weights that stay as they are.

In: the pairs of a ``PublishedAdapter``. Out: for each product that is adapted, ``A'`` and ``B' alpha / r`` laid out as
its fused rows are. Called by ``engine`` while the current weights generate; ``weights.adapt`` puts the result in
service.

Base and adapter are not merged: adding a small update to bfloat16 weights would round most of it away, and samplers
would not draw from what was trained. The two thin products cost ``r / in + r / out`` of the product beside them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from areal.engine.core.lora_layout import ADAPTER_PREFIX, SCALING
from areal.engine.core.weight_sync import ParamRecord
from areal.engine.native.products import LowRank, Product
from areal.engine.native.weights import Target, Weights
from areal.utils.errors import WeightSyncError

__all__ = ["is_adapter_name", "read_adapter"]

_NAME = re.compile(re.escape(ADAPTER_PREFIX) + r"(?P<module>.+)\.lora_(?P<side>[AB])\.weight")


@dataclass
class _Pair:
    """The adapter of one linear layer: ``A`` ``[r, in]``, ``B`` ``[out, r]``."""

    target: Target
    down: Tensor
    up: Tensor


def is_adapter_name(name: str) -> bool:
    """Whether a version that has a tensor of this name is an adapter."""
    return name == SCALING or name.startswith(ADAPTER_PREFIX)


def read_adapter(
    weights: Weights, pairs: Iterable[tuple[str, Tensor]]
) -> tuple[list[tuple[Product, LowRank]], list[ParamRecord]]:
    """The terms of an adapter of ``weights``, and the record of each of its tensors.

    Raises:
        WeightSyncError: a name or shape does not fit this model, or something is missing.
    """
    records, sides, scaling = [], dict[str, dict[str, Tensor]](), None
    for name, tensor in pairs:
        records.append(ParamRecord.of(name, tensor))
        kept = tensor.detach().to(device=weights.device, dtype=torch.float32, copy=True)  # the next one may replace it
        match = _NAME.fullmatch(name)
        if name == SCALING:
            scaling = kept
        elif match is not None:
            sides.setdefault(match["module"], {})[match["side"]] = kept
        else:
            raise WeightSyncError(f"{name!r} is no tensor of an adapter that this engine can hold")
    if scaling is None:
        raise WeightSyncError(f"an adapter of {len(records)} tensors came without {SCALING}")
    fused: dict[Product, list[_Pair]] = {}
    for module, found in sides.items():
        target = weights.targets.get(f"{module}.weight")
        product = target.matrix.product if target is not None and target.matrix is not None else None
        if target is None or product is None:
            raise WeightSyncError(f"{module!r} is no linear layer of this {weights.spec.arch} model")
        fused.setdefault(product, []).append(_checked(module, target, found))
    return [(product, _fuse(product, members, scaling, weights.dtype)) for product, members in fused.items()], records


def _checked(module: str, target: Target, found: dict[str, Tensor]) -> _Pair:
    if found.keys() != {"A", "B"}:
        raise WeightSyncError(f"the adapter of {module} has lora_{'lora_'.join(found)} alone")
    down, up = found["A"], found["B"]
    rows, columns = target.source_shape
    if down.shape != (up.shape[1], columns) or up.shape[0] != rows:
        raise WeightSyncError(
            f"the adapter of {module} has shapes {tuple(down.shape)} and {tuple(up.shape)}, this model has a layer of "
            f"({rows}, {columns})"
        )
    return _Pair(target, down, up)


def _fuse(product: Product, members: list[_Pair], scaling: Tensor, dtype: torch.dtype) -> LowRank:
    """The layers of one product next to each other: ``B`` is zero where a row is another layer's."""
    total = sum(pair.down.shape[0] for pair in members)
    up = members[0].up.new_zeros((product.weight.shape[0], total))
    first = 0
    for pair in members:
        rank, target = pair.down.shape[0], pair.target
        scaled = (pair.up * scaling).reshape(*target.shape[:-1], rank).permute(target.order)
        target.part(up)[..., first : first + rank].copy_(scaled)
        first += rank
    down = torch.cat([pair.down for pair in members])
    return LowRank(down.t().to(dtype).contiguous(), up.t().to(dtype).contiguous())
