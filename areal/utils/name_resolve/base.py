"""What every backend of name_resolve shares: name checks, waiting, watching, leases, and deleting one's own entries.

A ``NameStore`` wraps a backend, which only puts, gets, removes, lists and renews. A store that does not answer is a
``NetworkError`` which names the settings to look at (``unreachable``).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

from areal.utils import logging
from areal.utils.errors import ConfigError, DataError, NameEntryNotFoundError, NetworkError, WaitTimeoutError
from areal.utils.name_resolve.leases import LeaseBackend, LeaseKeeper
from areal.utils.network import split_hostport

logger = logging.getLogger("NameResolve")

_SUBENTRY_BYTES = 4  # 8 hex characters


class NameBackend(LeaseBackend, Protocol):
    """Where entries are kept; names arrive checked. It connects when first used, not when made.

    Every method raises NetworkError when the store cannot be reached, within a few seconds.
    """

    def get(self, name: str) -> str:
        """Read one entry; raises NameEntryNotFoundError."""
        ...

    def remove(self, name: str, *, only: str | None = None) -> None:
        """Remove one entry, if ``only`` is given just when that is its value; raises NameEntryNotFoundError."""
        ...

    def list_below(self, root: str) -> list[str]:
        """Names of ``root`` and below, in any order; an empty root means all."""
        ...

    def close(self) -> None:
        """Let go of connections; entries stay."""
        ...


class NameStore:
    """A tree of slash-separated names with text values, kept by ``backend``."""

    def __init__(self, backend: NameBackend) -> None:
        self.backend = backend
        self._disown()
        disown = weakref.WeakMethod(self._disown)
        os.register_at_fork(after_in_child=lambda: (method := disown()) and method())

    def _disown(self) -> None:
        """Start without own entries; a forked child neither renews nor deletes those of its parent."""
        self._own: dict[str, str] = {}
        self._own_lock = threading.Lock()
        self._keeper = LeaseKeeper(self.backend)

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
        value = str(value)
        if keepalive_ttl is not None and not 0 < keepalive_ttl < float("inf"):
            raise DataError(f"keepalive_ttl={keepalive_ttl} of name {name!r} must be a positive number of seconds")
        self.backend.put(name, value, replace=replace, keepalive_ttl=keepalive_ttl)
        if keepalive_ttl is None:
            self._keeper.drop(name)
        else:
            self._keeper.hold(name, value, keepalive_ttl)
        with self._own_lock:
            self._own.pop(name, None)
            if delete_on_exit:
                if not self._own:
                    atexit.register(self.reset)
                self._own[name] = value

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
            self._own.pop(name, None)
        self._keeper.drop(name)
        self.backend.remove(name)

    def get_subtree(self, root: str) -> list[str]:
        """See ``name_resolve.get_subtree``."""
        values = []
        for name in self.find_subtree(root):
            with contextlib.suppress(NameEntryNotFoundError):  # gone since it was listed
                values.append(self.backend.get(name))
        return values

    def find_subtree(self, root: str) -> list[str]:
        """See ``name_resolve.find_subtree``."""
        return sorted(self.backend.list_below(root.strip("/")))

    def clear_subtree(self, root: str) -> None:
        """See ``name_resolve.clear_subtree``."""
        for name in self.find_subtree(check_name(root)):
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

        late = [name for name in names if not self._may_exist(name, unreachable=False)]

        def watch() -> None:
            for name in late:
                self._await_quietly(name, wait_timeout, min(poll_frequency, 1))
            while any(self._may_exist(name) for name in names):
                time.sleep(poll_frequency)
            call_back()

        threading.Thread(target=watch, name="name-resolve-watch", daemon=True).start()

    def reset(self) -> None:
        """See ``name_resolve.reset``. Entries that someone else has replaced meanwhile stay."""
        atexit.unregister(self.reset)
        with self._own_lock:
            own, self._own = self._own, {}
        for name in own:
            self._keeper.drop(name)
        for name, value in own.items():
            try:
                self.backend.remove(name, only=value)
            except NameEntryNotFoundError:
                pass
            except NetworkError as exc:
                logger.warning(f"own names could not be deleted: {exc}")
                return

    def close(self) -> None:
        """Delete own entries, end the renewals, let go of connections."""
        self.reset()
        self._keeper.stop()
        self.backend.close()

    def _await_quietly(self, name: str, timeout_s: float, poll_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and not self._may_exist(name, unreachable=False):
            time.sleep(poll_s)

    def _may_exist(self, name: str, *, unreachable: bool = True) -> bool:
        """Whether the name is there; a store that cannot be asked gives ``unreachable``."""
        try:
            self.get(name)
        except NameEntryNotFoundError:
            return False
        except NetworkError as exc:
            logger.warning(f"watching {name!r}: {exc}")
            return unreachable
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


def split_address(setting: str, address: str) -> tuple[str, int]:
    """Host and port of ``host:port``.

    Raises:
        ConfigError: it is something else; names ``cluster.name_resolve.<setting>``.
    """
    try:
        return split_hostport(address)
    except ValueError as exc:
        raise ConfigError(f"cluster.name_resolve.{setting}: {exc}") from exc


def unreachable(kind: str, setting: str, address: str, cause: object, remedy: str) -> NetworkError:
    """The error for a store that does not answer; ``remedy`` says how to start it."""
    found = " ".join(str(cause).split())
    return NetworkError(
        f"the name store cannot be used: cluster.name_resolve.type={kind}, cluster.name_resolve.{setting}={address}: "
        f"{found}; {remedy}, correct the setting, or set cluster.name_resolve.type=nfs with a directory that all "
        "machines share"
    )
