"""What travels in a weight group: tensors in buckets, cut into broadcasts.

    trainer's first rank   send_buckets(member, pairs, buckets)
    samplers               receive_buckets(member, buckets) ─► (name, tensor) as they arrive

The wire. A bucket is an ordered list of tensors. One of 32 MiB or more travels alone, as one broadcast of its bytes;
smaller ones share a broadcast of at most 32 MiB, in order, each from the next multiple of 64 bytes on. A broadcast
starts as soon as its last tensor is met: for a shared one, when the next tensor does not fit or the bucket ends. In a
group that a server builds with torch's helper (``torch_helper``) every tensor is a broadcast of its own, in its own
dtype and shape.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from areal.engine.core.weight_groups import Membership, WeightGroupLostError
from areal.engine.core.weight_heads import head_names
from areal.engine.core.weight_sync import ParamRecord
from areal.engine.core.weight_threads import torch_threads
from areal.utils.errors import WeightSyncError
from areal.utils.runs import in_runs

if TYPE_CHECKING:
    from areal.api.io_struct import ParamSpec
    from areal.engine.core.weight_sources import WeightGroup

ALONE_FROM = 32 << 20  # bytes from which a tensor travels alone; the most that others fill together
ALIGNMENT = 64  # bytes, of a tensor in a shared broadcast
_AHEAD = 64 << 20  # bytes that a receiver is ready for, and a sender has ready, beyond the current broadcast


def make_buckets(specs: Iterable[ParamSpec], limit_bytes: int) -> list[list[ParamSpec]]:
    """Cut tensors into runs of at most ``limit_bytes``, in order; a larger tensor is a bucket of its own."""
    return list(in_runs(specs, lambda spec: spec.size, limit_bytes))


# -- sending -----------------------------------------------------------------------------------------------------------


def send_buckets(
    member: Membership, pairs: Iterable[tuple[str, Tensor]], buckets: Sequence[Sequence[ParamSpec]]
) -> list[ParamRecord]:
    """Broadcast ``pairs`` as ``buckets`` say; returns what was sent.

    Raises:
        WeightSyncError: the tensors are not those of ``buckets``, or a receiver is gone; the group was left.
    """
    supply = iter(pairs)
    records: dict[str, ParamRecord] = {}
    flight = _Flight(member, head_names({spec.name: spec.shape for bucket in buckets for spec in bucket}))
    with torch_threads(1) as pool:  # more threads would wait for work on the cores that gloo needs
        try:
            for bucket in buckets:
                waiting: dict[str, Tensor] = {}
                specs = iter(bucket)
                for parcel in _parcels(bucket, member.group.torch_helper):
                    while parcel.specs[-1].name not in waiting:
                        spec = next(specs)
                        waiting[spec.name] = _next(supply, spec)
                    tensors = [waiting.pop(spec.name) for spec in parcel.specs]
                    records.update(pool.submit(flight.add, parcel, tensors).result())
            flight.land()
            if (extra := next(supply, None)) is not None:
                raise WeightSyncError(f"{extra[0]} is a weight of the trainer that was not announced to the samplers")
        except BaseException as exc:  # noqa: BLE001 - raised again, under its name
            flight.forget()
            _leave_after(exc, member)
            _raise_named(exc, member.group)
    return [records[spec.name] for bucket in buckets for spec in bucket]


def _next(supply: Iterator[tuple[str, Tensor]], spec: ParamSpec) -> Tensor:
    found = next(supply, None)
    if found is None:
        raise WeightSyncError(f"{spec.name} was announced to the samplers, but the trainer has no more weights")
    name, tensor = found
    dtype = str(tensor.dtype).removeprefix("torch.")
    if (name, tuple(tensor.shape), dtype) != (spec.name, tuple(spec.shape), spec.dtype):
        raise WeightSyncError(
            f"{spec.name} {tuple(spec.shape)} {spec.dtype} was announced to the samplers, the trainer has "
            f"{name} {tuple(tensor.shape)} {dtype}"
        )
    return tensor.detach().contiguous()


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as ``uint8 [n]``."""
    return tensor.reshape(-1).view(torch.uint8)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class _Flight:
    """Broadcasts under way and the memory they need: at most ``_AHEAD`` bytes besides the newest."""

    def __init__(self, member: Membership, shown: Sequence[str]) -> None:
        self._member = member
        self._shown = frozenset(shown)  # tensors whose records tell what they begin with
        self._bytes = 0
        self._works: deque[tuple[Any, Tensor, _Parcel]] = deque()

    def add(self, parcel: _Parcel, tensors: Sequence[Tensor]) -> dict[str, ParamRecord]:
        """Start to send; returns what was sent, by name."""
        memory = self._fill(parcel, tensors)
        self._works.append((self._member.broadcast(memory), memory, parcel))
        self._bytes += parcel.n_bytes
        sent = parcel.tensors(memory) if parcel.flat else zip((s.name for s in parcel.specs), tensors, strict=True)
        records = {name: ParamRecord.of(name, tensor, head=name in self._shown) for name, tensor in sent}
        while self._bytes > _AHEAD and len(self._works) > 1:
            self._land_one()
        return records

    def land(self) -> None:
        while self._works:
            self._land_one()

    def forget(self) -> None:
        self._works.clear()

    def _fill(self, parcel: _Parcel, tensors: Sequence[Tensor]) -> Tensor:
        device = self._member.device
        if not parcel.flat:
            return (tensors[0] if parcel.typed else as_bytes(tensors[0])).to(device)
        memory = self._member.memory.take(parcel.n_bytes, device)
        for (_, place), tensor in zip(parcel.tensors(memory), tensors, strict=True):
            place.copy_(tensor)
        return memory

    def _land_one(self) -> None:
        work, memory, parcel = self._works.popleft()
        self._member.finish(work)
        if memory.device.type == "cuda":
            torch.cuda.current_stream(memory.device).synchronize()
        self._bytes -= parcel.n_bytes
        if parcel.flat:
            self._member.memory.give(memory)


# -- receiving ---------------------------------------------------------------------------------------------------------


def receive_buckets(
    member: Membership, buckets: Sequence[Sequence[ParamSpec]], lasting: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """``(name, tensor)`` as they arrive, not in the order of ``buckets``; leaves the group if that fails.

    A tensor is valid until the next one is asked for: then its memory receives again. If ``lasting``, it is valid until
    the next version is received.
    """
    member.memory.take_back()
    parcels = [parcel for bucket in buckets for parcel in _parcels(bucket, member.group.torch_helper)]
    coming: deque[tuple[_Parcel, Tensor, Any]] = deque()
    try:
        position = ahead = 0
        while position < len(parcels) or coming:
            while position < len(parcels) and (not coming or ahead + parcels[position].n_bytes <= _AHEAD):
                parcel = parcels[position]
                memory = member.memory.take(parcel.n_bytes, member.device)
                coming.append((parcel, memory, member.broadcast(parcel.wire_view(memory))))
                ahead += parcel.n_bytes
                position += 1
            parcel, memory, work = coming.popleft()
            member.finish(work)
            ahead -= parcel.n_bytes
            yield from parcel.tensors(memory)
            member.memory.give(memory, later=lasting)
    except BaseException as exc:
        coming.clear()
        _leave_after(exc, member)
        if isinstance(exc, GeneratorExit):
            raise
        _raise_named(exc, member.group)


@dataclass(frozen=True)
class _Parcel:
    """What travels in one broadcast: a tensor, or several small ones (``flat``)."""

    specs: list[ParamSpec]
    flat: bool
    typed: bool

    @property
    def n_bytes(self) -> int:
        return sum(_aligned(spec.size) for spec in self.specs) if self.flat else self.specs[0].size

    def wire_view(self, memory: Tensor) -> Tensor:
        """The memory as it is broadcast."""
        return _shaped(memory, self.specs[0]) if self.typed else memory

    def tensors(self, memory: Tensor) -> Iterator[tuple[str, Tensor]]:
        start = 0
        for spec in self.specs:
            yield spec.name, _shaped(memory[start : start + spec.size], spec)
            start += _aligned(spec.size)


def _parcels(bucket: Sequence[ParamSpec], torch_helper: bool) -> list[_Parcel]:
    """The broadcasts of a bucket, in the order in which the last tensor of each is met."""
    parcels: list[_Parcel] = []
    shared: list[ParamSpec] = []
    filled = 0
    for spec in bucket:
        if torch_helper or spec.size >= ALONE_FROM:
            parcels.append(_Parcel([spec], False, torch_helper))
            continue
        if filled + spec.size > ALONE_FROM:
            parcels.append(_Parcel(shared, True, False))
            shared, filled = [], 0
        shared.append(spec)
        filled += _aligned(spec.size)
    return parcels + ([_Parcel(shared, True, False)] if shared else [])


def _shaped(memory: Tensor, spec: ParamSpec) -> Tensor:
    return memory.view(_dtype(spec)).view(tuple(spec.shape))


def _dtype(spec: ParamSpec) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return dtype


def _leave_after(exc: BaseException, member: Membership) -> None:
    """Leave; what the frames of an error still hold would keep connections open."""
    traceback.clear_frames(exc.__traceback__)
    member.give_up()


def _raise_named(exc: BaseException, group: WeightGroup) -> NoReturn:
    if isinstance(exc, WeightSyncError) or not isinstance(exc, Exception):
        raise exc
    raise WeightGroupLostError(f"weight group {group.name}: rank {group.rank} lost the others: {exc}") from exc
