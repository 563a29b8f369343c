"""A run's status for a person at a terminal. Called by ``areal status``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from areal.infra.run_status import RolloutStatus, RunStatus, WorkerStatus
from areal.utils.console import format_duration

_PLAIN_WIDTH = 120  # columns where no terminal says how many there are
_COUNTS = ("trained", "filtered", "failed", "lost", "stale")
_STATE_STYLES = {"alive": "green", "starting": "yellow", "silent": "yellow"}


def print_status(status: RunStatus, log_dir: Path) -> None:
    """Write the status to stdout."""
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else _PLAIN_WIDTH, highlight=False)
    for line in _head(status, log_dir):
        console.print(line, soft_wrap=True)
    if status.rollouts:
        console.print(_rollout_table(status))
    for rollout in status.rollouts:
        if rollout.staleness:
            console.print(Text(f"{rollout.name}, age of trained samples in versions: {_ages(rollout)}"), soft_wrap=True)
    if status.workers:
        console.print(_worker_table(status))


def _head(status: RunStatus, log_dir: Path) -> Iterator[Text]:
    up = format_duration(max(0.0, status.time - status.started))
    yield Text.assemble(
        (f"{status.experiment}/{status.trial}", "bold"),
        f"  run {status.run_id}, pid {status.pid} on {status.host}, up {up}, {log_dir}",
    )
    step = "between steps" if status.step is None else f"step {status.step} of {status.total_steps}"
    parts = [step]
    if status.phase:
        parts.append(f"{status.phase} for {_seconds(status.time - status.phase_since)}")
    if status.version is not None:
        parts.append(f"version {status.version}")
    if status.tokens_per_s is not None:
        parts.append(f"{status.tokens_per_s:,.0f} tokens/s in the last step")
    yield Text(", ".join(parts))
    if (wait := status.waiting) is not None:
        yield Text(f"{wait.reason} (for {_seconds(status.time - wait.since)}, {wait.kind})", style="yellow")
    if (error := status.last_error) is not None:
        when = _seconds(status.time - error.when)
        yield Text(f"last error, {when} ago: {error.type}: {error.text}", style="red")


def _rollout_table(status: RunStatus) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    names = ("groups", "waiting", "submitted", "in flight", "ready", "in step", "capacity", *_COUNTS)
    for name in names:
        table.add_column(name, justify="left" if name == "groups" else "right", no_wrap=True)
    for rollout in status.rollouts:
        name = rollout.name + (" (paused)" if rollout.paused else "")
        numbers = (
            rollout.waiting,
            rollout.submitted,
            rollout.running,
            rollout.ready,
            rollout.in_step,
            rollout.capacity,
        )
        counts = (rollout.counts.get(name, 0) for name in _COUNTS)
        table.add_row(name, *(str(number) for number in (*numbers, *counts)))
    return table


def _worker_table(status: RunStatus) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("worker", "state", "address", "last seen", "version", "engine busy", "detail"):
        table.add_column(name, overflow="fold", no_wrap=name != "detail")
    for worker in sorted(status.workers, key=lambda worker: (worker.role, worker.index)):
        table.add_row(*_worker_cells(worker, status.time))
    return table


def _worker_cells(worker: WorkerStatus, now: float) -> tuple[Text | str, ...]:
    return (
        worker.id,
        Text(worker.state, style=_STATE_STYLES.get(worker.state, "red")),
        worker.address or "",
        "never" if worker.last_seen is None else f"{_seconds(now - worker.last_seen)} ago",
        "" if worker.version is None else str(worker.version),
        "" if worker.engine_busy_s is None else _seconds(worker.engine_busy_s),
        worker.detail,
    )


def _ages(rollout: RolloutStatus) -> str:
    return ", ".join(f"{age}: {samples}" for age, samples in sorted(rollout.staleness.items()))


def _seconds(value: float) -> str:
    return f"{max(0.0, value):.1f} s" if value < 120 else format_duration(value)
