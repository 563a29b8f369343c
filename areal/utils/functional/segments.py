"""Sums over the sequences of packed 1-D tensors; the helper of the other modules here.

Shapes: T tokens, n sequences; ``seq_ids [T]`` int64 says which sequence a token belongs to.
"""

from __future__ import annotations

import torch
from torch import Tensor

from areal.utils.batch.pack import sequence_ids


def segment_sum(x: Tensor, index: Tensor, n: int) -> Tensor:
    """Sum of ``x [E]`` per segment, ``[n]``."""
    return x.new_zeros(n).index_add_(0, index, x)


def segment_mean(x: Tensor, mask: Tensor, index: Tensor, n: int) -> Tensor:
    """Mean of ``x [E]`` over ``mask`` per segment, ``[n]``; 0 where nothing is masked in."""
    total = segment_sum(torch.where(mask, x, 0.0), index, n)
    return total / segment_sum(mask.to(x.dtype), index, n).clamp(min=1)


def segment_max(x: Tensor, mask: Tensor, index: Tensor, n: int) -> Tensor:
    """Maximum of ``x [E]`` over ``mask`` per segment, ``[n]``; 0 where nothing is masked in."""
    lowest = x.new_full((n,), float("-inf"))
    found = lowest.scatter_reduce(0, index, torch.where(mask, x, float("-inf")), "amax")
    return torch.where(found == float("-inf"), 0.0, found)


def flatten_padded(mask: Tensor, cu_seqlens: Tensor | None, *, need_sequences: bool) -> tuple[Tensor | None, int]:
    """Sequence of each element of a packed 1-D or padded 2-D tensor shaped like ``mask``, and their number.

    Returns: ``(seq_ids [numel], n)``, or ``(None, 0)`` when sequences are not needed.

    Raises:
        ValueError: sequences are needed for 1-D input without ``cu_seqlens``, or the shape is neither 1-D nor 2-D.
    """
    if mask.dim() not in (1, 2):
        raise ValueError(f"expected packed 1-D or padded 2-D tensors, got shape {tuple(mask.shape)}")
    if not need_sequences:
        return None, 0
    if mask.dim() == 2:
        rows = torch.arange(mask.shape[0], device=mask.device)
        return rows.repeat_interleave(mask.shape[1], output_size=mask.numel()), mask.shape[0]
    if cu_seqlens is None:
        raise ValueError("sequence-level statistics on packed 1-D tensors need cu_seqlens")
    return sequence_ids(cu_seqlens, mask.shape[0]), cu_seqlens.shape[0] - 1
