"""Keeps the leased entries of one process alive, so that they go only when the process is gone.

In: names with a time to live, from ``NameStore.add``. Out: a renewal each third of it, from one daemon thread per
store, which runs only while there are leases::

    hold ──► renewed every ttl/3 ──► drop (deleted, replaced, owner ended)
                 │ store unreachable: tried again
                 └ lost meanwhile: registered again if the name is free
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Protocol

from areal.utils import logging
from areal.utils.errors import NameEntryExistsError, NetworkError

logger = logging.getLogger("NameResolve")

_RENEWALS_PER_TTL = 3


class LeaseBackend(Protocol):
    """The part of a backend that renewals use."""

    def put(self, name: str, value: str, *, replace: bool, keepalive_ttl: float | None) -> None:
        """Write one entry; raises NameEntryExistsError."""
        ...

    def renew(self, name: str, value: str, keepalive_ttl: float) -> bool:
        """Give the entry its full time again; false when it is gone or someone else's."""
        ...


@dataclass
class _Lease:
    value: str
    ttl_s: float
    renewed_at: float = field(default_factory=time.monotonic)
    tried_at: float = field(default_factory=time.monotonic)
    unreachable: bool = False  # at the last try

    @property
    def due_at(self) -> float:
        return self.tried_at + self.ttl_s / _RENEWALS_PER_TTL


class LeaseKeeper:
    """Renews the leases of one store."""

    def __init__(self, backend: LeaseBackend) -> None:
        self._backend = backend
        self._leases: dict[str, _Lease] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def hold(self, name: str, value: str, ttl_s: float) -> None:
        """Renew ``name`` from now on; it was just put."""
        with self._changed:
            self._leases[name] = _Lease(value, ttl_s)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="name-resolve-leases", daemon=True)
                self._thread.start()
            self._changed.notify()

    def drop(self, name: str) -> None:
        """Stop renewing ``name``."""
        with self._changed:
            self._leases.pop(name, None)
            self._changed.notify()

    def stop(self) -> None:
        """Stop renewing anything; the thread ends."""
        with self._changed:
            self._leases.clear()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._leases:
                    self._thread = None
                    return
                wait_s = min(lease.due_at for lease in self._leases.values()) - time.monotonic()
                if wait_s > 0:
                    self._changed.wait(wait_s)
                    continue
                now = time.monotonic()
                due = [(name, lease) for name, lease in self._leases.items() if lease.due_at <= now]
            for name, lease in due:
                self._renew(name, lease)

    def _renew(self, name: str, lease: _Lease) -> None:
        lease.tried_at = time.monotonic()
        try:
            kept = self._backend.renew(name, lease.value, lease.ttl_s) or self._register_again(name, lease)
        except NetworkError as exc:
            if not lease.unreachable:
                logger.warning(f"{name!r} could not be kept alive, it goes after {lease.ttl_s:g} s without: {exc}")
            lease.unreachable = True
            return
        lease.unreachable = False
        if kept:
            lease.renewed_at = lease.tried_at
            return
        with self._changed:
            if self._leases.get(name) is lease:
                del self._leases[name]

    def _register_again(self, name: str, lease: _Lease) -> bool:
        """Put an entry back that was lost while the store was out of reach; one that was deleted stays away."""
        if not lease.unreachable and lease.tried_at - lease.renewed_at < lease.ttl_s:
            return False
        with self._changed:
            if self._leases.get(name) is not lease:
                return False
        try:
            self._backend.put(name, lease.value, replace=False, keepalive_ttl=lease.ttl_s)
        except NameEntryExistsError:
            logger.warning(f"{name!r} was lost while the store was out of reach, and someone else has taken it")
            return False
        logger.warning(f"{name!r} was lost while the store was out of reach; registered again")
        return True
