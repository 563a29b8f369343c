"""A lock between the ranks of a job, kept in a torch store; used around things only one rank may do at a time."""

from __future__ import annotations

import secrets
import time
from types import TracebackType
from typing import Protocol

from areal.utils.errors import WaitTimeoutError

_DEFAULT_TIMEOUT_S = 600.0


class Store(Protocol):
    """The part of ``torch.distributed.Store`` that the lock needs."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Write ``desired`` if the value is ``expected`` (empty: if unset); returns the value afterwards."""
        ...


class DistributedLock:
    """Mutual exclusion over the ranks that share a store; not re-entrant, use it in a ``with`` block.

    Args:
        name: what is locked.
        backoff: seconds between two tries.
        namespace: puts equal names of different owners apart.
        store: the store; None takes the default process group's.
        timeout_s: seconds to wait for the lock.
    """

    def __init__(  # noqa: PLR0913 - public signature
        self,
        name: str,
        backoff: float = 0.05,
        namespace: str | None = None,
        *,
        store: Store | None = None,
        timeout_s: float = _DEFAULT_TIMEOUT_S,
    ) -> None:
        self.key = f"lock/{namespace}/{name}" if namespace else f"lock/{name}"
        self.backoff = backoff
        self.timeout_s = timeout_s
        self._store = store
        self._token = secrets.token_hex(8)

    def acquire(self) -> None:
        """Wait until the lock is ours.

        Raises:
            WaitTimeoutError: another rank kept it for ``timeout_s`` seconds.
        """
        store = self._resolve_store()
        deadline = time.monotonic() + self.timeout_s
        while not self._try(store):
            if time.monotonic() > deadline:
                raise WaitTimeoutError(f"lock {self.key!r} was not free within {self.timeout_s:g} s; raise timeout_s")
            time.sleep(self.backoff)

    def release(self) -> None:
        """Give the lock back; does nothing when it is not ours."""
        self._resolve_store().compare_set(self.key, self._token, _FREE)

    def __enter__(self) -> DistributedLock:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _try(self, store: Store) -> bool:
        if store.compare_set(self.key, "", self._token) == self._token.encode():
            return True
        return store.compare_set(self.key, _FREE, self._token) == self._token.encode()

    def _resolve_store(self) -> Store:
        if self._store is None:
            from torch.distributed import distributed_c10d

            self._store = distributed_c10d._get_default_store()
        return self._store


_FREE = "free"  # value after a release; a key that was never set counts as free too
