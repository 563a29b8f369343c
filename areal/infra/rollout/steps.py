"""Steps: which groups make up the next batch, and how its rows end.

Fixed by the first batch: loader, workflow, filter, group size. Called by the executor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

from areal.api.trajectory import Row, TrajectoryRef
from areal.infra.rollout.acceptance import AcceptFn
from areal.infra.rollout.dispatcher import Dispatcher, Finished
from areal.infra.rollout.failures import RowsExhaustedError
from areal.infra.rollout.groups import GroupTask
from areal.infra.rollout.staleness import select_groups
from areal.infra.rollout.tasks import TaskDesk
from areal.utils import logging

logger = logging.getLogger("WorkflowExecutor")


class StepBook:
    """Takes complete steps out of what is ready.

    Args:
        dispatcher: holds the groups.
        desk: gives task ids.
        policy: ``wait`` holds a step for groups that would become too old; ``drop`` does not, and generates the rows of
            groups that became too old again; ``train`` uses them all the same.

    Attributes:
        ages: versions between drawing and training, of each group taken since the last export.
        histogram: the same age -> samples taken since the start.
    """

    def __init__(self, dispatcher: Dispatcher, desk: TaskDesk, policy: Literal["wait", "drop", "train"]) -> None:
        self._dispatcher = dispatcher
        self._desk = desk
        self._policy = policy
        self._loader: Any = None
        self._in_step: list[Finished] = []
        self.ages: list[int] = []
        self.histogram: Counter[int] = Counter()

    @property
    def attached(self) -> bool:
        """Whether the first batch was asked for."""
        return self._loader is not None

    @property
    def in_step(self) -> int:
        """Groups of the step whose weights are not published."""
        return len(self._in_step)

    def same_loader(self, loader: Any) -> bool:
        """Whether ``loader`` is the one in use."""
        return loader is self._loader

    def attach(self, loader: Any, workflow: Any, accept: AcceptFn | None, group_size: int, dynamic_bs: bool) -> None:
        """Dispense rows of ``loader`` from now on.

        Raises:
            ValueError: the loader has no batch size, or it exceeds ``rollout.queue_size``.
        """
        dispatcher = self._dispatcher
        batch = int(getattr(loader, "batch_size", 0) or 0)
        if batch < 1:
            raise ValueError(f"the data loader ({type(loader).__name__}) needs a batch_size >= 1")
        queue_size = dispatcher.limits.queue_size
        if queue_size is not None and queue_size < batch:
            raise ValueError(f"rollout.queue_size={queue_size} must be at least the batch size {batch}")
        self._set_sizes(loader, batch)
        is_eval = dispatcher.limits.is_eval

        def make_task(row: Row, record: dict[str, Any]) -> GroupTask:
            group_id = (row.epoch << 40) + row.position
            return GroupTask(
                self._desk.new_id(),
                record,
                workflow,
                accept,
                group_size,
                row,
                group_id,
                from_loader=True,
                is_eval=is_eval,
            )

        with dispatcher.condition:
            dispatcher.keep_rejected = dynamic_bs
            dispatcher.ledger.replaced = not dynamic_bs
            dispatcher.ledger.attach(loader)
            dispatcher.feeder.make_task = make_task
        self._loader = loader

    def next_step(self) -> tuple[int, int]:
        """Number of the next step, which is the version it is trained at, and its rows."""
        step = self._dispatcher.version + (1 if self._in_step else 0)
        return step, self._dispatcher.manager.rows_of(step)

    def take(self, step: int, count: int) -> list[Finished] | None:
        """Take the groups of ``step``, if they are complete and young enough; the caller holds the condition.

        Raises:
            RowsExhaustedError: they will never be complete.
        """
        dispatcher, manager = self._dispatcher, self._dispatcher.manager
        if self._policy != "train":
            self._drop_stale(step - manager.max_staleness)
        ready = [(item.task.sequence, item.task.start_version) for item in dispatcher.ready]
        if len(ready) < count:
            self._check_supply(step, count)
            return None
        running = dispatcher.running_versions if self._policy == "wait" else {}
        chosen = select_groups(ready, running, step, manager.max_staleness, manager.rows_of)
        if chosen is None:
            return None
        picked = set(chosen)
        taken = [dispatcher.ready[i] for i in chosen]
        dispatcher.ready = [item for i, item in enumerate(dispatcher.ready) if i not in picked]
        refs = [item.ref for item in taken if item.ref is not None]
        dispatcher.empty_in_step += count - len(refs)
        self._in_step += taken
        aged = [(step - ref.min_version, len(ref.lengths)) for ref in refs if ref.min_version >= 0]
        self.ages += [age for age, _ in aged]
        for age, samples in aged:
            self.histogram[age] += samples
        return taken

    def done(self) -> None:
        """End the rows of the step as trained and free their room; the caller holds the condition."""
        rows = [item.ref.row for item in self._in_step if item.ref is not None]
        self._in_step = []
        self._dispatcher.empty_in_step = 0
        for row in rows:
            self._dispatcher.ledger.end(row, "trained")
        self._dispatcher.manager.on_rollout_consumed(len(rows))

    def regenerate_ready(self, lost: Callable[[TrajectoryRef], bool]) -> int:
        """Generate again what no step has taken and is lost; the caller holds the condition. Returns how many."""
        dispatcher = self._dispatcher
        gone = [item for item in dispatcher.ready if item.ref is not None and lost(item.ref)]
        gone_ids = {id(item) for item in gone}
        dispatcher.ready = [item for item in dispatcher.ready if id(item) not in gone_ids]
        for item in gone:
            dispatcher.regenerate(item, "lost")
        return len(gone)

    def reopen(self) -> None:
        """Put the groups of the open step back among the finished ones; the caller holds the condition."""
        self._dispatcher.ready += self._in_step
        self._dispatcher.empty_in_step = 0
        self._in_step = []

    def _set_sizes(self, loader: Any, batch: int) -> None:
        manager = self._dispatcher.manager
        if batch != manager.consumer_batch_size:
            logger.warning(
                f"rollout.consumer_batch_size={manager.consumer_batch_size} differs from the loader's "
                f"batch_size={batch}; "
                f"{batch} is used"
            )
            if manager.max_concurrent_rollouts == manager.consumer_batch_size:
                manager.max_concurrent_rollouts = batch
            manager.consumer_batch_size = batch
        if hasattr(loader, "step_size"):
            manager.step_size = loader.step_size

    def _drop_stale(self, oldest: int) -> None:
        """Throw away finished groups that started before ``oldest``; their rows are generated again."""
        dispatcher = self._dispatcher
        stale = [item for item in dispatcher.ready if item.ref is not None and item.task.start_version < oldest]
        if not stale:
            return  # an attempt without a trajectory does not age: it stays, as one of its step's attempts
        dispatcher.ready = [item for item in dispatcher.ready if item.ref is None or item.task.start_version >= oldest]
        for item in stale:
            dispatcher.regenerate(item)
        dispatcher.kick()

    def _check_supply(self, step: int, count: int) -> None:
        dispatcher, ledger = self._dispatcher, self._dispatcher.ledger
        if not dispatcher.running and not dispatcher.waiting and dispatcher.feeder.dry:
            raise RowsExhaustedError(
                f"step {step} needs {count} rows, but only {len(dispatcher.ready)} are left of a total of "
                f"{ledger.total}: "
                f"{ledger.counts}, {ledger.outstanding} without an end"
            )
