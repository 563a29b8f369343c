"""What starts when: the state machine between rows, running groups and steps.

    loader ─feed─► waiting ─pump─► running ─finish─► ready ─take─► in step ─publish─► trained
    submit ──────────┘                └─► results (of submitted tasks)   └─ retry: back to the head of waiting

Everything below is guarded by one condition. ``pump``, ``feed`` and ``finish`` run in the loop thread, woken by events;
the other methods run in the controller's threads. Nothing polls.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from areal.api.trajectory import TrajectoryRef
from areal.infra.rollout.admission import AdmissionGate, admit_together
from areal.infra.rollout.failures import Backoff, FailureWindow, RolloutFailedError, RolloutStoppedError
from areal.infra.rollout.feeder import Feeder
from areal.infra.rollout.groups import GroupResult, GroupTask, RemoteRunner
from areal.infra.rollout.rows import RowLedger
from areal.infra.rollout.staleness import StalenessManager
from areal.infra.rollout.task_runner import AsyncTaskRunner
from areal.infra.run_status import ErrorStatus
from areal.utils import logging

logger = logging.getLogger("Rollout")

_LOGGED, _LOGGED_EVERY = 20, 100  # groups in trouble that are logged each, and how often further ones are
_REFUSED_BATCHES = 100  # batches' worth of rows refused in a row that end the run


@dataclass(slots=True)
class Finished:
    """A group that ended; ``ref`` is None if it has nothing to train on."""

    task: GroupTask
    ref: TrajectoryRef | None


@dataclass
class DispatchLimits:
    """Settings of one dispatcher.

    Attributes:
        max_row_retries: times a failed row is tried again.
        is_eval: no staleness bound, only concurrency.
        trace: log every start and end.
        queue_size: rows kept ready to start; None means as many as a step.
    """

    max_row_retries: int
    is_eval: bool
    trace: bool
    queue_size: int | None = None


class Dispatcher:
    """Starts groups as capacity allows and sorts what comes back.

    Attributes:
        condition: guards everything; notified when a waiter's predicate may hold.
        waiting, submitted: tasks not started, of the loader and of ``submit``.
        running: started tasks by id.
        ready: finished groups of the loader that no step has taken.
        results: finished tasks of ``submit`` by id.
        keep_rejected: rejected groups count as attempts of a step (dynamic batch size).
        empty_in_step: attempts without a trajectory in the step whose version is not published.
        version: current weight version.
        last_error: of the newest sample or group in trouble.
    """

    def __init__(
        self,
        runner: AsyncTaskRunner,
        groups: RemoteRunner,
        manager: StalenessManager,
        ledger: RowLedger,
        window: FailureWindow,
        limits: DispatchLimits,
    ) -> None:
        self.condition = threading.Condition()
        self.runner, self.groups, self.manager, self.ledger = runner, groups, manager, ledger
        self.window, self.limits = window, limits
        self.waiting: deque[GroupTask] = deque()
        self.submitted: deque[GroupTask] = deque()
        self.running: dict[int, GroupTask] = {}
        self.running_versions: Counter[int] = Counter()
        self.ready: list[Finished] = []
        self.results: dict[int, Finished] = {}
        self.keep_rejected = False
        self.empty_in_step = 0
        self.version = 0
        self.paused = False
        self.failure: BaseException | None = None
        self.counts: Counter[str] = Counter()
        self.last_error: ErrorStatus | None = None
        self.on_finish: Callable[[GroupTask, GroupResult], None] | None = None
        self.gate: AdmissionGate | None = None
        self.feeder = Feeder(runner, ledger, self._fed)
        self.predicates: list[Callable[[], bool]] = []
        self._sequence = 0
        self._batching = 0
        self._kicked = False
        self._refused = self._troubled = 0
        self._backoff = Backoff(self._schedule_pump)

    # -- called by the controller's threads ----------------------------------------------------------------------------

    def kick(self) -> None:
        """Look soon whether something can start."""
        with self.condition:
            if self._kicked or self.failure is not None:
                return
            self._kicked = True
        self.runner.call(self._pump)

    def submit(self, task: GroupTask) -> None:
        """Queue a task of ``submit``."""
        with self.condition:
            self.submitted.append(task)
            self.manager.on_rollout_enqueued()
        self.kick()

    @contextlib.contextmanager
    def batched(self) -> Iterator[None]:
        """Start what is submitted inside the ``with`` block together."""
        with self.condition:
            self._batching += 1
        try:
            yield
        finally:
            with self.condition:
                self._batching -= 1
            self.kick()

    def fail(self, error: BaseException) -> None:
        """Stop starting anything; the error surfaces in the next call of the controller. The first one is kept."""
        with self.condition:
            if self.failure is None:
                self.failure = error
            self.condition.notify_all()

    def raise_if_failed(self) -> None:
        """Raise what ended the rollout, if anything did, with its own traceback as the cause."""
        if isinstance(self.failure, RolloutFailedError):
            raise RolloutFailedError(str(self.failure)) from self.failure.__cause__
        if self.failure is not None:
            raise RolloutStoppedError(
                f"the rollout has stopped: {type(self.failure).__name__}: {self.failure}"
            ) from self.failure
        if not self.runner.alive:
            raise RolloutStoppedError("the rollout thread is not running: call initialize() first")

    @property
    def synchronous(self) -> bool:
        """Whether a step's groups are started as one wave, so that their admission does not depend on timing."""
        manager = self.manager
        return (
            self.gate is not None
            and not self.limits.is_eval
            and manager.max_staleness == 0
            and manager.max_concurrent_rollouts >= manager.consumer_batch_size
        )

    def capacity(self) -> int:
        """Groups of the loader that may start now; attempts without a trajectory hold room under dynamic batch size."""
        if self.limits.is_eval:
            return self.manager.get_concurrency()
        empty = self.empty_in_step + (sum(item.ref is None for item in self.ready) if self.keep_rejected else 0)
        return self.manager.get_capacity() - empty

    # -- in the loop thread --------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Start whatever may start."""
        with self.condition:
            self._kicked = False
            if self.paused or self.failure is not None or self._batching or self._backoff.active:
                return
            idle = not self.running
            tasks = [] if self.synchronous and not idle else self._take_startable()
            if idle and tasks:
                self.condition.notify_all()  # waiters book their time on another reason now
            low = max(self.manager.consumer_batch_size, self.capacity())
            self.feeder.want(min(low, self.limits.queue_size or low) - len(self.waiting))
        samples = sum(task.group_size for task in tasks)
        if self.gate is not None and idle and samples > 1 and (self.synchronous or self.limits.is_eval):
            starts = [functools.partial(self._start, task) for task in tasks]
            self.runner.start(admit_together(self.gate, starts, samples))
        else:
            for task in tasks:
                self._start(task)

    def _start(self, task: GroupTask, on_request: Callable[[], None] | None = None) -> None:
        self.runner.start(self._run(task, on_request))

    def _fed(self, tasks: list[GroupTask]) -> None:
        """Take rows from the feeder; none means that waiters may have to give up."""
        with self.condition:
            self.waiting.extend(tasks)
            for _ in tasks:
                self.manager.on_rollout_enqueued()
            if not tasks:
                self.condition.notify_all()
                return
        self._pump()

    def _take_startable(self) -> list[GroupTask]:
        capacity = self.capacity()
        if self.synchronous and not self.submitted and len(self.waiting) < capacity and not self.feeder.dry:
            return []  # the wave waits until the feeder has brought all of it
        tasks: list[GroupTask] = []
        concurrency = self.manager.get_concurrency()
        while concurrency > 0:
            if self.submitted and (capacity > 0 or self.submitted[0].is_eval):
                task = self.submitted.popleft()
            elif self.waiting and capacity > 0:
                task = self.waiting.popleft()
            else:
                break
            capacity, concurrency = capacity - 1, concurrency - 1
            task.sequence, self._sequence = self._sequence, self._sequence + 1
            task.start_version = self.version
            self.running[task.task_id] = task
            if task.from_loader:
                self.running_versions[task.start_version] += 1
            self.manager.on_rollout_submitted()
            tasks.append(task)
        return tasks

    async def _run(self, task: GroupTask, on_request: Callable[[], None] | None) -> None:
        if self.limits.trace:
            logger.info(f"task {task.task_id} started at v{task.start_version} (row {task.row})")
        result = await self.groups.run(task, on_request)
        if self.limits.trace:
            logger.info(f"task {task.task_id} {result.status}; dropped samples: {result.dropped or 'none'}")
        self._finish(task, result)

    def _finish(self, task: GroupTask, result: GroupResult) -> None:
        with self.condition:
            del self.running[task.task_id]
            if task.from_loader:
                self.running_versions[task.start_version] -= 1
                if not self.running_versions[task.start_version]:
                    del self.running_versions[task.start_version]
            self._count(task, result)
            item = self._settle(task, result)
            if item is not None and task.from_loader:
                self.ready.append(item)
            elif item is not None:
                self.results[task.task_id] = item
            if any(predicate() for predicate in self.predicates):
                self.condition.notify_all()
        if self.on_finish is not None:
            self.on_finish(task, result)
        self._schedule_pump()

    def _schedule_pump(self) -> None:
        """Pump once after all the groups that finish in this turn of the loop."""
        if not self._kicked:
            self._kicked = True
            self.runner.loop.call_soon(self.runner.guarded, self._pump)

    def _count(self, task: GroupTask, result: GroupResult) -> None:
        self.counts[result.status] += 1
        for reason, number in result.dropped.items():
            self.counts[f"dropped/{reason}"] += number
        self.window.expect_group(task.group_size)
        for end in result.ends:
            if end is None:
                self.window.success()
                self._backoff.worked()
            elif (stop := self.window.failure(end)) is not None and self.failure is None:
                self.fail(stop)
        if (error := result.error) is not None:
            self._troubled += 1
            self.last_error = ErrorStatus.of(error)
            if self._troubled <= _LOGGED or self._troubled % _LOGGED_EVERY == 0:
                logger.warning(
                    f"row {task.row.index} (epoch {task.row.epoch}) {result.status}; dropped samples: "
                    f"{result.dropped or 'none'}; first error of trouble no. {self._troubled}: {type(error).__name__}: "
                    f"{error}",
                    exc_info=error if self._troubled <= _LOGGED // 4 else None,
                )

    def _settle(self, task: GroupTask, result: GroupResult) -> Finished | None:
        """What to hand out; None if the task went back to the head of its queue, or its row is replaced."""
        if result.status == "accepted":
            self._refused = 0
            self.manager.on_rollout_accepted()
            return Finished(task, result.ref)
        self.manager.on_rollout_rejected()
        if result.status == "lost":
            self._backoff.lost(self.runner.loop)
            self._requeue(task)
            return None
        if result.status == "failed" and task.from_loader:
            task.attempts += 1
            if task.attempts <= self.limits.max_row_retries:
                self.counts["retried"] += 1
                self._requeue(task)
                return None
        if task.from_loader:
            self._refuse()
            self.ledger.end(task.row, "failed" if result.status == "failed" else "filtered")
            if not self.keep_rejected:
                return None
        return Finished(task, None)

    def _refuse(self) -> None:
        """Give up on data of which nothing is accepted any more."""
        self._refused += 1
        limit = _REFUSED_BATCHES * self.manager.consumer_batch_size
        if self._refused >= limit and self.failure is None:
            self.fail(
                RolloutFailedError(
                    f"{self._refused} rows in a row ended without a trajectory to train on (the filter refused them, "
                    f"or every "
                    "sample returned None): check should_accept_fn, or stop training on data that is solved"
                )
            )

    def _requeue(self, task: GroupTask) -> None:
        task.sequence = task.start_version = -1
        (self.waiting if task.from_loader else self.submitted).appendleft(task)
        self.manager.on_rollout_enqueued()

    def regenerate(self, item: Finished, why: str = "stale") -> None:
        """Let go of an accepted group (too old, or gone) and generate its row again. The caller holds the condition."""
        self.manager.on_rollout_consumed()
        self.counts[why] += 1
        self._requeue(item.task)
