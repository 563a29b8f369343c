"""What every launcher does: start workers and scripts, wait, and after a failure stop everything and start it again.

    read plan ─► checks ─► workers ─► scripts ─► wait ─► all ended with 0: done
                   ▲                              └─ one failed ─► all stopped ─► back-off ─┐
                   └────────────── recover.mode on/auto, at most recover.retries times ─────┘

Launchers differ only by the scheduler that hosts their workers. Called by ``local``, ``ray`` and ``slurm``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from typing import Any

from areal.api.scheduler_api import Job, Worker
from areal.infra.launcher.plan import LaunchPlan, read_plan
from areal.infra.run_context import RunContext
from areal.infra.scheduler.attached import WORKERS, release
from areal.infra.scheduler.base import BaseScheduler
from areal.utils import fs, logging, name_resolve
from areal.utils.errors import ArealError, SchedulerError, WorkerFailedError
from areal.utils.version import get_version_info

logger = logging.getLogger("Launcher")

SCRIPT = "areal.infra.launcher.script_rank.ScriptRank"
VERSION_FILE = "version.json"
_WAIT_S = 20.0  # one question to a script
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_ECHO_S = 0.25
_KILLED = 128  # exit code of a process that ended by signal n: 128 + n

MakeScheduler = Callable[[RunContext], BaseScheduler]


class JobException(SchedulerError):  # noqa: N818 - its public 1.x name
    """A part of a run ended with a failure; the whole run is stopped.

    Attributes:
        job: the worker or script that failed.
        exit_code: for this process to end with.
    """

    def __init__(self, message: str, job: str = "", exit_code: int = 1) -> None:
        super().__init__(message)
        self.job = job
        self.exit_code = exit_code


class Launch:
    """One attempt at a run.

    Args:
        scheduler: hosts the workers; closed by the caller.
        plan: what to start.
    """

    def __init__(self, scheduler: BaseScheduler, plan: LaunchPlan) -> None:
        self._scheduler = scheduler
        self._plan = plan
        self._lost: Future[None] = Future()  # fails with the first worker

    def start(self) -> None:
        """Start workers, then a script on every rank.

        Raises:
            SchedulerError: something could not be started.
        """
        scheduler, plan = self._scheduler, self._plan
        scheduler.on_failure(self._note_failure)
        if plan.replicas:
            scheduler.create_workers(Job("rollout", plan.replicas, [plan.rollout]))
        scheduler.create_workers(Job("actor", plan.ranks, [plan.actor]))
        workers = scheduler.get_workers("actor")
        if plan.replicas:
            scheduler.get_workers("rollout")
        arguments = [str(plan.script), *plan.arguments]
        for rank, worker in enumerate(workers):
            env = self._rank_env(rank, workers)
            scheduler.make_engine(worker.id, SCRIPT, rank, arguments, env, os.getcwd(), engine_name=_script(rank))
        logger.info(f"{plan.script.name} runs on {plan.ranks} ranks beside {plan.replicas} rollout workers")

    def wait(self) -> None:
        """Block until every script has ended.

        Raises:
            JobException: a script or a worker failed.
        """
        asyncio.run(self._wait_all())

    async def _wait_all(self) -> None:
        scripts = asyncio.gather(*(self._wait_one(rank) for rank in range(self._plan.ranks)))
        lost = asyncio.wrap_future(self._lost)
        waiting: list[asyncio.Future[Any]] = [scripts, lost]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        ended = lost if lost.done() else scripts
        for future in waiting:
            future.cancel()
        await ended

    async def _wait_one(self, rank: int) -> None:
        worker, status = f"actor/{rank}", None
        while status is None:
            status = await self._scheduler.async_call_engine(
                worker, "wait", _WAIT_S, engine_name=_script(rank), http_timeout=_WAIT_S + 60.0
            )
        if status:
            how = f"exit code {status}" if status > 0 else f"signal {signal.Signals(-status).name}"
            tail = self._scheduler.log_tail(worker)
            raise JobException(
                f"rank {rank} of {self._plan.script} ended with {how}. "
                f"Last {len(tail.splitlines())} lines of its log:\n{tail}",
                _script(rank),
                status if status > 0 else _KILLED - status,
            )
        if rank == 0:  # also if the script did not close its trainer
            release(self._scheduler.context.identity.run_id)

    def _note_failure(self, worker_id: str, cause: str) -> None:
        """From the scheduler's threads: a worker ended."""
        with contextlib.suppress(InvalidStateError):  # only the first counts
            self._lost.set_exception(JobException(f"worker {worker_id} failed: {cause}", worker_id))

    def _rank_env(self, rank: int, workers: Sequence[Worker]) -> dict[str, str]:
        """torchrun's variables for one rank, and how its trainer finds the workers.

        A rank sees its own device only, so that is number 0; without devices ``LOCAL_RANK`` counts the machine's ranks.
        """
        here = [index for index, worker in enumerate(workers) if worker.ip == workers[rank].ip]
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(workers)),
            "LOCAL_RANK": "0" if self._plan.actor.gpu else str(here.index(rank)),
            "LOCAL_WORLD_SIZE": str(len(here)),
            "MASTER_ADDR": workers[0].ip,
            "MASTER_PORT": workers[0].worker_ports[-1],
            "AREAL_SPMD_MODE": "1",
            WORKERS: self._plan.workers,
        }


class LogEcho:
    """Copies what workers and scripts write to this process's standard output, while a ``with`` block runs.

    ``merged.log`` also has the controller's records under ``[main]``; they are in its worker's log as well.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log-echo", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(5.0)

    def _run(self) -> None:
        while not self._stop.wait(_ECHO_S):
            self._copy()
        self._copy()

    def _copy(self) -> None:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return  # nothing was written yet
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        lines = [line for line in whole.splitlines(keepends=True) if not line.startswith(b"[main]")]
        sys.stdout.write(b"".join(lines).decode("utf-8", "replace"))
        sys.stdout.flush()


def run(plan: LaunchPlan, make_scheduler: MakeScheduler) -> None:
    """Run to the end, with restarts.

    Raises:
        JobException: a part failed and the run may not start again.
        ArealError: it could not be started.
    """
    recover = plan.config.recover
    for attempt in range(recover.retries + 1):
        try:
            run_once(plan, make_scheduler, attempt)
        except JobException as exc:
            if recover.mode not in ("on", "auto"):
                exc.add_note("set recover.mode=auto (with recover.freq_steps) to have failed runs started again")
                raise
            if attempt == recover.retries:
                exc.add_note(f"the run was started again recover.retries={recover.retries} times before")
                raise
            pause_s = min(_FIRST_PAUSE_S * 2**attempt, _LONGEST_PAUSE_S)
            logger.error(f"{exc}\nEverything was stopped. Restart {attempt + 1} of {recover.retries} in {pause_s:g} s.")
            time.sleep(pause_s)
        else:
            return


def run_once(plan: LaunchPlan, make_scheduler: MakeScheduler, attempt: int = 0) -> None:
    """One attempt: start, wait, stop everything in any case.

    Raises:
        JobException: a part failed.
        ArealError: it could not be started.
    """
    context = RunContext.from_config(plan.config)
    try:
        _write_version(context, plan, attempt)
        scheduler = make_scheduler(context)
    except BaseException:
        context.close()
        raise
    launch = Launch(scheduler, plan)
    with LogEcho(context.log_dir / "merged.log"):
        try:
            launch.start()
            launch.wait()
        except WorkerFailedError as exc:
            raise JobException(str(exc)) from exc
        finally:
            scheduler.close()
            name_resolve.clear_subtree(f"runs/{context.identity.run_id}")


def main(
    name: str,
    make_scheduler: MakeScheduler,
    argv: Sequence[str] | None = None,
    check: Callable[[LaunchPlan], None] | None = None,
) -> int:
    """What ``python -m areal.infra.launcher.<name>`` does; returns the exit code.

    Args:
        name: of the launcher, which is that of its scheduler.
        make_scheduler: hosts the workers of one attempt.
        argv: script and its arguments; None takes the command line.
        check: refuses a plan that cannot work there.
    """
    warnings.warn(
        f"python -m areal.infra.launcher.{name} is deprecated; run the script itself: "
        f"python script.py --config c.yaml scheduler.type={name}",
        FutureWarning,
        stacklevel=2,
    )
    try:
        plan = read_plan(sys.argv[1:] if argv is None else argv)
        if check is not None:
            check(plan)
        sys.path.insert(0, str(plan.script.parent))  # workers import what stands beside the script, as the script does
        run(plan, make_scheduler)
    except KeyboardInterrupt:
        return _KILLED + signal.SIGINT
    except (ArealError, OSError) as exc:
        notes = "".join(f"\n{note}" for note in getattr(exc, "__notes__", ()))
        logger.error(f"{type(exc).__name__}: {exc}{notes}")
        return exc.exit_code if isinstance(exc, JobException) else 1
    return 0


def _write_version(context: RunContext, plan: LaunchPlan, attempt: int) -> None:
    """Record which code the run began with; a run that resumes keeps the record."""
    path = context.log_dir / VERSION_FILE
    resumes = plan.config.recover.mode in ("on", "auto") and path.exists()
    if attempt or resumes:
        return
    info = get_version_info()
    fs.atomic_write_json(
        path,
        {
            "version": info.version,
            "commit": info.commit,
            "branch": info.branch,
            "is_dirty": info.is_dirty,
            "experiment_name": context.experiment_name,
            "trial_name": context.trial_name,
        },
    )


def _script(rank: int) -> str:
    return f"script/{rank}"
