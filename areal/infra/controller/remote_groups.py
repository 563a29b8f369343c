"""Groups that run in rollout workers, behind the interface of ``GroupRunner``; what an executor uses in their place."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

from areal.api.trajectory import TrajectoryRef
from areal.infra.controller.tables import RemoteTable
from areal.infra.controller.worker_pool import WorkerPool
from areal.infra.rollout.groups import GroupResult, GroupTask
from areal.infra.rollout.orders import GroupOrder, GroupReport, RemoteSampleError
from areal.infra.rpc.rtensor import RTensor
from areal.utils.errors import InfrastructureError


class RemoteGroups:
    """Runs groups on the workers of a pool.

    Args:
        pool: the workers.
    """

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool

    async def run(self, task: GroupTask, on_request: Callable[[], None] | None = None) -> GroupResult:
        """See ``GroupRunner.run``; ``on_request`` is called as soon as the group is on its way."""
        order = GroupOrder(
            key=self._pool.new_key(),
            recipe=self._pool.recipe_number(task.workflow, task.accept),
            task_id=task.task_id,
            data=task.data,
            group_size=task.group_size,
            epoch=task.row.epoch,
            position=task.row.position,
            index=task.row.index,
            group_id=task.group_id,
            from_loader=task.from_loader,
            is_eval=task.is_eval,
        )
        future = self._pool.submit(order)
        if on_request is not None:
            for _ in range(task.group_size):
                on_request()
        try:
            report, owner = await asyncio.wrap_future(future)
        except InfrastructureError:  # the pool has said why; the row goes back to the head of its queue
            return GroupResult("lost", dropped={"lost": task.group_size})
        return self._result(task, report, owner)

    def hold_admission(self) -> None:
        """Collect groups, to be admitted as one."""
        self._pool.hold()

    def release_admission(self) -> None:
        """Send what was collected."""
        self._pool.release()

    def _result(self, task: GroupTask, report: GroupReport, owner: tuple[str, int]) -> GroupResult:
        ends: list[BaseException | None] = [None] * report.succeeded
        ends += [RemoteSampleError(failure) for failure in report.failures]
        ref = None
        if report.shard is not None:

            def release(shard: RTensor, pool: WorkerPool = self._pool) -> None:
                pool.free(owner, shard)

            table = RemoteTable(report.shard, owner, release, sum(report.lengths), len(report.lengths), report.columns)
            ref = TrajectoryRef(
                row=task.row,
                group_id=task.group_id,
                lengths=report.lengths,
                rewards=report.rewards,
                min_version=report.min_version,
                max_version=report.max_version,
                data=cast("dict[str, Any]", table),  # a mapping that fetches what is read
            )
        return GroupResult(report.status, ref, ends, report.dropped)  # type: ignore[arg-type]  # one of Status
