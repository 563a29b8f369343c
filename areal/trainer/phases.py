"""One ``with`` around each phase of a step: timed for statistics, booked in the ledger, traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from areal.infra.step_ledger import StepLedger
from areal.utils import perf_tracer, stats_tracker


class PhaseClock:
    """Callable that opens a phase: ``with phase("rollout"): ...``.

    A phase appears as ``timeperf/<name>`` in the statistics, as an exclusive share in the ledger (which sums to the
    wall time of the step), as a span in the trace, and on the live console.

    Args:
        show: told the name of each phase as it begins.
    """

    def __init__(self, show: Callable[[str], None]) -> None:
        self.ledger = StepLedger()
        self._show = show

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._show(name)
        with self.ledger.phase(name), stats_tracker.record_timing(name), perf_tracer.trace_scope(name):
            yield

    def restart(self) -> None:
        """Begin the first step here: what the run was built with before is no step's time."""
        self.ledger.export()

    def export(self) -> dict[str, float]:
        """``ledger/<phase>`` seconds since the last export, with their sum as ``ledger/wall``."""
        seconds = self.ledger.export()
        shares = {f"ledger/{name}": value for name, value in seconds.items()}
        shares["ledger/wall"] = sum(seconds.values())
        return shares
