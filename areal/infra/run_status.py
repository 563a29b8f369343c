"""What a run is doing right now, as plain data that travels as JSON.

Each :class:`WorkflowExecutor` gives a :class:`RolloutStatus` (see ``infra/rollout/probe.py``), the scheduler gives one
:class:`WorkerStatus` per worker, and ``trainer/diagnostics.py`` joins them to a :class:`RunStatus`. The status server
sends it, ``areal status`` shows it. Times are seconds since 1970. Loads nothing heavy: the command line imports it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from areal.utils.errors import DataError

if TYPE_CHECKING:
    from areal.infra.rollout.executor import WorkflowExecutor

_TEXT_LIMIT = 2000  # characters of an error that are kept


@dataclass(frozen=True)
class ErrorStatus:
    """The last thing that went wrong; it need not have ended the run."""

    type: str
    text: str
    when: float

    @classmethod
    def of(cls, error: BaseException) -> ErrorStatus:
        """Note ``error`` now, without keeping it (and the frames it holds) alive."""
        return cls(type(error).__name__, str(error)[:_TEXT_LIMIT], time.time())


@dataclass
class WorkerStatus:
    """One worker process.

    Attributes:
        state: ``alive``, ``starting``, ``silent``, ``failed`` or ``ended``.
        last_seen: when it last answered; None if it never did.
        version: weight version it serves; None where it has none.
        engine_busy_s: seconds that its engine's current call has run so far; 0 if it is idle.
        detail: how it failed, or why it has not started.
    """

    role: str
    index: int
    address: str | None = None
    state: str = "alive"
    last_seen: float | None = None
    version: int | None = None
    engine_busy_s: float | None = None
    detail: str = ""

    @property
    def id(self) -> str:
        """``role/index``."""
        return f"{self.role}/{self.index}"


@dataclass
class WaitStatus:
    """A wait of the controller: why, on which phase of the ledger it is booked, and since when."""

    reason: str
    kind: str
    since: float


@dataclass
class RolloutStatus:
    """One executor; all numbers are groups unless they say otherwise.

    Attributes:
        version: weight version that new groups start at.
        waiting: rows read and not started.
        submitted: tasks of ``submit`` not started.
        running: in flight.
        ready: finished, in no step yet.
        in_step: taken by the step whose weights are not published.
        capacity: how many more may start now; below 0 while a smaller limit takes effect.
        staleness: age in versions, when taken for training -> samples, over the whole life of this controller.
        counts: accepted, filtered, failed, retried, lost and stale groups in the same time, and rows ``trained``.
        exact: false if the executor did not give up its lock in time, so that the numbers may not fit each other.
    """

    name: str
    version: int = 0
    paused: bool = False
    waiting: int = 0
    submitted: int = 0
    running: int = 0
    ready: int = 0
    in_step: int = 0
    capacity: int = 0
    staleness: dict[int, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    wait: WaitStatus | None = None
    last_error: ErrorStatus | None = None
    exact: bool = True


@dataclass
class RunStatus:
    """One run.

    Attributes:
        time: when this snapshot was taken.
        step: global step that runs, from 0; None outside the steps.
        version: weight version of the newest published step; None where nothing is published.
        tokens_per_s: of the last finished step.
    """

    experiment: str
    trial: str
    run_id: str = ""
    pid: int = 0
    host: str = ""
    started: float = 0.0
    time: float = 0.0
    phase: str = ""
    phase_since: float = 0.0
    step: int | None = None
    total_steps: int = 0
    version: int | None = None
    tokens_per_s: float | None = None
    rollouts: list[RolloutStatus] = field(default_factory=list)
    workers: list[WorkerStatus] = field(default_factory=list)
    last_error: ErrorStatus | None = None

    @property
    def waiting(self) -> WaitStatus | None:
        """The oldest wait of any executor."""
        waits = [rollout.wait for rollout in self.rollouts if rollout.wait is not None]
        return min(waits, key=lambda wait: wait.since, default=None)


def executor_status(executor: WorkflowExecutor) -> RolloutStatus:
    """What ``executor`` is doing; reads only, and waits for its lock no longer than a moment."""
    return executor.probe.status()


def to_json(status: RunStatus) -> bytes:
    """JSON of a status; keys are those of the dataclasses."""
    return msgspec.json.encode(status)


def from_json(data: bytes) -> RunStatus:
    """Inverse of :func:`to_json`; unknown keys are left out, so that another version's controller can be read.

    Raises:
        DataError: it is no status.
    """
    try:
        return msgspec.json.decode(data, type=RunStatus)
    except msgspec.MsgspecError as exc:
        raise DataError(f"the controller's answer is no run status: {exc}") from exc
