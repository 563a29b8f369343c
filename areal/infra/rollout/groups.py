"""Runs one row: ``group_size`` samples of it at once, and what survives becomes one checked table.

    data ─► sample 0 ─┐
            sample 1 ─┼─► drop bad samples ─► concatenate ─► fill ids ─► filter ─► GroupResult
            sample n ─┘

A sample that fails (or whose reward does), runs too long or returns None is dropped and counted; the group goes on with
the rest. Called by the dispatcher in the loop thread; nothing here touches its state.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

from areal.api.trajectory import Row, TrajectoryRef, check_trajectory
from areal.api.workflow_api import RolloutWorkflow
from areal.infra import workflow_context
from areal.infra.rollout.acceptance import AcceptFn, accepts
from areal.infra.rollout.failures import DroppedSampleError, EpisodeTimeoutError, is_infrastructure_error
from areal.infra.workflow_context import EpisodeContext, WorkflowContext
from areal.utils import perf_tracer
from areal.utils.errors import RewardError

Status = Literal["accepted", "filtered", "failed", "lost"]
Table = dict[str, Any]
_CUT = ("length", "abort")  # stop reasons of a continuation that did not end by itself


@dataclass(slots=True)
class GroupTask:
    """One row to run. ``row`` is a made-up one for :meth:`WorkflowExecutor.submit`, which has no loader.

    Attributes:
        sequence: start order; -1 until started.
        start_version: weight version at the start.
        attempts: times it failed so far.
    """

    task_id: int
    data: dict[str, Any]
    workflow: RolloutWorkflow
    accept: AcceptFn | None
    group_size: int
    row: Row
    group_id: int
    from_loader: bool
    is_eval: bool = False
    sequence: int = -1
    start_version: int = -1
    attempts: int = 0


@dataclass(slots=True)
class GroupResult:
    """How a group ended.

    Attributes:
        status: accepted; filtered (by the filter, or every sample returned None); failed; lost (infrastructure).
        ref: the trajectory, also of a group that the filter refused; None if nothing came back.
        ends: one entry per sample: None for a good end, else the exception.
        dropped: samples dropped, by reason: none, reward, timeout, error, lost.
    """

    status: Status
    ref: TrajectoryRef | None = None
    ends: list[BaseException | None] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)

    @property
    def error(self) -> BaseException | None:
        """The first failure among the samples."""
        return next((end for end in self.ends if end is not None), None)


class RemoteRunner(Protocol):
    """Runs groups somewhere else; offers the methods of an ``AdmissionGate`` for batches that are admitted as one."""

    async def run(self, task: GroupTask, on_request: Callable[[], None] | None = None) -> GroupResult:
        """As :meth:`GroupRunner.run`."""
        ...


class GroupRunner:
    """Runs groups against one engine.

    Args:
        engine: handed to workflows.
        run_seed: seed of the run, from which every request's seed derives.
        timeout_s: seconds a group may run; samples that are not back by then are dropped.
    """

    def __init__(self, engine: Any, run_seed: int, timeout_s: float) -> None:
        self._engine = engine
        self._run_seed = run_seed
        self._timeout_s = timeout_s
        self._expected_keys: frozenset[str] | None = None

    async def run(self, task: GroupTask, on_request: Callable[[], None] | None = None) -> GroupResult:
        """Run the samples of ``task``; ``on_request`` is called once per sample, at its first request or its end."""
        sessions = [perf_tracer.register_session(task.task_id) for _ in range(task.group_size)]
        outcomes = await self._run_samples(task, sessions, on_request)
        result = GroupResult("accepted")
        tables: list[Table] = []
        reasons: list[str | None] = []
        for outcome in outcomes:
            table, error, reason = self._judge(task, outcome)
            result.ends.append(error)
            reasons.append(reason)
            if reason is not None:
                result.dropped[reason] = result.dropped.get(reason, 0) + 1
            if table is not None:
                tables.append(table)
        if any(end is not None and is_infrastructure_error(end) for end in result.ends):
            result.status = "lost"
        elif not tables:
            result.status = "filtered" if result.error is None else "failed"
        else:
            self._finish(task, result, tables)
        close_sessions(sessions, reasons, result.status)
        return result

    async def _run_samples(
        self, task: GroupTask, sessions: list[int | None], on_request: Callable[[], None] | None
    ) -> list[Any]:
        samples = [
            asyncio.ensure_future(self._run_sample(task, i, session, on_request)) for i, session in enumerate(sessions)
        ]
        try:  # a sample that swallows its cancellation is abandoned, it cannot hold up the group
            await asyncio.wait(samples, timeout=self._timeout_s)
        finally:
            for sample in samples:
                sample.cancel()  # does nothing to those that are done
        return [s.result() if s.done() and not s.cancelled() else self._too_long(task) for s in samples]

    async def _run_sample(
        self, task: GroupTask, index: int, session: int | None, on_request: Callable[[], None] | None
    ) -> Any:
        """What the workflow returned, or the exception it raised, with the episode's stop reasons."""
        row = task.row
        episode = EpisodeContext(
            epoch=row.epoch,
            row=row.index,
            sample=index,
            position=row.position,
            run_seed=self._run_seed,
            on_request=on_request,
        )
        workflow_context.set(WorkflowContext(task.is_eval, task.task_id, episode))
        perf_tracer.set_task_id(task.task_id)
        perf_tracer.set_session_id(session)
        try:
            return await task.workflow.arun_episode(self._engine, dict(task.data)), episode.stop_reasons
        except (Exception, SystemExit) as exc:  # noqa: BLE001 - a task ends here; counted and judged by the caller
            return exc
        finally:
            if episode.on_request is not None and on_request is not None:
                on_request()

    def _judge(self, task: GroupTask, outcome: Any) -> tuple[Table | None, BaseException | None, str | None]:
        """The sample's table, the exception it counts as, the reason it is dropped."""
        if isinstance(outcome, BaseException):
            return None, outcome, drop_reason(outcome)
        value, stop_reasons = outcome
        if value is None:
            return None, None, "none"
        try:
            table = as_table(value)
            expected = self._expected_keys if task.from_loader else None
            check_trajectory(table, expected_keys=expected)
            if task.from_loader and expected is None:
                self._expected_keys = frozenset(table)
            add_truncated(table, stop_reasons)
            kept = keep_finite(table)
        except Exception as exc:  # noqa: BLE001 - what a workflow returned is user input
            return None, exc, drop_reason(exc)
        if kept is None:
            error = DroppedSampleError(f"row {task.row.index}: no reward of the sample is finite: {table['rewards']}")
            return None, error, "reward"
        return kept, None, None

    def _finish(self, task: GroupTask, result: GroupResult, tables: list[Table]) -> None:
        try:
            table = concat_tables(tables)
            count = table["input_ids"].shape[0]
            table["group_id"] = torch.full((count,), task.group_id, dtype=torch.int64)
            table["row_id"] = torch.full((count,), task.row.index, dtype=torch.int64)
            result.ref = make_ref(task.row, task.group_id, table)
            if not accepts(task.accept, table):
                result.status = "filtered"
        except Exception as exc:  # noqa: BLE001 - the filter and the columns are user input
            result.status = "failed"
            result.ref = None
            result.ends = [exc]

    def _too_long(self, task: GroupTask) -> EpisodeTimeoutError:
        return EpisodeTimeoutError(
            f"row {task.row.index}: an episode ran longer than rollout.episode_timeout_s={self._timeout_s:g}; raise it "
            f"if "
            "such episodes are meant to finish"
        )


def close_sessions(sessions: list[int | None], reasons: list[str | None], status: Status) -> None:
    """Tell the session tracer, if there is one, how each sample ended: dropped for its reason, else as its group."""
    ends = {"accepted": "accepted", "filtered": "rejected", "failed": "failed", "lost": "failed"}
    for session, reason in zip(sessions, reasons, strict=True):
        if session is not None:
            end = ends[status] if reason is None else "dropped"
            perf_tracer.trace_session_event("mark_finalized", session, status=end, reason=reason)


def drop_reason(error: BaseException) -> str:
    """Word under which a sample that ended with ``error`` is counted."""
    if isinstance(error, RewardError):
        return "reward"
    if isinstance(error, EpisodeTimeoutError):
        return "timeout"
    return "lost" if is_infrastructure_error(error) else "error"


def as_table(value: Any) -> Table:
    """A workflow's result as one table: interactions of an agent (``{id: interaction}``) are concatenated."""
    if isinstance(value, dict) and value:
        first = next(iter(value.values()))
        if hasattr(first, "to_tensor_dict"):
            return concat_tables([interaction.to_tensor_dict() for interaction in value.values()])
        return dict(value)
    return value  # type: ignore[no-any-return]  # not a table; the check says so


def add_truncated(table: Table, stop_reasons: list[str]) -> None:
    """Fill ``truncated [n]`` from what the engine said, unless the workflow returned it."""
    if "truncated" in table:
        return
    count = table["input_ids"].shape[0]
    if len(stop_reasons) != count:  # several turns in one sequence: the last one decides
        stop_reasons = (stop_reasons[-1:] or ["stop"]) * count
    table["truncated"] = torch.tensor([reason in _CUT for reason in stop_reasons], dtype=torch.bool)


def keep_finite(table: Table) -> Table | None:
    """The sequences whose reward is a finite number; None if there is none."""
    rewards = table.get("rewards")
    if rewards is None:
        return table
    good = [i for i, reward in enumerate(rewards.tolist()) if math.isfinite(reward)]
    if len(good) == len(rewards):
        return table
    if not good:
        return None
    index = torch.tensor(good)
    count = len(rewards)
    return {key: _take(value, index, good, count) for key, value in table.items()}


def _take(value: Any, index: torch.Tensor, good: list[int], count: int) -> Any:
    if isinstance(value, torch.Tensor) and value.ndim and value.shape[0] == count:
        return value[index]
    return [value[i] for i in good] if isinstance(value, list) and len(value) == count else value


def concat_tables(tables: list[Table]) -> Table:
    """One table of all sequences, right-padded to the widest; keys of the first table, which the others must have."""
    if len(tables) == 1:
        return tables[0]
    widths = [table["input_ids"].shape[1] for table in tables]
    return {key: _concat(key, [table[key] for table in tables], widths) for key in tables[0]}


def _concat(key: str, values: list[Any], widths: list[int]) -> Any:
    if isinstance(values[0], list):
        return [item for value in values for item in value]
    if not isinstance(values[0], torch.Tensor):
        return values[0]
    width = max(widths)
    per_token = all(v.ndim > 1 and v.shape[1] == w for v, w in zip(values, widths, strict=True))
    if not per_token or min(widths) == width:
        return torch.cat(values)
    count = sum(v.shape[0] for v in values)
    out = values[0].new_full((count, width, *values[0].shape[2:]), -1 if key == "versions" else 0)
    row = 0
    for value in values:
        out[row : row + value.shape[0], : value.shape[1]] = value
        row += value.shape[0]
    return out


def make_ref(row: Row, group_id: int, table: Table) -> TrajectoryRef:
    """The trainer's handle: lengths, rewards and the range of versions that drew the trained tokens."""
    oldest = newest = -1
    if "versions" in table:  # numpy views of the CPU tensors: several times cheaper than torch at these sizes
        versions = table["versions"].cpu().numpy()
        drawn = versions[table["loss_mask"].cpu().numpy() > 0] if "loss_mask" in table else versions[versions >= 0]
        if drawn.size:
            oldest, newest = int(drawn.min()), int(drawn.max())
    rewards = table.get("rewards")
    return TrajectoryRef(
        row=row,
        group_id=group_id,
        lengths=tuple(table["attention_mask"].cpu().numpy().sum(1).tolist()),
        rewards=() if rewards is None else tuple(rewards.tolist()),
        min_version=oldest,
        max_version=newest,
        data=table,
    )
