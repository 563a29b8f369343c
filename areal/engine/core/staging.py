"""Snapshots in host memory: what a checkpoint holds, copied at once and written while training goes on.

In: this rank's shards. Out: host copies that training does not touch, and whole tensors gathered from them, one at a
time, on a group of their own. Called by the backends' checkpoint code.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from areal.engine.core.distributed import COLLECTIVE_TIMEOUT, group_rank
from areal.utils.errors import EngineError
from areal.utils.ranks import gather_json


@dataclass(frozen=True)
class Piece:
    """This rank's part of a tensor.

    Attributes:
        data: contiguous values of the part.
        shape: of the whole tensor.
        offset: where the part begins, per dimension.
    """

    data: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]

    @property
    def index(self) -> tuple[slice, ...]:
        """Where the part is in the whole tensor."""
        return box_index(self.offset, tuple(self.data.shape))


Box = tuple[tuple[int, ...], tuple[int, ...]]  # offset and shape of a part


class HostStage:
    """Host buffers of one engine, kept from save to save, and the group of its background writes.

    A snapshot is valid until the next one, so its write must end first.
    """

    def __init__(self, world: dist.ProcessGroup | None) -> None:
        """Args: ``world`` holds all ranks of the engine; every one must make its ``HostStage`` at the same time."""
        self.group: dist.ProcessGroup | None = None
        if world is not None:
            ranks = dist.get_process_group_ranks(world)
            self.group = dist.new_group(ranks, backend="gloo", timeout=COLLECTIVE_TIMEOUT)
        self._buffers: dict[str, Tensor] = {}
        self._copies: dict[int, tuple[Any, Any]] = {}
        self.busy = False

    def begin(self) -> None:
        """Start a snapshot.

        Raises:
            EngineError: the previous one is still being written.
        """
        if self.busy:
            raise EngineError(
                "the previous checkpoint is still being written; wait for it before the next stage_save()"
            )
        self.busy = True

    def keep(self, key: str, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Copy a plain tensor to the host, as ``dtype``; on CUDA the copy is complete after :meth:`finish`."""
        dtype = tensor.dtype if dtype is None else dtype
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != dtype:
            buffer = torch.empty(tensor.shape, dtype=dtype, pin_memory=tensor.is_cuda)
            self._buffers[key] = buffer
        buffer.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
        return buffer

    def own_copy(self, thing: Any) -> Any:
        """A copy of a tokenizer or processor that the writer may use while the original is in use elsewhere."""
        if thing is None:
            return None
        original, twin = self._copies.get(id(thing), (None, None))
        if original is not thing:
            twin = copy.deepcopy(thing)
            self._copies[id(thing)] = (thing, twin)
        return twin

    def finish(self) -> None:
        """Return when every copy is complete."""
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        """Free the buffers and leave the group."""
        self._buffers.clear()
        self._copies.clear()
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group(self.group)
        self.group = None


class PieceGatherer:
    """Makes whole tensors of the ranks' pieces; every rank must call, with the same names in the same order."""

    def __init__(self, pieces: Mapping[str, Piece], group: dist.ProcessGroup | None) -> None:
        """Args: ``group`` (gloo) is used by nobody else meanwhile."""
        self.pieces, self.group = pieces, group
        mine = {name: [list(piece.offset), list(piece.data.shape)] for name, piece in pieces.items()}
        self._boxes = [] if group is None else gather_json(mine, group)

    def fetch(self, name: str, owner: int) -> Tensor | None:
        """The whole tensor on rank ``owner`` of the group, None on the others."""
        piece = self.pieces[name]
        if self.group is None:
            return piece.data
        rank = group_rank(self.group)
        senders = self._senders(name, owner)
        if rank != owner:
            if rank in senders:
                dist.send(piece.data, group_dst=owner, group=self.group)
            return None
        if senders.get(owner) == ((0,) * len(piece.shape), piece.shape):
            return piece.data
        whole = torch.empty(piece.shape, dtype=piece.data.dtype)
        for sender, (offset, shape) in senders.items():
            part = piece.data
            if sender != owner:
                part = torch.empty(shape, dtype=piece.data.dtype)
                dist.recv(part, group_src=sender, group=self.group)
            whole[box_index(offset, shape)] = part
        return whole

    def _senders(self, name: str, owner: int) -> dict[int, Box]:
        """Who contributes which part: each part once, the owner's own first."""
        order = [owner, *(rank for rank in range(len(self._boxes)) if rank != owner)]
        found: dict[Box, int] = {}
        for rank in order:
            offset, shape = (tuple(part) for part in self._boxes[rank][name])
            if all(shape):
                found.setdefault((offset, shape), rank)
        return {rank: box for box, rank in found.items()}


def box_index(offset: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    """Slices of a part in the whole tensor."""
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
