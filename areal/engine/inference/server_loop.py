"""A thread with an event loop for the connections to servers, and the one failure that ends everything on it.

Other threads hand it functions that make coroutines, and wait with a limit. When the servers are lost, every call that
waits, and every later one, raises the reason::

    new ──start──► running ──stop──► stopped        (waiting calls raise EngineStoppedError)
                      └── fail(error) ──► failed    (they raise it as the cause; ``on_failure`` is told once)

Used by ``remote``.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from areal.infra.rollout.failures import RolloutStoppedError
from areal.infra.rollout.task_runner import AsyncTaskRunner
from areal.utils import logging
from areal.utils.errors import EngineStoppedError, WaitTimeoutError

T = TypeVar("T")
Work = Callable[..., Awaitable[T]]

logger = logging.getLogger("RemoteSampler")

_GRACE_S = 10.0  # beyond a coroutine's own limit: the loop itself must answer by then
_STOP_S = 5.0


class ServerLoop:
    """Runs coroutines for other threads until something fails for good.

    Args:
        on_failure: told once, on the loop's thread, when :meth:`fail` was called.
    """

    def __init__(self, on_failure: Callable[[BaseException], None]) -> None:
        self._on_failure = on_failure
        self._runner = AsyncTaskRunner("server-http", self.fail)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._lock = threading.Lock()
        self.failure: BaseException | None = None
        self._stopped = False

    @property
    def alive(self) -> bool:
        """Whether calls are taken."""
        return self._runner.alive and self.failure is None

    def check_alive(self) -> None:
        """Raise why the loop takes no calls.

        Raises:
            EngineStoppedError: it failed (the cause is chained), was stopped, or was not started.
        """
        if self.failure is not None:
            raise EngineStoppedError(str(self.failure)) from self.failure
        if not self._runner.alive:
            raise EngineStoppedError("the sampler is not running: call start() first")

    def start(self) -> None:
        """Start the thread; does nothing if it runs."""
        if self.failure is not None:
            self.check_alive()
        self._runner.initialize()

    def background(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run ``work`` beside the calls until the loop stops; an exception that leaves it is a failure."""
        self._runner.call(lambda: self._runner.start(work()))

    def submit(self, work: Work[T], *args: Any) -> Future[T]:
        """Start ``work(*args)``; cancelling the future cancels it.

        Raises:
            EngineStoppedError: see :meth:`check_alive`.
        """
        self.check_alive()
        guarded = self._guard(work, args)
        try:
            return asyncio.run_coroutine_threadsafe(guarded, self._runner.loop)
        except (RuntimeError, RolloutStoppedError) as exc:  # the loop closed in between
            guarded.close()
            raise EngineStoppedError("the sampler was stopped") from exc

    def run(self, what: str, limit_s: float, work: Work[T], *args: Any) -> T:
        """``submit`` and wait, from any other thread.

        Args:
            what: of the wait, for the message; names the setting that raises the limit.
        Raises:
            WaitTimeoutError: the limit was reached; the work is cancelled.
        """
        future = self.submit(_limited, what, limit_s, work, args)
        try:
            found: T = future.result(limit_s + _GRACE_S)
            return found
        except TimeoutError as exc:
            if future.done():
                raise
            future.cancel()
            raise WaitTimeoutError(f"{what}: the connections' thread is stuck in\n{self._runner.stack()}") from exc

    def fail(self, error: BaseException) -> None:
        """End everything with ``error``; only the first one counts. From any thread."""
        with self._lock:
            if self.failure is not None or self._stopped:
                return
            self.failure = error
        logger.error(f"the sampler failed: {error}")
        with contextlib.suppress(RolloutStoppedError):
            self._runner.call(self._end_tasks)
            self._runner.call(self._on_failure, error)

    def stop(self, closing: Work[None]) -> None:
        """End what waits, run ``closing()``, stop the thread. Idempotent, bounded."""
        with self._lock:
            first, self._stopped = not self._stopped, True
            if self.failure is None:
                self.failure = EngineStoppedError("the sampler was stopped")
        if not first or not self._runner.alive:
            return
        future = asyncio.run_coroutine_threadsafe(self._close(closing), self._runner.loop)
        try:
            future.result(_STOP_S)
        except Exception as exc:  # noqa: BLE001 - the thread ends all the same
            logger.warning(f"connections were not closed in order: {type(exc).__name__}: {exc}")
        self._runner.destroy(_STOP_S)

    async def _close(self, closing: Work[None]) -> None:
        tasks = self._end_tasks()
        if tasks:
            await asyncio.wait(tasks, timeout=_STOP_S / 2)
        await closing()

    def _end_tasks(self) -> list[asyncio.Task[Any]]:
        tasks = [task for task in self._tasks if not task.done()]
        for task in tasks:
            task.cancel()
        return tasks

    async def _guard(self, work: Work[T], args: tuple[Any, ...]) -> T:
        """``work``, cancelled by a failure, which it then raises."""
        self.check_alive()
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            return await work(*args)
        except asyncio.CancelledError:
            if self.failure is not None:
                self.check_alive()
            raise
        finally:
            self._tasks.discard(task)


async def _limited(what: str, limit_s: float, work: Work[T], args: tuple[Any, ...]) -> T:
    try:
        async with asyncio.timeout(limit_s) as scope:
            return await work(*args)
    except TimeoutError as exc:
        if not scope.expired():
            raise
        raise WaitTimeoutError(f"{what}: not done after {limit_s:g} s") from exc
