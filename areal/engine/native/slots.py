"""Which request owns which cache slot: the ready ones first, without holes, then those being filled.

A decode step reads slots ``0 .. n_ready - 1`` in place, so a request that ends is replaced by another one. Attention
reads a block of slots up to the longest of them: blocks are cut where lengths differ much, and the replacement comes
from the end of the block, whose own end is replaced from the next block. So long requests stay together. Owned by
``scheduler``.
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from itertools import accumulate

from areal.engine.native.kv_cache import SlotCache
from areal.engine.native.model import Block
from areal.engine.native.requests import Sequence

_BLOCK_COST = 2**18  # elements of queries times keys that take as long as the calls for one more block (CPU)


def cut(lengths: Ordered[int], cost: int) -> list[Block]:
    """Cut slots of these lengths into blocks.

    Args:
        lengths: positions to read, by slot; not empty.
        cost: of a block, in positions.

    Returns: blocks in order; each cut saves more than ``cost``.
    """
    blocks, left = [], [(0, len(lengths))]
    while left:
        begin, end = left.pop()
        part = lengths[begin:end]
        before = list(accumulate(part, max))
        after = list(accumulate(reversed(part), max))[::-1]
        sums = [size * before[size - 1] + (len(part) - size) * after[size] for size in range(1, len(part))]
        best = min(sums, default=0)
        if sums and best + cost < len(part) * before[-1]:
            middle = begin + 1 + sums.index(best)
            left += [(middle, end), (begin, middle)]
        else:
            blocks.append(Block(begin, end, before[-1]))
    return blocks


class SlotTable:
    """Slot ``i`` belongs to ``owners[i]``; the first ``n_ready`` owners decode."""

    def __init__(self, cache: SlotCache) -> None:
        self.cache = cache
        self.owners: list[Sequence] = []
        self.n_ready = 0
        self._ends: list[int] = []  # of the blocks last asked for, without what has left since

    def blocks(self) -> list[Block]:
        """Blocks that a decode step of the ready slots reads."""
        lengths = [sequence.kv_len + 1 for sequence in self.ready]
        spec = self.cache.spec
        on_cpu = self.cache.device.type == "cpu"
        cost = _BLOCK_COST // (spec.heads * spec.head_dim) if on_cpu else len(lengths) * max(lengths)
        blocks = cut(lengths, cost)
        self._ends = [block.end for block in blocks]
        return blocks

    @property
    def ready(self) -> list[Sequence]:
        """Requests that decode, in slot order."""
        return self.owners[: self.n_ready]

    def assign(self, sequence: Sequence) -> None:
        """Give ``sequence`` the next free slot, if it has none."""
        if sequence.slot < 0:
            sequence.slot = len(self.owners)
            self.owners.append(sequence)

    def promote(self, sequence: Sequence) -> None:
        """Move a filled request behind the ready ones."""
        target, source = self.n_ready, sequence.slot
        self.n_ready += 1
        if source == target:
            return
        other = self.owners[target]
        self.cache.swap(source, target, max(sequence.kv_len, other.kv_len))
        self.owners[source], self.owners[target] = other, sequence
        other.slot, sequence.slot = source, target

    def release(self, sequence: Sequence) -> None:
        """Free the slot of a request that ends, and close the hole from the back, block by block."""
        hole = sequence.slot
        if hole < 0:
            return
        if hole < self.n_ready:
            for block, end in enumerate(self._ends):
                if hole < end:
                    self._ends[block] = end - 1
                    self._move(end - 1, hole)
                    hole = end - 1
            self.n_ready -= 1
            self._move(self.n_ready, hole)
            hole = self.n_ready
        self._move(len(self.owners) - 1, hole)
        self.owners.pop()
        sequence.slot = -1

    def clear(self) -> None:
        """Take every slot away; nothing that is cached counts any more."""
        for sequence in self.owners:
            sequence.slot, sequence.kv_len = -1, 0
        self.owners, self.n_ready, self._ends = [], 0, []

    def _move(self, source: int, hole: int) -> None:
        if source != hole:
            moved = self.owners[source]
            self.cache.copy(source, hole, moved.kv_len)
            self.owners[hole] = moved
            moved.slot = hole
