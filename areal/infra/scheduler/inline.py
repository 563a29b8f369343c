"""The inline scheduler: workers are objects in the controller's process, one rank each.

For debugging, unit tests and notebooks. The trainer's builder hosts every engine and role here and calls
``delete_workers`` when the run closes.
"""

from __future__ import annotations

from typing import Any

from areal.api.scheduler_api import Job, Scheduler, Worker
from areal.utils.dynamic_import import import_from_string
from areal.utils.errors import EngineError


class InlineScheduler(Scheduler):
    """Hosts objects by worker id and name; the only worker of a role is ``role/0``."""

    context = None  # no worker processes

    def __init__(self) -> None:
        self._objects: dict[str, dict[str, Any]] = {}

    @property
    def n_gpus_per_node(self) -> int:
        import torch

        return torch.cuda.device_count() if torch.cuda.is_available() else 0

    def create_workers(self, job: Job) -> list[str]:
        if job.role in self._objects:
            raise EngineError(f"role {job.role!r} has workers already")
        if job.replicas != 1:
            raise EngineError(
                f"role {job.role!r} asks for {job.replicas} workers; scheduler.type=inline hosts exactly one rank. "
                "Use scheduler.type=local for more."
            )
        self._objects[job.role] = {}
        return [f"{job.role}/0"]

    def get_workers(self, role: str, timeout: float | None = None) -> list[Worker]:
        self._worker(f"{role}/0")
        return [Worker(id=f"{role}/0", ip="127.0.0.1")]

    def delete_workers(self, role: str | None = None, reverse_order: bool = False) -> None:
        """Destroy the objects of ``role`` (None: of every role), newest first."""
        roles = [role] if role is not None else list(reversed(self._objects))
        for name in roles:
            for hosted in reversed(list(self._objects.pop(name, {}).values())):
                if hasattr(hosted, "destroy"):
                    hosted.destroy()

    def worker_ids(self) -> list[str]:
        """Ids of worker processes: none."""
        return []

    def close(self) -> None:
        """Destroy every object; safe to call twice."""
        self.delete_workers()

    def host(self, worker_id: str, hosted: Any, engine_name: str | None = None) -> Any:
        """Keep an object made here under ``engine_name`` (default: the worker's id); returns it."""
        self._worker(worker_id)[engine_name or worker_id] = hosted
        return hosted

    async def create_engine(
        self, worker_id: str, engine: Any, *args: Any, engine_name: str | None = None, **kwargs: Any
    ) -> Any:
        cls = import_from_string(engine) if isinstance(engine, str) else engine
        return self.host(worker_id, cls(*args, **kwargs), engine_name)

    def call_engine(
        self, worker_id: str, method: str, *args: Any, engine_name: str | None = None, **kwargs: Any
    ) -> Any:
        hosted = self._worker(worker_id).get(engine_name or worker_id)
        if hosted is None:
            raise EngineError(f"worker {worker_id} hosts no object {engine_name or worker_id!r}")
        return getattr(hosted, method)(*args, **kwargs)

    async def async_call_engine(
        self, worker_id: str, method: str, *args: Any, engine_name: str | None = None, **kwargs: Any
    ) -> Any:
        return self.call_engine(worker_id, method, *args, engine_name=engine_name, **kwargs)

    def _worker(self, worker_id: str) -> dict[str, Any]:
        role, _, index = worker_id.partition("/")
        if role not in self._objects or index != "0":
            raise EngineError(
                f"no worker {worker_id!r}; there are {', '.join(f'{r}/0' for r in self._objects) or 'none'}"
            )
        return self._objects[role]
