"""References to tensors that stay in the process that made them, until somebody needs the bytes.

A controller passes :class:`RTensor` objects around; only the process that computes with one fetches it, straight into
new memory, and only the rows it asks for. ``remotize`` and ``localize`` walk nested containers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from areal.infra.rpc import frames, heavy
from areal.infra.rpc.errors import RPCConnectionError, TensorLostError
from areal.infra.rpc.store import TensorStore, process_store
from areal.infra.rpc.stream import stream_pool

if TYPE_CHECKING:
    import torch

__all__ = [
    "LocalStore",
    "RTensor",
    "TensorLostError",
    "TensorStore",
    "clear_node",
    "collect_shards",
    "local_store",
    "localize",
    "remotize",
]

BATCH_BYTES = 32 << 20  # of one request; larger tensors have a request of their own
BATCH_TENSORS = 512
_FETCH_TRIES = 2  # reading again changes nothing; a connection may have gone stale


@dataclass(frozen=True)
class RTensor:
    """A tensor, or some rows of one, in the store of the process at ``address`` (``host:port`` of its stream).

    ``dtype`` is the name of a torch type, ``offset`` the first byte.
    """

    shard_id: str
    address: str
    dtype: str
    shape: tuple[int, ...]
    offset: int = 0

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch type."""
        return heavy.torch_dtype(self.dtype)

    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes that a fetch moves."""
        return heavy.tensor_size(self.dtype, self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> RTensor:
        """Rows ``a:b`` of the first dimension; nothing is fetched.

        Raises:
            TypeError: not a slice of step 1, or a tensor without dimensions.
        """
        sliced: Any = rows
        if not isinstance(sliced, slice) or rows.step not in (None, 1) or not self.shape:
            raise TypeError(f"a remote tensor is sliced as rt[a:b] along its first dimension, not by {rows!r}")
        start, stop, _ = rows.indices(self.shape[0])
        row_bytes = heavy.tensor_size(self.dtype, self.shape[1:])
        shape = (max(stop - start, 0), *self.shape[1:])
        return replace(self, shape=shape, offset=self.offset + start * row_bytes)

    def fetch(self) -> torch.Tensor:
        """The tensor; see :func:`localize`."""
        tensor: torch.Tensor = localize(self)
        return tensor


class LocalStore:
    """The tensors of this process as :class:`RTensor` references."""

    def __init__(self, store: TensorStore) -> None:
        self._store = store

    def put(self, tensor: torch.Tensor) -> RTensor:
        """Keep a tensor, without a copy where it is a contiguous CPU tensor: do not change it afterwards."""
        key = self._store.add(tensor)
        return RTensor(key, self._store.address, heavy.dtype_name(tensor.dtype), tuple(tensor.shape))

    def get(self, reference: RTensor) -> torch.Tensor:
        """The tensor or rows of one that is stored here; shares its memory.

        Raises:
            TensorLostError: it is not here.
        """
        stored = self._store.tensor(reference.shard_id)
        count = reference.numel()
        first = reference.offset // stored.itemsize
        flat = stored.reshape(-1)
        if reference.torch_dtype != stored.dtype or first + count > flat.numel():
            raise TensorLostError(f"{reference} does not fit the stored tensor {tuple(stored.shape)} of {stored.dtype}")
        rows: torch.Tensor = flat[first : first + count].view(reference.shape)
        return rows

    def free(self, ids: Sequence[str]) -> tuple[int, int]:
        """Remove tensors by id; returns their number and bytes."""
        return self._store.remove(ids)

    def stats(self) -> dict[str, int]:
        """Number and bytes of the stored tensors."""
        return self._store.stats()

    def __contains__(self, reference: RTensor) -> bool:
        return reference.shard_id in self._store


_local = LocalStore(process_store())


def local_store() -> LocalStore:
    """The store of this process."""
    return _local


def remotize(tree: Any) -> Any:
    """Store every tensor of a nested dict, list or tuple in this process; returns the tree of references."""
    return _map(tree, lambda leaf: _local.put(leaf) if heavy.is_tensor(leaf) else leaf)


def localize(tree: Any, *, concurrency: int = 32) -> Any:
    """Fetch every reference of a nested dict, list or tuple, each once; returns the tree of tensors.

    Tensors of this process are returned without a copy: do not change them.

    Args:
        concurrency: connections used at once, over all owners.

    Raises:
        TensorLostError: an owner has ended, or has freed a tensor.
    """
    fetched: dict[RTensor, Any] = {}
    _map(tree, lambda leaf: fetched.setdefault(leaf, None) if isinstance(leaf, RTensor) else None)
    remote: dict[str, list[RTensor]] = {}
    for reference in fetched:
        if reference in _local:
            fetched[reference] = _local.get(reference)
        else:
            remote.setdefault(reference.address, []).append(reference)
    batches = [batch for address, references in remote.items() for batch in _batches(references)]
    for batch, tensors in zip(batches, _fetch_all(batches, concurrency), strict=True):
        fetched.update(zip(batch, tensors, strict=True))
    return _map(tree, lambda leaf: fetched[leaf] if isinstance(leaf, RTensor) else leaf)


def collect_shards(tree: Any) -> dict[str, list[str]]:
    """Ids of all references in a tree, without repetition, by the address of their owner."""
    shards: dict[str, dict[str, None]] = {}

    def note(leaf: Any) -> None:
        if isinstance(leaf, RTensor):
            shards.setdefault(leaf.address, {})[leaf.shard_id] = None

    _map(tree, note)
    return {address: list(ids) for address, ids in shards.items()}


def clear_node(address: str, ids: Sequence[str]) -> int:
    """Have the process at ``address`` free tensors; returns how many there were, 0 when it has ended."""
    if address == process_store().address:
        return _local.free(ids)[0]
    try:
        with stream_pool.connection(address) as connection:
            return int(connection.request(frames.FREE, list(ids))[0])
    except RPCConnectionError:
        return 0  # an ended process keeps nothing


def _batches(references: list[RTensor]) -> list[list[RTensor]]:
    """Requests to one owner: many small tensors together, large ones alone."""
    batches: list[list[RTensor]] = []
    room = 0
    for reference in references:
        if not batches or reference.nbytes > room or len(batches[-1]) >= BATCH_TENSORS:
            batches.append([])
            room = BATCH_BYTES
        batches[-1].append(reference)
        room -= reference.nbytes
    return batches


def _fetch_all(batches: list[list[RTensor]], concurrency: int) -> list[list[Any]]:
    if len(batches) <= 1 or concurrency <= 1:
        return [_fetch(batch) for batch in batches]
    with ThreadPoolExecutor(min(concurrency, len(batches)), thread_name_prefix="rtensor") as pool:
        return list(pool.map(_fetch, batches))


def _fetch(batch: list[RTensor]) -> list[Any]:
    address = batch[0].address
    made = [heavy.empty_tensor(reference.dtype, reference.shape) for reference in batch]
    wanted = [(reference.shard_id, reference.offset, view) for reference, (_, view) in zip(batch, made, strict=True)]
    for attempt in range(_FETCH_TRIES):
        try:
            with stream_pool.connection(address) as connection:
                sizes = connection.read(frames.GET, wanted)
            break
        except RPCConnectionError as exc:
            if attempt == _FETCH_TRIES - 1:
                raise TensorLostError(
                    f"{len(batch)} tensors of worker {address} are lost: {exc}. Compute them again"
                ) from exc
    lost = [reference.shard_id for reference, size in zip(batch, sizes, strict=True) if size < 0]
    if lost:
        raise TensorLostError(
            f"worker {address} does not have {len(lost)} of {len(batch)} tensors (first: {lost[0]}): they were freed, "
            "or the worker was restarted"
        )
    return [tensor for tensor, _ in made]


def _map(tree: Any, leaf: Callable[[Any], Any]) -> Any:
    """Apply ``leaf`` to everything that is no dict, list or tuple."""
    if isinstance(tree, dict):
        return {key: _map(item, leaf) for key, item in tree.items()}
    if isinstance(tree, list):
        return [_map(item, leaf) for item in tree]
    if isinstance(tree, tuple):
        items = [_map(item, leaf) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else tuple(items)
    return leaf(tree)
