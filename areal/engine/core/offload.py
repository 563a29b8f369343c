"""Takes a whole engine out of its device's memory between phases, and brings it back bit for bit.

In: the tensors of an engine (weights, masters, optimizer state). Out: freed storages, whose tensors, views and aliases
stay valid objects. On a GPU the bytes wait in pinned host memory, on a CPU in an unnamed temporary file (``TMPDIR``
says where). Called by the engine facades.

    resident --offload()--> offloaded --onload()--> resident
        \\--resident_during(): brings it back, and takes it out again when the outermost block ends
"""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import IO, TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from areal.api.remote import remote
from areal.engine.core.distributed import barrier
from areal.engine.core.memory import memory_of, return_memory
from areal.utils import logging
from areal.utils.errors import EngineError

if TYPE_CHECKING:
    from areal.engine.core.parallel_dims import ParallelGroups

logger = logging.getLogger("Offload")


class _Parked(Protocol):
    """Bytes of storages that were freed."""

    def restore(self, storages: list[torch.UntypedStorage]) -> None:
        """Fill storages that have their size again, in the order in which they were parked."""
        ...

    def discard(self) -> None:
        """Free the bytes."""
        ...


class Offloader:
    """Moves an engine's tensors out and in.

    Args:
        tensors: all tensors to move, asked for at every :meth:`offload`; aliases are moved once.
        device: where they belong; tensors elsewhere (moments in host memory) stay.
        drop: frees what need not be kept (gradients, gathered weights).
        zeros: tensors that hold nothing but zeros after ``drop``; they leave without being kept, and are zero again.
    """

    def __init__(
        self,
        tensors: Callable[[], Iterable[Tensor]],
        device: torch.device,
        drop: Callable[[], None],
        zeros: Callable[[], Iterable[Tensor]] = tuple,
    ) -> None:
        self._tensors, self._device, self._drop, self._zeros = tensors, device, drop, zeros
        self._storages: list[torch.UntypedStorage] = []  # those that are kept come first
        self._sizes: list[int] = []
        self._n_kept = 0
        self._parked: _Parked | None = None
        self._depth = 0

    @property
    def offloaded(self) -> bool:
        """Whether the tensors have no memory now."""
        return self._parked is not None

    def offload(self) -> None:
        """Free the memory of all tensors; gradients are dropped. Does nothing when they are out already.

        Raises:
            EngineError: there is no room for the bytes; the engine stays as it is.
        """
        if self.offloaded:
            return
        self._drop()
        kept, zeros = (_distinct_storages(tensors(), self._device) for tensors in (self._tensors, self._zeros))
        self._storages, self._n_kept = kept + zeros, len(kept)
        self._sizes = [storage.nbytes() for storage in self._storages]
        park = _park_on_host if self._device.type == "cuda" else _park_in_file
        self._parked = park(kept)
        for storage in self._storages:
            storage.resize_(0)
        return_memory(self._device)
        logger.debug(f"offloaded {sum(self._sizes) / 2**20:.0f} MiB in {len(self._sizes)} tensors")

    def onload(self) -> None:
        """Bring everything back where it was. Does nothing when it is there."""
        if self._parked is None:
            return
        for storage, size in zip(self._storages, self._sizes, strict=True):
            storage.resize_(size)
        self._parked.restore(self._storages[: self._n_kept])
        for storage in self._storages[self._n_kept :]:
            _as_bytes(storage).zero_()
        self._parked, self._storages = None, []

    def close(self) -> None:
        """Forget what is out; its tensors are lost. For an engine that ends."""
        if self._parked is not None:
            self._parked.discard()
        self._parked, self._storages = None, []

    @contextmanager
    def resident_during(self) -> Iterator[None]:
        """Bring the tensors in for a block and take them out again if they were out before the outermost one."""
        outermost = self._depth == 0
        was_out = self.offloaded
        self.onload()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if outermost and was_out:
                self.offload()


class ResidencyFacade:
    """What every train engine can do about its own memory; inherited through ``ComputeFacade``."""

    groups: ParallelGroups
    device: torch.device
    _offloader: Offloader | None = None

    @property
    def is_offload(self) -> bool:
        """Whether the engine's tensors are out of its device's memory."""
        return self._offloader is not None and self._offloader.offloaded

    @remote
    def offload(self) -> None:
        """Free the device memory of weights, masters and optimizer state; gradients are dropped. Every rank calls.

        The next training, scoring or evaluation brings everything back, bit for bit, and leaves it there; saving,
        loading and publishing bring it back for the time they take.

        Raises:
            EngineError: the engine is not initialized, or the host has no room; then everything stays where it is.
        """
        if self._offloader is None:
            raise EngineError(f"{type(self).__name__}.offload: the engine is not initialized")
        self._offloader.offload()
        barrier(self.groups.cpu)

    @remote
    def onload(self) -> None:
        """Bring back what :meth:`offload` took out; does nothing when it is there. Every rank calls."""
        if self.is_offload:
            assert self._offloader is not None
            self._offloader.onload()
            barrier(self.groups.cpu)

    def resident(self) -> AbstractContextManager[None]:
        """Context in which the tensors are there; may be nested."""
        return nullcontext() if self._offloader is None else self._offloader.resident_during()

    @contextmanager
    def working(self, phase: str) -> Iterator[None]:
        """Context of a computation: tensors come in and stay, memory is recorded under ``memory/<phase>``."""
        self.onload()
        with memory_of(phase, self.device):
            yield


class _FileParked:
    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def restore(self, storages: list[torch.UntypedStorage]) -> None:
        with self._file:
            self._file.seek(0)
            for storage in storages:
                view, done = _bytes_of(storage), 0
                while done < len(view):  # one call reads 2 GiB at most
                    n_read = self._file.readinto(view[done:])  # type: ignore[attr-defined]
                    if not n_read:
                        raise EngineError("onload: the temporary file that holds this engine's tensors is truncated")
                    done += n_read

    def discard(self) -> None:
        self._file.close()


class _HostParked:
    def __init__(self, copies: list[Tensor]) -> None:
        self._copies = copies

    def restore(self, storages: list[torch.UntypedStorage]) -> None:
        for storage, copy in zip(storages, self._copies, strict=True):
            _as_bytes(storage).copy_(copy, non_blocking=True)
        torch.cuda.synchronize()

    def discard(self) -> None:
        self._copies.clear()


def _park_in_file(storages: list[torch.UntypedStorage]) -> _Parked:
    file = tempfile.TemporaryFile(prefix="areal-offload-", buffering=0)  # noqa: SIM115 - open until onload
    try:
        for storage in storages:
            view = _bytes_of(storage)
            written = 0
            while written < len(view):  # one call writes 2 GiB at most
                written += file.write(view[written:])
    except OSError as exc:
        file.close()
        raise EngineError(
            f"offload: {sum(s.nbytes() for s in storages) / 2**30:.1f} GiB do not fit into {tempfile.gettempdir()} "
            f"({exc}); the engine stays in memory. Free the disk, or set TMPDIR to another one"
        ) from exc
    return _FileParked(file)


def _park_on_host(storages: list[torch.UntypedStorage]) -> _Parked:
    copies = [torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True) for storage in storages]
    for storage, copy in zip(storages, copies, strict=True):
        copy.copy_(_as_bytes(storage), non_blocking=True)
    torch.cuda.synchronize()
    return _HostParked(copies)


def _distinct_storages(tensors: Iterable[Tensor], device: torch.device) -> list[torch.UntypedStorage]:
    """Storages of ``tensors`` on ``device``, each once; memory that is not torch's alone (mapped, NumPy's) stays."""
    found: dict[int, torch.UntypedStorage] = {}
    shared: dict[int, int] = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        if not storage.nbytes() or local.device.type != device.type:
            continue
        if storage.resizable():
            found.setdefault(storage.data_ptr(), storage)
        else:
            shared[storage.data_ptr()] = storage.nbytes()
    if shared:
        logger.warning(f"{sum(shared.values()) / 2**20:.0f} MiB stay in memory: others than torch use them too")
    return list(found.values())


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload, no-any-return]


def _bytes_of(storage: torch.UntypedStorage) -> memoryview:
    # Not through NumPy: a storage that it has seen can never be freed again.
    return memoryview((ctypes.c_ubyte * storage.nbytes()).from_address(storage.data_ptr())).cast("B")
