"""Checks a job before anything is started, and turns it into one spec per worker."""

from __future__ import annotations

import re

from areal.api.config.scheduling import SchedulingSpec
from areal.api.scheduler_api import Job
from areal.infra.scheduler.exceptions import WorkerCreationError, WorkerNotFoundError
from areal.infra.scheduler.handles import RoleEntry, WorkerTable

_ROLE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")  # it becomes part of keys and file names


def check_role(role: str, table: WorkerTable) -> None:
    """Refuse a role that has workers already or cannot be part of a path.

    Raises:
        WorkerCreationError: says which.
    """
    if not _ROLE.fullmatch(role):
        raise WorkerCreationError(f"role {role!r} must be letters, digits, '.', '_' or '-', as it becomes a file name")
    if role in table:
        raise WorkerCreationError(f"role {role!r} has workers already; delete them first or choose another name")


def target_of(role: str, target: str | None, table: WorkerTable) -> RoleEntry:
    """The role that ``role`` shares machines and devices with.

    Raises:
        WorkerCreationError: it has no workers.
    """
    try:
        return table.role(target or "")
    except WorkerNotFoundError as exc:
        raise WorkerCreationError(
            f"role {role!r} shares the devices of {target!r} (scheduling_strategy.target): {exc}. "
            "Create the target's workers first"
        ) from exc


def specs_of(job: Job, target: RoleEntry | None) -> list[SchedulingSpec]:
    """One spec per replica; a role that shares another's devices may leave them out and takes the target's.

    Raises:
        WorkerCreationError: no replicas, another number of specs than 1 or replicas, or than the target's workers.
    """
    if job.replicas < 1:
        raise WorkerCreationError(f"role {job.role!r} asks for {job.replicas} workers; at least 1 is needed")
    if target is not None and len(target.handles) != job.replicas:
        raise WorkerCreationError(
            f"role {job.role!r} asks for {job.replicas} workers and shares those of {target.name!r}, which has "
            f"{len(target.handles)}; both numbers must be equal"
        )
    if target is not None and not job.tasks:
        return [handle.spec for handle in target.handles]
    if len(job.tasks) not in (1, job.replicas):
        raise WorkerCreationError(
            f"role {job.role!r} has {len(job.tasks)} scheduling specs for {job.replicas} workers; "
            f"give 1 for all or {job.replicas}"
        )
    return list(job.tasks) if len(job.tasks) == job.replicas else job.tasks * job.replicas
