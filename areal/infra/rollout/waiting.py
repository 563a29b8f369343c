"""The controller's waits: each has a limit, a heartbeat in the log, and a reason it can print.

Used by the executor for batches and for submitted tasks. The condition of the dispatcher wakes it; the timer only
serves the heartbeat and the limits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from areal.infra.rollout.dispatcher import Dispatcher
from areal.infra.run_status import WaitStatus
from areal.infra.step_ledger import StepLedger
from areal.utils import logging
from areal.utils.errors import RolloutTimeoutError

logger = logging.getLogger("WorkflowExecutor")
T = TypeVar("T")

# Phases of the step ledger that a wait is booked on.
WAIT_DATA, WAIT_CAPACITY, WAIT_GENERATION, WAIT_STALE = (
    "wait_data",
    "wait_capacity",
    "wait_generation",
    "wait_stale",
)


@dataclass(frozen=True)
class WaitLimit:
    """How long a wait may take.

    Attributes:
        timeout_s: limit; None waits as long as something can still happen.
        setting: name of the setting or argument that raises the limit.
        expected: the caller handles the end of its time; nothing is wrong then.
    """

    timeout_s: float | None
    setting: str
    expected: bool = False


@dataclass(frozen=True)
class _Wait:
    """A wait that goes on; ``began`` is in seconds of the monotonic clock."""

    what: Callable[[], str]
    began: float


class Waiter:
    """Waits for the dispatcher.

    Args:
        dispatcher: whose condition wakes the wait.
        log_interval_s: seconds between two lines in the log.
        stall_s: seconds after which a wait that nothing can end, or a loop that does not answer, is an error.
        ledger: books the waiting time by reason.

    Attributes:
        on_timeout: told the message of a wait that failed, without any lock held; returns the name of a file that holds
            more (the stacks of all workers), or None. It must not raise.
    """

    def __init__(self, dispatcher: Dispatcher, log_interval_s: float, stall_s: float, ledger: StepLedger) -> None:
        self._dispatcher = dispatcher
        self._log_interval_s = max(log_interval_s, 0.05)
        self._stall_s = stall_s
        self.ledger = ledger
        self.on_timeout: Callable[[str], str | None] | None = None
        self._waits: list[_Wait] = []

    def wait_for(
        self, take: Callable[[], T | None], maybe: Callable[[], bool], what: Callable[[], str], limit: WaitLimit
    ) -> T:
        """Block until ``take()`` returns something.

        Args:
            take: called with the condition held; None means "not yet".
            maybe: cheap test, run as each group ends, whether ``take`` is worth calling.
            what: says what is waited for, such as ``3 of 8 groups``.
            limit: when to give up.

        Raises:
            RolloutTimeoutError: the limit passed, the loop is blocked, or nothing can end the wait.
            RolloutFailedError: too many samples failed.
            RolloutStoppedError: the rollout thread is not running.
        """
        try:
            return self._wait(take, maybe, what, limit)
        except RolloutTimeoutError as exc:
            if limit.expected or self.on_timeout is None or (file := self.on_timeout(str(exc))) is None:
                raise
            raise RolloutTimeoutError(f"{exc}\nStacks of all workers: {file}") from None

    def current(self, now: float) -> WaitStatus | None:
        """The oldest wait that goes on, for a person; ``now`` is in seconds since 1970. Under the condition."""
        waits = list(self._waits)
        if not waits:
            return None
        wait = min(waits, key=lambda wait: wait.began)
        return WaitStatus(self.reason(wait.what()), self.kind(), now - (time.monotonic() - wait.began))

    def _wait(
        self, take: Callable[[], T | None], maybe: Callable[[], bool], what: Callable[[], str], limit: WaitLimit
    ) -> T:
        dispatcher = self._dispatcher
        began = idle_since = logged = time.monotonic()
        wait = _Wait(what, began)
        with dispatcher.condition:
            dispatcher.predicates.append(maybe)
            self._waits.append(wait)
            try:
                while True:
                    dispatcher.raise_if_failed()
                    if (value := take()) is not None:
                        return value
                    now = time.monotonic()
                    if not self.idle():
                        idle_since = now
                    self._check_limits(wait, idle_since, limit)
                    if now - logged >= self._log_interval_s:
                        logged = now
                        logger.info(f"{self.reason(what())} ({now - began:.0f} s so far)")
                        if dispatcher.runner.silence_s() >= self._log_interval_s:
                            logger.warning(f"the rollout loop does not answer; it is in:\n{dispatcher.runner.stack()}")
                    pause_s = logged + self._log_interval_s - now
                    if limit.timeout_s is not None:
                        pause_s = min(pause_s, began + limit.timeout_s - now)
                    with self.ledger.phase(self.kind()):
                        dispatcher.condition.wait(max(pause_s, 0.001))
            finally:
                dispatcher.predicates.remove(maybe)
                self._waits.remove(wait)

    def idle(self) -> bool:
        """Whether nothing under way can end a wait: no group runs, none can start."""
        dispatcher = self._dispatcher
        if dispatcher.running or dispatcher.feeder.active:
            return False
        can_start = dispatcher.capacity() > 0 and not dispatcher.paused
        return not (can_start and (dispatcher.waiting or dispatcher.submitted or not dispatcher.feeder.dry))

    def kind(self) -> str:
        """The phase that waiting now is booked on."""
        dispatcher = self._dispatcher
        if dispatcher.running:
            full = bool(dispatcher.ready) and len(dispatcher.ready) >= dispatcher.manager.consumer_batch_size
            return WAIT_STALE if full else WAIT_GENERATION
        if dispatcher.feeder.active and not dispatcher.waiting:
            return WAIT_DATA
        return WAIT_CAPACITY

    def reason(self, what: str) -> str:
        """One line for a person."""
        dispatcher = self._dispatcher
        parts = [f"{len(dispatcher.running)} running", f"capacity {dispatcher.capacity()}"]
        parts.append(f"bound v{dispatcher.version}")
        if dispatcher.waiting or dispatcher.submitted:
            parts.append(f"{len(dispatcher.waiting) + len(dispatcher.submitted)} not started")
        if dispatcher.paused:
            parts.append("paused")
        counts = dispatcher.counts
        parts += [f"{counts[name]} {name}" for name in ("filtered", "failed", "lost") if counts[name]]
        return f"waiting for {what}: {', '.join(parts)}"

    def _check_limits(self, wait: _Wait, idle_since: float, limit: WaitLimit) -> None:
        now, timeout_s = time.monotonic(), limit.timeout_s
        silence_s = self._dispatcher.runner.silence_s()
        limit_s = self._stall_s if timeout_s is None else min(self._stall_s, timeout_s)
        over = timeout_s is not None and now - wait.began >= timeout_s
        if silence_s >= limit_s or (over and silence_s >= limit_s / 2):
            raise RolloutTimeoutError(
                f"{self.reason(wait.what())}; the rollout loop has not answered for {silence_s:.0f} s: a workflow or "
                "reward blocks it with a synchronous call (use await, or asyncio.to_thread). It is "
                f"in:\n{self._dispatcher.runner.stack()}"
            )
        if over:
            raise RolloutTimeoutError(
                f"{self.reason(wait.what())}; gave up after {now - wait.began:.3g} s, raise {limit.setting}"
            )
        if now - idle_since >= self._stall_s:
            raise RolloutTimeoutError(
                f"{self.reason(wait.what())}; nothing could end this wait for {self._stall_s:g} s. Publish a new "
                "version (set_version or step_done), resume the executor, or raise rollout.episode_timeout_s"
            )
