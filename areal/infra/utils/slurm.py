"""Talking to Slurm: submit a job, ask how jobs are, cancel them, and tell waits that end from waits that never do.

In: job ids and script paths. Out: ``JobState`` values. Called by the Slurm scheduler and launcher; scripts come from
``areal.infra.utils.slurm_script``. Only text output that every release prints is read: ``squeue --json`` exists only in
builds with a JSON library, and lists every job of the cluster.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from areal.utils import environ
from areal.utils.errors import ConfigError, SchedulerError

COMMANDS = ("sbatch", "srun", "squeue", "scancel", "scontrol")
NOT_FOUND = "NOT_FOUND"
_ACTIVE = frozenset({"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "STAGE_OUT"})
_WAITING = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD"})
_COMMAND_TIMEOUT_S = 60.0
_CANCEL_POLL_S = 0.2
_GONE = ("Invalid job id", "already completing or completed", "not found")  # what scancel says of an ended job

# Reasons that no other job's end removes: limits per job or node refuse the request itself, others wait for somebody.
_PERMANENT = re.compile(
    r"PartitionNodeLimit|PartitionTimeLimit|DependencyNeverSatisfied|BadConstraints|InvalidAccount|InvalidQOS"
    r"|AccountNotAllowed|QOSNotAllowed|QOSTimeLimit|JobHoldMaxRequeue|NodeDown|launch.failed.requeued.held"
    r"|(Assoc|QOS)Max\w*Per(Job|Node)\w*|(Assoc|QOS)MaxWallDuration\w*|QOSMin\w+|QOSUsageThreshold"
    r"|(Assoc|QOS)Grp\w*(?<!Run)Minutes(Limit)?"
)
_UNAVAILABLE_NODES = re.compile(r"ReqNodeNotAvail.*UnavailableNodes:(\S+)")
_DOWN_NODE = re.compile(r"(down|fail|error|drain|unknown|future|power(ed)?_down_fail)", re.IGNORECASE)


class SlurmUnavailableError(ConfigError):
    """This machine cannot submit Slurm jobs."""


class SlurmCommandError(SchedulerError):
    """A Slurm command failed; the message holds what it printed."""


@dataclass(frozen=True)
class JobState:
    """One job as Slurm reports it.

    Attributes:
        state: ``PENDING``, ``RUNNING``, ``FAILED``, ...; ``NOT_FOUND`` when Slurm no longer knows the job.
        reason: why it waits or failed; empty when Slurm gives none.
        exit_code: ``code:signal`` of an ended job.
        nodes: where it runs, in Slurm's notation (``n[1-2]``).
    """

    job_id: int
    state: str
    reason: str = ""
    exit_code: str = ""
    nodes: str = ""

    @property
    def ended(self) -> bool:
        """Whether nothing of the job runs or will run."""
        return self.state not in _ACTIVE | _WAITING

    @property
    def waiting(self) -> bool:
        """Whether it has not begun to run."""
        return self.state in _WAITING

    def __str__(self) -> str:
        facts = [f"exit code {self.exit_code}"] if self.exit_code else []
        facts += [f"reason {self.reason}"] if self.reason else []
        return f"Slurm job {self.job_id} is {self.state}" + (f" ({', '.join(facts)})" if facts else "")


def require_commands(user: str = "scheduler.type=slurm") -> None:
    """Refuse to go on where Slurm's commands are not installed.

    Args:
        user: the setting that needs them.

    Raises:
        SlurmUnavailableError: names the setting, what is missing and the remedy.
    """
    missing = [command for command in COMMANDS if shutil.which(command) is None]
    if missing:
        raise SlurmUnavailableError(
            f"{user} needs the command{'s' if len(missing) > 1 else ''} {', '.join(missing)}, which this machine "
            "does not have on PATH; start the run on a node from which jobs are submitted, or use scheduler.type=local"
        )


def run(command: Sequence[str], timeout_s: float = _COMMAND_TIMEOUT_S) -> str:
    """Standard output of a Slurm command.

    Raises:
        SlurmCommandError: it failed or did not end in time.
    """
    try:
        done = subprocess.run(  # outside a job: srun and sbatch read what they are to do from SLURM_* variables
            list(command),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=submission_env(),
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise SlurmCommandError(f"{command[0]} did not work: {exc}") from exc
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "nothing")[-2000:]
        raise SlurmCommandError(f"{' '.join(command)} ended with exit code {done.returncode} and printed: {said}")
    return done.stdout


def submission_env() -> dict[str, str]:
    """This process's environment without what Slurm set for the job this process may itself be in."""
    return {
        name: value
        for name, value in environ.environ_copy().items()
        if name == "SLURM_CONF" or not name.startswith(("SLURM_", "SLURMD_", "PMI_"))
    }


def submit(script: Path) -> int:
    """Hand a batch script to Slurm; returns the job's id.

    Raises:
        SlurmCommandError: Slurm refused it.
    """
    printed = run(["sbatch", "--parsable", str(script)]).strip()
    number = printed.splitlines()[-1].partition(";")[0] if printed else ""  # "12" or "12;cluster"
    if not number.isdigit():
        raise SlurmCommandError(f"sbatch {script} printed {printed!r} instead of a job id")
    return int(number)


def query_jobs(job_ids: Iterable[int]) -> dict[int, JobState]:
    """How each job is; ended ones with their exit code.

    Raises:
        SlurmCommandError: Slurm's controller does not answer.
    """
    wanted = sorted(set(job_ids))
    if not wanted:
        return {}
    command = ["squeue", "--noheader", "--states=all", f"--jobs={','.join(map(str, wanted))}", "--format=%i|%T|%r|%N"]
    try:
        found = parse_squeue(run(command))
    except SlurmCommandError as exc:
        if "Invalid job id" not in str(exc):
            raise
        found = {}  # none of them is in the queue any more
    return {
        job_id: found[job_id] if job_id in found and not found[job_id].ended else _ended_job(job_id)
        for job_id in wanted
    }


def parse_squeue(text: str) -> dict[int, JobState]:
    """Jobs in the lines ``id|state|reason|nodes``."""
    found = {}
    for line in text.splitlines():
        job_id, state, reason, nodes = line.strip().split("|")
        found[int(job_id)] = JobState(int(job_id), state, _reason(reason), nodes=nodes)
    return found


def parse_scontrol(line: str) -> JobState:
    """The job in a line of ``scontrol -o show job``."""
    values = dict(re.findall(r"(\w+)=(\S*)", line)[::-1])  # a name that comes twice counts where it comes first
    return JobState(
        int(values["JobId"]),
        values["JobState"],
        _reason(values.get("Reason", "")),
        values.get("ExitCode", ""),
        "" if values.get("NodeList") == "(null)" else values.get("NodeList", ""),
    )


def _reason(text: str) -> str:
    return "" if text in ("None", "(null)", "") else text


def _ended_job(job_id: int) -> JobState:
    """Details of a job that is no longer active, from whoever still knows it."""
    try:
        return parse_scontrol(run(["scontrol", "-o", "show", "job", str(job_id)]))
    except SlurmCommandError as exc:
        if "Invalid job id" not in str(exc):
            raise
    try:  # clusters with accounting remember longer
        lines = run(["sacct", "-n", "-X", "-P", "-j", str(job_id), "-o", "State,ExitCode"]).split("\n")
        state, _, code = lines[0].partition("|")
        return JobState(job_id, state.split()[0], "", code) if state.strip() else JobState(job_id, NOT_FOUND)
    except SlurmCommandError:
        return JobState(job_id, NOT_FOUND)


def never_starts(job: JobState) -> str | None:
    """Why a pending job will never run, None when waiting may help."""
    if job.state == "PENDING" and _PERMANENT.match(job.reason):
        return job.reason
    if job.state == "PENDING" and (match := _UNAVAILABLE_NODES.match(job.reason)):
        down = _down_nodes(match.group(1))
        return f"{job.reason}; out of service: {', '.join(down)}" if down else None
    return None


def _down_nodes(nodes: str) -> list[str]:
    printed = run(["sinfo", "--noheader", "--Node", f"--nodes={nodes}", "--format=%N %T"])
    lines = dict.fromkeys(line.strip() for line in printed.splitlines() if line.strip())
    return [line for line in lines if _DOWN_NODE.match(line.split()[-1])]


def cancel(job_ids: Iterable[int], *, kill: bool = False) -> None:
    """Ask Slurm to end jobs: SIGTERM to their tasks, or SIGKILL with ``kill``; jobs that have ended are fine.

    Raises:
        SlurmCommandError: Slurm's controller does not answer.
    """
    ids = [str(job_id) for job_id in sorted(set(job_ids))]
    if not ids:
        return
    for options in (["--full", "--signal=KILL"], []) if kill else ([],):
        try:
            run(["scancel", *options, *ids])
        except SlurmCommandError as exc:
            if not any(said in str(exc) for said in _GONE):
                raise


def wait_ended(job_ids: Iterable[int], timeout_s: float) -> list[JobState]:
    """Block until the jobs have ended; returns those that have not after ``timeout_s`` seconds."""
    wanted = set(job_ids)
    deadline = time.monotonic() + timeout_s
    while True:
        left = [job for job in query_jobs(wanted).values() if not job.ended]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(_CANCEL_POLL_S)


class JobWatch:
    """Answers how jobs are, asking Slurm at most once per interval for all of them. Thread-safe.

    Args:
        interval_s: how old an answer may be.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._known: dict[int, JobState] = {}
        self._ended: dict[int, JobState] = {}
        self._asked_at = float("-inf")
        self._lock = threading.RLock()

    def add(self, job_id: int) -> None:
        """Include a job that was just submitted."""
        with self._lock:
            self._known[job_id] = JobState(job_id, "PENDING", "submitted")

    def state(self, job_id: int, *, fresh: bool = False) -> JobState:
        """How a job is, now (``fresh``) or at most an interval ago.

        Raises:
            SlurmCommandError: Slurm's controller does not answer.
        """
        with self._lock:
            if job_id in self._ended:
                return self._ended[job_id]
            if fresh or time.monotonic() - self._asked_at >= self._interval_s:
                self._asked_at = time.monotonic()  # also when it fails: a silent controller is not asked more often
                self._known.update(query_jobs([known for known in self._known if known not in self._ended]))
                self._ended.update({known: job for known, job in self._known.items() if job.ended})
            return self._known[job_id]
