"""A run's status in the text format of Prometheus (0.0.4). Called by the status server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from areal.infra.run_status import RolloutStatus, RunStatus, WorkerStatus

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ENDS = ("trained", "accepted", "filtered", "failed", "retried", "lost", "stale")
_UP = ("alive",)


@dataclass
class _Metric:
    """One metric with its samples: ``(suffix of the name, labels, value)``."""

    name: str
    kind: str
    help: str
    samples: list[tuple[str, Mapping[str, object], float]] = field(default_factory=list)

    def add(self, value: float | bool | None, suffix: str = "", **labels: object) -> _Metric:
        """One more sample; None adds nothing."""
        if value is not None:
            self.samples.append((suffix, labels, float(value)))
        return self

    def lines(self) -> Iterator[str]:
        """Nothing without samples."""
        if not self.samples:
            return
        yield f"# HELP {self.name} {_escaped(self.help, quote=False)}"
        yield f"# TYPE {self.name} {self.kind}"
        for suffix, labels, value in self.samples:
            yield f"{self.name}{suffix}{_labels(labels)} {_number(value)}"


def render(status: RunStatus) -> str:
    """The whole page."""
    metrics = [*_run_metrics(status), *_rollout_metrics(status), *_worker_metrics(status)]
    return "".join(f"{line}\n" for metric in metrics for line in metric.lines())


def _run_metrics(status: RunStatus) -> Iterator[_Metric]:
    run = {"experiment": status.experiment, "trial": status.trial, "run_id": status.run_id}
    yield _Metric("areal_run_info", "gauge", "Names of the run; always 1.").add(1, **run)
    yield _Metric("areal_start_time_seconds", "gauge", "When the controller started, in seconds since 1970.").add(
        status.started
    )
    yield _Metric("areal_step", "gauge", "Global step that runs, from 0.").add(status.step)
    yield _Metric("areal_steps_planned", "gauge", "Global steps of the whole run.").add(status.total_steps)
    yield _Metric("areal_version", "gauge", "Weight version in service.").add(status.version)
    yield _Metric("areal_phase_seconds", "gauge", "Seconds that the current phase of the step has run.").add(
        max(0.0, status.time - status.phase_since) if status.phase else None, phase=status.phase
    )
    yield _Metric("areal_tokens_per_second", "gauge", "Tokens trained per second in the last finished step.").add(
        status.tokens_per_s
    )
    error = _Metric("areal_last_error_time_seconds", "gauge", "When the last error happened, in seconds since 1970.")
    if status.last_error is not None:
        error.add(status.last_error.when, type=status.last_error.type)
    yield error


def _rollout_metrics(status: RunStatus) -> Iterator[_Metric]:
    groups = _Metric("areal_rollout_groups", "gauge", "Groups by state.")
    capacity = _Metric("areal_rollout_capacity", "gauge", "Groups that may start now.")
    paused = _Metric("areal_rollout_paused", "gauge", "1 while no group may start.")
    wait = _Metric("areal_rollout_wait_seconds", "gauge", "Seconds that the controller has waited for this rollout.")
    ends = _Metric("areal_rollout_groups_total", "counter", "Groups by how they ended, and rows trained.")
    ages = _Metric("areal_rollout_staleness_versions", "histogram", "Age of the trained samples in versions.")
    for rollout in status.rollouts:
        name = rollout.name
        for state in ("waiting", "submitted", "running", "ready", "in_step"):
            groups.add(getattr(rollout, state), rollout=name, state=state)
        capacity.add(rollout.capacity, rollout=name)
        paused.add(rollout.paused, rollout=name)
        wait.add(0.0 if rollout.wait is None else max(0.0, status.time - rollout.wait.since), rollout=name)
        for end in _ENDS:
            ends.add(rollout.counts.get(end, 0), rollout=name, end=end)
        _add_histogram(ages, rollout)
    yield from (groups, capacity, paused, wait, ends, ages)


def _add_histogram(metric: _Metric, rollout: RolloutStatus) -> None:
    total = 0
    for age, samples in sorted(rollout.staleness.items()):
        total += samples
        metric.add(total, "_bucket", rollout=rollout.name, le=age)
    metric.add(total, "_bucket", rollout=rollout.name, le="+Inf")
    metric.add(sum(age * samples for age, samples in rollout.staleness.items()), "_sum", rollout=rollout.name)
    metric.add(total, "_count", rollout=rollout.name)


def _worker_metrics(status: RunStatus) -> Iterator[_Metric]:
    up = _Metric("areal_worker_up", "gauge", "1 for a worker that answers.")
    seen = _Metric("areal_worker_silent_seconds", "gauge", "Seconds since a worker last answered.")
    version = _Metric("areal_worker_version", "gauge", "Weight version that a worker serves.")
    busy = _Metric("areal_worker_engine_busy_seconds", "gauge", "Seconds that a worker's current engine call has run.")
    for worker in status.workers:
        role, index = worker.role, worker.index
        up.add(worker.state in _UP, role=role, index=index)
        seen.add(_silent_s(worker, status.time), role=role, index=index)
        version.add(worker.version, role=role, index=index)
        busy.add(worker.engine_busy_s, role=role, index=index)
    yield from (up, seen, version, busy)


def _silent_s(worker: WorkerStatus, now: float) -> float | None:
    return None if worker.last_seen is None else max(0.0, now - worker.last_seen)


def _labels(labels: Mapping[str, object]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(str(value))}"' for name, value in labels.items()) + "}"


def _escaped(text: str, *, quote: bool = True) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quote else text


def _number(value: float) -> str:
    return str(int(value)) if value.is_integer() else repr(value)
