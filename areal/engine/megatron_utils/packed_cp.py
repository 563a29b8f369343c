"""Packed rows under megatron's context parallelism: every rank has two pieces of every sequence.

In: a micro-batch of core. Out: ``PackedRow``: its tokens with every sequence padded, so that it can be cut into
``2 * cp`` pieces, of which rank r has r and ``2 * cp - 1 - r`` (the causal mask then costs every rank the same); and
hidden states back in the form of core, where every rank has a contiguous slice. Called by ``pipeline.py`` and
``spec.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from areal.engine.core.distributed import group_rank, group_size, padding_quantum, reduce_rows

if TYPE_CHECKING:
    import torch.distributed as dist

    from areal.engine.core.inputs import ModelInput
    from areal.engine.core.parallel_dims import ParallelGroups

__all__ = ["PackedRow", "held_positions", "own_slices", "row_length"]


@dataclass
class PackedRow:
    """One micro-batch as the model sees it.

    Attributes:
        ids, positions: int64 ``[1, L / c]``, this rank's tokens.
        cu_seqlens: int32 ``[K + 1]``, bounds of the padded sequences, of all L tokens.
        max_seqlen: tokens of the longest one.
        rows: int64 ``[T]``, where each real token is among the L.
        held: int64 ``[L / c]``, which of the L this rank has.
    """

    ids: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    rows: Tensor
    held: Tensor

    @classmethod
    def of(cls, item: ModelInput, groups: ParallelGroups, length: int | None = None) -> PackedRow:
        """Pad and cut ``item``; the ranks of a model group must be given equal items.

        Args:
            length: tokens that the row gets, at least :func:`row_length`; None: as many.
        """
        batch = item.batch
        ids = batch.tokens["input_ids"]
        device, cp = ids.device, group_size(groups.sequence)
        padded = _padded_lens(item, cp)
        missing = (row_length(item, groups) if length is None else length) - int(padded.sum())
        if missing:  # one more sequence, which nothing reads
            padded = torch.cat([padded, torch.tensor([missing])])
        bounds = torch.zeros(len(padded) + 1, dtype=torch.int64)
        bounds[1:] = padded.cumsum(0)
        rows = torch.cat([torch.arange(n) + start for n, start in zip(batch.lens, bounds.tolist(), strict=False)])
        whole = ids.new_zeros(int(bounds[-1]))
        rows = rows.to(device)
        whole[rows] = ids
        positions = torch.cat([torch.arange(n) for n in padded.tolist()]).to(device)
        held = held_positions(bounds, cp, group_rank(groups.sequence)).to(device)
        longest = int(padded.max())
        if cp > 1:
            whole, positions = whole[held], positions[held]
        return cls(whole[None], positions[None], bounds.to(device, torch.int32), longest, rows, held)


def row_length(item: ModelInput, groups: ParallelGroups) -> int:
    """Tokens of the row that ``item`` becomes: every rank gets an equal share, and kernels what they want."""
    cp, device = group_size(groups.sequence), item.batch.cu_seqlens.device
    quantum = math.lcm(_piece(cp), cp * group_size(groups.tensor), padding_quantum(device))
    wanted = max(int(_padded_lens(item, cp).sum()), item.padded.n_tokens)  # core's padding may go up to a maximum
    return -(-wanted // quantum) * quantum


def _padded_lens(item: ModelInput, cp: int) -> Tensor:
    piece = _piece(cp)
    return -(-torch.as_tensor(item.batch.lens) // piece) * piece


def _piece(cp: int) -> int:
    """Every sequence has a multiple of this many tokens."""
    return 2 * cp if cp > 1 else 1


def held_positions(bounds: Tensor, cp: int, rank: int) -> Tensor:
    """Tokens of a row with these ``bounds`` (int64 ``[K + 1]``) that ``rank`` of ``cp`` has, in its order."""
    if cp == 1:
        return torch.arange(int(bounds[-1]))
    found = []
    for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        pieces = torch.arange(start, end).view(2 * cp, -1)
        found += [pieces[rank], pieces[2 * cp - 1 - rank]]
    return torch.cat(found)


def own_slices(hidden: Tensor, row: PackedRow, width: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's slice ``[width, H]`` of the real tokens, from what all ranks have; every rank of ``group`` calls.

    Args:
        hidden: ``[L / c, H]``, in the order of ``row.held``.
        row: of this micro-batch.
        width: tokens of a slice; the c slices hold all real tokens, and rows behind them are 0.
    """
    token = torch.full((int(row.cu_seqlens[-1]),), -1, dtype=torch.int64, device=hidden.device)
    token[row.rows] = torch.arange(row.rows.shape[0], device=hidden.device)
    token = token[row.held]
    real = (token >= 0).nonzero().squeeze(1)
    whole = hidden.new_zeros(width * group_size(group), hidden.shape[1])
    return reduce_rows(whole.index_copy(0, token[real], hidden[real]), group)
