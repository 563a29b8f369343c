"""Names inside one process: the backend for ``scheduler.type=inline`` and for tests, and what the Ray actor hosts.

Thread-safe.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from areal.utils.errors import NameEntryExistsError, NameEntryNotFoundError


@dataclass
class _Entry:
    value: str
    expires_at: float | None  # monotonic clock


def _deadline(keepalive_ttl: float | None) -> float | None:
    return None if keepalive_ttl is None else time.monotonic() + keepalive_ttl


class MemoryBackend:
    """A dictionary."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._lock = threading.Lock()

    def put(self, name: str, value: str, *, replace: bool, keepalive_ttl: float | None) -> None:
        """Write one entry."""
        with self._lock:
            taken = self._find(name)
            if taken is not None and not replace:
                raise NameEntryExistsError(f"name {name!r} is already registered as {taken.value!r}")
            self._entries[name] = _Entry(value, _deadline(keepalive_ttl))

    def renew(self, name: str, value: str, keepalive_ttl: float) -> bool:
        """Give the entry its full time again."""
        with self._lock:
            entry = self._find(name)
            if entry is None or entry.expires_at is None or entry.value != value:
                return False
            entry.expires_at = _deadline(keepalive_ttl)
            return True

    def get(self, name: str) -> str:
        """Read one entry."""
        with self._lock:
            entry = self._find(name)
        if entry is None:
            raise NameEntryNotFoundError(f"name {name!r} is not registered")
        return entry.value

    def remove(self, name: str, *, only: str | None = None) -> None:
        """Remove one entry."""
        with self._lock:
            entry = self._find(name)
            if entry is None or only not in (None, entry.value):
                raise NameEntryNotFoundError(f"name {name!r} is not registered")
            del self._entries[name]

    def list_below(self, root: str) -> list[str]:
        """Names of ``root`` and below."""
        with self._lock:
            return [
                name
                for name in list(self._entries)
                if (not root or name == root or name.startswith(f"{root}/")) and self._find(name)
            ]

    def close(self) -> None:
        """Nothing to let go of."""

    def _find(self, name: str) -> _Entry | None:
        """The entry unless its time is over; called with the lock held."""
        entry = self._entries.get(name)
        if entry is not None and entry.expires_at is not None and entry.expires_at <= time.monotonic():
            del self._entries[name]
            return None
        return entry
