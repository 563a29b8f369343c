"""The two lanes of a worker: calls in order of arrival on one engine thread, and calls beside it.

::

    event loop -- EngineLane.run(work) --> queue --> engine thread --> future of the loop
                                             '-- not begun by its deadline: DeadlinePassedError, never run

Used by ``server``. The engine thread is never the main thread, so that signals and the event loop stay responsive.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from areal.infra.rpc.errors import RPCTimeoutError
from areal.utils.errors import EngineError


class DeadlinePassedError(RPCTimeoutError):
    """The time limit of a call passed while it waited for its turn; it was not run."""


@dataclass
class _Job:
    work: Callable[[], Any]
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]
    lock: threading.Lock = field(default_factory=threading.Lock)
    begun: bool = False
    dropped: bool = False

    def begin(self) -> bool:
        """Claim it for running; False when it was dropped."""
        with self.lock:
            self.begun = not self.dropped
            return self.begun

    def drop(self) -> bool:
        """Give it up if it has not begun; returns whether it is given up."""
        with self.lock:
            self.dropped = not self.begun
            return self.dropped


class EngineLane:
    """One thread that runs jobs in order of arrival."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._busy_since: float | None = None
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the jobs that are queued."""
        self._jobs.put(None)

    @property
    def queued(self) -> int:
        """Jobs that wait for their turn."""
        return self._jobs.qsize()

    @property
    def busy_s(self) -> float:
        """How long the current job has been running; 0 between jobs."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    async def run(self, work: Callable[[], Any], deadline_s: float | None = None) -> Any:
        """Run ``work()`` in its turn and return its result.

        Raises:
            DeadlinePassedError: it had not begun after ``deadline_s`` seconds; it will not.
            BaseException: what it raised.
        """
        loop = asyncio.get_running_loop()
        job = _Job(work, loop, loop.create_future())
        timer = None if deadline_s is None else loop.call_later(deadline_s, _expire, job, deadline_s)
        self._jobs.put(job)
        try:
            return await job.future
        finally:
            if timer is not None:
                timer.cancel()

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            if not job.begin():
                continue
            self._busy_since = time.monotonic()
            try:
                result, error = job.work(), None
            except BaseException as exc:  # noqa: BLE001 - it belongs to whoever waits, SystemExit too
                result, error = None, exc
            self._busy_since = None
            with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits
                job.loop.call_soon_threadsafe(_resolve, job.future, result, error)
            del job, result, error


def _expire(job: _Job, deadline_s: float) -> None:
    if job.drop():
        _resolve(
            job.future, None, DeadlinePassedError(f"the call did not begin within {deadline_s:g} s; it was not run")
        )


def _resolve(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
        future.set_exception(error if plain else EngineError(f"{type(error).__name__} on the engine thread: {error}"))
