"""A pool of worker processes for small, untrusted calls: one that hangs, dies or raises costs only itself.

    submit ─► queue ─► slot thread ─► its worker process ─► future
                           └─ too long, or the process died: kill it, fail this call, start another for the next one

Each slot is a thread that owns one process, so nothing is shared that a bad call could break. The time limit counts
from the start of the call, not from its submission: calls queued behind a bad one are not punished. A worker starts as
a bare interpreter (see ``process_worker``), on first use, and ends after a while without work. Used by the reward
wrapper.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from areal.utils import logging
from areal.utils.errors import ArealError
from areal.utils.process_worker import WORKER_FLAG

logger = logging.getLogger("ProcessPool")

MAIN_ALIAS = "__mp_main__"  # name under which other processes load the main script
IDLE_S = 300.0  # a worker without work for this long ends; the next call starts one again
_JOIN_S = 2.0  # time that close() gives the slot threads


class CallTimeoutError(ArealError, TimeoutError):
    """A call ran longer than its limit; its process was killed."""


class WorkerDiedError(ArealError, RuntimeError):
    """The process ended during a call (exit, signal, out of memory)."""


class PoolClosedError(ArealError, RuntimeError):
    """The pool is closed, or may not be used here."""


class RemoteCallError(ArealError, RuntimeError):
    """A call raised an exception that cannot travel between processes; the message holds its text and traceback."""


@dataclass
class _Call:
    payload: bytes
    needs_main: bool
    timeout_s: float | None
    future: Future[Any] = field(default_factory=Future)


class _Worker:
    """One process and the connection to it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        program = Path(__file__).with_name("process_worker.py")
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(program), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is the parent's business; a kill takes grandchildren along
            )
        finally:
            theirs.close()
        self._connection = Connection(ours.detach())
        path, module = main_origin()
        setup = {"sys_path": list(sys.path), "main_path": path, "main_module": module, "parent": os.getpid()}
        try:
            self._connection.send(setup)
        except OSError:
            raise WorkerDiedError(f"a worker process could not be started: {self._ending()}") from None

    def call(self, call: _Call) -> Any:
        """Run one call.

        Raises:
            CallTimeoutError, WorkerDiedError: the process is no longer usable and must be closed.
            Exception: what the call raised.
        """
        try:
            self._connection.send((call.needs_main, call.payload))
            if not self._connection.poll(call.timeout_s):
                raise CallTimeoutError(f"the call ran longer than {call.timeout_s:g} s")
            answer = self._connection.recv()
        except (EOFError, OSError) as exc:
            if isinstance(exc, CallTimeoutError):
                raise
            raise WorkerDiedError(f"the worker process ended during the call ({self._ending()})") from None
        if answer[0] == "ok":
            return pickle.loads(answer[1])
        _, data, name, text, trace = answer
        if data is not None:
            error: BaseException = pickle.loads(data)
            if isinstance(error, Exception):
                error.add_note(f"raised in a worker process:\n{trace}")
                raise error
        raise RemoteCallError(f"{name}: {text}\nraised in a worker process:\n{trace}")

    def _ending(self) -> str:
        try:
            code = self._process.wait(_JOIN_S)
        except subprocess.TimeoutExpired:
            self.close()
            return "it closed its connection"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def close(self) -> None:
        """Kill the process and whatever it started, and reap it."""
        with contextlib.suppress(OSError):
            self._connection.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_JOIN_S)


class ProcessPool:
    """Runs calls in up to ``max_workers`` processes.

    Raises:
        ValueError: ``max_workers < 1``.
        PoolClosedError: made inside a worker process, which happens when a script without a main guard is imported
        there.
    """

    def __init__(self, max_workers: int) -> None:
        if max_workers < 1:
            raise ValueError(f"max_workers={max_workers} must be >= 1")
        if hasattr(sys, WORKER_FLAG):
            raise PoolClosedError(
                "a pool cannot be used inside a pool worker. If your script defines the reward function, keep its "
                "start under "
                "'if __name__ == \"__main__\":', because workers import the script"
            )
        self.max_workers = max_workers
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._workers: dict[int, _Worker] = {}
        self._idle = 0
        self._pending = 0
        self.closed = False

    def submit(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Future[Any]:
        """Queue ``function(*args, **kwargs)``. The future raises what the call raised, or one of this module's errors.

        Args:
            function: picklable; functions of the main script are found by importing it in the worker.
            timeout_s: limit of the call once it runs; None waits for ever.

        Raises:
            PoolClosedError: the pool is closed.
            Exception: the arguments cannot be pickled (whatever pickling raises).
        """
        payload = pickle.dumps((function, args, kwargs or {}))
        call = _Call(payload, _names_main(payload), timeout_s)
        with self._lock:
            if self.closed:
                raise PoolClosedError("the pool is closed")
            self._pending += 1
            if self._pending > self._idle and len(self._threads) < self.max_workers:
                slot = len(self._threads)
                thread = threading.Thread(target=self._serve, args=(slot,), name=f"pool-slot-{slot}", daemon=True)
                self._threads.append(thread)
                thread.start()
        self._calls.put(call)
        return call.future

    def close(self) -> None:
        """Kill the workers and fail what is queued; takes a few seconds at most, whatever the calls do. Idempotent."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            workers, threads = list(self._workers.values()), list(self._threads)
        for _ in threads:
            self._calls.put(None)
        for worker in workers:
            worker.close()
        deadline = time.monotonic() + _JOIN_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        with contextlib.suppress(queue.Empty):
            while True:
                call = self._calls.get_nowait()
                if call is not None:
                    _resolve(call.future, error=PoolClosedError("the pool was closed before the call started"))

    def _serve(self, slot: int) -> None:
        worker: _Worker | None = None
        while True:
            with self._lock:
                self._idle += 1
            try:
                call = self._calls.get(timeout=IDLE_S if worker is not None else None)
            except queue.Empty:
                self._drop(slot, worker)
                worker = None
                with self._lock:
                    self._idle -= 1
                continue
            with self._lock:
                self._idle -= 1
                self._pending -= call is not None
            if call is None or self.closed:
                self._drop(slot, worker)
                if call is not None:
                    _resolve(call.future, error=PoolClosedError("the pool was closed before the call started"))
                return
            if call.future.set_running_or_notify_cancel():
                worker = self._run(slot, worker, call)

    def _run(self, slot: int, worker: _Worker | None, call: _Call) -> _Worker | None:
        """Run one call and resolve its future; returns the worker for the next one."""
        try:
            if worker is None:
                worker = _Worker()
                with self._lock:
                    self._workers[slot] = worker
            _resolve(call.future, worker.call(call))
        except (CallTimeoutError, WorkerDiedError) as exc:
            self._drop(slot, worker)
            worker = None
            _resolve(call.future, error=PoolClosedError("the pool was closed during the call") if self.closed else exc)
        except Exception as exc:  # noqa: BLE001 - it belongs to whoever holds the future
            _resolve(call.future, error=exc)
        return worker

    def _drop(self, slot: int, worker: _Worker | None) -> None:
        with self._lock:
            self._workers.pop(slot, None)
        if worker is not None:
            worker.close()


def _resolve(future: Future[Any], value: Any = None, *, error: BaseException | None = None) -> None:
    with contextlib.suppress(InvalidStateError):  # the caller gave up
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)


def main_origin() -> tuple[str | None, str | None]:
    """Path and module name under which another process can import the main script; (None, None) if it cannot.

    In a worker process that has loaded a controller's script under another name, that script is meant.
    """
    main = sys.modules.get(MAIN_ALIAS) or sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name and spec.name != MAIN_ALIAS:
        return None, str(spec.name)
    path = getattr(main, "__file__", None)
    return (str(Path(path).resolve()), None) if path and Path(path).is_file() else (None, None)


def _names_main(payload: bytes) -> bool:
    """Whether a pickled call refers to the main script."""
    return b"__main__" in payload or MAIN_ALIAS.encode() in payload


def can_travel(function: Callable[..., Any]) -> bool:
    """Whether a worker process could run ``function``: it pickles, and its module can be imported there."""
    try:
        payload = pickle.dumps(function)
    except Exception:  # noqa: BLE001 - lambdas, closures and odd objects raise many types
        return False
    return not _names_main(payload) or main_origin() != (None, None)


_pools: dict[int, ProcessPool] = {}
_pools_lock = threading.Lock()


def shared_pool(max_workers: int) -> ProcessPool:
    """The pool of this process with that many workers; made on first use, closed at exit or by :func:`close_pools`."""
    with _pools_lock:
        pool = _pools.get(max_workers)
        if pool is None or pool.closed:
            pool = _pools[max_workers] = ProcessPool(max_workers)
        return pool


def close_pools() -> None:
    """Close every shared pool."""
    with _pools_lock:
        pools = list(_pools.values())
        _pools.clear()
    for pool in pools:
        pool.close()


atexit.register(close_pools)


def default_workers() -> int:
    """Half of the CPUs per device of this machine, at least 2: with a lone worker one bad call would stop all."""
    devices = len(list(Path("/dev").glob("nvidia[0-9]*"))) or 1
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(cpus // devices // 2, 2)
