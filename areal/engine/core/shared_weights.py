"""Weights in shared memory: written by the trainer's first rank, mapped by samplers on the same host.

Two anonymous memory files (``memfd``) take turns, so that a version can be read while the next one is written. They
have no name: the kernel frees them with the last process that holds them, whatever killed it. A reader on the same
host opens the writer's descriptor through ``/proc``; a reader elsewhere has the bytes sent over the writer's tensor
stream.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from areal.engine.core.weight_sync import ParamRecord, checksum
from areal.engine.core.weight_threads import TASK_BYTES, torch_threads
from areal.infra.rpc.rtensor import RTensor, local_store, localize
from areal.utils.errors import WeightSyncError
from areal.utils.runs import in_runs

_ALIGNMENT = 64  # bytes
_KEPT_MAPS = 2
_MOST_WAITING = 256 << 20  # bytes


@dataclass
class SharedParam:
    """One tensor in the buffer: its record and where it starts (bytes)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    checksum: int
    offset: int

    def record(self) -> ParamRecord:
        """What a receiver must have recorded."""
        return ParamRecord(self.name, tuple(self.shape), self.dtype, self.checksum)


@dataclass
class WeightManifest:
    """Where one version's weights are.

    Attributes:
        version: of the weights.
        host: identity of the writer's host and process tree; equal ones share ``/proc``.
        pid, fd: the writer and its descriptor.
        size_bytes: of the buffer.
        params: the tensors, in model order.
        shard: the same bytes in the writer's tensor store, for readers elsewhere.
        timeout_s: limit of reading it; None: the reader's.
    """

    version: int
    host: str
    pid: int
    fd: int
    size_bytes: int
    params: list[SharedParam]
    shard: RTensor
    timeout_s: float | None = None


class WeightWriter:
    """Writes versions into two buffers, in turn."""

    def __init__(self) -> None:
        self._buffers: list[_Buffer | None] = [None, None]
        self._turn = 0

    def write(self, pairs: Iterable[tuple[str, Tensor]], version: int, keep: int | None = None) -> WeightManifest:
        """Copy ``(checkpoint name, full tensor)`` pairs into a buffer that no reader may still use.

        Args:
            pairs: the weights.
            version: of them.
            keep: descriptor of the buffer in service; None takes the older one.

        Raises:
            WeightSyncError: the shared memory cannot hold them.
        """
        if keep is not None:
            self._turn = next((i for i, b in enumerate(self._buffers) if b is None or b.fd != keep), self._turn)
        buffer, other = self._buffers[self._turn], self._buffers[1 - self._turn]
        if buffer is None and other is not None:
            buffer = self._buffers[self._turn] = _Buffer(other.size, None)
        params, kept, end = _copy(pairs, buffer)
        if kept or buffer is None:  # the first time: the size is known only now
            grown = _Buffer(max(end, 1), buffer)
            for index, tensor in kept:
                params[index].checksum = grown.put(params[index].offset, tensor)
            if buffer is not None:
                buffer.close()
            buffer = self._buffers[self._turn] = grown
        self._turn = 1 - self._turn
        return WeightManifest(version, host_identity(), os.getpid(), buffer.fd, buffer.size, params, buffer.shard)

    def close(self) -> None:
        """Free both buffers."""
        for buffer in self._buffers:
            if buffer is not None:
                buffer.close()
        self._buffers = [None, None]


def _copy(
    pairs: Iterable[tuple[str, Tensor]], buffer: _Buffer | None
) -> tuple[list[SharedParam], list[tuple[int, Tensor]], int]:
    """Lay tensors out in ``buffer``; returns their places, those that did not fit (by position), and the whole size."""
    params: list[SharedParam] = []
    kept: list[tuple[int, Tensor]] = []
    end = 0  # of the layout

    def laid_out() -> Iterator[tuple[SharedParam, Tensor]]:
        nonlocal end
        for name, tensor in pairs:
            tensor = tensor.detach().contiguous()
            offset = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = offset + tensor.nbytes
            dtype = str(tensor.dtype).removeprefix("torch.")
            params.append(SharedParam(name, tuple(tensor.shape), dtype, 0, offset))
            if buffer is None or end > buffer.size:
                kept.append((len(params) - 1, tensor.to("cpu", copy=tensor.device.type == "cpu")))
            else:
                yield params[-1], tensor

    waiting = 0  # bytes of gathered tensors
    copies: list[Future[None]] = []
    with torch_threads(torch.get_num_threads()) as pool:
        for run in in_runs(laid_out(), lambda item: item[1].nbytes, TASK_BYTES):
            copies.append(pool.submit(_put, buffer, run))
            waiting += sum(tensor.nbytes for _, tensor in run)
            if waiting > _MOST_WAITING or run[-1][1].device.type != "cpu":
                waiting = 0
                _finish(copies)
            del run
        _finish(copies)
    return params, kept, end


def _put(buffer: _Buffer | None, run: list[tuple[SharedParam, Tensor]]) -> None:
    assert buffer is not None
    for param, tensor in run:
        param.checksum = buffer.put(param.offset, tensor)


def _finish(copies: list[Future[None]]) -> None:
    while copies:
        copies.pop().result()


class _Buffer:
    """One anonymous memory file, mapped, and offered in the tensor store."""

    def __init__(self, size: int, old: _Buffer | None) -> None:
        self.size = size
        try:
            self.fd = os.memfd_create("areal-weights", os.MFD_CLOEXEC)
            os.ftruncate(self.fd, size)
            self._map = mmap.mmap(self.fd, size)
        except OSError as exc:
            raise WeightSyncError(
                f"{size} bytes of shared memory for the weights cannot be had ({exc}); free memory, or set "
                "actor.weight_update_mode"
            ) from exc
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        if old is not None:
            self.bytes[: old.size].copy_(old.bytes[: min(old.size, size)])
        self.shard = local_store().put(self.bytes)

    def put(self, offset: int, tensor: Tensor) -> int:
        """Copy ``tensor`` to ``offset``; returns the checksum of the copy."""
        place = self.bytes[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        place.copy_(tensor)
        return checksum(place)

    def close(self) -> None:
        """Free the memory, as soon as no reader maps it."""
        local_store().free([self.shard.shard_id])
        del self.bytes  # the mapping itself ends with the last tensor over it
        os.close(self.fd)


@contextlib.contextmanager
def read_weights(manifest: WeightManifest) -> Iterator[list[tuple[str, Tensor]]]:
    """``(name, tensor)`` pairs of a version; the tensors are views that end with the block.

    Raises:
        WeightSyncError: the writer is gone, or its memory cannot be opened.
    """
    flat = _maps.get(manifest) if manifest.host == host_identity() else None
    if flat is None:
        (flat,) = localize([manifest.shard])
    yield list(_pairs(flat, manifest.params))


def _pairs(flat: Tensor, params: list[SharedParam]) -> Iterator[tuple[str, Tensor]]:
    for param in params:
        dtype = getattr(torch, param.dtype)
        count = 1
        for extent in param.shape:
            count *= extent
        part = flat[param.offset : param.offset + count * dtype.itemsize]
        yield param.name, part.view(dtype).view(tuple(param.shape))


class _Maps:
    """A writer's buffers mapped by this process: the newest two stay, as mapping one again costs a fault per page.

    Those of another writer go at once: it has died, and the memory is free only when nobody maps it.
    """

    def __init__(self) -> None:
        self._writer = 0
        self._maps: dict[tuple[int, int], Tensor] = {}
        self._lock = threading.Lock()

    def get(self, manifest: WeightManifest) -> Tensor | None:
        """The buffer of a manifest; None where the writer's descriptor cannot be opened from here.

        Raises:
            WeightSyncError: the descriptor is not that buffer any more.
        """
        try:
            fd = os.open(f"/proc/{manifest.pid}/fd/{manifest.fd}", os.O_RDONLY)
        except OSError:
            return None
        try:
            found = os.fstat(fd)
            if found.st_size != manifest.size_bytes:
                raise WeightSyncError(f"weights v{manifest.version}: process {manifest.pid} no longer holds them")
            identity = (found.st_dev, found.st_ino)
            with self._lock:
                if manifest.pid != self._writer:
                    self._writer, self._maps = manifest.pid, {}
                flat = self._maps.pop(identity, None)
                if flat is None:
                    flat = _map(fd, manifest.size_bytes)
                self._maps[identity] = flat  # the newest is last
                for old in list(self._maps)[:-_KEPT_MAPS]:
                    del self._maps[old]
            return flat
        finally:
            os.close(fd)


def _map(fd: int, size: int) -> Tensor:
    mapped = mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return torch.frombuffer(mapped, dtype=torch.uint8)


_maps = _Maps()


def host_identity() -> str:
    """Equal for processes that see each other in ``/proc``: one boot of one kernel, one process-id namespace."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    return f"no-proc-{os.getpid()}"


def any_rank(manifests: Iterable[Any]) -> WeightManifest:
    """The manifest of the rank that wrote one."""
    for manifest in manifests:
        if manifest is not None:
            return manifest  # type: ignore[no-any-return]
    raise WeightSyncError("no rank of the train engine published its weights")
