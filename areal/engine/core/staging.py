"""Snapshots in host memory: what a checkpoint holds, copied at once and written while training goes on.

In: this rank's shards. Out: host copies that training does not touch, and whole tensors gathered from them, one at a
time, on a group of their own. Called by the backends' checkpoint code.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from areal.engine.core.distributed import COLLECTIVE_TIMEOUT, group_rank
from areal.engine.core.tensor_parts import box_index, own_index
from areal.utils.errors import EngineError
from areal.utils.ranks import gather_json


@dataclass(frozen=True)
class Piece:
    """This rank's part of a tensor.

    Attributes:
        data: values of the part.
        shape: of the whole tensor.
        offset: where the part begins, per dimension.
        dtype: in which it is wanted.
    """

    data: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor, data: Tensor, dtype: torch.dtype) -> Self:
        """``data``: this rank's part of ``tensor``, or a copy of it."""
        return cls(data, tuple(tensor.shape), tuple(part.start for part in own_index(tensor)), dtype)

    def on_host(self) -> Tensor:
        """The values, contiguous, in host memory and as ``dtype``."""
        return self.data.to("cpu", self.dtype).contiguous()


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
    """Makes whole tensors of the ranks' pieces; every rank must call, with the same names in the same order.

    Attributes:
        outlines: every tensor of which some rank has a piece, on the meta device; the same on all ranks, in the order
            of the ranks that have them.
    """

    def __init__(self, pieces: Mapping[str, Piece], group: dist.ProcessGroup | None) -> None:
        """Args: ``group`` (gloo) is used by nobody else meanwhile."""
        self.pieces, self.group = pieces, group
        mine: dict[str, list[Any]] = {
            name: [list(piece.offset), list(piece.data.shape), list(piece.shape), str(piece.dtype)]
            for name, piece in pieces.items()
        }
        told = [mine] if group is None else gather_json(mine, group)
        self._boxes: list[dict[str, Box]] = []
        self.outlines: dict[str, Tensor] = {}
        for boxes in told:
            self._boxes.append({name: (tuple(offset), tuple(size)) for name, (offset, size, *_) in boxes.items()})
            for name, (*_, shape, dtype) in boxes.items():
                if name not in self.outlines:
                    kind = getattr(torch, dtype.removeprefix("torch."))
                    self.outlines[name] = torch.empty(shape, dtype=kind, device="meta")

    @property
    def total_bytes(self) -> int:
        """Size of all whole tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.outlines.values())

    def fetch(self, name: str, owner: int) -> Tensor | None:
        """The whole tensor on rank ``owner`` of the group, None on the others."""
        if self.group is None:
            return self.pieces[name].on_host()
        rank, outline = group_rank(self.group), self.outlines[name]
        senders = self._senders(name, owner)
        if rank != owner:
            if rank in senders:
                dist.send(self.pieces[name].on_host(), group_dst=owner, group=self.group)
            return None
        if senders.get(owner) == ((0,) * outline.dim(), tuple(outline.shape)):
            return self.pieces[name].on_host()
        whole = torch.empty(outline.shape, dtype=outline.dtype)
        for sender, (offset, shape) in senders.items():
            if sender == owner:
                part = self.pieces[name].on_host()
            else:
                part = torch.empty(shape, dtype=outline.dtype)
                dist.recv(part, group_src=sender, group=self.group)
            whole[box_index(offset, shape)] = part
        return whole

    def _senders(self, name: str, owner: int) -> dict[int, Box]:
        """Who contributes which part: each part once, the owner's own first."""
        order = [owner, *(rank for rank in range(len(self._boxes)) if rank != owner)]
        found: dict[Box, int] = {}
        for rank in order:
            box = self._boxes[rank].get(name)
            if box is not None and all(box[1]):
                found.setdefault(box, rank)
        return {rank: box for box, rank in found.items()}
