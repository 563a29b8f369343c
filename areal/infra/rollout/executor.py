"""The rollout executor: rows and workflows in, batches of checked trajectories out.

The trainer calls, each step::

    batch = executor.next_batch(loader, workflow, ...)   # ordered by row; older than max_head_offpolicyness never
    ...                                                  # score, update, publish (set_version comes with the publish)
    executor.step_done()                                 # the rows of the batch end as trained

Between the calls generation goes on in the executor's thread. The 1.x methods (submit, wait, rollout_batch,
prepare_batch, pause, resume) are the same machinery.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from areal.api.trajectory import TrajectoryRef
from areal.infra.rollout.acceptance import AcceptFn, resolve_accept_fn
from areal.infra.rollout.admission import admission_gate
from areal.infra.rollout.dispatcher import Dispatcher, DispatchLimits
from areal.infra.rollout.dump import TrajectoryDumper, build_dumper
from areal.infra.rollout.failures import FailureWindow, RolloutStoppedError
from areal.infra.rollout.groups import GroupResult, GroupRunner, GroupTask, RemoteRunner
from areal.infra.rollout.lost_groups import LostGroups
from areal.infra.rollout.probe import RolloutProbe
from areal.infra.rollout.recipe import RecipeResolver
from areal.infra.rollout.resolve import WorkflowResolver
from areal.infra.rollout.rows import RowLedger
from areal.infra.rollout.staleness import StalenessManager
from areal.infra.rollout.steps import StepBook
from areal.infra.rollout.task_runner import AsyncTaskRunner
from areal.infra.rollout.tasks import TaskDesk
from areal.infra.rollout.waiting import Waiter, WaitLimit
from areal.infra.step_ledger import StepLedger
from areal.utils import logging
from areal.utils.errors import DataError, RolloutTimeoutError

if TYPE_CHECKING:
    from areal.api.cli_args import InferenceEngineConfig
    from areal.api.workflow_api import WorkflowLike

logger = logging.getLogger("WorkflowExecutor")

EVAL_STALENESS = 10**12  # evaluation has no bound on age
STATE_FORMAT = 1


class WorkflowExecutor:
    """Runs episodes of one engine under the staleness bound.

    Args:
        config: section ``rollout``.
        engine: handed to workflows as ``engine``; its optional ``hold_admission`` and ``release_admission`` are used.
        run_seed: seed of the run.
        tokenizer: decodes dumped trajectories; None dumps token ids only.
        is_eval: evaluation: no staleness bound, statistics under ``eval-rollout``.
        dump_dir: write trajectories there; None follows ``config.dump_to_file``.
        remote: runs the groups in other processes; None runs them here, against ``engine``.
    """

    def __init__(  # noqa: PLR0913 - the pieces it joins
        self,
        config: InferenceEngineConfig,
        engine: Any,
        *,
        run_seed: int = 1,
        tokenizer: Any = None,
        is_eval: bool = False,
        dump_dir: str | os.PathLike[str] | None = None,
        remote: RemoteRunner | None = None,
    ) -> None:
        self.config = config
        self.ledger = RowLedger()
        batch = max(1, config.consumer_batch_size)
        self.staleness_manager = StalenessManager(
            self,
            config.max_concurrent_rollouts or batch,
            batch,
            EVAL_STALENESS if is_eval else config.max_head_offpolicyness,
        )
        self.staleness_manager.on_rollout_consumed(0)  # consumption is reported, see step_done
        runner = AsyncTaskRunner("eval-rollout" if is_eval else "rollout", lambda error: self._dispatcher.fail(error))
        self._dispatcher = Dispatcher(
            runner,
            remote or GroupRunner(engine, run_seed, config.episode_timeout_s),
            self.staleness_manager,
            self.ledger,
            FailureWindow(config.failure_window, config.max_failure_share, max(8, batch)),
            DispatchLimits(config.max_row_retries, is_eval, config.enable_rollout_tracing, config.queue_size),
        )
        self._dispatcher.gate = admission_gate(engine if remote is None else remote)
        self._dispatcher.on_finish = self._dump
        self.waiter = Waiter(self._dispatcher, config.log_wait_interval_s, config.episode_timeout_s, StepLedger())
        self._dumper: TrajectoryDumper | None = None  # rollout workers write their own
        if remote is None:
            self._dumper = build_dumper(config, tokenizer, is_eval, dump_dir)
        self._is_eval = is_eval
        self._desk = TaskDesk(self._dispatcher)
        self._steps = StepBook(self._dispatcher, self._desk, "train" if is_eval else config.on_stale)
        name = "eval-rollout" if is_eval else "rollout"
        self.probe = RolloutProbe(name, self._dispatcher, self._steps, self.waiter)
        self.lost_groups = LostGroups(self._dispatcher, self._steps)
        self._resolve: Callable[..., Any] = WorkflowResolver() if remote is None else RecipeResolver()
        self._recipe: tuple[Any, ...] = ()

    # -- life cycle ----------------------------------------------------------------------------------------------------

    def initialize(self, train_data_parallel_size: int | None = None) -> None:
        """Start the rollout thread. Limits are global: ``train_data_parallel_size`` (1.x) divides nothing."""
        self._dispatcher.runner.initialize()
        self._dispatcher.paused = False

    def destroy(self) -> None:
        """Stop everything and finish the dumps; safe to call twice. Waiting callers get a RolloutStoppedError."""
        self._dispatcher.fail(RolloutStoppedError("the executor was destroyed"))
        self._dispatcher.runner.destroy()
        if self._dumper is not None:
            self._dumper.close()

    def pause(self) -> None:
        """Start no further episodes; those that run go on."""
        self._dispatcher.paused = True

    def resume(self) -> None:
        """Start episodes again."""
        self._dispatcher.paused = False
        self._dispatcher.kick()

    def use_ledger(self, ledger: StepLedger) -> None:
        """Book waiting times on the trainer's ledger."""
        self.waiter.ledger = ledger

    # -- version and books ---------------------------------------------------------------------------------------------

    def get_version(self) -> int:
        """Weight version that new groups start at."""
        return self._dispatcher.version

    def set_version(self, version: int) -> None:
        """Record the version now in service. A newer one ends the step: its rows were trained."""
        with self._dispatcher.condition:
            newer = version > self._dispatcher.version
            self._dispatcher.version = version
        if newer:
            self.step_done()

    def step_done(self) -> None:
        """End the rows of the last batch as trained, and free their room; does nothing if there is no open step."""
        with self._dispatcher.condition:
            self._steps.done()
            self._desk.published()
        if self._dispatcher.runner.alive:
            self._dispatcher.kick()

    def set_total_rows(self, total: int | None) -> None:
        """Stop dispensing once this many rows are trained or under way; None means no end."""
        self.ledger.total = total

    def state_dict(self) -> dict[str, Any]:
        """Cursor, ordered rows without an end, counters. No trajectories: those rows are generated again."""
        return {"format": STATE_FORMAT, "rows": self.ledger.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state`` was taken; call before the first batch, and ``set_version`` beside it.

        Raises:
            DataError: the state has another format.
            RolloutStoppedError: rows were dispensed already.
        """
        if state.get("format") != STATE_FORMAT:
            raise DataError(f"rollout state has format {state.get('format')!r}; this version reads {STATE_FORMAT}")
        if self._steps.attached:
            raise RolloutStoppedError("load_state_dict comes before the first batch")
        self.ledger.load_state_dict(state["rows"])

    def export_stats(self) -> dict[str, float]:
        """Counters since the last export, and the age of the samples handed out, under ``rollout/`` or
        ``eval-rollout/``.

        ``accepted``, ``rejected`` (filtered and failed), ``failed``, ``retried``, ``lost``, ``stale`` count groups;
        ``dropped/<reason>`` counts samples; ``staleness/{avg,max}`` is in versions.
        """
        with self._dispatcher.condition:
            counts = dict(self._dispatcher.counts)
            self.probe.absorb(counts)
            self._dispatcher.counts.clear()
            ages, self._steps.ages = self._steps.ages, []
            running = len(self._dispatcher.running)
        rejected = counts.get("filtered", 0) + counts.get("failed", 0) - counts.get("retried", 0)
        stats: dict[str, float] = {
            "accepted": counts.get("accepted", 0),
            "rejected": rejected,
            "running": running,
            **counts,
        }
        if ages:
            stats |= {"staleness/avg": sum(ages) / len(ages), "staleness/max": max(ages)}
        scope = "eval-rollout" if self._is_eval else "rollout"
        return {f"{scope}/{name}": float(value) for name, value in stats.items()}

    # -- steps ---------------------------------------------------------------------------------------------------------

    def next_batch(  # noqa: PLR0913 - public 1.x signature of prepare_batch
        self,
        loader: Any,
        workflow: WorkflowLike,
        workflow_kwargs: dict[str, Any] | None = None,
        should_accept_fn: AcceptFn | str | None = None,
        group_size: int = 1,
        dynamic_bs: bool = False,
    ) -> list[TrajectoryRef]:
        """The groups of one step, ordered by row; blocks until they are there.

        The first call fixes loader, workflow, filter and group size; other values later are ignored with a warning.

        Args:
            loader: our RowLoader, or any iterable of lists of records with ``batch_size``.
            workflow: object, class or import string.
            workflow_kwargs: of a class.
            should_accept_fn: filter over the group's table; function or import string.
            group_size: samples per row, >= 1.
            dynamic_bs: count rejected rows as part of the batch and return only the accepted ones.

        Raises:
            RolloutTimeoutError: the limit ``rollout.wait_timeout_s`` passed, or nothing could end the wait.
            RolloutFailedError: too many samples failed; the first original exception is chained.
            RowsExhaustedError: the data cannot fill the step.
            ValueError: bad arguments, see :func:`areal.infra.rollout.resolve.resolve_workflow`; ``queue_size`` below
            the batch size.
        """
        dispatcher, steps = self._dispatcher, self._steps
        dispatcher.raise_if_failed()
        recipe = (workflow, workflow_kwargs, should_accept_fn, group_size, dynamic_bs)
        if not steps.attached:
            resolved, accept = self._resolve(workflow, workflow_kwargs), resolve_accept_fn(should_accept_fn)
            steps.attach(loader, resolved, accept, _check_group_size(group_size), dynamic_bs)
        elif not steps.same_loader(loader) or recipe != self._recipe:
            logger.warning("next_batch: loader, workflow, filter and group size of the first call stay in use")
        self._recipe = recipe
        dispatcher.kick()
        step, count = steps.next_step()
        taken = self.waiter.wait_for(
            lambda: steps.take(step, count),
            lambda: len(dispatcher.ready) >= count or not dispatcher.running,
            lambda: f"{max(0, count - len(dispatcher.ready))} of {count} groups",
            WaitLimit(self.config.wait_timeout_s, "rollout.wait_timeout_s"),
        )
        dispatcher.kick()
        return sorted((item.ref for item in taken if item.ref is not None), key=lambda ref: ref.row)

    def prepare_batch(  # noqa: PLR0913 - public 1.x signature
        self,
        dataloader: Any,
        workflow: WorkflowLike,
        workflow_kwargs: dict[str, Any] | None = None,
        should_accept_fn: AcceptFn | str | None = None,
        group_size: int = 1,
        dynamic_bs: bool = False,
    ) -> list[dict[str, Any]]:
        """:meth:`next_batch` as plain tables. ``set_version`` ends the step."""
        batch = self.next_batch(dataloader, workflow, workflow_kwargs, should_accept_fn, group_size, dynamic_bs)
        return [ref.data for ref in batch]

    # -- single tasks --------------------------------------------------------------------------------------------------

    def submit(  # noqa: PLR0913 - public 1.x signature
        self,
        data: dict[str, Any],
        workflow: WorkflowLike,
        workflow_kwargs: dict[str, Any] | None = None,
        should_accept_fn: AcceptFn | str | None = None,
        group_size: int = 1,
        task_id: int | None = None,
        is_eval: bool = False,
    ) -> int:
        """Queue one row and return its task id; never blocks. ``is_eval`` tasks are not bound by staleness.

        Raises:
            ValueError: the id is in use; bad workflow or filter.
            RolloutStoppedError: not initialised, or stopped.
            RolloutFailedError: too many samples failed before.
        """
        self._dispatcher.raise_if_failed()
        _check_group_size(group_size)
        resolved, accept = self._resolve(workflow, workflow_kwargs), resolve_accept_fn(should_accept_fn)
        task_id = self._desk.claim(task_id)
        self._desk.submit(task_id, data, resolved, accept, group_size, is_eval or self._is_eval)
        return task_id

    def wait(self, count: int, timeout: float | None = None, raise_timeout: bool = True) -> list[dict[str, Any] | None]:
        """``count`` finished tasks of :meth:`submit`, those that started first, in start order; None for rejected ones.

        Args:
            count: tasks to wait for, > 0.
            timeout: seconds; None waits as long as something can still happen.
            raise_timeout: False returns ``[]`` when the time is over.

        Raises:
            RolloutTimeoutError: time is over.
            ValueError: ``count <= 0``.
        """
        if count <= 0:
            raise ValueError(f"count={count} must be > 0")
        desk = self._desk
        try:
            items = self.waiter.wait_for(
                lambda: desk.take_oldest(count),
                lambda: desk.finished() >= count,
                lambda: f"{max(0, count - desk.finished())} of {count} tasks",
                WaitLimit(timeout, "timeout", expected=timeout is not None and not raise_timeout),
            )
        except RolloutTimeoutError:
            if raise_timeout or timeout is None:
                raise
            return []
        return [None if item.ref is None else item.ref.data for item in items]

    def wait_for_task(
        self, task_id: int, timeout: float | None = None, raise_timeout: bool = True
    ) -> dict[str, Any] | None:
        """The trajectory of one task; None if it was rejected, or on timeout with ``raise_timeout=False``.

        Raises:
            RolloutTimeoutError: time is over.
            ValueError: the id was never submitted, or its result was taken already.
        """
        if not self._desk.is_open(task_id):
            raise ValueError(f"task_id={task_id} was never submitted, or its result was taken already")
        try:
            item = self.waiter.wait_for(
                lambda: self._desk.take(task_id),
                lambda: task_id in self._dispatcher.results,
                lambda: f"task {task_id}",
                WaitLimit(timeout, "timeout", expected=timeout is not None and not raise_timeout),
            )
        except RolloutTimeoutError:
            if raise_timeout or timeout is None:
                raise
            return None
        return None if item.ref is None else item.ref.data

    def rollout_batch(
        self,
        data: list[dict[str, Any]],
        workflow: WorkflowLike,
        workflow_kwargs: dict[str, Any] | None = None,
        group_size: int = 1,
    ) -> list[dict[str, Any]]:
        """Run all rows and return the trajectories of those that were not rejected, in the order of ``data``.

        Bound by staleness like everything else: more rows than capacity wait for newer versions.
        """
        if not data:
            return []
        resolved = self._resolve(workflow, workflow_kwargs)
        with self._dispatcher.batched():
            ids = [self.submit(row, resolved, group_size=group_size) for row in data]
        found = [self.wait_for_task(task_id, self.config.wait_timeout_s) for task_id in ids]
        return [table for table in found if table is not None]

    def _dump(self, task: GroupTask, result: GroupResult) -> None:
        if self.config.check_trajectory_format and result.ref is not None:
            shapes = {key: tuple(value.shape) for key, value in result.ref.data.items() if hasattr(value, "shape")}
            logger.info(f"task {task.task_id}: {shapes}")
        if self._dumper is not None and result.ref is not None:
            self._dumper.write(task.task_id, result.ref, result.status, task.is_eval)


def _check_group_size(group_size: int) -> int:
    if group_size < 1:
        raise ValueError(f"group_size={group_size} must be >= 1")
    return group_size
