"""Status and stacks of every worker process of a run, asked over its scheduler.

In: a scheduler and the ids of its workers. Out: one :class:`WorkerStatus` per worker, and text per worker, for
``trainer/diagnostics.py``. All workers are asked at once, from threads that nobody waits for: one that hangs is shown
as silent and delays the answer by no more than the limit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TypeVar

from areal.infra.run_status import WorkerStatus
from areal.utils.errors import ArealError

STATUS_LIMIT_S = 2.0
STACKS_LIMIT_S = 5.0
_WIDTH = 32  # workers asked at the same time
_DETAIL_LINES = 1  # of a failure; the whole is in the worker's log
T = TypeVar("T")


class WorkerConnection(Protocol):
    """What is asked of a :class:`WorkerClient`."""

    address: str

    def health(self, timeout_s: float = 2.0) -> Mapping[str, Any]:
        """Answer of ``GET /health``."""
        ...

    def stats(self) -> Mapping[str, Any]:
        """Answer of ``GET /stats``: ``{name: status of the hosted object}`` among others."""
        ...

    def stack(self) -> str:
        """Stacks of all threads."""
        ...


class WorkerSource(Protocol):
    """What is asked of a scheduler."""

    def client(self, worker_id: str) -> WorkerConnection:
        """The connection to a ready worker; raises an ArealError if it is not."""
        ...

    def worker_failure(self, worker_id: str) -> str | None:
        """How a worker ended; None while it has not."""
        ...


class WorkerOverview:
    """Asks the workers of one scheduler.

    Args:
        source: the scheduler.
        worker_ids: ids (``role/index``) of the workers that exist now.
    """

    def __init__(self, source: WorkerSource, worker_ids: Callable[[], Iterable[str]]) -> None:
        self._source = source
        self._worker_ids = worker_ids
        self._last_seen: dict[str, float] = {}

    def statuses(self) -> list[WorkerStatus]:
        """Every worker, as it answers now."""
        found = ask_all(list(self._worker_ids()), self._status, STATUS_LIMIT_S)
        return [
            answer if answer is not None else self._unanswered(worker_id, f"no answer within {STATUS_LIMIT_S:g} s")
            for worker_id, answer in found.items()
        ]

    def stacks(self) -> dict[str, str]:
        """Stacks of every worker, or why there are none."""
        found = ask_all(list(self._worker_ids()), self._stack, STACKS_LIMIT_S)
        missing = f"(no answer within {STACKS_LIMIT_S:g} s)"
        return {worker_id: missing if text is None else text for worker_id, text in found.items()}

    def _status(self, worker_id: str) -> WorkerStatus:
        failure = self._source.worker_failure(worker_id)
        if failure is not None:
            detail = "\n".join(failure.splitlines()[:_DETAIL_LINES])
            return self._named(worker_id, state="failed", detail=detail, last_seen=self._last_seen.get(worker_id))
        try:
            client = self._source.client(worker_id)
        except ArealError as exc:
            return self._named(worker_id, state="starting", detail=str(exc))
        try:
            health = client.health(timeout_s=STATUS_LIMIT_S)
            self._last_seen[worker_id] = time.time()
            stats = client.stats()
        except (ArealError, OSError) as exc:
            return self._unanswered(worker_id, f"{type(exc).__name__}: {exc}", client.address)
        return self._named(
            worker_id,
            address=client.address,
            last_seen=self._last_seen[worker_id],
            version=_version(stats),
            engine_busy_s=float(health["engine_busy_s"]),
        )

    def _stack(self, worker_id: str) -> str:
        try:
            return self._source.client(worker_id).stack()
        except (ArealError, OSError) as exc:
            return f"({type(exc).__name__}: {exc})"

    def _unanswered(self, worker_id: str, detail: str, address: str | None = None) -> WorkerStatus:
        last_seen = self._last_seen.get(worker_id)
        return self._named(worker_id, address=address, state="silent", detail=detail, last_seen=last_seen)

    @staticmethod
    def _named(worker_id: str, **values: Any) -> WorkerStatus:
        role, _, index = worker_id.rpartition("/")
        return WorkerStatus(role, int(index), **values)


def ask_all(worker_ids: list[str], ask: Callable[[str], T], limit_s: float) -> dict[str, T | None]:
    """``ask(worker_id)`` of all at once, in daemon threads; None for those that have not answered after ``limit_s``.

    Raises:
        Exception: the first that any call raised.
    """
    answers: dict[str, T] = {}
    errors: list[Exception] = []
    left = iter(worker_ids)
    lock = threading.Lock()

    def run() -> None:
        while True:
            with lock:
                worker_id = next(left, None)
            if worker_id is None:
                return
            try:
                answers[worker_id] = ask(worker_id)
            except Exception as exc:  # noqa: BLE001 - raised below
                errors.append(exc)

    threads = [
        threading.Thread(target=run, name="worker-overview", daemon=True) for _ in range(min(_WIDTH, len(worker_ids)))
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if errors:
        raise errors[0]
    return {worker_id: answers.get(worker_id) for worker_id in worker_ids}


def _version(stats: Mapping[str, Any]) -> int | None:
    """The newest weight version that an object on the worker reports."""
    versions = [status["version"] for status in stats.values() if isinstance(status, Mapping) and "version" in status]
    return max((int(version) for version in versions), default=None)
