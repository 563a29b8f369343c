"""Looks into a running executor without disturbing it, for ``areal status``.

Made by the executor, read from the threads of the status server.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping

from areal.infra.rollout.dispatcher import Dispatcher
from areal.infra.rollout.steps import StepBook
from areal.infra.rollout.waiting import Waiter
from areal.infra.run_status import RolloutStatus

LOCK_LIMIT_S = 0.5  # longest wait for the dispatcher's condition; after it the numbers are read as they stand


class RolloutProbe:
    """Reads one executor.

    Args:
        name: ``rollout`` or ``eval-rollout``.
        dispatcher, steps, waiter: the executor's parts.
    """

    def __init__(self, name: str, dispatcher: Dispatcher, steps: StepBook, waiter: Waiter) -> None:
        self.name = name
        self._dispatcher = dispatcher
        self._steps = steps
        self._waiter = waiter
        self._exported: Counter[str] = Counter()

    def absorb(self, counts: Mapping[str, int]) -> None:
        """Keep counters that the executor exports and clears; the caller holds the condition."""
        self._exported.update(counts)

    def status(self) -> RolloutStatus:
        """The numbers of this moment; holds the condition for microseconds."""
        held = self._dispatcher.condition.acquire(timeout=LOCK_LIMIT_S)
        try:
            return self._read(exact=held)
        finally:
            if held:
                self._dispatcher.condition.release()

    def tasks(self) -> str:
        """Where the running episodes are, see :func:`areal.utils.stacks.task_stacks`."""
        return self._dispatcher.runner.task_stacks()

    def _read(self, *, exact: bool) -> RolloutStatus:
        dispatcher = self._dispatcher
        counts = self._exported + dispatcher.counts
        counts["failed"] -= counts["retried"]  # those are under way again
        counts["trained"] = dispatcher.ledger.counts["trained"]
        return RolloutStatus(
            name=self.name,
            version=dispatcher.version,
            paused=dispatcher.paused,
            waiting=len(dispatcher.waiting),
            submitted=len(dispatcher.submitted),
            running=len(dispatcher.running),
            ready=len(dispatcher.ready),
            in_step=self._steps.in_step,
            capacity=dispatcher.capacity(),
            staleness=dict(self._steps.histogram),
            counts={name: count for name, count in counts.items() if "/" not in name},
            wait=self._waiter.current(time.time()),
            last_error=dispatcher.last_error,
            exact=exact,
        )
