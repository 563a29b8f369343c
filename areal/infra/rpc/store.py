"""Tensors that this process keeps for others, by id; the stream server reads it. One store per process.

A stored tensor is shared, not copied: who stores one must not change it afterwards. Entries of calls (arguments that
were sent ahead, results not fetched yet) have an owner or an age and do not stay for ever.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from areal.infra.rpc import heavy
from areal.infra.rpc.errors import TensorLostError

RESULT_LIFE_S = 900.0  # a result that its caller did not fetch for so long is dropped
_ID_PREFIX = secrets.token_hex(6)


@dataclass
class _Entry:
    tensor: Any
    view: memoryview
    owner: object = None
    expires: float | None = None


class TensorStore:
    """Thread-safe map from id to tensor. ``address`` is where the stream server of this process answers."""

    def __init__(self) -> None:
        self.address = ""
        self._entries: dict[str, _Entry] = {}
        self._lock = threading.Lock()
        self._next = 0

    def add(self, tensor: Any, *, owner: object = None, life_s: float | None = None, key: str | None = None) -> str:
        """Keep a tensor, as a contiguous CPU tensor; returns its id.

        Args:
            owner: the connection whose end removes it.
            life_s: seconds after which it may be removed.
            key: id given by the sender; None makes one.
        """
        plain = heavy.plain_tensor(tensor)
        expires = None if life_s is None else time.monotonic() + life_s
        entry = _Entry(plain, heavy.byte_view(plain), owner, expires)
        with self._lock:
            if expires is not None:
                self._drop_expired()
            if key is None:
                self._next += 1
                key = f"{_ID_PREFIX}-{self._next}"
            self._entries[key] = entry
        return key

    def tensor(self, key: str) -> Any:
        """The tensor itself.

        Raises:
            TensorLostError: there is none of that id.
        """
        with self._lock:
            entry = self._entries.get(key)
        if entry is None:
            raise TensorLostError(f"tensor {key} is not in this process ({self.address}): it was freed or never stored")
        return entry.tensor

    def take(self, key: str) -> Any:
        """The tensor, which is removed."""
        tensor = self.tensor(key)
        self.remove([key])
        return tensor

    def view(self, key: str, start: int, size: int) -> memoryview | None:
        """Bytes of a tensor; None when there is none, or not so many."""
        with self._lock:
            entry = self._entries.get(key)
        if entry is None or start < 0 or size < 0 or start + size > entry.view.nbytes:
            return None
        return entry.view[start : start + size]

    def __contains__(self, key: object) -> bool:
        with self._lock:
            return key in self._entries

    def remove(self, keys: Iterable[str]) -> tuple[int, int]:
        """Remove tensors; returns how many there were and their bytes. Unknown ids count nothing."""
        with self._lock:
            found = [entry for key in keys if (entry := self._entries.pop(key, None)) is not None]
        return len(found), sum(entry.view.nbytes for entry in found)

    def remove_of(self, owner: object) -> None:
        """Remove what a connection sent and nobody took."""
        with self._lock:
            for key in [key for key, entry in self._entries.items() if entry.owner is owner]:
                del self._entries[key]

    def stats(self) -> dict[str, int]:
        """Number and bytes of the tensors."""
        with self._lock:
            self._drop_expired()
            return {
                "num_tensors": len(self._entries),
                "total_bytes": sum(entry.view.nbytes for entry in self._entries.values()),
            }

    def _drop_expired(self) -> None:
        now = time.monotonic()
        for key in [k for k, entry in self._entries.items() if entry.expires is not None and entry.expires < now]:
            del self._entries[key]


_store = TensorStore()


def process_store() -> TensorStore:
    """The store of this process."""
    return _store
