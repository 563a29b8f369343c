"""An event loop in a thread of its own, for calls that a synchronous caller waits for and a failure must interrupt."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class CallLoop:
    """Runs coroutines for other threads. The thread is started at the first one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Run ``call`` and return its result; an exception in the waiting thread (Ctrl-C) cancels it."""
        future = asyncio.run_coroutine_threadsafe(call, self._running())
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Stop the loop; calls that still run are cancelled."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None:
            asyncio.run_coroutine_threadsafe(_cancel_all(), loop).add_done_callback(
                lambda _: loop.call_soon_threadsafe(loop.stop)
            )

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                loop = asyncio.new_event_loop()
                threading.Thread(target=_serve, args=(loop,), name=self._name, daemon=True).start()
                self._loop = loop
            return self._loop


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
