"""Keeps rows ready to start, without ever making the loop wait for a record.

The dispatcher asks (:meth:`Feeder.want`) whenever rows run low; one helper thread at a time reads them from the ledger.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from areal.api.trajectory import Row
from areal.infra.rollout.groups import GroupTask
from areal.infra.rollout.rows import RowLedger
from areal.infra.rollout.task_runner import AsyncTaskRunner

MakeTask = Callable[[Row, dict[str, Any]], GroupTask]


class Feeder:
    """Reads rows ahead.

    Args:
        runner: whose loop ``want`` is called in.
        ledger: dispenses the rows.
        deliver: given the tasks, in order, in the loop thread; an empty list means that there are no more rows for now.

    Attributes:
        make_task: turns a row and its record into a task; None until a loader is attached.
        active: a read is under way.
    """

    def __init__(self, runner: AsyncTaskRunner, ledger: RowLedger, deliver: Callable[[list[GroupTask]], None]) -> None:
        self._runner = runner
        self._ledger = ledger
        self._deliver = deliver
        self.make_task: MakeTask | None = None
        self.active = False

    @property
    def dry(self) -> bool:
        """Whether no row will come, unless one that is under way fails or is filtered."""
        return self.make_task is None or (not self.active and self._ledger.exhausted)

    def want(self, number: int) -> None:
        """Have ``number`` more rows delivered, unless a read is under way already; only in the loop thread."""
        if number > 0 and not self.active and not self.dry:
            self.active = True
            self._runner.start(self._feed(number))

    async def _feed(self, number: int) -> None:
        try:
            tasks = await asyncio.to_thread(self._read, number)
        finally:
            self.active = False
        self._deliver(tasks)

    def _read(self, number: int) -> list[GroupTask]:
        assert self.make_task is not None
        tasks: list[GroupTask] = []
        while len(tasks) < number and (found := self._ledger.dispense()) is not None:
            tasks.append(self.make_task(*found))
        return tasks
