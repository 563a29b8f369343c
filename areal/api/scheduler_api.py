"""The contract of a scheduler: who hosts the workers of a role, and how they are called."""

from __future__ import annotations

import abc
from dataclasses import dataclass, field
from typing import Any

from areal.api.config.scheduling import SchedulingSpec, SchedulingStrategy


@dataclass
class Worker:
    """One running worker; ``id`` is ``role/index`` and ``worker_ports[0]`` its HTTP port."""

    id: str
    ip: str
    worker_ports: list[str] = field(default_factory=list)
    engine_ports: list[str] = field(default_factory=list)


@dataclass
class Job:
    """Workers wanted for one role; ``tasks`` holds one spec for all, or one per replica."""

    role: str
    replicas: int = 0
    tasks: list[SchedulingSpec] = field(default_factory=list)
    scheduling_strategy: SchedulingStrategy = field(default_factory=SchedulingStrategy)


class Scheduler(abc.ABC):
    """Starts, finds, calls and stops workers."""

    @property
    @abc.abstractmethod
    def n_gpus_per_node(self) -> int:
        """Devices of one node; 0 on a CPU machine."""

    @abc.abstractmethod
    def create_workers(self, job: Job) -> list[str]:
        """Start the workers of a role; returns their ids."""

    @abc.abstractmethod
    def get_workers(self, role: str, timeout: float | None = None) -> list[Worker]:
        """Block until every worker of the role is healthy, at most ``timeout`` seconds."""

    @abc.abstractmethod
    def delete_workers(self, role: str | None = None, reverse_order: bool = False) -> None:
        """Stop the workers of a role, or all."""

    @abc.abstractmethod
    async def create_engine(
        self, worker_id: str, engine: Any, *args: Any, engine_name: str | None = None, **kwargs: Any
    ) -> Any:
        """Make an object on a worker, by import path."""

    @abc.abstractmethod
    def call_engine(
        self, worker_id: str, method: str, *args: Any, engine_name: str | None = None, **kwargs: Any
    ) -> Any:
        """Call a method of that object and return its result."""

    @abc.abstractmethod
    async def async_call_engine(
        self, worker_id: str, method: str, *args: Any, engine_name: str | None = None, **kwargs: Any
    ) -> Any:
        """The same without blocking."""
