"""``stats.jsonl``: one line per committed step, cut back when a run resumes from an earlier step.

A line is ``{"format", "epoch", "step", "global_step", "log_step", "time", "stats": {key: number}}``; ``time`` is in
seconds since 1970. Written by ``StatsLogger``, read by ``areal plot`` and by users.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from areal.utils import fs

FORMAT = 1
FILE_NAME = "stats.jsonl"


class StatsFile:
    """Appends steps to one file; nothing stays open between two steps."""

    def __init__(self, path: fs.PathLike) -> None:
        self.path = Path(path)
        self._started = False

    def write(self, row: dict[str, Any]) -> None:
        """Append one line. At the first call, rows of this step or later ones are cut away, and a run that starts at
        step 0 leaves an earlier run's file beside it.
        """
        if not self._started:
            self._start(int(row["global_step"]))
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"format": FORMAT, **_finite(row)}, allow_nan=False) + "\n")

    def cut_after(self, global_step: int) -> int:
        """Drop rows later than ``global_step`` (and a torn last line); returns how many rows went."""
        if not self.path.exists():
            return 0
        lines = self.path.read_text(encoding="utf-8").splitlines()
        kept = [json.dumps(row) for row in _parse(lines) if row["global_step"] <= global_step]
        if len(kept) != len(lines):
            fs.atomic_write_text(self.path, "".join(line + "\n" for line in kept))
        return len(lines) - len(kept)

    def _start(self, first_step: int) -> None:
        self._started = True
        if first_step == 0 and self.path.exists() and self.path.stat().st_size:
            self.path.rename(_free_name(self.path))
        else:
            self.cut_after(first_step - 1)


def read_stats(path: fs.PathLike) -> list[dict[str, Any]]:
    """Rows of a ``stats.jsonl`` (or of the one in a directory); a torn last line is left out.

    Raises:
        FileNotFoundError: there is no such file.
    """
    file = Path(path)
    file = file / FILE_NAME if file.is_dir() else file
    return list(_parse(file.read_text(encoding="utf-8").splitlines()))


def _parse(lines: list[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:  # a kill in the middle of a write
            continue
        if isinstance(row, dict) and "global_step" in row:
            yield row


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null and strings."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value


def _free_name(path: Path) -> Path:
    number = 1
    while (candidate := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    return candidate
