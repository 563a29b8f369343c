"""Runs torch's profiler around a block and turns its events into events of our trace."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def profiled(begin_us: int, profiler_args: dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """Profile the block.

    Args:
        begin_us: time of our trace at which the block starts; the profiler's first event is put there.
        profiler_args: for ``torch.profiler.profile``.

    Yields:
        A list that holds the profiler's events once the block has ended; their thread ids are negative, so that they
        never share a row with our own spans.
    """
    import torch

    events: list[dict[str, Any]] = []
    with torch.profiler.profile(**profiler_args) as profile:
        yield events
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "trace.json")
        profile.export_chrome_trace(str(path))
        raw = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    spans = [event for event in raw if event.get("ph") == "X"]
    first = min((event["ts"] for event in spans), default=0)
    rows: dict[tuple[Any, Any], int] = {}
    for event in spans:
        row = rows.setdefault((event.get("pid"), event.get("tid")), -1 - len(rows))
        events.append({**event, "ts": event["ts"] - first + begin_us, "tid": row})
