"""The live console of a run: progress, time left, reward, staleness, tokens per second, and what it is doing now.

On a terminal it is a panel that stays at the bottom while log lines scroll above it; elsewhere (files, CI) it logs one
plain line at most every ``log_interval_s`` seconds. The trainer calls ``phase`` and ``update``.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from areal.utils import environ, logging

logger = logging.getLogger("Console")

_WIDE = 72  # columns from which bar and clock share a line
_WINDOW_STEPS = 20  # steps over which speed is measured
# What is shown, in this order: name given to update() -> (label, format)
METRICS = {
    "reward": ("reward", "{:.3f}"),
    "loss": ("loss", "{:.4f}"),
    "accuracy": ("accuracy", "{:.3f}"),
    "eval": ("eval", "{:.3f}"),
    "staleness": ("staleness", "{:.2f}"),
    "mismatch": ("mismatch", "{:.2g}"),
    "tokens_per_s": ("tokens/s", "{:,.0f}"),
    "sequences_per_s": ("sequences/s", "{:.1f}"),
}


class LiveConsole:
    """Shows where a run stands; a context manager.

    Args:
        total_steps: steps of the whole run.
        start_step: steps already done (a resumed run).
        title: name of the run.
        live: draw the panel; None: when stderr is a terminal that can redraw lines.
        log_interval_s: least seconds between two plain lines.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        start_step: int = 0,
        title: str = "",
        live: bool | None = None,
        log_interval_s: float = 10.0,
    ) -> None:
        self.total_steps = total_steps
        self.title = title
        self.done = start_step
        self.metrics: dict[str, float] = {}
        self._phase = ""
        self._live_wanted = can_redraw() if live is None else live
        self._live: Any = None
        self._log_interval_s = log_interval_s
        self._last_line = -float("inf")
        self._begin = time.monotonic()
        self._ends: deque[tuple[int, float]] = deque([(start_step, self._begin)], maxlen=_WINDOW_STEPS + 1)

    def __enter__(self) -> LiveConsole:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Begin to draw; the clock of the time left starts here."""
        self._begin = time.monotonic()
        self._ends = deque([(self.done, self._begin)], maxlen=_WINDOW_STEPS + 1)
        if self._live_wanted and self._live is None:
            from rich.console import Console
            from rich.live import Live

            self._live = Live(
                get_renderable=self._panel, console=Console(file=sys.stderr), refresh_per_second=4, transient=False
            )
            self._live.start()

    def stop(self) -> None:
        """Leave the last state on the screen; safe to call twice."""
        if self._live is not None:
            if self.done >= self.total_steps:
                self._phase = "finished"
            self._live.stop()
            self._live = None

    def phase(self, text: str) -> None:
        """Say what the run is doing now, such as ``rollout: 5 of 8 groups``."""
        self._phase = text

    def update(self, global_step: int, metrics: Mapping[str, float]) -> None:
        """A step is over.

        Args:
            global_step: its number, from 0.
            metrics: numbers to show, see ``METRICS``; others are ignored, missing ones keep their last value.
        """
        self.done = global_step + 1
        self._ends.append((self.done, time.monotonic()))
        self.metrics.update({key: float(value) for key, value in metrics.items() if key in METRICS})
        if self._live is not None:
            return
        now = time.monotonic()
        if now - self._last_line >= self._log_interval_s or self.done >= self.total_steps:
            self._last_line = now
            logger.info("%s", self.line())

    def line(self) -> str:
        """The state as one line of text."""
        share = self.done / max(self.total_steps, 1)
        parts = [f"step {self.done}/{self.total_steps} ({share:.0%})"]
        parts += [f"{label} {text}" for label, text in self._cells()]
        return ", ".join([*parts, f"{self.seconds_per_step():.2f} s/step", f"ETA {format_duration(self.eta_s())}"])

    def seconds_per_step(self) -> float:
        """Mean over the last steps; 0 before the first."""
        (first, start), (last, end) = self._ends[0], self._ends[-1]
        return (end - start) / (last - first) if last > first else 0.0

    def eta_s(self) -> float:
        """Seconds left at the present speed; infinite before the first step."""
        left = max(self.total_steps - self.done, 0)
        speed = self.seconds_per_step()
        return left * speed if speed or not left else float("inf")

    def _cells(self) -> list[tuple[str, str]]:
        return [(METRICS[k][0], METRICS[k][1].format(self.metrics[k])) for k in METRICS if k in self.metrics]

    def _panel(self) -> Any:
        from rich.console import Group
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        clock = f"{format_duration(time.monotonic() - self._begin)} elapsed, {format_duration(self.eta_s())} left"
        bar = ProgressBar(total=max(self.total_steps, 1), completed=self.done)
        where = Text(f"step {self.done}/{self.total_steps}  {clock}")
        top = Table.grid(padding=(0, 1), expand=True)
        top.add_column(ratio=1)
        if self._live is None or self._live.console.width >= _WIDE:
            top.add_column(justify="right")
            top.add_row(bar, where)
        else:
            top.add_row(bar)
            top.add_row(where)
        cells = Text("   ").join(
            Text.assemble((f"{label} ", "dim"), (text, "bold cyan"))
            for label, text in [*self._cells(), ("s/step", f"{self.seconds_per_step():.2f}")]
        )
        return Panel(Group(top, cells, Text(self._phase, style="dim")), title=self.title or None, border_style="blue")


def can_redraw() -> bool:
    """Whether stderr is a terminal on which a panel can be drawn over itself."""
    return sys.stderr.isatty() and (environ.get_env("TERM") or "").lower() not in ("dumb", "unknown")


def format_duration(seconds: float) -> str:
    """``1:02:03`` or ``02:03``; ``--:--`` when unknown."""
    if seconds == float("inf"):
        return "--:--"
    minutes, second = divmod(int(round(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute:02d}:{second:02d}"
