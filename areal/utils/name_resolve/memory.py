"""Names inside one process: the backend for ``scheduler.type=inline`` and for tests. Thread-safe."""

from __future__ import annotations

import threading

from areal.utils.errors import NameEntryExistsError, NameEntryNotFoundError


class MemoryBackend:
    """A dictionary."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._lock = threading.Lock()

    def put(self, name: str, value: str, *, replace: bool, keepalive_ttl: float | None) -> None:
        """Write one entry."""
        del keepalive_ttl  # the names end with the process
        with self._lock:
            if name in self._values and not replace:
                raise NameEntryExistsError(f"name {name!r} is already registered as {self._values[name]!r}")
            self._values[name] = value

    def get(self, name: str) -> str:
        """Read one entry."""
        with self._lock:
            if name not in self._values:
                raise NameEntryNotFoundError(f"name {name!r} is not registered")
            return self._values[name]

    def remove(self, name: str) -> None:
        """Remove one entry."""
        with self._lock:
            if self._values.pop(name, None) is None:
                raise NameEntryNotFoundError(f"name {name!r} is not registered")

    def list_below(self, root: str) -> list[str]:
        """Names of ``root`` and below."""
        with self._lock:
            return [name for name in self._values if not root or name == root or name.startswith(f"{root}/")]
