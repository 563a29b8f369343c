"""One daemon thread with an asyncio loop, where every episode runs.

The dispatcher gives it coroutines and callbacks; other threads talk to it only through :meth:`AsyncTaskRunner.call`. It
never polls: the loop sleeps until a socket, a timer or a call wakes it.

    new ──initialize──► running ──destroy──► stopped
                          └─ the loop dies ─► failed (its exception is kept and raised to the next caller)
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from typing import Any

from areal.infra.rollout.failures import RolloutStoppedError
from areal.utils import logging
from areal.utils.stacks import task_stacks

logger = logging.getLogger("Rollout")


class AsyncTaskRunner:
    """Owns the loop thread.

    Args:
        name: of the thread.
        on_failure: told, in the loop thread, when a callback raised; such an error is a bug of ours and ends the run.
    """

    def __init__(self, name: str = "rollout", on_failure: Callable[[BaseException], None] | None = None) -> None:
        self._name = name
        self._on_failure = on_failure
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._asked: float | None = None

    @property
    def alive(self) -> bool:
        """Whether the loop runs."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop; only for use inside its own thread."""
        if self._loop is None:
            raise RolloutStoppedError("the rollout thread is not running: call initialize() first")
        return self._loop

    def initialize(self) -> None:
        """Start the thread; does nothing if it runs."""
        if self.alive:
            return
        self._loop = asyncio.new_event_loop()
        self._asked = None
        self._thread = threading.Thread(target=self._run, args=(self._loop,), name=self._name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[..., object], *args: Any) -> None:
        """Run ``function(*args)`` in the loop thread soon.

        Raises:
            RolloutStoppedError: the thread is not running.
        """
        if self._loop is None or not self.alive:
            raise RolloutStoppedError("the rollout thread is not running: it was never started, destroyed, or has died")
        self._loop.call_soon_threadsafe(self.guarded, function, *args)

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start ``coroutine`` as a task; only in the loop thread. An exception that leaves it is reported as ours."""
        task = self.loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def silence_s(self) -> float:
        """Seconds that the loop has left a question unanswered, 0 if it answered the last one; asks it (again).

        Long silence means that something blocks the loop.
        """
        asked = self._asked
        if asked is not None:
            return time.monotonic() - asked
        if self._loop is not None and self.alive:
            self._asked = time.monotonic()
            self._loop.call_soon_threadsafe(self._answer)
        return 0.0

    def stack(self) -> str:
        """What the loop thread is doing right now, as a traceback."""
        ident = self._thread.ident if self._thread is not None else None
        frame = sys._current_frames().get(ident) if ident is not None else None
        return "".join(traceback.format_stack(frame)) if frame is not None else "(no thread)"

    def task_stacks(self) -> str:
        """Where each running episode is, equal ones together."""
        loop = self._loop
        return task_stacks(asyncio.all_tasks(loop)) if loop is not None else ""

    def destroy(self, timeout_s: float = 30.0) -> None:
        """Cancel every task, stop the loop and join the thread; safe to call twice."""
        thread, loop = self._thread, self._loop
        if thread is None or loop is None:
            return
        if thread.is_alive() and thread is not threading.current_thread():
            loop.call_soon_threadsafe(loop.stop)
            thread.join(timeout_s)
            if thread.is_alive():
                logger.error(f"the rollout thread did not stop within {timeout_s:g} s; it is in:\n{self.stack()}")
        self._thread = None
        self._loop = None

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
        except BaseException as exc:
            self._report(exc)
            raise
        finally:
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            if left:
                loop.run_until_complete(asyncio.wait(left, timeout=5.0))
            loop.run_until_complete(loop.shutdown_asyncgens())
            asyncio.set_event_loop(None)
            loop.close()

    def _answer(self) -> None:
        self._asked = None

    def guarded(self, function: Callable[..., object], *args: Any) -> None:
        """Run ``function(*args)`` in the loop thread; an exception is reported, it never reaches the loop."""
        try:
            function(*args)
        except Exception as exc:  # noqa: BLE001 - handed to the controller's next call
            self._report(exc)

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._report(error)

    def _report(self, error: BaseException) -> None:
        if self._on_failure is not None:
            self._on_failure(error)
        else:
            logger.error("a task of the rollout thread failed", exc_info=error)
