"""Logs of workers: the tail for an error message, and ``merged.log`` with every line of all workers as it comes."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path

TAIL_LINES = 50
_TAIL_BYTES = 64 * 1024
_READ_BYTES = 256 * 1024  # per worker and round
_INTERVAL_S = 0.25


def tail(path: Path, offset: int = 0, lines: int = TAIL_LINES) -> str:
    """The last ``lines`` lines of a log, none from before byte ``offset``; empty when there is no log."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(offset, size - _TAIL_BYTES))
            text = file.read(_TAIL_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


@dataclass
class _Source:
    path: Path
    prefix: bytes
    offset: int


class LogMerger:
    """Copies new whole lines of worker logs to one file, each with the worker's prefix."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self._sources: dict[Path, _Source] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def follow(self, path: Path, prefix: str, offset: int) -> None:
        """Copy what comes after byte ``offset`` of ``path``; following a path again changes nothing."""
        with self._lock:
            self._sources.setdefault(path, _Source(path, prefix.encode() + b" ", offset))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="worker-logs", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Copy what is left, an unfinished last line too, and stop."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while not self._stop.wait(_INTERVAL_S):
            self._round(last=False)
        self._round(last=True)

    def _round(self, *, last: bool) -> None:
        with self._lock:
            sources = list(self._sources.values())
        for source in sources:
            try:
                self._copy(source, last=last)
            except OSError:  # not there yet, or the disk is full: the worker's own log is what counts
                continue

    def _copy(self, source: _Source, *, last: bool) -> None:
        if source.path.stat().st_size <= source.offset:
            return
        with source.path.open("rb") as file:
            file.seek(source.offset)
            data = file.read(_READ_BYTES)
        whole = len(data) if last or len(data) == _READ_BYTES else data.rfind(b"\n") + 1
        if not whole:
            return
        lines = data[:whole].splitlines()
        with self._target.open("ab") as merged:
            merged.write(b"".join(source.prefix + line + b"\n" for line in lines))
        source.offset += whole
