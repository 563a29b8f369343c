"""One ``with`` around each phase of a step: timed for statistics, booked in the ledger, traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from areal.infra.step_ledger import StepLedger
from areal.utils import perf_tracer, stats_tracker
from areal.utils.perf_tracer import Category

# Phase -> its category in the trace. Compute phases are the ones that `perf_tracer.profile_steps` profiles.
_CATEGORIES = {
    "rollout": Category.SCHEDULER,
    "eval": Category.SCHEDULER,
    "critic_values": Category.COMPUTE,
    "ref_logp": Category.COMPUTE,
    "teacher_logp": Category.COMPUTE,
    "recompute_logp": Category.COMPUTE,
    "compute_advantage": Category.COMPUTE,
    "train_step": Category.COMPUTE,
    "critic_train_step": Category.COMPUTE,
    "update_weights": Category.COMM,
    "load_bcast": Category.COMM,
    "save": Category.IO,
    "checkpoint_for_recover": Category.IO,
}


class PhaseClock:
    """Callable that opens a phase: ``with phase("rollout"): ...``.

    A phase appears as ``timeperf/<name>`` in the statistics, as an exclusive share in the ledger (which sums to the
    wall time of the step), as a span in the trace, and on the live console.

    Args:
        show: told the name of each phase as it begins.
        current_step: global step that runs now, None outside the steps; shown with the spans of the trace.
    """

    def __init__(self, show: Callable[[str], None], current_step: Callable[[], int | None]) -> None:
        self.ledger = StepLedger()
        self._show = show
        self._current_step = current_step

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._show(name)
        with self.ledger.phase(name), stats_tracker.record_timing(name), self._span(name):
            yield

    def _span(self, name: str) -> AbstractContextManager[None]:
        step = self._current_step()
        category = _CATEGORIES.get(name, Category.MISC)
        return perf_tracer.trace_scope(
            name,
            category=category,
            enable_profiler=category is Category.COMPUTE,
            args={} if step is None else {"global_step": step},
        )

    def restart(self) -> None:
        """Begin the first step here: what the run was built with before is no step's time."""
        self.ledger.export()

    def export(self) -> dict[str, float]:
        """``ledger/<phase>`` seconds since the last export, with their sum as ``ledger/wall``."""
        seconds = self.ledger.export()
        shares = {f"ledger/{name}": value for name, value in seconds.items()}
        shares["ledger/wall"] = sum(seconds.values())
        return shares
