"""Prompts that several sequences of a micro-batch share run through the model once.

In: a packed micro-batch with ``group_id``. Out: which tokens the model has to compute, and how the full layout is made
from them. A causal model's hidden state depends on a token and what precedes it, so sequences of one group that begin
alike have equal states there, in forward, and the sum of their gradients in backward: no approximation.
Only attention sees the full layout. Called by ``engine/core/model.py``; applied in ``models/transformers``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from areal.utils.batch import PackedBatch

MIN_SAVED_SHARE = 0.1  # of the tokens; below, copying to and fro costs more than it saves


@dataclass
class PrefixSharing:
    """Two layouts of a micro-batch: ``T`` full tokens, and ``U`` distinct ones in the same order.

    Attributes:
        source: int64 ``[T]``, distinct token that each full one equals.
        keep: int64 ``[U]``, full token that each distinct one is.
    """

    source: Tensor
    keep: Tensor

    def expand(self, x: Tensor) -> Tensor:
        """``[U, ...]`` -> ``[T, ...]``; gradients of equal tokens add up."""
        expanded: Tensor = _Expand.apply(x, self)  # type: ignore[no-untyped-call]
        return expanded

    def compress(self, x: Tensor) -> Tensor:
        """``[T, ...]`` -> ``[U, ...]``; the tokens left out get no gradient."""
        return x.index_select(0, self.keep)

    @cached_property
    def repeats(self) -> tuple[Tensor, Tensor, Tensor]:
        """Full tokens that were left out, sorted by the token they equal; those tokens; how often each is repeated."""
        left_out = torch.ones(self.source.shape[0], dtype=torch.bool, device=self.source.device)
        left_out[self.keep] = False
        rows = left_out.nonzero().squeeze(1)
        targets, order = self.source[rows].sort(stable=True)
        distinct, counts = targets.unique_consecutive(return_counts=True)
        return rows[order], distinct, counts


class _Expand(torch.autograd.Function):
    """Selection whose backward adds repeats segment by segment: ``index_add`` walks a CPU tensor row by row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sharing: PrefixSharing) -> Tensor:
        ctx.sharing = sharing
        return x.index_select(0, sharing.source)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        rows, targets, counts = ctx.sharing.repeats
        total = grad.index_select(0, ctx.sharing.keep)
        repeated = torch.segment_reduce(grad.index_select(0, rows).flatten(1), "sum", lengths=counts, axis=0)
        total.index_copy_(0, targets, total.index_select(0, targets) + repeated.view(-1, *grad.shape[1:]))
        return total, None


def find_shared_prefixes(batch: PackedBatch) -> PrefixSharing | None:
    """What the sequences of each group have in common with the group's first one; None when sharing does not pay."""
    if "group_id" not in batch.sequences or batch.n_sequences < 2:
        return None
    ids, position = batch.tokens["input_ids"], batch.tokens["position_ids"]
    starts, lens = batch.cu_seqlens[:-1].long(), batch.cu_seqlens.diff().long()
    leader = _first_of_group(batch.sequences["group_id"])
    sequence = torch.arange(batch.n_sequences, device=ids.device).repeat_interleave(lens)
    twin = (starts[leader[sequence]] + position).clamp_max(ids.shape[0] - 1)
    equal = (position < lens[leader[sequence]]) & (ids[twin] == ids)
    # length of the common prefix: the first position that differs, else the whole sequence
    common = lens.scatter_reduce(0, sequence, torch.where(equal, lens[sequence], position), "amin")
    keep = ((position >= common[sequence]) | (leader[sequence] == sequence)).nonzero().squeeze(1)
    if keep.shape[0] > (1 - MIN_SAVED_SHARE) * ids.shape[0]:
        return None
    place = torch.empty_like(twin)
    place[keep] = torch.arange(keep.shape[0], device=ids.device)
    own = torch.arange(ids.shape[0], device=ids.device)
    source = torch.where(position < common[sequence], twin, own)
    return PrefixSharing(place[source], keep)


def _first_of_group(group_id: Tensor) -> Tensor:
    """``[n]``: index of the first sequence with the same id."""
    _, group = group_id.unique(return_inverse=True)
    index = torch.arange(group_id.shape[0], device=group_id.device)
    first = torch.full_like(index, group_id.shape[0]).scatter_reduce(0, group, index, "amin")
    return first[group]
