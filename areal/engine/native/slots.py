"""Which request owns which cache slot: the ready ones first, without holes, then those being filled.

A decode step reads slots ``0 .. n_ready - 1`` in place, so a request that ends is replaced by the last one. Owned by
``scheduler``.
"""

from __future__ import annotations

from areal.engine.native.kv_cache import SlotCache
from areal.engine.native.requests import Sequence


class SlotTable:
    """Slot ``i`` belongs to ``owners[i]``; the first ``n_ready`` owners decode."""

    def __init__(self, cache: SlotCache) -> None:
        self.cache = cache
        self.owners: list[Sequence] = []
        self.n_ready = 0

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
        """Free the slot of a request that ends, and close the hole from the back."""
        hole = sequence.slot
        if hole < 0:
            return
        if hole < self.n_ready:
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
        self.owners, self.n_ready = [], 0

    def _move(self, source: int, hole: int) -> None:
        if source != hole:
            moved = self.owners[source]
            self.cache.copy(source, hole, moved.kv_len)
            self.owners[hole] = moved
            moved.slot = hole
