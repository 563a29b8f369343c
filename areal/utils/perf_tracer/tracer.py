"""Records spans as Chrome trace events and appends them, one per line, to this rank's file.

Times are microseconds since the tracer started. Threads and asyncio tasks get rows of their own.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from areal.utils import fs
from areal.utils.perf_tracer.categories import Category, category_name
from areal.utils.perf_tracer.jsonl import append_records, trace_file
from areal.utils.perf_tracer.profiler import profiled
from areal.utils.perf_tracer.session import SessionTracer

if TYPE_CHECKING:
    from areal.api.config.logging import PerfTracerConfig

_MIN_DURATION_US = 1
_global_step: ContextVar[int | None] = ContextVar("perf_tracer_global_step", default=None)


class PerfTracer:
    """Events of one process; thread-safe.

    Args:
        config: the ``perf_tracer`` section.
        rank: of this process within its role.
        role: names a subdirectory and the process in the viewer.
    """

    def __init__(self, config: PerfTracerConfig, *, rank: int, role: str | None) -> None:
        self.config = config
        self.enabled = config.enabled
        self.rank, self.role = rank, role
        log_dir = fs.get_log_path(config.fileroot, config.experiment_name, config.trial_name)
        self.path = trace_file(log_dir, "perf_tracer", "traces", rank=rank, role=role)
        self.session_tracer: SessionTracer | None = None
        if config.session_tracer is not None and config.session_tracer.enabled:
            path = trace_file(log_dir, "session_tracer", "sessions", rank=rank, role=role)
            threshold = config.session_tracer.flush_threshold
            self.session_tracer = SessionTracer(path, flush_threshold=threshold, rank=rank, role=role)
        self._start_ns = time.perf_counter_ns()
        self._lock = threading.Lock()
        self._events: list[dict[str, Any]] = []
        self._rows: set[int] = set()
        self._profiling = threading.Lock()  # torch's profiler does not nest
        if self.enabled:
            self._add_process_names()

    @contextmanager
    def scope(
        self,
        name: str,
        category: Category | str | None,
        args: dict[str, Any],
        *,
        profile: bool = False,
        profiler_args: Mapping[str, Any] | None = None,
    ) -> Iterator[None]:
        """One complete event around the block; an exception is noted in its arguments and passes on."""
        step = args.get("global_step", _global_step.get())
        token = _global_step.set(step)
        begin = self._now_us()
        try:
            with self._profiler(step, profiler_args) if profile else nullcontext():
                yield
        except BaseException as exc:
            args["exception"] = f"{type(exc).__name__}: {exc}"
            raise
        finally:
            _global_step.reset(token)
            duration = max(self._now_us() - begin, _MIN_DURATION_US)
            self._add({"name": name, "ph": "X", "ts": begin, "dur": duration}, category, args)

    def instant(self, name: str, category: Category | str | None, args: dict[str, Any]) -> None:
        """One event without duration."""
        self._add({"name": name, "ph": "i", "ts": self._now_us(), "s": "t"}, category, args)

    def save(self, step: int | None = None, force: bool = False) -> None:
        """Append what is buffered when it is this step's turn, or forced (then unfinished sessions too)."""
        due = force or step is None or (step + 1) % self.config.save_interval == 0
        if not due:
            return
        with self._lock:
            events, self._events = self._events, []
        append_records(self.path, events)
        if self.session_tracer is not None and force:
            self.session_tracer.flush(force=True)

    def _now_us(self) -> int:
        return (time.perf_counter_ns() - self._start_ns) // 1000

    def _add(self, event: dict[str, Any], category: Category | str | None, args: dict[str, Any]) -> None:
        row, row_name = _current_row()
        event |= {"pid": os.getpid(), "tid": row, "cat": category_name(category)}
        event["args"] = {**args, "rank": self.rank, **({"role": self.role} if self.role else {})}
        with self._lock:
            if row not in self._rows:
                self._rows.add(row)
                self._events.append(_metadata("thread_name", row, {"name": row_name}))
            self._events.append(event)

    def _add_process_names(self) -> None:
        name = f"[{self.role}] Rank {self.rank}, Process" if self.role else f"Rank {self.rank}, Process"
        self._events.append(_metadata("process_name", 0, {"name": name}))
        self._events.append(_metadata("process_sort_index", 0, {"sort_index": self.rank}))

    @contextmanager
    def _profiler(self, step: int | None, profiler_args: Mapping[str, Any] | None) -> Iterator[None]:
        """Run torch's profiler around the block on the chosen steps, unless an outer scope does already."""
        wanted = step is not None and step in (self.config.profile_steps or [])
        if not wanted or not self._profiling.acquire(blocking=False):
            yield
            return
        try:
            with profiled(self._now_us(), dict(profiler_args or {})) as events:
                yield
        finally:
            self._profiling.release()
        with self._lock:
            self._events.extend(events)


def _current_row() -> tuple[int, str]:
    """Id and name of the viewer's row for the running asyncio task, or thread."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    if task is not None:
        return id(task) & 0x7FFFFFFF, f"task {task.get_name()}"
    thread = threading.current_thread()
    return thread.native_id or thread.ident or 0, thread.name


def _metadata(name: str, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": os.getpid(), "tid": tid, "args": args}
