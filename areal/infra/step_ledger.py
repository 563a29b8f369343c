"""What each second of a step went to: named phases that exclude each other and sum to the wall time.

The trainer holds one ledger and opens phases around its work; the rollout executor opens phases around its waits, one
per reason. A phase inside another takes its seconds away from the outer one. What lies outside every phase is
``other``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

OTHER = "other"


class StepLedger:
    """Exclusive time per phase since the last :meth:`export`; belongs to one thread.

    Args:
        clock: seconds, never going back.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._mark = clock()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Book the time inside the ``with`` block on ``name``, less the time of phases inside it."""
        self._book()
        self._open.append(name)
        try:
            yield
        finally:
            self._book()
            self._open.pop()

    def export(self) -> dict[str, float]:
        """Seconds per phase since the last export (phases never opened are absent), and start the next step.

        The values sum to the wall time in between, exactly up to rounding. A phase that is open goes on in the next
        step.
        """
        self._book()
        seconds, self._seconds = self._seconds, {}
        return seconds

    def _book(self) -> None:
        now = self._clock()
        name = self._open[-1] if self._open else OTHER
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._mark
        self._mark = now
