"""How many groups may be under way, and which of the finished ones make up a step.

One group is everything generated for one dispensed row. The bound: a group started at version s is trained at version
s + max_staleness at the latest. It has two halves, both here:

* :class:`StalenessManager` limits what is started, so that the steps up to version s + max_staleness have room for it;
* :func:`select_groups` limits what a step may take, so that stragglers are not overtaken until they are too old.

Called by the dispatcher under its lock; the public class is thread-safe on its own as well.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from areal.api.io_struct import RolloutStat

_UNBOUNDED = 10_000  # max_staleness above this means "no bound"; the budget is then not summed step by step
StepSize = Callable[[int], int]


class VersionProvider(Protocol):
    """Anything that knows the current weight version."""

    def get_version(self) -> int:
        """Current weight version, 0 before the first update."""
        ...


class StalenessManager:
    """Counts groups and says how many more may start.

    Capacity is ``min(max_concurrent - running, budget - running - unpublished)``. ``budget`` is the number of rows in
    the steps of versions v .. v + max_staleness, that is ``(max_staleness + 1) * batch`` for equal steps.
    ``unpublished`` are accepted groups whose step's weights are not published yet: those that wait (`ready`) and those
    in the current step. A caller that never reports consumption (:meth:`on_rollout_consumed`) gets the 1.x rule, which
    assumes that ``version * batch`` groups were consumed.

    Args:
        version_provider: source of the current version.
        max_concurrent_rollouts: groups that may run at once; at least 1 is used.
        consumer_batch_size: rows per step; at least 1 is used.
        max_staleness: versions a sample may be old when it is trained, >= 0.
        step_size: rows of step k; None means ``consumer_batch_size`` for every step.
    """

    def __init__(
        self,
        version_provider: VersionProvider,
        max_concurrent_rollouts: int,
        consumer_batch_size: int,
        max_staleness: int,
        *,
        step_size: StepSize | None = None,
    ) -> None:
        self.version_provider = version_provider
        self.max_concurrent_rollouts = max(1, max_concurrent_rollouts)
        self.consumer_batch_size = max(1, consumer_batch_size)
        self.max_staleness = max_staleness
        self.step_size = step_size
        self._lock = threading.Lock()
        self._stat = RolloutStat()
        self._consumed: int | None = None

    def get_concurrency(self) -> int:
        """How many more groups fit beside the running ones, whatever their age; may be negative."""
        with self._lock:
            return self.max_concurrent_rollouts - self._stat.running

    def get_capacity(self) -> int:
        """How many groups may be started now; may be negative."""
        with self._lock:
            version = self.version_provider.get_version()
            stat = self._stat
            consumed = version * self.consumer_batch_size if self._consumed is None else self._consumed
            room = self._budget(version) - stat.running - (stat.accepted - consumed)
            return min(self.max_concurrent_rollouts - stat.running, room)

    def rows_of(self, step: int) -> int:
        """Rows of step ``step``."""
        return self.consumer_batch_size if self.step_size is None else self.step_size(step)

    def get_pending_limit(self) -> int:
        """How many rows are worth keeping ready to start."""
        return (self.max_staleness + 1) * self.consumer_batch_size

    def on_rollout_enqueued(self) -> None:
        """A group waits to be started."""
        self._add(enqueued=1)

    def on_rollout_submitted(self) -> None:
        """A waiting group was started."""
        self._add(enqueued=-1, running=1)

    def on_rollout_accepted(self) -> None:
        """A running group ended with a trajectory."""
        self._add(running=-1, accepted=1)

    def on_rollout_rejected(self) -> None:
        """A running group ended without one; its room is free again."""
        self._add(running=-1, rejected=1)

    def on_rollout_consumed(self, count: int = 1) -> None:
        """``count`` accepted groups left for good: their step's version is published, or they were dropped."""
        with self._lock:
            self._consumed = (self._consumed or 0) + count

    def on_version_recovered(self, version: int) -> None:
        """Start counting at ``version`` after a resume: nothing is accepted beyond the steps already trained."""
        with self._lock:
            self._stat.accepted = version * self.consumer_batch_size
            if self._consumed is not None:
                self._consumed = self._stat.accepted

    def get_stats(self) -> RolloutStat:
        """A copy of the counters."""
        with self._lock:
            return replace(self._stat)

    def _add(self, **changes: int) -> None:
        with self._lock:
            for name, change in changes.items():
                setattr(self._stat, name, getattr(self._stat, name) + change)

    def _budget(self, version: int) -> int:
        if self.step_size is None or self.max_staleness > _UNBOUNDED:
            return (self.max_staleness + 1) * self.consumer_batch_size
        return sum(self.step_size(version + k) for k in range(self.max_staleness + 1))


def select_groups(
    ready: Sequence[tuple[int, int]],
    running: Mapping[int, int],
    version: int,
    max_staleness: int,
    step_size: StepSize,
) -> list[int] | None:
    """Choose the groups of the step at ``version``, or hold it.

    The oldest ready groups are taken. They may overtake older groups that still run only as long as everything left
    behind still fits into the steps before it is too old: for every k, at most ``sum(step_size(version + 1 .. version +
    k))`` of the rest may be due by version + k. (With k = 0: nothing that is due now may be left behind.)

    Args:
        ready: ``(start order, start version)`` of each finished group, none older than ``version - max_staleness``.
        running: number of running groups by start version.
        version: version the step will be trained at.
        max_staleness: versions a group may be old when it is trained.
        step_size: rows of step k.

    Returns:
        Indices into ``ready`` in start order; None while the step must wait for a running group.
    """
    order = sorted(range(len(ready)), key=lambda i: ready[i][0])
    count = step_size(version)
    if len(order) < count:
        return None
    chosen = order[:count]
    if not running or max_staleness > _UNBOUNDED:
        return chosen
    due: dict[int, int] = {}
    for start, number in running.items():
        if start + max_staleness >= version:
            due[start + max_staleness] = due.get(start + max_staleness, 0) + number
    for i in order[count:]:
        last = ready[i][1] + max_staleness
        due[last] = due.get(last, 0) + 1
    left, room, step = 0, 0, version
    for last in sorted(due):
        while step < last:
            step += 1
            room += step_size(step)
        left += due[last]
        if left > room:
            return None
    return chosen
