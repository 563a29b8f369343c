"""Put results of micro-batches back into the order and the shape of the caller's input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from areal.utils.batch.pack import pad_packed, unpack_tokens
from areal.utils.batch.split import MicroBatch

T = TypeVar("T")


def restore_order(parts: Sequence[Sequence[T]], micro_batches: Sequence[MicroBatch]) -> list[T]:
    """Flatten per-micro-batch lists of per-row results into the rows' original order."""
    total = sum(len(mb.indices) for mb in micro_batches)
    out: list[Any] = [None] * total
    for part, micro_batch in zip(parts, micro_batches, strict=True):
        for value, row in zip(part, micro_batch.indices, strict=True):
            out[row] = value
    return out


def scatter_rows(parts: Sequence[Tensor], micro_batches: Sequence[MicroBatch]) -> Tensor:
    """Concatenate per-token results ``[T_i]`` of micro-batches into ``[T]`` in the original row order."""
    if len(parts) == 1:
        return parts[0]
    rows = [unpack_tokens(part, mb.batch.lens) for part, mb in zip(parts, micro_batches, strict=True)]
    return torch.cat(restore_order(rows, micro_batches))


def split_like(x: Tensor, lens: Sequence[int], trajectories: Sequence[dict[str, Any]]) -> list[Tensor]:
    """Lay packed ``[T]`` results out as one padded ``[n_i, S_i]`` tensor per trajectory, zeros on padding."""
    out, row, start = [], 0, 0
    for trajectory in trajectories:
        n, width = trajectory["attention_mask"].shape[:2]
        row_lens = list(lens[row : row + n])
        stop = start + sum(row_lens)
        out.append(pad_packed(x[start:stop], row_lens, width))
        row, start = row + n, stop
    return out
