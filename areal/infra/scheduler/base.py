"""What every scheduler of worker processes shares: the life of workers, calls to their engines, and their failures.

A backend (``local``, ``ray``, ``slurm``) derives from ``BaseScheduler`` and supplies the four hooks of ``WorkerHooks``.
In: jobs from the trainer's builder and the controllers. Out: worker ids, and results of engine calls. See ``handles``
for the states of a worker.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from areal.api.scheduler_api import Job, Scheduler, Worker
from areal.infra.rpc.client import WorkerClient
from areal.infra.run_context import RunContext
from areal.infra.scheduler import jobs, launch, worker_logs
from areal.infra.scheduler.engine_calls import CALL_TIMEOUT_S, EngineCalls
from areal.infra.scheduler.handles import RoleEntry, WorkerTable
from areal.infra.scheduler.hooks import WorkerHooks
from areal.infra.scheduler.monitor import WorkerMonitor
from areal.infra.scheduler.role_life import RoleLife
from areal.utils import logging

logger = logging.getLogger("Scheduler")

_STOP_GRACE_S = 5.0  # of a worker between SIGTERM and SIGKILL


class BaseScheduler(Scheduler, WorkerHooks):
    """Starts, finds, calls, watches and stops worker processes.

    Args:
        context: the run; its token is removed by ``close``.
        cores: of every machine, which bounds the threads of a worker; None when machines differ.
    """

    def __init__(self, context: RunContext, *, cores: int | None = None) -> None:
        self.context = context
        self._cores = cores
        self._table = WorkerTable()
        self._monitor = WorkerMonitor(context, self)
        self._engines = EngineCalls(self._table, self._monitor)
        self._life = RoleLife(self, context, self._table, self._monitor)

    @property
    def n_gpus_per_node(self) -> int:
        return self.context.n_gpus_per_node

    # --- life ---------------------------------------------------------------------------------------------------
    def create_workers(self, job: Job) -> list[str]:
        """Start the workers of a role and return their ids at once; ``get_workers`` waits for them.

        Raises:
            WorkerCreationError: the job cannot be started as it is; nothing was started.
        """
        jobs.check_role(job.role, self._table)
        strategy = job.scheduling_strategy
        target = None
        if strategy.type == "colocation":
            target = jobs.target_of(job.role, strategy.target, self._table)
        specs = jobs.specs_of(job, target)
        if target is not None and not strategy.fork:
            self._table.add(RoleEntry(job.role, target.handles, target=target.name, shared=True))
            return [handle.id for handle in target.handles]
        handles = [
            launch.make_handle(self.context, job.role, index, spec, self._cores) for index, spec in enumerate(specs)
        ]
        return self._life.launch(job.role, handles, target)

    def fork_workers(self, role: str, target_role: str, command: str | None = None) -> list[str]:
        """Start one more process next to each worker of ``target_role``, on the same devices; returns their ids.

        Args:
            role: name of the new role.
            target_role: role with workers.
            command: module that the processes run, ``areal.infra.rpc.rpc_server`` by default.
        """
        jobs.check_role(role, self._table)
        target = jobs.target_of(role, target_role, self._table)
        module = command or launch.RPC_SERVER
        handles = []
        for index, beside in enumerate(target.handles):
            spec = dataclasses.replace(beside.spec, cmd=f"python -m {module}")
            handles.append(launch.make_handle(self.context, role, index, spec, self._cores))
        return self._life.launch(role, handles, target)

    def get_workers(self, role: str, timeout: float | None = None) -> list[Worker]:
        """Block until every worker of the role is healthy.

        Args:
            role: created before.
            timeout: seconds in all; None allows ``scheduler.startup_timeout_s`` from the start of each process, and any
                time before that (a queue of the cluster).

        Raises:
            WorkerNotFoundError: no such role.
            WorkerFailedError: a worker ended; with the end of its log.
            WorkerTimeoutError: not healthy in time.
        """
        handles = self._table.role(role).handles
        self._monitor.wait_ready(handles, timeout)
        return [handle.worker() for handle in handles]

    def delete_workers(self, role: str | None = None, reverse_order: bool = False) -> None:
        """Stop the workers of ``role`` (None: of all roles, newest first), and those that share their devices.

        Args:
            role: unknown roles are logged only.
            reverse_order: stop worker 0 of each role last, after the others are gone.
        """
        if role is not None and role not in self._table:
            logger.warning("delete_workers: there are no workers of role %r", role)
            return
        self._life.end(role, _STOP_GRACE_S, reverse_order=reverse_order)

    def restart_worker(self, worker_id: str) -> Worker:
        """Stop what is left of a worker, start it again and wait until it is healthy; its engines are to be made anew.

        Raises:
            WorkerFailedError, WorkerTimeoutError: the new one did not come up.
        """
        handle = self._table.worker(worker_id)
        self._life.restart(handle, _STOP_GRACE_S)
        self._monitor.wait_ready([handle], None)
        return handle.worker()

    def stop_all(self, grace_s: float = _STOP_GRACE_S) -> None:
        """Stop every worker, by force after ``grace_s`` seconds."""
        self._life.stop_all(grace_s)

    def close(self) -> None:
        """Stop every worker and everything of this scheduler; it cannot be used afterwards."""
        self.stop_all()
        self._monitor.close()
        self._life.close()
        self._engines.close()

    # --- engines ------------------------------------------------------------------------------------------------
    async def create_engine(
        self, worker_id: str, engine: Any, *args: Any, engine_name: str | None = None, **kwargs: Any
    ) -> Any:
        """Make an object on a worker.

        Args:
            worker_id: a ready worker.
            engine: import path ``package.module.Class``, or the class.
            args, kwargs: of its constructor.
            engine_name: its name on the worker, the worker's id by default.

        Raises:
            EngineImportError: the class cannot be imported there.
            EngineCreationError: its constructor failed; the cause is chained. A ConfigError passes unchanged.
        """
        path = engine if isinstance(engine, str) else f"{engine.__module__}.{engine.__qualname__}"
        name = engine_name or worker_id
        return await self._engines.create(worker_id, path, lambda client: client.acreate(name, path, *args, **kwargs))

    def call_engine(
        self,
        worker_id: str,
        method: str,
        *args: Any,
        engine_name: str | None = None,
        http_timeout: float = CALL_TIMEOUT_S,
        **kwargs: Any,
    ) -> Any:
        """Call a method of a hosted object and return its result.

        Raises:
            WorkerFailedError: the worker ended or fell silent, before the call or during it.
            Exception: what the method raised, of the same type where it is known here, else EngineCallError.
        """
        return self._engines.wait(
            self.async_call_engine(
                worker_id, method, *args, engine_name=engine_name, http_timeout=http_timeout, **kwargs
            )
        )

    async def async_call_engine(
        self,
        worker_id: str,
        method: str,
        *args: Any,
        engine_name: str | None = None,
        http_timeout: float = CALL_TIMEOUT_S,
        **kwargs: Any,
    ) -> Any:
        """``call_engine`` without blocking."""
        name = engine_name or worker_id
        return await self._engines.on(
            worker_id, lambda client: client.acall(name, method, *args, timeout_s=http_timeout, **kwargs)
        )

    async def set_worker_env(self, worker_id: str, env: dict[str, str]) -> None:
        """Set environment variables of a running worker; a restarted one starts with them."""
        await self._engines.set_env(worker_id, env)

    def make_engine(
        self, worker_id: str, engine: Any, *args: Any, engine_name: str | None = None, **kwargs: Any
    ) -> Any:
        """``create_engine`` for a synchronous caller."""
        return self._engines.wait(self.create_engine(worker_id, engine, *args, engine_name=engine_name, **kwargs))

    def set_env(self, worker_id: str, env: dict[str, str]) -> None:
        """``set_worker_env`` for a synchronous caller."""
        self._engines.wait(self._engines.set_env(worker_id, env))

    def worker_ids(self) -> list[str]:
        """Ids of all workers, in the order of their roles."""
        return self._table.worker_ids()

    def client(self, worker_id: str) -> WorkerClient:
        """The connection to a ready worker."""
        return self._engines.client(worker_id)

    # --- failures -----------------------------------------------------------------------------------------------
    def worker_failure(self, worker_id: str) -> str | None:
        """How a worker ended and the last 50 lines of its log; None while it has not."""
        return self._table.worker(worker_id).failure

    def on_failure(self, callback: Callable[[str, str], None]) -> None:
        """Have ``callback(worker_id, cause)`` called in a thread of its own when a worker fails."""
        self._monitor.callbacks.append(callback)

    def log_tail(self, worker_id: str, lines: int = worker_logs.TAIL_LINES) -> str:
        """The last lines that a worker wrote since it was started."""
        handle = self._table.worker(worker_id)
        return worker_logs.tail(handle.log_path, handle.log_offset, lines)
