"""The life of each generated sample, one JSON record when it ends.

A *task* is a dataset item, a *session* one sample generated for it. The executor registers both; workflows mark phases
(generate, reward, toolcall) through context variables, so nothing is passed along. Times are wall-clock seconds.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from areal.utils import logging
from areal.utils.errors import DataError
from areal.utils.perf_tracer.jsonl import append_records

logger = logging.getLogger("SessionTracer")

F = TypeVar("F", bound=Callable[..., Any])
Status = Literal["pending", "accepted", "rejected", "failed", "dropped"]
PHASES = ("generate", "reward", "toolcall")

_task_id: ContextVar[int | None] = ContextVar("session_tracer_task", default=None)
_session_id: ContextVar[int | None] = ContextVar("session_tracer_session", default=None)


@dataclass
class SessionRecord:
    """One sample: when it was submitted and finalised, what it spent its time on, how it ended."""

    task_id: int
    session_id: int
    submit_ts: float
    status: Status = "pending"
    reason: str | None = None
    finalized_ts: float | None = None
    phases: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    counters: dict[str, float] = field(default_factory=dict)

    def to_json(self, *, rank: int, role: str | None) -> dict[str, Any]:
        """The record as written; fields without a value are left out."""
        spent = {f"{name}_s": self._spent_s(name) for name in PHASES if name in self.phases}
        total = None if self.finalized_ts is None else self.finalized_ts - self.submit_ts
        record = {
            "task_id": self.task_id,
            "session_id": self.session_id,
            "rank": rank,
            "role": role,
            "status": self.status,
            "reason": self.reason,
            "submit_ts": self.submit_ts,
            "finalized_ts": self.finalized_ts,
            "total_s": total,
            **spent,
            "phases": self.phases or None,
            "counters": self.counters or None,
        }
        return {key: value for key, value in record.items() if value is not None}

    def _spent_s(self, phase: str) -> float:
        return sum(span["end_ts"] - span["start_ts"] for span in self.phases[phase] if "end_ts" in span)


class SessionTracer:
    """Sessions of one process; finished ones are appended when ``flush_threshold`` of them are ready.

    Args:
        path: JSONL file.
        flush_threshold: at least 1.
        rank: written into every record.
        role: written into every record, if there is one.
    """

    def __init__(self, path: Path, *, flush_threshold: int = 256, rank: int = 0, role: str | None = None) -> None:
        self.path = path
        self.flush_threshold = max(flush_threshold, 1)
        self.rank, self.role = rank, role
        self._lock = threading.Lock()
        self._ids = itertools.count()
        self._open: dict[int, SessionRecord] = {}
        self._ready: list[SessionRecord] = []

    def register(self, task_id: int) -> int:
        """A new session of ``task_id``; returns its id."""
        with self._lock:
            session_id = next(self._ids)
            self._open[session_id] = SessionRecord(task_id, session_id, submit_ts=time.time())
        return session_id

    def event(self, method: str, session_id: int, payload: dict[str, Any]) -> None:
        """Apply one event: ``mark_finalized(status, reason)``, ``mark_<phase>_start``, ``mark_<phase>_end`` or
        ``increment_counter(name, value)``. Events of a session that is over are ignored.

        Raises:
            ValueError: no such method.
        """
        with self._lock:
            record = self._open.get(session_id)
            if record is None:
                return
            if method == "mark_finalized":
                record.status, record.reason = payload["status"], payload.get("reason")
                record.finalized_ts = time.time()
                self._ready.append(self._open.pop(session_id))
            elif method == "increment_counter":
                name = payload["name"]
                record.counters[name] = record.counters.get(name, 0) + payload.get("value", 1)
            else:
                _mark_phase(record, method)
            full = len(self._ready) >= self.flush_threshold
        if full:
            self.flush()

    def flush(self, *, force: bool = False) -> None:
        """Append finished sessions; with ``force`` the unfinished ones too, as pending."""
        with self._lock:
            records, self._ready = self._ready, []
            if force:
                records += self._open.values()
                self._open = {}
        append_records(self.path, [record.to_json(rank=self.rank, role=self.role) for record in records])

    def sessions_of(self, task_id: int) -> list[int]:
        """Unfinished sessions of one task."""
        with self._lock:
            return [key for key, record in self._open.items() if record.task_id == task_id]


def _mark_phase(record: SessionRecord, method: str) -> None:
    phase, _, edge = method.removeprefix("mark_").rpartition("_")
    if not method.startswith("mark_") or not phase or edge not in ("start", "end"):
        raise DataError(f"unknown session event {method!r}")
    spans = record.phases.setdefault(phase, [])
    if edge == "start":
        spans.append({"start_ts": time.time()})
    elif spans and "end_ts" not in spans[-1]:
        spans[-1]["end_ts"] = time.time()


# --- module surface --------------------------------------------------------------------------------------------------
_active: SessionTracer | None = None


def set_session_tracer(tracer: SessionTracer | None) -> None:
    """Make ``tracer`` the one that the functions below use; None makes them do nothing."""
    global _active
    _active = tracer


def register_task(task_id: int) -> None:
    """Say that this coroutine or thread works on ``task_id``."""
    _task_id.set(task_id)


def register_session(task_id: int) -> int | None:
    """Open a session of ``task_id`` and make it the current one; None when sessions are not traced."""
    if _active is None:
        return None
    session_id = _active.register(task_id)
    _session_id.set(session_id)
    return session_id


def set_task_id(task_id: int | None) -> None:
    """Set the current task."""
    _task_id.set(task_id)


def get_task_id() -> int | None:
    """The current task, or None."""
    return _task_id.get()


def set_session_id(session_id: int | None) -> None:
    """Set the current session."""
    _session_id.set(session_id)


def get_session_id() -> int | None:
    """The current session, or None."""
    return _session_id.get()


def trace_session_event(method: str, session_id: int | None = None, task_id: int | None = None, **payload: Any) -> None:
    """Apply an event (see ``SessionTracer.event``) to one session, to all of a task, or to the current one."""
    if _active is None:
        return
    if session_id is None and task_id is not None:
        for one in _active.sessions_of(task_id):
            _active.event(method, one, payload)
        return
    target = session_id if session_id is not None else _session_id.get()
    if target is not None:
        _active.event(method, target, payload)


@contextmanager
def trace_session_phase(name: str) -> Iterator[None]:
    """The current session spends the block in phase ``name``."""
    trace_session_event(f"mark_{name}_start")
    try:
        yield
    finally:
        trace_session_event(f"mark_{name}_end")


@asynccontextmanager
async def atrace_session_phase(name: str) -> AsyncIterator[None]:
    """``trace_session_phase`` for ``async with``."""
    with trace_session_phase(name):
        yield


def session_context() -> Callable[[F], F]:
    """Decorator of a coroutine function that generates one sample: it runs in a session of the current task."""

    def decorate(fn: F) -> F:
        @functools.wraps(fn)
        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            task_id = _task_id.get()
            if _active is None or task_id is None:
                return await fn(*args, **kwargs)
            token = _session_id.set(_active.register(task_id))
            try:
                return await fn(*args, **kwargs)
            finally:
                _session_id.reset(token)

        return wrapper  # type: ignore[return-value]

    return decorate


def trace_session(phase: str) -> Callable[[F], F]:
    """Decorator of a coroutine function that is one phase of a session, such as ``@trace_session("reward")``."""

    def decorate(fn: F) -> F:
        @functools.wraps(fn)
        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            with trace_session_phase(phase):
                return await fn(*args, **kwargs)

        return wrapper  # type: ignore[return-value]

    return decorate
