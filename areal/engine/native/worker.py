"""The thread that runs the scheduler, and the ways other threads reach it.

The worker alone touches scheduler, cache and current weights. Between two steps it looks at what others left for it::

    stopped --start--> running <--pause / resume--> paused       (frozen between two steps; calls still run)
                          |
                          +-- exception --> failed               (the owner is told; pending and later calls raise it)

Owned by ``engine``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

from areal.engine.native.requests import InvalidRequestError, Sequence
from areal.engine.native.scheduler import Scheduler
from areal.utils import logging
from areal.utils.errors import EngineStoppedError
from areal.utils.threads import release_thread_pool

logger = logging.getLogger("NativeEngine")


class Worker:
    """Steps ``scheduler`` on a thread of its own.

    Args:
        scheduler: touched by the worker thread only, once it runs.
        num_threads: CPU threads of tensor operations; None leaves torch's setting.
        on_failure: told once, on the thread, what it died of, before the pending calls raise it.
    """

    def __init__(
        self, scheduler: Scheduler, num_threads: int | None, on_failure: Callable[[BaseException], None]
    ) -> None:
        self._scheduler, self._on_failure = scheduler, on_failure
        self._num_threads = num_threads
        self._wake = threading.Condition()
        self._inbox: list[Sequence] = []
        self._calls: list[tuple[Callable[[], Any], Future[Any]]] = []
        self._live: dict[str, Sequence] = {}
        self._arrivals = 0
        self._pauses = 0
        self._stepping = False
        self._stopping = False
        self.failure: BaseException | None = None  # what the thread died of
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread; does nothing if it runs."""
        with self._wake:
            self.check_alive()
            if self._thread is None:
                self._stopping = False
                self._thread = threading.Thread(target=self._run, name="NativeEngine", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Stop and join the thread; pending requests end as aborted. Idempotent."""
        with self._wake:
            thread, self._stopping = self._thread, True
            self._wake.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def check_alive(self) -> None:
        """Raise what the thread died of, if it did."""
        if self.failure is not None:
            raise self.failure

    def submit(self, sequence: Sequence) -> None:
        """Queue a request; raises InvalidRequestError when its rid is live, EngineStoppedError when nothing runs."""
        rid = sequence.request.rid
        with self._wake:
            self.check_alive()
            if self._thread is None or self._stopping:
                raise EngineStoppedError("the native engine is not running: call start() first")
            if rid in self._live:
                raise InvalidRequestError(f"rid {rid!r} is live already: give every request a rid of its own")
            self._live[rid] = sequence
            self._arrivals += 1
            sequence.arrival = self._arrivals
            self._inbox.append(sequence)
            if len(self._inbox) == 1:
                self._wake.notify_all()
        sequence.future.add_done_callback(lambda _: self._live.pop(rid, None))

    def abort(self, rid: str | None) -> None:
        """Mark one request (None: all) and have the worker end it; returns at once."""
        with self._wake:
            chosen = list(self._live.values()) if rid is None else [s for s in (self._live.get(rid),) if s]
            for sequence in chosen:
                sequence.abort = True
            if chosen:
                self._calls.append((self._scheduler.abort_marked, Future()))
                self._wake.notify_all()

    def pause(self) -> None:
        """Freeze between two steps; returns when frozen. Nests."""
        with self._wake:
            self.check_alive()
            self._pauses += 1
            if threading.current_thread() is not self._thread:
                self._wake.wait_for(lambda: not self._stepping)

    def resume(self) -> None:
        """Undo one pause."""
        with self._wake:
            self._pauses = max(0, self._pauses - 1)
            self._wake.notify_all()

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run ``function`` between two steps, even while paused: on the worker if there is one, else here."""
        future: Future[Any] = Future()
        with self._wake:
            self.check_alive()
            if self._thread is None or threading.current_thread() is self._thread:
                return function(*args)
            self._calls.append((lambda: function(*args), future))
            self._wake.notify_all()
        return future.result()

    def _run(self) -> None:
        try:
            if self._num_threads is not None:
                torch.set_num_threads(self._num_threads)
            with torch.inference_mode():
                while self._take_turn():
                    pass
                self._end_pending()
        except BaseException as exc:  # noqa: BLE001 - ends the thread; callers get it
            self._fail(exc)

    def _take_turn(self) -> bool:
        """Do what others left, then one step; False when stopping."""
        with self._wake:
            if not (self._stopping or self._calls or self._inbox or self._scheduler.has_work()):
                release_thread_pool()  # idle: whoever computes now should not find more threads than cores
            while not (self._stopping or self._calls or self._may_step()):
                self._wake.wait()
            inbox, self._inbox = self._inbox, []
            calls, self._calls = self._calls, []
            stopping = self._stopping
        for sequence in inbox:
            self._scheduler.add(sequence)
        for position, (function, future) in enumerate(calls):
            try:
                future.set_result(function())
            except BaseException:
                self._calls = calls[position:] + self._calls  # they fail with the engine
                raise
        if stopping:
            return False
        with self._wake:
            if not self._may_step():
                return True
            self._stepping = True
        try:
            self._scheduler.step()
        finally:
            with self._wake:
                self._stepping = False
                if self._pauses:
                    self._wake.notify_all()
        return True

    def _may_step(self) -> bool:
        return not self._pauses and (bool(self._inbox) or self._scheduler.has_work())

    def _end_pending(self) -> None:
        """Resolve what is left when the engine stops."""
        with self._wake:
            inbox, self._inbox = self._inbox, []
        for sequence in inbox:
            self._scheduler.add(sequence)
        left = self._scheduler.live()
        if left:
            logger.info(f"stopped with {len(left)} requests in flight: they end as aborted")
            self._scheduler.abort(left)
        with self._wake:
            for _, future in self._calls:
                future.set_exception(EngineStoppedError("the native engine was stopped"))
            self._calls, self._thread = [], None  # from here on calls run on their callers' threads

    def _fail(self, exc: BaseException) -> None:
        logger.error("the worker thread failed", exc_info=exc)
        with self._wake:
            self.failure = exc
            self._stepping = False
            pending = list(self._live.values())
            calls, self._calls = self._calls, []
            self._wake.notify_all()
        try:
            self._on_failure(exc)
        finally:
            for future in [s.future for s in pending] + [f for _, f in calls]:
                if not future.done():
                    future.set_exception(exc)
