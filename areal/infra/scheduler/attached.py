"""The scheduler of a script under an SPMD launcher: it starts nothing, its workers are those that the launcher started.

    launcher ── starts ──► actor/i, rollout/j ◄── finds, calls, watches ── AttachedScheduler (script of rank 0)

Roles that train beside the actor (``ref``) share its workers. A worker that ends is the launcher's affair: it stops
everything and starts the run again. Made by the trainer instead of another scheduler when ``AREAL_SPMD_MODE`` is set.
"""

from __future__ import annotations

from pathlib import Path

from areal.api.scheduler_api import Job, Worker
from areal.infra.rpc.identity import RunIdentity, read_token
from areal.infra.run_context import RunContext
from areal.infra.scheduler import jobs
from areal.infra.scheduler.base import BaseScheduler
from areal.infra.scheduler.exceptions import SchedulerError, WorkerConfigurationError, WorkerCreationError
from areal.infra.scheduler.handles import RoleEntry, WorkerHandle
from areal.utils import environ, name_resolve
from areal.utils.errors import ConfigError

RUN_ID, TOKEN_FILE, WORKERS = "AREAL_RUN_ID", "AREAL_TOKEN_FILE", "AREAL_SPMD_WORKERS"
"""Variables of every rank: id of the run, file with its token, and roles with their numbers of workers."""

_HOST_ROLE = "actor"  # whose workers other training roles share
_used: set[str] = set()  # runs that this process had a scheduler for


class AttachedScheduler(BaseScheduler):
    """Uses the workers of a launcher.

    Args:
        context: the launcher's run, see ``RunContext.join``.

    Raises:
        SchedulerError: this process has attached before: workers keep what the first trainer built on them.
        ConfigError: the launcher's variables are missing.
    """

    def __init__(self, context: RunContext) -> None:
        run_id = context.identity.run_id
        if run_id in _used:
            raise SchedulerError(
                "the workers of a launcher serve one trainer of the script; start a script with several trainers as "
                "`python script.py scheduler.type=local` (or ray, slurm)"
            )
        self._counts = _worker_counts()
        super().__init__(context)
        _used.add(run_id)

    def create_workers(self, job: Job) -> list[str]:
        """Look for the workers of a role; ``get_workers`` waits for them.

        Raises:
            WorkerCreationError: the launcher started none, or another number.
        """
        jobs.check_role(job.role, self._table)
        if job.role not in self._counts:
            target = jobs.target_of(job.role, _HOST_ROLE, self._table)
            self._check_count(job, len(target.handles))
            self._table.add(RoleEntry(job.role, target.handles, target=target.name, shared=True))
            return [handle.id for handle in target.handles]
        self._check_count(job, self._counts[job.role])
        specs = jobs.specs_of(job, None)
        log_dir = self.context.log_dir
        handles = [
            WorkerHandle(job.role, index, spec, command=[], env={}, log_path=log_dir / f"{job.role}-{index}.log")
            for index, spec in enumerate(specs)
        ]
        for handle in handles:
            handle.begin()
        self._table.add(RoleEntry(job.role, handles))
        self._monitor.watch(handles)
        return [handle.id for handle in handles]

    def restart_worker(self, worker_id: str) -> Worker:
        """Not here: the launcher starts the whole run again."""
        failure = self.worker_failure(worker_id)
        raise SchedulerError(
            f"worker {worker_id} belongs to a launcher, which stops the run when a worker ends and, with "
            f"recover.mode=auto, starts it again{f': {failure}' if failure else ''}"
        )

    def close(self) -> None:
        """Let go of the workers, and let the scripts of the other ranks go on."""
        super().close()
        release(self.context.identity.run_id)

    # --- hooks of the base ----------------------------------------------------------------------------------------
    def _start(self, handles: list[WorkerHandle]) -> None:
        raise WorkerCreationError(
            f"role {handles[0].role!r} needs processes of its own, which a script under a launcher does not start"
        )

    def _stop(self, handles: list[WorkerHandle], grace_s: float) -> None:
        """The launcher does."""

    def _poll(self, handle: WorkerHandle) -> str | None:
        return None  # known to the launcher only

    def _pending(self, handle: WorkerHandle) -> str | None:
        return None

    def _check_count(self, job: Job, count: int) -> None:
        if job.replicas != count:
            raise WorkerConfigurationError(
                f"role {job.role!r} wants {job.replicas} workers and the launcher started {count}; {job.role}.backend "
                "and allocation_mode must name the same sizes"
            )


def attach(config: object) -> AttachedScheduler:
    """The scheduler of this process's launcher.

    Args:
        config: experiment root of the script.

    Raises:
        ConfigError: this process was not started by a launcher.
    """
    identity, token_path = launcher_identity()
    return AttachedScheduler(RunContext.join(config, identity, token_path))


def launcher_identity() -> tuple[RunIdentity, Path]:
    """Identity of the launcher's run, and its token's file.

    Raises:
        ConfigError: the launcher's variables are missing.
    """
    run_id, token_file = _variable(RUN_ID), _variable(TOKEN_FILE)
    return RunIdentity(run_id, read_token(token_file)), Path(token_file)


def released_key(run_id: str) -> str:
    """Name under which rank 0 says that the other ranks' scripts may go on."""
    return f"runs/{run_id}/released"


def release(run_id: str) -> None:
    """Let the scripts of the other ranks go on."""
    name_resolve.add(released_key(run_id), "1", delete_on_exit=False, replace=True)


def _worker_counts() -> dict[str, int]:
    text = _variable(WORKERS)
    try:
        return {role: int(count) for role, _, count in (entry.partition("=") for entry in text.split(","))}
    except ValueError as exc:
        raise ConfigError(f"environment variable {WORKERS}={text!r} must look like 'actor=2,rollout=1'") from exc


def _variable(name: str) -> str:
    value = environ.get_env(name)
    if not value:
        raise ConfigError(
            f"AREAL_SPMD_MODE is set and {name} is not: start the script with python -m areal.infra.launcher.local, or "
            "unset AREAL_SPMD_MODE"
        )
    return value
