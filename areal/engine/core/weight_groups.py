"""Collective groups that carry weights: the trainer's first rank sends, samplers receive.

    rank 0:   open_store(host) ─► port ─► enter_group(group, store) ─► send_buckets(...) ─► abort()
    others:                              enter_group(group)        ─► receive_buckets(...) ─► abort()

The wire. A bucket is an ordered list of tensors. One of 32 MiB or more travels alone, as one broadcast of its bytes;
smaller ones share a broadcast of at most 32 MiB, in order, each from the next multiple of 64 bytes on. A broadcast
starts as soon as its last tensor is met: for a shared one, when the next tensor does not fit or the bucket ends. In a
group that a server builds with torch's helper (``torch_helper``) every tensor is a broadcast of its own, in its own
dtype and shape. A group does not survive an error: whoever meets one says so in the store and leaves. The
others look there while they wait: connections alone do not tell, since gloo closes them only when nothing is under way,
and two ranks may each wait for the other's part of another broadcast.
"""

from __future__ import annotations

import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from areal.engine.core.weight_sync import ParamRecord
from areal.engine.core.weight_threads import torch_threads
from areal.utils.errors import WeightSyncError
from areal.utils.network import address_towards, format_hostport

if TYPE_CHECKING:
    from areal.api.io_struct import ParamSpec
    from areal.engine.core.weight_sources import WeightGroup

_dist: Any = dist  # names that its stubs do not export
ALONE_FROM = 32 << 20  # bytes from which a tensor travels alone; the most that others fill together
ALIGNMENT = 64  # bytes, of a tensor in a shared broadcast
_AHEAD = 64 << 20  # bytes that a receiver is ready for, and a sender has ready, beyond the current broadcast
_POLL_S = 0.005
_LOOK_S = 0.5  # between looks whether somebody has given the group up
_LOST = "lost"


class WeightGroupLostError(WeightSyncError):
    """A group ended while it was needed: usually because another member failed, whose error says more."""


def make_buckets(specs: Iterable[ParamSpec], limit_bytes: int) -> list[list[ParamSpec]]:
    """Cut tensors into runs of at most ``limit_bytes``, in order; a larger tensor is a bucket of its own."""
    buckets: list[list[ParamSpec]] = []
    filled = limit_bytes
    for spec in specs:
        if not buckets or filled + spec.size > limit_bytes:
            buckets.append([])
            filled = 0
        buckets[-1].append(spec)
        filled += spec.size
    return buckets


def open_store(host: str, timeout_s: float) -> Any:
    """A rendezvous store that listens on ``host`` only, on a port of the system's choice (``store.port``)."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.bind((host, 0))
            listener.listen(128)
            port = listener.getsockname()[1]
            fd = listener.detach()
    except OSError as exc:
        raise WeightSyncError(f"no port for the weight group can be had on {host}: {exc}") from exc
    timeout = timedelta(seconds=timeout_s)
    return _dist.TCPStore(host, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=fd)


class Membership:
    """A rank's place in a group. Leaving it (:meth:`abort`) is the only way to end it.

    Attributes:
        group: with the rank of this process.
        device: where tensors must lie to travel.
    """

    def __init__(self, group: WeightGroup, process_group: Any, store: Any) -> None:
        self.group = group
        self.device = torch.device("cuda" if group.backend == "nccl" else "cpu")
        self.memory = _Memory()
        self._process_group, self._store = process_group, store
        self._options = dist.BroadcastOptions()
        self._options.rootRank, self._options.rootTensor = 0, 0

    def broadcast(self, tensor: Tensor) -> Any:
        """Start to send (rank 0) or to fill ``tensor``; returns the work to wait for."""
        process_group = self._process_group
        if process_group is None:
            raise WeightGroupLostError(f"weight group {self.group.name} was left")
        return process_group.broadcast([tensor], self._options)

    def finish(self, work: Any) -> None:
        """Wait for a broadcast that was started.

        Raises:
            WeightGroupLostError: this rank or another one has given the group up.
        """
        if self.group.backend == "nccl":
            work.wait()
            return
        while True:
            try:
                work.wait(timedelta(seconds=_LOOK_S))
                return
            except RuntimeError:
                if work.is_completed():
                    raise
            if self._given_up():
                raise WeightGroupLostError(f"weight group {self.group.name} was given up by a rank")

    def give_up(self) -> None:
        """Leave after an error, and let the others know."""
        store = self._store
        if store is not None:
            with suppress(RuntimeError):  # it may have ended with rank 0
                store.set(_LOST, "1")
        self.abort()

    def _given_up(self) -> bool:
        store = self._store
        try:
            return store is None or bool(store.check([_LOST]))
        except RuntimeError:  # rank 0, which keeps the store, is gone
            return True

    def abort(self) -> None:
        """Leave: connections close, so that nobody waits for this rank. Safe to call twice and from any thread.

        Connections of gloo close with the object, which first waits for what it has under way here: that ends when
        the other side closes, so it is left to a thread.
        """
        process_group, self._process_group, self._store = self._process_group, None, None
        if process_group is not None:
            holder = [process_group]
            del process_group
            threading.Thread(target=_close, args=(holder, self.group.torch_helper), daemon=True).start()


def _close(holder: list[Any], torch_helper: bool) -> None:
    with suppress(Exception):
        holder[0].abort()  # NCCL; nothing to gloo
    if torch_helper:
        with suppress(Exception):
            dist.destroy_process_group(holder[0])
    holder.clear()


def enter_group(group: WeightGroup, store: Any = None, aborted: Callable[[], bool] = lambda: False) -> Membership:
    """Take the place ``group.rank``; returns when every rank has.

    Args:
        group: where to go.
        store: of rank 0, from :func:`open_store`; None: joins it as the others do.
        aborted: asked while waiting for the others.

    Raises:
        WeightSyncError: not everybody came within ``group.timeout_s``.
    """
    timeout = timedelta(seconds=group.timeout_s)
    scoped: Any = None
    try:
        if store is None:
            store = _dist.TCPStore(group.host, group.port, is_master=False, timeout=timeout, wait_for_workers=False)
        scoped = _dist.PrefixStore(group.name, store)
        if group.torch_helper:
            return Membership(group, _with_torch_helper(group, scoped, timeout), scoped)
        scoped.set(f"here/{group.rank}", "1")
        if group.rank == 0:
            try:
                _await_others(group, scoped, aborted)
            except WeightSyncError:
                with suppress(RuntimeError):  # the store may have ended with the group
                    scoped.set("go", "0")
                raise
            scoped.set("go", "1")
        else:
            scoped.wait(["go"], timeout)
            if scoped.get("go") != b"1":
                raise WeightGroupLostError(f"weight group {group.name}: not every rank joined, it was given up")
        return Membership(group, _direct(group, scoped, timeout), scoped)
    except (RuntimeError, OSError) as exc:  # torch's store and gloo errors derive from RuntimeError
        if isinstance(exc, WeightSyncError):
            raise
        if aborted():
            raise WeightGroupLostError(f"weight group {group.name} was given up before every rank joined") from exc
        lost = scoped is not None and isinstance(exc, _dist.DistNetworkError)  # rank 0 ended the store
        raise (WeightGroupLostError if lost else WeightSyncError)(
            f"weight group {group.name}: rank {group.rank} of {group.world_size} could not join at "
            f"{group.host}:{group.port} within {group.timeout_s:g} s: {exc}"
        ) from exc


def _await_others(group: WeightGroup, store: Any, aborted: Callable[[], bool]) -> None:
    deadline = time.monotonic() + group.timeout_s
    for rank in range(1, group.world_size):
        while not store.check([f"here/{rank}"]):
            if aborted():
                raise WeightGroupLostError(f"weight group {group.name} was given up before rank {rank} joined")
            if time.monotonic() > deadline:
                raise WeightSyncError(
                    f"weight group {group.name}: rank {rank} did not join within {group.timeout_s:g} s "
                    "(actor.weight_update_timeout_s)"
                )
            time.sleep(_POLL_S)


def _direct(group: WeightGroup, store: Any, timeout: timedelta) -> Any:
    """A process group beside any default one."""
    if group.backend == "nccl":
        options = _dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return _dist.ProcessGroupNCCL(store, group.rank, group.world_size, options)
    options = _dist.ProcessGroupGloo._Options()
    options._timeout = timeout
    own = address_towards(format_hostport(group.host, group.port))
    options._devices = [_dist.ProcessGroupGloo.create_device(hostname=own)]
    return _dist.ProcessGroupGloo(store, group.rank, group.world_size, options)


def _with_torch_helper(group: WeightGroup, store: Any, timeout: timedelta) -> Any:
    """The group that SGLang's ``init_weights_update_group`` builds."""
    c10d: Any = _dist.distributed_c10d
    process_group, _ = c10d._new_process_group_helper(
        group.world_size, group.rank, [], dist.Backend(group.backend), store, group_name=group.name, timeout=timeout
    )
    c10d._world.pg_group_ranks[process_group] = {rank: rank for rank in range(group.world_size)}
    return process_group


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
    flight = _Flight(member)
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

    def __init__(self, member: Membership) -> None:
        self._member = member
        self._bytes = 0
        self._works: deque[tuple[Any, Tensor, _Parcel]] = deque()

    def add(self, parcel: _Parcel, tensors: Sequence[Tensor]) -> dict[str, ParamRecord]:
        """Start to send; returns what was sent, by name."""
        memory = self._fill(parcel, tensors)
        self._works.append((self._member.broadcast(memory), memory, parcel))
        self._bytes += parcel.n_bytes
        sent = parcel.tensors(memory) if parcel.flat else zip((s.name for s in parcel.specs), tensors, strict=True)
        records = {name: ParamRecord.of(name, tensor) for name, tensor in sent}
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
    for spec in bucket:
        if torch_helper or spec.size >= ALONE_FROM:
            parcels.append(_Parcel([spec], False, torch_helper))
            continue
        if sum(_aligned(other.size) for other in shared) + spec.size > ALONE_FROM:
            parcels.append(_Parcel(shared, True, False))
            shared = []
        shared.append(spec)
    return parcels + ([_Parcel(shared, True, False)] if shared else [])


def _shaped(memory: Tensor, spec: ParamSpec) -> Tensor:
    return memory.view(_dtype(spec)).view(tuple(spec.shape))


class _Memory:
    """Receive buffers, kept from one version to the next: new memory costs a fault per page."""

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = {}
        self._lent: list[Tensor] = []

    def take(self, n_bytes: int, device: torch.device) -> Tensor:
        free = self._free.get(n_bytes)
        return free.pop() if free else torch.empty(n_bytes, dtype=torch.uint8, device=device)

    def give(self, memory: Tensor, later: bool = False) -> None:
        if later:
            self._lent.append(memory)
        else:
            self._free.setdefault(memory.numel(), []).append(memory)

    def take_back(self) -> None:
        lent, self._lent = self._lent, []
        for memory in lent:
            self.give(memory)


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


class Memberships:
    """The groups that a receiver is in, by name; joined and left by calls of the trainer's side."""

    def __init__(self) -> None:
        self._members: dict[str, Membership] = {}
        self._lock = threading.Lock()

    def join(self, group: WeightGroup) -> None:
        """Take the place ``group.rank``; returns when every rank has. Groups that this one replaces are left."""
        member = enter_group(group)
        with self._lock:
            old = [name for name, other in self._members.items() if other.group.stage == group.stage]
            left = [self._members.pop(name) for name in old]
            self._members[group.name] = member
        for other in left:
            other.abort()

    def leave(self, name: str) -> None:
        """Leave a group; an unknown one is no error."""
        with self._lock:
            member = self._members.pop(name, None)
        if member is not None:
            member.abort()

    def get(self, name: str) -> Membership:
        """The place in a group.

        Raises:
            WeightSyncError: it was not joined.
        """
        with self._lock:
            member = self._members.get(name)
            known = ", ".join(self._members) or "none"
        if member is None:
            raise WeightGroupLostError(f"weight group {name} was not joined here (joined: {known})")
        return member
