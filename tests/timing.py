"""Waits and time limits that hold on a slow, shared machine; for tests of other threads and processes."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], limit_s: float = 60.0) -> None:
    """Return as soon as ``condition()`` holds; fail after ``limit_s``, which no working code comes near."""
    limit = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < limit, f"not true after {limit_s:g} s"
        time.sleep(0.001)


def slowness(samples: int = 5) -> float:
    """How many times longer things take here and now than on an idle core: wall over CPU time of short bursts, >= 1.

    Multiply a limit on a duration with it, when the duration itself is what the test is about.
    """
    wall, busy = time.perf_counter(), time.process_time()
    for _ in range(samples):
        until = time.process_time() + 0.01
        while time.process_time() < until:
            pass
    return max(1.0, (time.perf_counter() - wall) / (time.process_time() - busy))
