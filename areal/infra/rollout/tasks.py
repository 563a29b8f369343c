"""Single tasks: what the 1.x methods ``submit``, ``wait`` and ``wait_for_task`` stand on.

Task ids count up from 0 per executor; groups of the loader take theirs here too, so that no two files or log lines
share one.
"""

from __future__ import annotations

import threading
from typing import Any

from areal.api.trajectory import Row
from areal.infra.rollout.acceptance import AcceptFn
from areal.infra.rollout.dispatcher import Dispatcher, Finished
from areal.infra.rollout.groups import GroupTask

EVAL_EPOCH = -1  # submitted tasks have no epoch; keeps their seeds apart from those of training rows


class TaskDesk:
    """Ids and results of submitted tasks."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._lock = threading.Lock()
        self._next = 0
        self._open: set[int] = set()
        self._unpublished = 0

    def new_id(self) -> int:
        """A fresh task id."""
        with self._lock:
            while self._next in self._open:
                self._next += 1
            self._next += 1
            return self._next - 1

    def claim(self, task_id: int | None) -> int:
        """Reserve the caller's id, or a fresh one, until its result is taken.

        Raises:
            ValueError: the id is in use.
        """
        chosen = self.new_id() if task_id is None else task_id
        with self._lock:
            if chosen in self._open:
                raise ValueError(f"task_id={chosen} is in use: its result was not taken yet")
            self._open.add(chosen)
        return chosen

    def submit(
        self, task_id: int, data: dict[str, Any], workflow: Any, accept: AcceptFn | None, group_size: int, is_eval: bool
    ) -> None:
        """Queue a claimed task."""
        row = Row(epoch=EVAL_EPOCH, position=task_id, index=task_id)
        self._dispatcher.submit(
            GroupTask(task_id, data, workflow, accept, group_size, row, task_id, from_loader=False, is_eval=is_eval)
        )

    def is_open(self, task_id: int) -> bool:
        """Whether the id was submitted and its result not taken."""
        return task_id in self._open

    def finished(self) -> int:
        """Tasks whose result can be taken."""
        return len(self._dispatcher.results)

    def take(self, task_id: int) -> Finished | None:
        """The result of one task, if it is there; under the condition."""
        item = self._dispatcher.results.pop(task_id, None)
        if item is None:
            return None
        self._open.discard(task_id)
        if item.ref is not None:
            if item.task.is_eval:
                self._dispatcher.manager.on_rollout_consumed()
            else:
                self._unpublished += 1  # keeps its room until the next version
        return item

    def take_oldest(self, count: int) -> list[Finished] | None:
        """The ``count`` results that started first, if there are so many; under the condition."""
        results = self._dispatcher.results
        if len(results) < count:
            return None
        oldest = sorted(results, key=lambda task_id: results[task_id].task.sequence)[:count]
        return [item for task_id in oldest if (item := self.take(task_id)) is not None]

    def published(self) -> None:
        """A newer version is in service: what was taken before frees its room; under the condition."""
        self._dispatcher.manager.on_rollout_consumed(self._unpublished)
        self._unpublished = 0
