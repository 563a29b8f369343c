"""What a scheduler knows about its workers: one handle per worker process, one entry per role.

::

    starting --(answers /health)--> ready --(ended, or silent too long)--> failed --(restart)--> starting
        `-----------(ended)------------------------------------------------^         any --(deleted)--> gone

Handles are made by ``base``, started and stopped by a backend, watched by ``monitor``.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from areal.api.config.scheduling import SchedulingSpec
from areal.api.scheduler_api import Worker
from areal.infra.scheduler.exceptions import WorkerFailedError, WorkerNotFoundError
from areal.utils.network import split_hostport

if TYPE_CHECKING:
    from areal.infra.rpc.client import WorkerClient

T = TypeVar("T")


@dataclass(eq=False)
class WorkerHandle:
    """One worker.

    Attributes:
        command: whole command line; backends that start no process (Ray) ignore it.
        env: variables to add to the environment that the worker inherits from its machine.
        gpus: names of its devices, as ``CUDA_VISIBLE_DEVICES`` takes them; set by a backend that assigns devices.
        beside: the worker it was forked from: same machine, same devices.
        backend: whatever the backend keeps about it (a process, an actor, a job id).
        incarnation: how often it was restarted.
        address: ``host:port`` once it is ready.
        ports: the ports of ``Worker.worker_ports`` once it is ready.
        failure: how it ended and the tail of its log; None while it has not.
    """

    role: str
    index: int
    spec: SchedulingSpec
    command: list[str]
    env: dict[str, str]
    log_path: Path
    beside: WorkerHandle | None = None
    gpus: list[str] = field(default_factory=list)
    backend: Any = None
    incarnation: int = 0
    log_offset: int = 0
    address: str | None = None
    ports: list[int] = field(default_factory=list)
    client: WorkerClient | None = None
    failure: str | None = None
    started_at: float | None = None
    last_answer: float = 0.0
    last_probe: float = 0.0
    probing: bool = False
    trouble: str = ""
    _calls: set[asyncio.Task[Any]] = field(default_factory=set)
    _lock: Any = field(default_factory=threading.RLock)  # re-entrant: signal handlers stop workers too

    @property
    def id(self) -> str:
        """``role/index``."""
        return f"{self.role}/{self.index}"

    @property
    def ready(self) -> bool:
        """Whether it answered and has not failed."""
        return self.client is not None and self.failure is None

    def worker(self) -> Worker:
        """The public view; the handle is ready."""
        assert self.address is not None
        host, _ = split_hostport(self.address)
        return Worker(id=self.id, ip=host, worker_ports=[str(port) for port in self.ports])

    def error(self) -> WorkerFailedError:
        """The error of every call to a failed worker."""
        return WorkerFailedError(
            f"worker {self.id} failed: {self.failure}\n"
            f"Its whole log is {self.log_path}. Restart it (restart_worker) and create its engines again."
        )

    def begin(self) -> None:
        """Forget the previous incarnation; the backend is about to start the worker."""
        self.log_offset = self.log_path.stat().st_size if self.log_path.exists() else 0
        self.backend, self.address, self.client, self.failure, self.started_at = None, None, None, None, None
        self.ports, self.trouble = [], ""

    def become_ready(self, client: WorkerClient, address: str, ports: list[int]) -> None:
        """The worker answered at ``address``."""
        self.last_answer = time.monotonic()
        self.address, self.ports, self.trouble, self.client = address, ports, "", client

    def end(self, cause: str, incarnation: int | None = None) -> bool:
        """Record how the worker ended and wake every call that waits on it; False when it had ended already.

        Args:
            cause: how it ended, with the end of its log.
            incarnation: the one that ended; None: the present one.
        """
        with self._lock:
            if self.failure is not None or incarnation not in (None, self.incarnation):
                return False
            self.failure = cause
            calls = list(self._calls)
        for task in calls:
            with contextlib.suppress(RuntimeError):  # that loop is closed
                task.get_loop().call_soon_threadsafe(task.cancel)
        return True

    async def guard(self, call: Coroutine[Any, Any, T]) -> T:
        """Await ``call``; ends at once, with the worker's failure, when the worker ends.

        Raises:
            WorkerFailedError: the worker ended before the call did.
        """
        task = asyncio.ensure_future(call)
        with self._lock:
            failed = self.failure is not None
            if not failed:
                self._calls.add(task)
        if failed:
            task.cancel()
        try:
            return await task
        except asyncio.CancelledError:
            waiting = asyncio.current_task()
            if self.failure is None or (waiting is not None and waiting.cancelling()):
                raise
            raise self.error() from None
        finally:
            self._calls.discard(task)


@dataclass
class RoleEntry:
    """The workers of one role.

    Attributes:
        target: the role whose machines and devices it shares.
        shared: it has no workers of its own, ``handles`` are the target's.
    """

    name: str
    handles: list[WorkerHandle]
    target: str | None = None
    shared: bool = False


class WorkerTable:
    """Roles in the order in which they were created. Thread-safe."""

    def __init__(self) -> None:
        self._roles: dict[str, RoleEntry] = {}
        self._lock = threading.RLock()

    def __contains__(self, role: str) -> bool:
        return role in self._roles

    def add(self, entry: RoleEntry) -> None:
        """Keep a role whose name is free."""
        with self._lock:
            assert entry.name not in self._roles
            self._roles[entry.name] = entry

    def role(self, name: str) -> RoleEntry:
        """The entry of a role.

        Raises:
            WorkerNotFoundError: no such role.
        """
        with self._lock:
            if name not in self._roles:
                known = ", ".join(self._roles) or "none"
                raise WorkerNotFoundError(f"no workers of role {name!r}; there are roles: {known}")
            return self._roles[name]

    def worker(self, worker_id: str) -> WorkerHandle:
        """The handle of ``role/index``; a role that shares another's workers may be named too.

        Raises:
            WorkerNotFoundError: no such worker.
        """
        role, _, index = worker_id.rpartition("/")
        handles = self.role(role).handles
        if not index.isdigit() or int(index) >= len(handles):
            raise WorkerNotFoundError(f"no worker {worker_id!r}; role {role!r} has {len(handles)} workers from 0")
        return handles[int(index)]

    def holds(self, handle: WorkerHandle) -> bool:
        """Whether a handle belongs to a role that was not removed."""
        with self._lock:
            entry = self._roles.get(handle.role)
            return entry is not None and handle in entry.handles

    def worker_ids(self) -> list[str]:
        """Ids of all workers, each once."""
        with self._lock:
            return [handle.id for entry in self._roles.values() if not entry.shared for handle in entry.handles]

    def take(self, role: str | None) -> list[RoleEntry]:
        """Remove a role (None: all) and those that share its workers or devices; newest first."""
        with self._lock:
            gone: list[RoleEntry] = []
            names = {role} if role is not None else set(self._roles)
            for entry in list(self._roles.values()):  # a target is older than those that share it
                if entry.name in names or entry.target in names:
                    names.add(entry.name)
                    gone.insert(0, self._roles.pop(entry.name))
            return gone
