"""Watches workers: finds the address of a new one, asks each whether it is alive, and says which has failed.

One daemon thread per scheduler looks at every worker; questions over the network go to a small thread pool, so that a
silent worker delays nobody. The thread also holds the leash: workers whose controller is gone end themselves.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from areal.infra.rpc.client import WorkerClient
from areal.infra.rpc.stream import Leash
from areal.infra.run_context import RunContext
from areal.infra.scheduler import worker_logs
from areal.infra.scheduler.exceptions import PortAllocationError, WorkerTimeoutError
from areal.infra.scheduler.handles import WorkerHandle
from areal.infra.scheduler.hooks import WorkerHooks
from areal.utils import logging, name_resolve, names
from areal.utils.errors import ArealError, NameEntryNotFoundError
from areal.utils.network import format_hostport, split_hostport

logger = logging.getLogger("Scheduler")

_STARTING_TICK_S = 0.1
_TICK_S = 0.5
_ANSWER_S = 2.0  # a worker that takes longer to answer /health was silent this time
_THREADS = 16
_PORT_TRIES = 10


class WorkerMonitor:
    """Keeps ``WorkerHandle.client`` and ``.failure`` true.

    Args:
        context: the run.
        hooks: the backend.
    """

    def __init__(self, context: RunContext, hooks: WorkerHooks) -> None:
        self._context = context
        self._hooks = hooks
        self.callbacks: list[Callable[[str, str], None]] = []  # called with (worker id, cause) per failure
        self._handles: list[WorkerHandle] = []
        self._ports: set[tuple[str, int]] = set()
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._leash = Leash(context.identity)
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="worker-health")
        self._thread: threading.Thread | None = None

    def watch(self, handles: list[WorkerHandle]) -> None:
        """Begin to look at workers that were just started."""
        with self._changed:
            self._handles += [handle for handle in handles if handle not in self._handles]
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="worker-monitor", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def forget(self, handles: list[WorkerHandle]) -> None:
        """Stop looking at workers that are about to be stopped: their end is no failure, calls that wait end now."""
        with self._changed:
            self._handles = [handle for handle in self._handles if handle not in handles]
            for handle in handles:
                if handle.address is not None:
                    host = split_hostport(handle.address)[0]
                    self._ports -= {(host, port) for port in handle.ports}
            self._changed.notify_all()
        for handle in handles:
            handle.end("it was stopped by this process")
            if handle.client is not None:
                handle.client.close()

    def stopped(self, handles: list[WorkerHandle]) -> None:
        """Forgotten workers are gone: let go of their leash, which would have ended them, and of their names."""
        for handle in handles:
            self._leash.release(handle.id)
            for key in address_keys(self._context, handle):  # an old address must not be found by the next one
                with contextlib.suppress(ArealError, OSError):
                    name_resolve.delete(key)

    def wait_ready(self, handles: list[WorkerHandle], timeout: float | None) -> None:
        """Block until every handle is ready.

        Args:
            handles: workers that are watched.
            timeout: seconds; None allows each the run's startup timeout from the moment its process was started.

        Raises:
            WorkerFailedError: one has failed.
            WorkerTimeoutError: one is not ready in time.
        """
        began = time.monotonic()
        with self._changed:
            while True:
                waiting = [handle for handle in handles if not handle.ready]
                for handle in waiting:
                    if handle.failure is not None:
                        raise handle.error()
                if not waiting:
                    return
                now = time.monotonic()
                for handle in waiting:
                    start = began if timeout is not None else handle.started_at or now
                    limit = self._context.startup_timeout_s if timeout is None else timeout
                    if now - start > limit:
                        raise self._late(handle, limit, explicit=timeout is not None)
                self._changed.wait(_STARTING_TICK_S)

    def check(self, handle: WorkerHandle) -> None:
        """Ask the backend about one worker right now; blocks as long as that takes."""
        incarnation = handle.incarnation
        if handle.failure is None and (cause := self._poll(handle)) is not None:
            self.fail(handle, cause, incarnation)

    def fail(self, handle: WorkerHandle, cause: str, incarnation: int) -> None:
        """Record that an incarnation of a worker ended; further calls for it do nothing."""
        if handle not in self._handles:
            return
        text = worker_logs.tail(handle.log_path, handle.log_offset)
        count = len(text.splitlines())
        shown = f"{cause}. Last {count} lines of its log:\n{text}" if text else f"{cause}. It wrote no log"
        if not handle.end(shown, incarnation):
            return
        logger.error("worker %s failed: %s", handle.id, shown)
        with self._changed:
            self._changed.notify_all()
        self._leash.release(handle.id)
        if self.callbacks:  # in a thread of their own: they may restart the worker, which this thread has to see
            threading.Thread(target=self._tell, args=(handle.id, shown), name="worker-failure", daemon=True).start()

    def close(self) -> None:
        """Stop looking at anything."""
        self._closed.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._leash.close()

    def _tell(self, worker_id: str, cause: str) -> None:
        for callback in self.callbacks:
            try:
                callback(worker_id, cause)
            except Exception:  # noqa: BLE001 - the others are called all the same
                logger.exception("a failure callback raised for worker %s", worker_id)

    # --- the thread ---------------------------------------------------------------------------------------------
    def _run(self) -> None:
        last = time.monotonic()
        while True:
            with self._changed:
                handles = list(self._handles)
            starting = any(handle.client is None and handle.failure is None for handle in handles)
            tick = _STARTING_TICK_S if starting else min(_TICK_S, self._context.heartbeat_interval_s)
            if self._closed.wait(tick):
                return
            now = time.monotonic()
            paused, last = now - last - tick, now
            for handle in handles:
                if paused > 1.0:  # this process was stopped itself: nobody could have been heard
                    handle.last_answer += paused
                if handle.failure is None:
                    self._look(handle, now)

    def _look(self, handle: WorkerHandle, now: float) -> None:
        incarnation = handle.incarnation
        cause = self._poll(handle)
        if cause is None and handle.ready and now - handle.last_answer > self._context.heartbeat_timeout_s:
            cause = (
                f"no answer for {now - handle.last_answer:.0f} s (scheduler.heartbeat_timeout_s="
                f"{self._context.heartbeat_timeout_s:g}); last trouble: {handle.trouble or 'none'}"
            )
        if cause is not None:
            self.fail(handle, cause, incarnation)
            return
        due = handle.client is None or now - handle.last_probe >= self._context.heartbeat_interval_s
        if due and not handle.probing:
            handle.probing, handle.last_probe = True, now
            try:
                self._pool.submit(self._probe, handle)
            except RuntimeError:  # the interpreter is shutting down
                self._closed.set()

    def _poll(self, handle: WorkerHandle) -> str | None:
        try:
            return self._hooks._poll(handle)
        except (ArealError, OSError) as exc:  # the cluster does not answer: nothing is known about the worker
            handle.trouble = f"{type(exc).__name__}: {exc}"
            return None

    # --- in the pool --------------------------------------------------------------------------------------------
    def _probe(self, handle: WorkerHandle) -> None:
        incarnation = handle.incarnation
        try:
            client = handle.client
            if client is None:
                self._discover(handle)
            else:
                client.health(timeout_s=_ANSWER_S)
                handle.last_answer, handle.trouble = time.monotonic(), ""
        except (ArealError, OSError) as exc:
            handle.trouble = f"{type(exc).__name__}: {exc}"
        except Exception as exc:  # noqa: BLE001 - the pool would swallow it
            self.fail(handle, f"it cannot be watched: {type(exc).__name__}: {exc}", incarnation)
        finally:
            handle.probing = False

    def _discover(self, handle: WorkerHandle) -> None:
        """Find the worker by the name it registered, and make sure that it is this run's."""
        incarnation = handle.incarnation
        if handle.started_at is None:
            try:
                reason = self._hooks._pending(handle)
            except ArealError as exc:
                self.fail(handle, str(exc), incarnation)
                return
            if reason is not None:
                handle.trouble = reason
                return
            handle.started_at = time.monotonic()
        address = self._registered(handle)
        if address is None:
            handle.trouble = "its process was started and has not registered an address yet"
            return
        client = WorkerClient(address, self._context.identity)
        try:
            health = client.health(timeout_s=_ANSWER_S)
            expected = (self._context.identity.run_id, handle.role, handle.index)
            if (health["run_id"], health["role"], health["index"]) != expected:
                handle.trouble = f"{address} is registered for it and belongs to {health['role']}/{health['index']}"
                client.close()
                return
            ports = self._reserve_ports(handle, client, address)
            host = split_hostport(address)[0]
            self._leash.hold(handle.id, format_hostport(host, int(health["stream_port"])))
        except BaseException:
            client.close()
            raise
        with self._changed:
            if handle.incarnation == incarnation and handle.failure is None:
                handle.become_ready(client, address, ports)
            self._changed.notify_all()

    def _registered(self, handle: WorkerHandle) -> str | None:
        for key in address_keys(self._context, handle):
            try:
                return name_resolve.get(key)
            except NameEntryNotFoundError:
                continue
        return None

    def _reserve_ports(self, handle: WorkerHandle, client: WorkerClient, address: str) -> list[int]:
        """The HTTP port and ``port_count - 1`` more that no other worker of this machine was given."""
        host, http_port = split_hostport(address)
        wanted = handle.spec.port_count
        with self._changed:
            self._ports.add((host, http_port))
        ports = [http_port]
        for _ in range(_PORT_TRIES):
            if len(ports) == wanted:
                return ports
            offered = client.alloc_ports(wanted - len(ports))
            with self._changed:
                fresh = [port for port in offered if (host, port) not in self._ports]
                self._ports.update((host, port) for port in fresh)
            ports += fresh
        if len(ports) == wanted:
            return ports
        self.fail(
            handle,
            f"found {len(ports)} of {wanted} free ports on {host} (scheduling_spec.port_count)",
            handle.incarnation,
        )
        raise PortAllocationError(f"worker {handle.id}: no free ports on {host}")

    def _late(self, handle: WorkerHandle, limit: float, *, explicit: bool) -> WorkerTimeoutError:
        text: Any = worker_logs.tail(handle.log_path, handle.log_offset)
        remedy = "give get_workers more time" if explicit else "raise scheduler.startup_timeout_s"
        return WorkerTimeoutError(
            f"worker {handle.id} is not ready after {limit:g} s: {handle.trouble or 'it was not looked at yet'}. "
            f"Read its log {handle.log_path}, or {remedy}." + (f" The log's end:\n{text}" if text else "")
        )


def address_keys(context: RunContext, handle: WorkerHandle) -> list[str]:
    """Names under which a worker registers: of the run, which no other run shares, and of the trial."""
    return [
        f"runs/{context.identity.run_id}/workers/{handle.role}/{handle.index}",
        names.worker(context.experiment_name, context.trial_name, handle.role, handle.index),
    ]
