"""Appends JSON records to a file so that a crash loses at most the records not yet handed over."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def append_records(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Append one line per record and fsync; creates the directory."""
    text = "".join(json.dumps(record, default=str) + "\n" for record in records)
    if not text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def trace_file(log_dir: Path, kind: str, stem: str, *, rank: int, role: str | None) -> Path:
    """``<log dir>/<kind>/[<role>/]<stem>-r<rank>.jsonl``."""
    directory = log_dir / kind / role if role else log_dir / kind
    return directory / f"{stem}-r{rank}.jsonl"
