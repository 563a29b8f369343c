"""Errors of a rollout, and the rule that stops a run which mostly fails.

:class:`FailureWindow` is told how every sample ended. It keeps the first exception of the current bad stretch, so that
the error which stops the run carries the traceback of what went wrong first, not of the last consequence.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from areal.utils.errors import ArealError, InfrastructureError, RewardError, RolloutTimeoutError

# OSErrors that user code meets on its own files; they are no sign of a lost engine.
_LOCAL_OS_ERRORS = (
    TimeoutError,
    FileNotFoundError,
    FileExistsError,
    PermissionError,
    NotADirectoryError,
    IsADirectoryError,
)

_LEAST_GROUPS = 8  # groups that a window holds at least
_BACKOFF_S = (0.05, 3.2)  # first and longest pause after a lost group


class RolloutFailedError(ArealError, RuntimeError):
    """Too many episodes failed; the first original exception is chained as the cause."""


class RolloutStoppedError(ArealError, RuntimeError):
    """The executor was not initialised, was destroyed, or its thread died; the cause is chained if there is one."""


class RowsExhaustedError(ArealError, RuntimeError):
    """The data cannot fill the step that was asked for."""


class EpisodeTimeoutError(RolloutTimeoutError):
    """An episode ran longer than ``rollout.episode_timeout_s``."""


class DroppedSampleError(ArealError, RuntimeError):
    """A sample came back with a reward that is not finite; it is dropped and counted."""


def is_infrastructure_error(error: BaseException) -> bool:
    """Whether ``error`` says that an engine or a connection was lost, rather than that an episode went wrong."""
    if isinstance(error, RewardError | RolloutTimeoutError):
        return False
    if isinstance(error, InfrastructureError):
        return True
    return isinstance(error, OSError) and not isinstance(error, _LOCAL_OS_ERRORS)


class Backoff:
    """Pauses starts after a lost group, longer each time nothing worked in between.

    Args:
        wake: called in the loop thread when starting may go on.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._in_a_row = 0
        self.active = False

    def lost(self, loop: asyncio.AbstractEventLoop) -> None:
        """A group was lost: an engine or connection failed."""
        if not self.active:
            self.active = True
            first_s, longest_s = _BACKOFF_S
            loop.call_later(min(first_s * 2**self._in_a_row, longest_s), self._end)
            self._in_a_row += 1

    def worked(self) -> None:
        """A sample came back."""
        self._in_a_row = 0

    def _end(self) -> None:
        self.active = False
        self._wake()


class FailureWindow:
    """Share of failed samples over the last ones.

    The run stops when the window is full and more than ``max_share`` of it failed, or, before the first success ever,
    when ``first`` groups failed in a row: a run that never worked need not fill the window.

    Args:
        size: samples looked at; more where groups are so large that one bad row would fill them.
        max_share: share above which the run stops, in [0, 1]; 1 never stops a run that worked once.
        first: groups whose failure stops a run without any success.
    """

    def __init__(self, size: int, max_share: float, first: int) -> None:
        self._ends: deque[bool] = deque()
        self._size = max(1, size)
        self._max_share = max_share
        self._first_groups = min(max(1, first), self._size)
        self._first = self._first_groups
        self._group_size = 1
        self._failed = 0
        self._succeeded = False
        self.first_error: BaseException | None = None

    def expect_group(self, group_size: int) -> None:
        """Samples may come in groups of this size: one bad row must not look like a run that fails."""
        if group_size > self._group_size:
            self._group_size = group_size
            self._size = max(self._size, min(self._first_groups, _LEAST_GROUPS) * group_size)
            self._first = min(self._first_groups * group_size, self._size)

    def success(self) -> None:
        """A sample ended well."""
        self._succeeded = True
        self._append(False)
        if not self._failed:
            self.first_error = None

    def failure(self, error: BaseException) -> RolloutFailedError | None:
        """A sample failed with ``error``; returns the error that stops the run, if it must stop."""
        if self.first_error is None:
            self.first_error = error
        self._append(True)
        total = len(self._ends)
        full = total == self._size and self._failed > self._max_share * total
        never = not self._succeeded and self._failed >= self._first
        if not full and not never:
            return None
        stop = RolloutFailedError(
            f"{self._failed} of the last {total} samples failed (rollout.max_failure_share={self._max_share:g}); the "
            f"first "
            f"failure was {type(self.first_error).__name__}: {self.first_error}"
        )
        stop.__cause__ = self.first_error
        return stop

    def _append(self, failed: bool) -> None:
        if len(self._ends) == self._size:
            self._failed -= self._ends.popleft()
        self._ends.append(failed)
        self._failed += failed
