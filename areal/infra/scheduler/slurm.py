"""The Slurm scheduler: the workers of a role are the tasks of one job, on as many nodes as they need.

::

    submitted --queued--> pending --placed--> running --(task ended, job or node lost)--> failed --(restart)--> ...
                             `--(a reason that never clears)--> error

One ``srun`` starts all workers of a role; each registers its own address, so node names need not resolve. What only
the nodes know (which node, how a task ended) comes back in small files below ``{log_dir}/slurm``, on the storage that
every machine of the run shares. A worker that is restarted gets its old place while its job runs, else a job of its
own. Partition, account, time limit and the like are taken from the ``SBATCH_*`` variables that sbatch itself reads.

Jobs end with the controller: it cancels them when it stops; when it is killed, its reaper does, and workers whose leash
broke end themselves.
"""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import threading
import time
from dataclasses import replace

from areal.infra.run_context import RunContext
from areal.infra.scheduler import launch, slurm_jobs, worker_logs
from areal.infra.scheduler.base import BaseScheduler
from areal.infra.scheduler.exceptions import WorkerCreationError
from areal.infra.scheduler.handles import WorkerHandle
from areal.infra.scheduler.local import describe_exit
from areal.infra.scheduler.slurm_jobs import Task
from areal.infra.utils import slurm
from areal.infra.utils.slurm_script import HOST, SCRIPT_PID, TaskFiles, TaskSpec, batch_script, task_script
from areal.utils import logging

logger = logging.getLogger("SlurmScheduler")

_KILL_WAIT_S = 30.0  # of Slurm after SIGKILL, until it counts a job as ended
_SETTLE_S = 5.0  # a task that ended may be the first sign that its whole job was cancelled
_BATCH_TAIL_LINES = 10
_KEYS = "cpu, gpu, mem, nodelist, exclude"
_SHELL_SIGNAL = 128  # a shell reports the end by signal n as 128 + n


class SlurmScheduler(BaseScheduler):
    """Starts workers as tasks of Slurm jobs.

    Args:
        context: the run. Its ``host``, if set, is the address every worker binds; else each binds its node's own.
        partition: of all jobs; None leaves it to ``SBATCH_PARTITION`` and the cluster's default.
        poll_interval_s: how often Slurm is asked about the run's jobs, all at once.

    Raises:
        SlurmUnavailableError: this machine has no Slurm commands.
    """

    def __init__(self, context: RunContext, *, partition: str | None = None, poll_interval_s: float = 2.0) -> None:
        slurm.require_commands()
        self._partition = partition
        self._watch = slurm.JobWatch(poll_interval_s)
        self._reaper = slurm_jobs.Reaper()
        self._dir = context.log_dir / "slurm" / context.identity.run_id
        self._dir.mkdir(parents=True, exist_ok=True)
        self._exits = slurm_jobs.ExitFiles(self._dir)
        self._tasks: dict[str, Task] = {}  # the newest of each worker
        self._reasons: dict[int, str] = {}  # of each job that waits, the one last logged
        self._refused: dict[int, str] = {}  # why jobs that this process took back would never have started
        self._serial = itertools.count()
        self._lock = threading.RLock()
        super().__init__(context)

    def close(self) -> None:
        super().close()
        self._reaper.close()

    # --- hooks of the base ----------------------------------------------------------------------------------------
    def _start(self, handles: list[WorkerHandle]) -> None:
        fresh = []
        for handle in handles:
            if handle.beside is not None:
                self._prepare_fork(handle, handle.beside)
            elif not self._start_in_place(handle):
                fresh.append(handle)
        for _, group in itertools.groupby(fresh, key=lambda handle: slurm_jobs.same_job(handle.spec)):
            self._submit(list(group))

    def _stop(self, handles: list[WorkerHandle], grace_s: float) -> None:
        leaving = [handle.backend for handle in handles if handle.backend is not None]
        with self._lock:
            for task in leaving:
                task.stopped = True
            used = {task.job_id for task in self._tasks.values() if not task.stopped and task.beside is None}
        whole = {task.job_id for task in leaving if task.beside is None} - used
        try:
            for job_id in {task.job_id for task in leaving} - whole:
                self._stop_some(job_id, [handle for handle in handles if handle.backend in leaving], grace_s)
            self._stop_jobs(whole, grace_s)
        except slurm.SlurmCommandError as exc:  # the reaper and the leashes are left
            logger.warning("Slurm jobs %s may still run: %s", sorted(whole) or "of other workers", exc)
        for task in leaving:
            if task.step is not None:
                slurm_jobs.end_step(task.step)

    def _poll(self, handle: WorkerHandle) -> str | None:
        task: Task | None = handle.backend
        if task is None or (task.beside is not None and not task.forked):
            return None
        status = self._exits.status(task.files.exit)
        if status is None:
            job = self._watch.state(task.job_id)
            if job.ended:
                if task.job_id in self._refused:
                    return self._refused[task.job_id]
                return f"{job}{self._batch_tail(task)}"
            if task.step is not None and task.step.poll() is not None and not task.files.place.exists():
                return f"srun could not place it again: exit code {task.step.returncode}{self._batch_tail(task)}"
            return None
        now = time.monotonic()
        task.ended_at = task.ended_at or now
        ended = describe_exit(status if status <= _SHELL_SIGNAL else _SHELL_SIGNAL - status)
        job = self._watch.state(task.job_id, fresh=True)
        if job.state == "COMPLETING" and now - task.ended_at < _SETTLE_S:
            return None
        return f"{ended}; {job}" if job.ended else ended

    def _pending(self, handle: WorkerHandle) -> str | None:
        task: Task | None = handle.backend
        if task is None:
            return "its job is being submitted"
        if task.beside is not None:
            return self._fork(handle, task, task.beside)
        try:
            job = self._watch.state(task.job_id)
            never = slurm.never_starts(job)
        except slurm.SlurmCommandError as exc:
            return f"Slurm job {task.job_id} was submitted, and Slurm does not answer: {exc}"
        if never is not None:
            self._refused[task.job_id] = (
                f"Slurm job {task.job_id} of role {handle.role!r} can never start: {never}. "
                f"{slurm_jobs.asked_for(task.batch_log)}. "
                f"Ask for less ({_KEYS} of {handle.role}.scheduling_spec, fewer workers), or choose another partition "
                "(SBATCH_PARTITION)"
            )
            with contextlib.suppress(slurm.SlurmCommandError):
                slurm.cancel([task.job_id])
            raise WorkerCreationError(self._refused[task.job_id])
        if not job.waiting:
            return None
        reason = job.reason or job.state
        if self._reasons.get(task.job_id) != reason:
            self._reasons[task.job_id] = reason
            logger.info("Slurm job %d of role %r waits: %s", task.job_id, handle.role, reason)
        return f"Slurm job {task.job_id} waits in the queue: {reason}"

    # --- start ----------------------------------------------------------------------------------------------------
    def _submit(self, handles: list[WorkerHandle]) -> None:
        """One job for all, as tasks 0, 1, ...; their resources are the same."""
        first = handles[0]
        where = f"{first.role}.scheduling_spec"
        slurm_jobs.check_srun_arguments(first.spec, where)
        files = [self._write_task(handle) for handle in handles]
        batch_log = self._dir / f"{first.role}.{next(self._serial)}.batch.log"
        name = f"{self.context.experiment_name}_{self.context.trial_name}:{first.role}"
        wanted = slurm_jobs.allocation(name, first.spec, len(handles), self.n_gpus_per_node, batch_log)
        script = batch_log.with_suffix(".sh")
        script.write_text(
            batch_script(
                replace(wanted, partition=self._partition), [f.script for f in files], first.spec.srun_additional_args
            )
        )
        try:
            job_id = slurm.submit(script)
        except slurm.SlurmCommandError as exc:
            raise WorkerCreationError(
                f"role {first.role!r}: Slurm refused the job {script}: {exc}. {slurm_jobs.asked_for(batch_log)}. "
                f"Ask for what a node has ({_KEYS} of {where}; cluster.n_gpus_per_node)"
            ) from exc
        self._reaper.add(job_id)
        self._watch.add(job_id)
        for handle, own in zip(handles, files, strict=True):
            self._register(handle, Task(own, job_id, batch_log))
        logger.info("role %r: Slurm job %d, %d workers, script %s", first.role, job_id, len(handles), script)

    def _start_in_place(self, handle: WorkerHandle) -> bool:
        """Start a worker that ended once more where it was, with the same devices, if its job runs still."""
        old = self._tasks.get(handle.id) if handle.incarnation else None
        if old is None or not old.files.place.exists() or not self._has_others(old.job_id):
            return False
        job = self._watch.state(old.job_id, fresh=True)
        if job.state != "RUNNING":
            return False
        node, slot = old.files.place.read_text().split()
        files = self._write_task(handle, slot=int(slot))
        command = ["srun", f"--jobid={old.job_id}", "--overlap", f"--nodelist={node}", "--nodes=1", "--ntasks=1"]
        command += [f"--cpus-per-task={handle.spec.cpu}", "bash", str(files.script)]
        with old.batch_log.open("ab") as log:
            step = subprocess.Popen(
                command,
                env=slurm.submission_env(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._register(handle, Task(files, old.job_id, old.batch_log, step=step))
        logger.info("worker %s: started again on node %s in Slurm job %d", handle.id, node, old.job_id)
        return True

    def _has_others(self, job_id: int) -> bool:
        """Whether the first step of a job has tasks that run, without which the job is about to end."""
        with self._lock:
            tasks = [task for task in self._tasks.values() if task.job_id == job_id and task.beside is None]
        return any(
            task.step is None and self._exits.status(task.files.exit) is None for task in tasks if not task.stopped
        )

    def _prepare_fork(self, handle: WorkerHandle, beside: WorkerHandle) -> None:
        parent: Task = beside.backend
        self._register(handle, Task(self._write_task(handle), parent.job_id, parent.batch_log, beside=beside))

    def _fork(self, handle: WorkerHandle, task: Task, beside: WorkerHandle) -> str | None:
        """Have the worker beside start this one, once it can."""
        if not beside.ready:
            return f"worker {beside.id}, beside which it runs, is not ready"
        if not task.forked:
            assert beside.client is not None
            beside.client.fork(handle.role, handle.index, ["bash", str(task.files.script)], {})
            task.forked = True
        return None

    def _register(self, handle: WorkerHandle, task: Task) -> None:
        with self._lock:
            handle.backend = self._tasks[handle.id] = task

    def _write_task(self, handle: WorkerHandle, slot: int | None = None) -> TaskFiles:
        """The script of one incarnation of a worker; only the user may read it, as variables can hold secrets."""
        name = f"{handle.role}-{handle.index}.{next(self._serial)}"  # never twice: a role may be deleted and made again
        files = TaskFiles(
            script=self._dir / f"{name}.sh",
            log=handle.log_path,
            place=self._dir / f"{name}.place",
            exit=self._dir / f"{name}.exit",
        )
        origin = handle.beside or handle  # a forked worker is inside its parent's container already
        image = slurm_jobs.container(origin.spec, f"{origin.role}.scheduling_spec")
        own_path = handle.env.get("PYTHONPATH")
        path = launch.python_path(own_path) if image is None else slurm_jobs.python_path_inside(own_path)
        flags = [] if self.context.host is not None else ["--host", HOST]
        if image is None:  # an image may number its processes by itself
            flags += ["--parent-pid", SCRIPT_PID]
        spec = TaskSpec(
            files=files,
            command=[*(handle.command if image is None else slurm_jobs.command_inside(handle.command)), *flags],
            env={**handle.env, "PYTHONPATH": path},
            gpus=handle.spec.gpu,
            slot=slot,
            keep_devices=handle.beside is not None,
            setup=handle.spec.additional_bash_cmds or (),
            container=image if handle.beside is None else None,
        )
        files.script.touch(mode=0o700)
        files.script.write_text(task_script(spec))
        return files

    # --- stop -----------------------------------------------------------------------------------------------------
    def _stop_jobs(self, job_ids: set[int], grace_s: float) -> None:
        """Cancel whole jobs and wait until Slurm counts them as ended."""
        if not job_ids:
            return
        slurm.cancel(job_ids, kill=grace_s <= 0)
        left = slurm.wait_ended(job_ids, grace_s)
        if left:
            slurm.cancel([job.job_id for job in left], kill=True)
            left = slurm.wait_ended([job.job_id for job in left], _KILL_WAIT_S)
        for job in left:
            logger.warning("%s, %.0f s after it was killed; look at its nodes", job, _KILL_WAIT_S)
        for job_id in job_ids - {job.job_id for job in left}:
            self._reaper.remove(job_id)

    def _stop_some(self, job_id: int, handles: list[WorkerHandle], grace_s: float) -> None:
        """End some workers of a job whose others go on."""
        marks = [handle.env[launch.MARKER] for handle in handles if handle.backend.job_id == job_id]
        job = self._watch.state(job_id, fresh=True)
        if job.state == "RUNNING":
            slurm_jobs.end_processes(job, marks, grace_s)

    # --- messages -------------------------------------------------------------------------------------------------
    def _batch_tail(self, task: Task) -> str:
        """What Slurm itself wrote about a job that ended."""
        text = worker_logs.tail(task.batch_log, lines=_BATCH_TAIL_LINES)
        if text:
            return f". Slurm wrote:\n{text}\n"
        return f"; nothing was written to {task.batch_log}: do the nodes share that directory (cluster.fileroot)?"
