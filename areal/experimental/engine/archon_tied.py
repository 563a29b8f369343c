"""A tied embedding in a pipeline: the first stage embeds with it, the last one has it as its head.

In: the shards of a rank that may hold one copy of the weight, or both. Out: the same shards, whose gradients are those
of the one weight. Used by the Archon engine; the copies start equal and take equal steps, so they stay equal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from areal.engine.core.distributed import all_reduce_sum
from areal.experimental.models.archon.state_dict import EMBEDDING, HEAD
from areal.utils.ranks import gather_json

if TYPE_CHECKING:
    from areal.engine.core.optimizer import ParamShards
    from areal.engine.core.parallel_dims import ParallelGroups

__all__ = ["COPIES", "TiedShards", "group_of_copies"]

COPIES = {EMBEDDING: 2, HEAD: 2}
"""So many ranks (or parts of one rank) hold each of them: a gradient norm counts the weight once."""


class TiedShards:
    """``ParamShards`` of a pipeline rank; see there.

    Args:
        inner: the shards.
        group: the ranks with the first and the last stage; None: this rank holds both, or neither.
    """

    def __init__(self, inner: ParamShards, group: dist.ProcessGroup | None) -> None:
        self.inner, self.group = inner, group
        self.shards = inner.shards
        self._copies = [self.shards[name] for name in (EMBEDDING, HEAD) if name in self.shards]

    def collect_gradients(self) -> list[Tensor]:
        """Add up the gradients of the copies; the ranks that hold them must call."""
        self.inner.collect_gradients()
        if self._copies:
            grads = [torch.zeros_like(copy) if copy.grad is None else copy.grad for copy in self._copies]
            total = all_reduce_sum(torch.stack(grads).sum(0), self.group)
            for copy in self._copies:
                copy.grad = total.clone()
        return [shard.grad for shard in self.shards.values() if shard.grad is not None and shard.grad.numel()]

    def write_back(self) -> None:
        """See ``ParamShards``."""
        self.inner.write_back()

    def zero_grad(self) -> None:
        """See ``ParamShards``."""
        self.inner.zero_grad()


def group_of_copies(groups: ParallelGroups, v_shape: bool) -> dist.ProcessGroup | None:
    """The ranks of this rank's pipeline that hold a copy; None elsewhere. Every rank of the job must call."""
    assert groups.pp is not None
    assert groups.cpu is not None
    if v_shape:
        return None
    ranks = dist.get_process_group_ranks(groups.pp)
    own: dist.ProcessGroup | None = None
    for pair in sorted({tuple(found) for found in gather_json([ranks[0], ranks[-1]], groups.cpu)}):
        group = _group_of(pair)
        if dist.get_rank() in pair:
            own = group
    return own


# Engines share groups, which cost memory and sockets.
_groups: dict[tuple[dist.ProcessGroup, tuple[int, ...]], dist.ProcessGroup] = {}


def _group_of(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    for key in [key for key in _groups if key[0] is not world]:
        del _groups[key]  # of a world that was left
    if (world, ranks) not in _groups:
        _groups[world, ranks] = dist.new_group(list(ranks))
    return _groups[world, ranks]
