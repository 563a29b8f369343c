"""Calls to the objects that workers host. A call ends as soon as its worker does, whatever the connection does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from areal.infra.rpc.client import WorkerClient
from areal.infra.scheduler.call_loop import CallLoop
from areal.infra.scheduler.exceptions import (
    EngineCallError,
    EngineCreationError,
    EngineImportError,
    RPCConnectionError,
    SchedulerError,
)
from areal.infra.scheduler.handles import WorkerHandle, WorkerTable
from areal.infra.scheduler.monitor import WorkerMonitor
from areal.utils.errors import ConfigError

CALL_TIMEOUT_S = 7200.0
_CONFIRM_TRIES, _CONFIRM_PAUSE_S = 20, 0.1  # after a broken connection: has the worker ended?

T = TypeVar("T")


class EngineCalls:
    """Calls of one scheduler."""

    def __init__(self, table: WorkerTable, monitor: WorkerMonitor) -> None:
        self._table = table
        self._monitor = monitor
        self._loop = CallLoop("scheduler-calls")

    def client(self, worker_id: str) -> WorkerClient:
        """The connection to a ready worker.

        Raises:
            WorkerNotFoundError: no such worker.
            WorkerFailedError: it has failed.
            SchedulerError: it is starting.
        """
        return self._ready(self._table.worker(worker_id))

    async def on(self, worker_id: str, call: Callable[[WorkerClient], Coroutine[Any, Any, T]]) -> T:
        """Await ``call(client)`` for a ready worker.

        Raises:
            WorkerFailedError: the worker ended before the call did.
            WorkerNotFoundError, SchedulerError: as ``client``.
        """
        handle = self._table.worker(worker_id)
        try:
            return await handle.guard(call(self._ready(handle)))
        except RPCConnectionError as exc:
            for _ in range(_CONFIRM_TRIES):
                await asyncio.to_thread(self._monitor.check, handle)
                if handle.failure is not None:
                    raise handle.error() from exc
                await asyncio.sleep(_CONFIRM_PAUSE_S)
            raise

    async def create(self, worker_id: str, path: str, call: Callable[[WorkerClient], Coroutine[Any, Any, T]]) -> T:
        """``on`` for a call that makes an object of class ``path``; what goes wrong there is an EngineCreationError."""
        try:
            return await self.on(worker_id, call)
        except (ImportError, AttributeError) as exc:
            raise EngineImportError(f"worker {worker_id}: {path} cannot be made: {type(exc).__name__}: {exc}") from exc
        except EngineCallError as exc:
            raise EngineCreationError(f"worker {worker_id}: {path} cannot be made: {exc}") from exc
        except (SchedulerError, ConfigError):
            raise
        except Exception as exc:
            raise EngineCreationError(
                f"worker {worker_id}: the constructor of {path} failed: {type(exc).__name__}: {exc}"
            ) from exc

    async def set_env(self, worker_id: str, env: dict[str, str]) -> None:
        """Set variables in a running worker and in those that replace it."""
        await self.on(worker_id, lambda client: asyncio.to_thread(client.set_env, env))
        self._table.worker(worker_id).env.update(env)

    def wait(self, call: Coroutine[Any, Any, T]) -> T:
        """Run one of the above for a synchronous caller."""
        return self._loop.run(call)

    def close(self) -> None:
        """Cancel what synchronous callers wait for."""
        self._loop.close()

    def _ready(self, handle: WorkerHandle) -> WorkerClient:
        if handle.failure is not None:
            raise handle.error()
        if handle.client is None:
            raise SchedulerError(f"worker {handle.id} is starting; wait for it with get_workers({handle.role!r})")
        return handle.client
