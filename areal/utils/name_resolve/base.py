"""What every backend of name_resolve shares: name checks, waiting, watching, and deleting one's own entries.

A ``NameStore`` wraps a backend, which only puts, gets, removes and lists.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from areal.utils.errors import DataError, NameEntryNotFoundError, WaitTimeoutError

_SUBENTRY_BYTES = 4  # 8 hex characters


class NameBackend(Protocol):
    """Where entries are kept; names arrive checked."""

    def put(self, name: str, value: str, *, replace: bool, keepalive_ttl: float | None) -> None:
        """Write one entry; raises NameEntryExistsError."""
        ...

    def get(self, name: str) -> str:
        """Read one entry; raises NameEntryNotFoundError."""
        ...

    def remove(self, name: str) -> None:
        """Remove one entry; raises NameEntryNotFoundError."""
        ...

    def list_below(self, root: str) -> list[str]:
        """Names of ``root`` and below, in any order; an empty root means all."""
        ...


class NameStore:
    """A tree of slash-separated names with text values, kept by ``backend``."""

    def __init__(self, backend: NameBackend) -> None:
        self.backend = backend
        self._own: set[str] = set()
        self._own_lock = threading.Lock()
        self._owner_pid = os.getpid()

    def add(
        self,
        name: str,
        value: str,
        *,
        delete_on_exit: bool = True,
        keepalive_ttl: float | None = None,
        replace: bool = False,
    ) -> None:
        """See ``name_resolve.add``."""
        name = check_name(name)
        self.backend.put(name, str(value), replace=replace, keepalive_ttl=keepalive_ttl)
        if delete_on_exit:
            with self._own_lock:
                if not self._own:
                    atexit.register(self.reset)
                self._own.add(name)

    def add_subentry(
        self, name: str, value: str, *, delete_on_exit: bool = True, keepalive_ttl: float | None = None
    ) -> str:
        """See ``name_resolve.add_subentry``."""
        child = f"{check_name(name)}/{secrets.token_hex(_SUBENTRY_BYTES)}"
        self.add(child, value, delete_on_exit=delete_on_exit, keepalive_ttl=keepalive_ttl)
        return child

    def get(self, name: str) -> str:
        """See ``name_resolve.get``."""
        return self.backend.get(check_name(name))

    def delete(self, name: str) -> None:
        """See ``name_resolve.delete``."""
        name = check_name(name)
        with self._own_lock:
            self._own.discard(name)
        self.backend.remove(name)

    def find_subtree(self, root: str) -> list[str]:
        """See ``name_resolve.find_subtree``."""
        return sorted(self.backend.list_below(root.strip("/")))

    def clear_subtree(self, root: str) -> None:
        """See ``name_resolve.clear_subtree``."""
        for name in self.find_subtree(root):
            with contextlib.suppress(NameEntryNotFoundError):  # someone else was faster
                self.delete(name)

    def wait(self, name: str, *, timeout: float | None = None, poll_frequency: float = 1) -> str:
        """See ``name_resolve.wait``."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            try:
                return self.get(name)
            except NameEntryNotFoundError as exc:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise WaitTimeoutError(f"name {name!r} was not registered within {timeout:g} s") from exc
            time.sleep(poll_frequency if left is None else min(poll_frequency, left))

    def watch_names(
        self, names: Sequence[str], call_back: Callable[[], None], *, poll_frequency: float, wait_timeout: float
    ) -> None:
        """See ``name_resolve.watch_names``."""

        def watch() -> None:
            for name in names:
                with contextlib.suppress(WaitTimeoutError):
                    self.wait(name, timeout=wait_timeout, poll_frequency=min(poll_frequency, 1))
            while any(self._exists(name) for name in names):
                time.sleep(poll_frequency)
            call_back()

        threading.Thread(target=watch, name="name-resolve-watch", daemon=True).start()

    def reset(self) -> None:
        """See ``name_resolve.reset``. A forked child does not delete its parent's entries."""
        atexit.unregister(self.reset)
        with self._own_lock:
            own, self._own = self._own, set()
        if os.getpid() != self._owner_pid:
            return
        for name in own:
            with contextlib.suppress(NameEntryNotFoundError):
                self.backend.remove(name)

    def _exists(self, name: str) -> bool:
        try:
            self.get(name)
        except NameEntryNotFoundError:
            return False
        return True


def check_name(name: str) -> str:
    """The name without slashes at its ends.

    Raises:
        ValueError: nothing is left, or a part is empty, ``.`` or ``..``.
    """
    stripped = name.strip("/")
    if not stripped or any(part in ("", ".", "..") for part in stripped.split("/")):
        raise DataError(f"name {name!r} must be non-empty parts joined by '/', none of them '.' or '..'")
    return stripped
