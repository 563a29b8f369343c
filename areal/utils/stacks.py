"""Python stacks as text: of every thread of this process, and of the tasks of an asyncio loop.

Called by the status server and by whoever writes a report of a wait that failed. Only reads, from any thread.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Iterable
from types import CodeType, FrameType
from typing import Any

_OWN_FILE = __file__


def thread_stacks() -> str:
    """The stack of every Python thread of this process, the main thread first."""
    threads = {thread.ident: thread for thread in threading.enumerate()}
    frames = sys._current_frames()
    main = threading.main_thread().ident
    parts = []
    for ident in sorted(frames, key=lambda ident: (ident != main, ident)):
        thread = threads.get(ident)
        name = "(not started by Python)" if thread is None else thread.name
        kind = " daemon" if thread is not None and thread.daemon else ""
        parts.append(f"Thread {name} ({ident}){kind}:\n{_frame_text(frames[ident])}")
    return "\n".join(parts)


def task_stacks(tasks: Iterable[asyncio.Task[Any]]) -> str:
    """Where each unfinished task is suspended, innermost line last; tasks at the same place are shown once, counted."""
    places = Counter(_task_text(task) for task in tasks if not task.done())
    return "\n".join(f"{count} task{'s' if count > 1 else ''} at:\n{text}" for text, count in places.most_common())


def _frame_text(frame: FrameType) -> str:
    entries = [entry for entry in traceback.extract_stack(frame) if entry.filename != _OWN_FILE]
    begun = itertools.dropwhile(lambda entry: entry.filename == threading.__file__, entries)  # how every thread begins
    return "".join(traceback.format_list(list(begun) or entries))


def _task_text(task: asyncio.Task[Any]) -> str:
    """The chain of awaits inside a task."""
    lines: list[tuple[str, int, str]] = []
    waiting: Any = task.get_coro()
    while waiting is not None:
        code, frame, waiting = _suspended(waiting)
        if code is not None:
            lines.append((code.co_filename, frame.f_lineno if frame is not None else 0, code.co_qualname))
    return "".join(traceback.format_list([(path, number, name, None) for path, number, name in lines]))


def _suspended(awaitable: Any) -> tuple[CodeType | None, FrameType | None, Any]:
    """Code, frame and what it awaits, of a coroutine or generator; of anything else, only that it ends the chain."""
    for prefix, inner in (("cr", "cr_await"), ("gi", "gi_yieldfrom"), ("ag", "ag_await")):
        if hasattr(awaitable, f"{prefix}_code"):
            return (
                getattr(awaitable, f"{prefix}_code"),
                getattr(awaitable, f"{prefix}_frame"),
                getattr(awaitable, inner),
            )
    return None, None, None
