"""Slot cache of keys and values, written in place; slot ``s`` belongs to the request that the scheduler put there.

One tensor ``[layers, slots, kv_heads, 2, capacity, head_dim]`` (2: key, value). The first ``n`` slots of a layer are
``n * kv_heads`` equally strided matrices ``[capacity, head_dim]``, which ``torch.bmm`` reads without a copy. Both
extents grow by doubling, up to what the live requests need. Fresh memory is zero: a masked position must hold a
finite value. Called by ``scheduler`` (slots) and ``model`` (reads and writes).
"""

from __future__ import annotations

import torch
from torch import Tensor

from areal.engine.native.weights import ModelSpec

_FIRST_SLOTS = 8
_FIRST_CAPACITY = 64


class SlotCache:
    """Keys and values of every live request.

    Args:
        spec: model shape.
        dtype: dtype of keys and values.
        device: where they lie.
        max_slots: most requests at once.
        max_capacity: most positions of one request.
    """

    def __init__(
        self, spec: ModelSpec, dtype: torch.dtype, device: torch.device, *, max_slots: int, max_capacity: int
    ) -> None:
        self.spec, self.dtype, self.device = spec, dtype, device
        self.max_slots, self.max_capacity = max_slots, max_capacity
        self.slots, self.capacity = 0, 0
        self.data = torch.empty(0)
        self._allocate(min(_FIRST_SLOTS, max_slots), min(_FIRST_CAPACITY, max_capacity))

    def reserve(self, slots: int, capacity: int) -> None:
        """Make room for ``slots`` requests of ``capacity`` positions; keeps what is stored."""
        if slots <= self.slots and capacity <= self.capacity:
            return
        if slots > self.slots:
            slots = min(max(slots, 2 * self.slots), self.max_slots)
        if capacity > self.capacity:
            capacity = min(max(capacity, 2 * self.capacity), self.max_capacity)
        self._allocate(max(slots, self.slots), max(capacity, self.capacity))

    def _allocate(self, slots: int, capacity: int) -> None:
        spec = self.spec
        shape = (spec.layers, slots, spec.kv_heads, 2, capacity, spec.head_dim)
        data = torch.zeros(shape, dtype=self.dtype, device=self.device)
        if self.slots:
            data[:, : self.slots, :, :, : self.capacity] = self.data
        self.data, self.slots, self.capacity = data, slots, capacity
        rows = slots * spec.kv_heads
        self.pairs = list(data.view(spec.layers, rows, 2, capacity, spec.head_dim))
        self.keys = [layer[:, 0] for layer in self.pairs]
        self.values = [layer[:, 1] for layer in self.pairs]
        self.flat = list(data.view(spec.layers, rows * 2 * capacity, spec.head_dim))
        first = torch.arange(rows * 2, dtype=torch.int64, device=self.device) * capacity
        self._first_row = first.view(slots, spec.kv_heads, 2)

    def decode_index(self, positions: Tensor) -> Tensor:
        """Rows of ``flat`` for one new position of each of the first slots: ``[n]`` int64 -> ``[n * kv_heads, 2]``."""
        return (self._first_row[: positions.shape[0]] + positions[:, None, None]).view(-1, 2)

    def value_index(self, begin: int, end: int, group: int, length: int) -> Tensor:
        """Rows of ``flat`` that hold the first ``length`` values of the slots from ``begin`` to ``end - 1``, once for
        each of the ``group`` queries that read them: ``[slots * kv_heads * group * length]`` int32."""
        first = self._first_row[begin:end, :, 1].to(torch.int32).view(-1, 1, 1)
        steps = torch.arange(length, dtype=torch.int32, device=self.device)
        return (first + steps).expand(-1, group, -1).reshape(-1)

    def extend_index(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Rows of ``flat`` for tokens in any slots: two ``[T]`` int64 -> ``[T, kv_heads, 2]``."""
        return self._first_row[slots] + positions[:, None, None]

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` positions of one slot to another."""
        self.data[:, target, :, :, :length] = self.data[:, source, :, :, :length]

    def copy_many(self, sources: list[int], targets: list[int], length: int) -> None:
        """Copy the first ``length`` positions of some slots to others, pair by pair; no target is a source."""
        origin = torch.tensor(sources, device=self.device)
        self.data[:, torch.tensor(targets, device=self.device), :, :, :length] = self.data[:, origin, :, :, :length]

    def swap(self, a: int, b: int, length: int) -> None:
        """Exchange the first ``length`` positions of two slots."""
        kept = self.data[:, a, :, :, :length].clone()
        self.data[:, a, :, :, :length] = self.data[:, b, :, :, :length]
        self.data[:, b, :, :, :length] = kept
