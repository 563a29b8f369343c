"""Parts of the Slurm scheduler: what a role asks for, its container, what nodes report, who cleans up after a kill."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from areal.api.config.fields import is_default
from areal.api.config.scheduling import SchedulingSpec
from areal.infra.scheduler import launch
from areal.infra.scheduler.exceptions import GPUAllocationError, WorkerConfigurationError
from areal.infra.scheduler.handles import WorkerHandle
from areal.infra.utils import slurm
from areal.infra.utils.slurm_script import Allocation, Container, TaskFiles
from areal.utils import logging

logger = logging.getLogger("SlurmScheduler")

_MB_PER_GB = 1024
_LISTING_AGE_S = 0.5
_STEP_TIMEOUT_S = 20.0  # of a step that signals processes, beyond their grace


@dataclass(eq=False)
class Task:
    """One incarnation of a worker.

    Attributes:
        job_id: the job whose nodes and devices it uses.
        batch_log: what Slurm itself and srun said about the job.
        beside: the worker that forks it; None for a task that Slurm starts.
        forked: whether that was done.
        step: the srun that put it into a job that ran already.
        ended_at: when its exit file was first seen.
        stopped: whether this process ended it.
    """

    files: TaskFiles
    job_id: int
    batch_log: Path
    beside: WorkerHandle | None = None
    forked: bool = False
    step: subprocess.Popen[bytes] | None = None
    ended_at: float | None = None
    stopped: bool = False


def same_job(spec: SchedulingSpec) -> tuple[object, ...]:
    """Workers that agree in this are tasks of one job."""
    return (spec.cpu, spec.gpu, spec.mem, spec.nodelist, spec.exclude, spec.srun_additional_args)


def allocation(name: str, spec: SchedulingSpec, tasks: int, n_gpus_per_node: int, log_path: Path) -> Allocation:
    """What ``tasks`` equal workers need. Nodes are taken in part where that is enough, and filled evenly.

    Raises:
        GPUAllocationError: one worker needs more devices than a node has.
    """
    wanted = Allocation(
        name=name,
        tasks=tasks,
        log_path=log_path,
        chdir=os.getcwd(),
        cpus_per_task=spec.cpu,
        mem_per_cpu_mb=None if spec.gpu else math.ceil(spec.mem * _MB_PER_GB / spec.cpu),
        nodelist=spec.nodelist,
        exclude=spec.exclude,
    )
    if not spec.gpu:
        return wanted
    if spec.gpu > n_gpus_per_node:
        raise GPUAllocationError(
            f"{name}: scheduling_spec.gpu={spec.gpu} devices per worker, and a node has cluster.n_gpus_per_node="
            f"{n_gpus_per_node}; a worker lives on one node: use fewer devices for each, or correct that setting"
        )
    nodes = math.ceil(tasks / (n_gpus_per_node // spec.gpu))
    per_node = math.ceil(tasks / nodes)
    return dataclasses.replace(
        wanted,
        nodes=nodes,
        tasks_per_node=per_node,
        gpus_per_node=per_node * spec.gpu,
        mem_per_node_mb=per_node * spec.mem * _MB_PER_GB,
    )


def container(spec: SchedulingSpec, where: str) -> Container | None:
    """The image that workers run in, None without one.

    The default of the configuration names an image that few sites have: where it cannot run, workers run without one.

    Args:
        spec: of the workers.
        where: key of ``spec`` for the message, such as ``actor.scheduling_spec``.

    Raises:
        WorkerConfigurationError: the user named an image that this machine cannot run or see.
    """
    if spec.container_type == "none":
        return None
    trouble = None
    if shutil.which("apptainer") is None:
        trouble = "apptainer is not installed on this machine"
    elif "://" not in spec.image and not Path(spec.image).exists():
        trouble = f"there is no image {spec.image}"
    if trouble is None:
        return Container(image=spec.image, mount=spec.mount, gpu=spec.gpu > 0)
    if is_default(spec.container_type) or spec.image == SchedulingSpec().image:
        _log_once(f"scheduling_spec.container_type is taken as 'none': {trouble}")
        return None
    raise WorkerConfigurationError(
        f"{where}.container_type={spec.container_type!r} with image={spec.image!r} cannot run: {trouble}. "
        f"Correct {where}.image, or set {where}.container_type=none to run in this machine's own Python environment"
    )


@functools.cache
def _log_once(text: str) -> None:
    logger.info(text)


def check_srun_arguments(spec: SchedulingSpec, where: str) -> None:
    """Refuse srun options of the pyxis plugin where it is not installed: the job would be queued, then fail.

    Raises:
        WorkerConfigurationError: names the key.
    """
    if "--container-" in spec.srun_additional_args and "--container-image" not in slurm.run(["srun", "--help"]):
        raise WorkerConfigurationError(
            f"{where}.srun_additional_args={spec.srun_additional_args!r} uses --container-..., which srun does not "
            f"know here (it comes with the pyxis plugin); remove it, or use {where}.container_type=apptainer"
        )


def command_inside(command: list[str]) -> list[str]:
    """A worker's command in an image, which has a Python of its own."""
    return ["python3" if word == sys.executable else word for word in command]


def python_path_inside(own: str | None) -> str:
    """``PYTHONPATH`` in an image: the user's code, not this machine's packages."""
    prefixes = {os.path.abspath(prefix) for prefix in (sys.prefix, sys.base_prefix)}
    entries = launch.python_path(own).split(os.pathsep)
    return os.pathsep.join(e for e in entries if not any(Path(e).is_relative_to(prefix) for prefix in prefixes))


def asked_for(batch_log: Path) -> str:
    """What the batch script of a job asks for, for a message."""
    lines = batch_log.with_suffix(".sh").read_text().splitlines()
    return "It asked for: " + " ".join(line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH "))


# --- what nodes report -----------------------------------------------------------------------------------------------
class ExitFiles:
    """Exit statuses that tasks left in a directory, which is read at most every half second. Thread-safe.

    A directory that is opened shows what other machines wrote; asking for one absent file may not, on NFS.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._names: set[str] = set()
        self._read_at = float("-inf")
        self._lock = threading.RLock()

    def status(self, path: Path) -> int | None:
        """Status in the shell's terms (128 + signal), None while the task runs."""
        with self._lock:
            if time.monotonic() - self._read_at > _LISTING_AGE_S:
                self._names = set(os.listdir(self._directory))
                self._read_at = time.monotonic()
            if path.name not in self._names:
                return None
        text = path.read_text().strip()
        return int(text) if text.isdigit() else None


_SIGNAL_MARKED = """grace=$1; shift
patterns=(); for mark; do patterns+=(-e "$mark"); done
marked() { grep -lzxF "${patterns[@]}" /proc/[0-9]*/environ 2>/dev/null | cut -d/ -f3; }
end=$((SECONDS + grace))
(( grace )) && marked | xargs -r kill -TERM 2>/dev/null
while (( SECONDS < end )) && [[ $(marked) ]]; do sleep 0.1; done
for _ in {1..50}; do
    pids=$(marked)
    [[ $pids ]] || exit 0
    kill -KILL $pids 2>/dev/null
    sleep 0.1
done
exit 1"""


def end_processes(job: slurm.JobState, marks: Iterable[str], grace_s: float) -> None:
    """End the processes on a running job's nodes whose environment has one of ``marks``; the job goes on.

    Raises:
        SlurmCommandError: they could not be reached, or some are left.
    """
    step = ["srun", f"--jobid={job.job_id}", "--overlap", f"--nodelist={job.nodes}", "--ntasks-per-node=1"]
    patterns = [f"{launch.MARKER}={mark}" for mark in marks]
    script = ["bash", "-c", _SIGNAL_MARKED, "areal-stop", str(math.ceil(grace_s)), *patterns]
    slurm.run([*step, "--chdir=/", "--cpus-per-task=1", *script], timeout_s=grace_s + _STEP_TIMEOUT_S)


def end_step(step: subprocess.Popen[bytes]) -> None:
    """Wait for the srun of a task that was ended."""
    try:
        step.wait(timeout=5.0)
    except subprocess.TimeoutExpired:
        step.kill()
        step.wait()


# --- after a killed controller ---------------------------------------------------------------------------------------
_REAPER = """trap '' INT TERM HUP
declare -A jobs
while read -r what job; do
    if [[ $what == add ]]; then jobs[$job]=1; else unset "jobs[$job]"; fi
done
(( ${#jobs[@]} == 0 )) || scancel --quiet "${!jobs[@]}" """


class Reaper:
    """A process that cancels the jobs it was told about when this process ends in whatever way, even by SIGKILL.

    It reads from a pipe that only this process writes: its end is this process's end.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.RLock()

    def add(self, job_id: int) -> None:
        """Cancel this job too."""
        self._tell(f"add {job_id}\n")

    def remove(self, job_id: int) -> None:
        """The job has ended."""
        self._tell(f"remove {job_id}\n")

    def close(self) -> None:
        """Cancel the jobs that are left, now."""
        with self._lock:
            if self._process is None:
                return
            assert self._process.stdin is not None
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=10.0)
            self._process = None

    def _tell(self, line: str) -> None:
        with self._lock:
            if self._process is None:
                self._process = subprocess.Popen(
                    ["bash", "-c", _REAPER],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=slurm.submission_env(),
                    start_new_session=True,  # a signal to this process's group must not reach it
                )
            assert self._process.stdin is not None
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
