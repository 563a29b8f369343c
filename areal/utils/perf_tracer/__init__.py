"""Spans of a run as Chrome trace events, and the life of each sample as session records.

``configure`` is called once per process by the trainer or worker; until then, and when the section is disabled, every
function here does nothing. Files: ``<log dir>/perf_tracer/[<role>/]traces-r<rank>.jsonl`` and
``<log dir>/session_tracer/[<role>/]sessions-r<rank>.jsonl``.
"""

from __future__ import annotations

import atexit
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from areal.utils.errors import EngineError
from areal.utils.perf_tracer.categories import Category
from areal.utils.perf_tracer.session import (
    SessionTracer,
    atrace_session_phase,
    get_session_id,
    get_task_id,
    register_session,
    register_task,
    session_context,
    set_session_id,
    set_session_tracer,
    set_task_id,
    trace_session,
    trace_session_event,
    trace_session_phase,
)
from areal.utils.perf_tracer.tracer import PerfTracer

if TYPE_CHECKING:
    from areal.api.config.logging import PerfTracerConfig

__all__ = [
    "Category",
    "PerfTracer",
    "SessionTracer",
    "atrace_scope",
    "atrace_session_phase",
    "configure",
    "get_session_id",
    "get_task_id",
    "get_tracer",
    "instant",
    "is_configured",
    "register_session",
    "register_task",
    "reset",
    "save",
    "session_context",
    "set_session_id",
    "set_task_id",
    "trace_perf",
    "trace_scope",
    "trace_session",
    "trace_session_event",
    "trace_session_phase",
]

F = TypeVar("F", bound=Callable[..., Any])
_tracer: PerfTracer | None = None


def configure(config: PerfTracerConfig, *, rank: int, role: str | None = None) -> PerfTracer:
    """Start tracing in this process.

    Args:
        config: the ``perf_tracer`` section.
        rank: rank of this process within its role.
        role: master, actor, critic, ref, rollout, eval-rollout; None for a process without one.

    Raises:
        RuntimeError: already configured; call ``reset`` first.
    """
    global _tracer
    if _tracer is not None:
        raise EngineError("perf_tracer is configured already in this process; call perf_tracer.reset() first")
    _tracer = PerfTracer(config, rank=rank, role=role)
    set_session_tracer(_tracer.session_tracer)
    atexit.register(_save_at_exit)
    return _tracer


def is_configured() -> bool:
    """Whether ``configure`` was called."""
    return _tracer is not None


def get_tracer() -> PerfTracer:
    """The tracer of this process. Raises RuntimeError when there is none."""
    if _tracer is None:
        raise EngineError("perf_tracer is not configured in this process; call perf_tracer.configure() first")
    return _tracer


def reset() -> None:
    """Write what is buffered and forget the tracer."""
    global _tracer
    if _tracer is not None:
        _tracer.save(force=True)
    _tracer = None
    set_session_tracer(None)
    atexit.unregister(_save_at_exit)


def save(step: int | None = None, force: bool = False) -> None:
    """Append buffered events to the files, when ``(step + 1) % save_interval == 0`` or forced."""
    if _tracer is not None:
        _tracer.save(step, force)


@contextmanager
def trace_scope(
    name: str,
    *,
    category: Category | str | None = None,
    enable_profiler: bool = False,
    profiler_args: Mapping[str, Any] | None = None,
    args: Mapping[str, Any] | None = None,
) -> Iterator[None]:
    """A span around the block.

    Args:
        name: shown in the trace.
        category: see ``Category``; aliases are understood, other strings are kept.
        enable_profiler: add torch profiler events on the steps in ``profile_steps`` (needs ``global_step`` in ``args``,
            of this or an outer scope). Profiled scopes do not nest.
        profiler_args: arguments for ``torch.profiler.profile``.
        args: shown with the span.
    """
    if _tracer is None or not _tracer.enabled:
        yield
        return
    with _tracer.scope(name, category, dict(args or {}), profile=enable_profiler, profiler_args=profiler_args):
        yield


@asynccontextmanager
async def atrace_scope(
    name: str, *, category: Category | str | None = None, args: Mapping[str, Any] | None = None
) -> AsyncIterator[None]:
    """``trace_scope`` for ``async with``; each asyncio task has its own row in the trace."""
    with trace_scope(name, category=category, args=args):
        yield


def instant(name: str, category: Category | str | None = None, args: Mapping[str, Any] | None = None) -> None:
    """A point in time."""
    if _tracer is not None and _tracer.enabled:
        _tracer.instant(name, category, dict(args or {}))


def trace_perf(name: str, category: Category | str | None = None) -> Callable[[F], F]:
    """Decorator: a span around each call of a function or coroutine function."""

    def decorate(fn: F) -> F:
        if inspect.iscoroutinefunction(fn):

            @functools.wraps(fn)
            async def awrapper(*args: Any, **kwargs: Any) -> Any:
                with trace_scope(name, category=category):
                    return await fn(*args, **kwargs)

            return awrapper  # type: ignore[return-value]

        @functools.wraps(fn)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with trace_scope(name, category=category):
                return fn(*args, **kwargs)

        return wrapper  # type: ignore[return-value]

    return decorate


def _save_at_exit() -> None:
    save(force=True)
