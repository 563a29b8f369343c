"""Split a packed batch into micro-batches under a token limit, the same number on every rank.

Called by ``engine/core`` for each train, evaluation and forward batch, and by the PPO actor for its mini-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from areal.utils.batch.pack import PackedBatch
from areal.utils.seqpack import UNLIMITED_TOKENS, PackingError, flat2d, get_allocate_fn

if TYPE_CHECKING:
    from areal.api.config.train import MicroBatchSpec


@dataclass
class MicroBatch:
    """A part of a batch and the rows of the whole that it holds, in order."""

    batch: PackedBatch
    indices: list[int]


def allocate_rows(lens: Sequence[int], spec: MicroBatchSpec, group: dist.ProcessGroup | None = None) -> list[list[int]]:
    """Rows of each micro-batch, sorted inside and by first row.

    Rows stay together in blocks of ``spec.granularity``. With a ``group`` every rank of it must call; all get the same
    number of micro-batches (the largest any rank needs).

    Args:
        lens: tokens of each row.
        spec: n_mbs, granularity, max_tokens_per_mb, n_mbs_divisor, packing_algorithm.
        group: ranks that run the same collectives per micro-batch; None: this rank alone.

    Raises:
        PackingError: granularity does not divide the rows, a block exceeds the limit, or some rank has fewer blocks
            than micro-batches (raised on every rank).
    """
    size = spec.granularity
    if len(lens) % size:
        raise PackingError(f"{len(lens)} sequences do not divide into blocks of granularity={size}")
    blocks = [list(range(i, i + size)) for i in range(0, len(lens), size)]
    sizes = [sum(lens[r] for r in rows) for rows in blocks]
    allocate = get_allocate_fn(spec.packing_algorithm or "ffd")
    capacity = spec.max_tokens_per_mb or UNLIMITED_TOKENS
    minimum, divisor = spec.n_mbs or 1, spec.n_mbs_divisor or 1
    while True:
        groups, failure = [], None
        try:
            groups = allocate(sizes, capacity, minimum, divisor)
        except PackingError as exc:
            failure = exc
        agreed, failed = _agree(len(groups), failure is not None, group)
        if failure is not None:
            raise failure
        if failed:
            raise PackingError(f"another rank cannot make at least {minimum} micro-batches; see its error")
        if agreed == len(groups):
            break
        minimum = agreed
    return sorted(sorted(flat2d(blocks[b] for b in g)) for g in groups)


def split_micro_batches(
    batch: PackedBatch, spec: MicroBatchSpec, group: dist.ProcessGroup | None = None
) -> list[MicroBatch]:
    """Split all fields of ``batch``, per token and per sequence alike, with their rows.

    Args, Raises: as ``allocate_rows``.
    Returns: micro-batches that are views of one reordered copy (of the batch itself when the order is unchanged).
    """
    groups = allocate_rows(batch.lens, spec, group)
    ordered = batch.select(flat2d(groups))
    micro_batches, start = [], 0
    for rows in groups:
        stop = start + len(rows)
        part = ordered if len(groups) == 1 else ordered.slice(start, stop)
        micro_batches.append(MicroBatch(part, rows))
        start = stop
    return micro_batches


def _agree(count: int, failed: bool, group: dist.ProcessGroup | None) -> tuple[int, bool]:
    """Largest count over the group and whether any rank failed; one collective."""
    if group is None or dist.get_world_size(group) == 1:
        return count, failed
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    pair = torch.tensor([count, int(failed)], device=device)
    dist.all_reduce(pair, op=dist.ReduceOp.MAX, group=group)
    agreed, any_failed = pair.tolist()
    return agreed, bool(any_failed)
