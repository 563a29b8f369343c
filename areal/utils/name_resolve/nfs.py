"""Names as files below a shared directory: ``{root}/{name}/ENTRY`` holds the value.

An entry appears complete (written aside, then linked or renamed), exclusively when it must not exist yet. Stale handles
of network file systems are retried. There are no leases: a time to live is ignored.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import time
from pathlib import Path

from areal.utils.errors import NameEntryExistsError, NameEntryNotFoundError

_ENTRY = "ENTRY"
_RETRIES = 10
_RETRY_DELAY_S = 0.05


class NfsBackend:
    """Files under ``root`` (created)."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        self.root.mkdir(parents=True, exist_ok=True)

    def put(self, name: str, value: str, *, replace: bool, keepalive_ttl: float | None) -> None:
        """Write one entry."""
        del keepalive_ttl  # files have no leases
        entry = self.root / name / _ENTRY
        for attempt in range(_RETRIES):
            try:
                self._write(entry, value, replace=replace)
            except FileNotFoundError:  # a concurrent delete removed the empty directory
                if attempt == _RETRIES - 1:
                    raise
            except FileExistsError:
                raise NameEntryExistsError(f"name {name!r} is already registered in {self.root}") from None
            else:
                return

    def _write(self, entry: Path, value: str, *, replace: bool) -> None:
        entry.parent.mkdir(parents=True, exist_ok=True)
        aside = entry.with_name(f".{_ENTRY}-{secrets.token_hex(8)}")
        try:
            aside.write_text(value, encoding="utf-8")
            if replace:
                os.replace(aside, entry)
            else:
                os.link(aside, entry)  # fails when the entry exists, atomically
        finally:
            with contextlib.suppress(FileNotFoundError):
                aside.unlink()

    def get(self, name: str) -> str:
        """Read one entry."""
        for attempt in range(_RETRIES):
            try:
                return (self.root / name / _ENTRY).read_text(encoding="utf-8")
            except (FileNotFoundError, NotADirectoryError):
                raise NameEntryNotFoundError(f"name {name!r} is not registered in {self.root}") from None
            except OSError as exc:
                if exc.errno != errno.ESTALE or attempt == _RETRIES - 1:
                    raise
                time.sleep(_RETRY_DELAY_S)
        raise AssertionError("unreachable")

    def remove(self, name: str) -> None:
        """Remove one entry."""
        try:
            (self.root / name / _ENTRY).unlink()
        except (FileNotFoundError, NotADirectoryError):
            raise NameEntryNotFoundError(f"name {name!r} is not registered in {self.root}") from None
        directory = self.root / name
        with contextlib.suppress(OSError):  # not empty, or someone else was faster
            while directory != self.root:
                directory.rmdir()
                directory = directory.parent

    def list_below(self, root: str) -> list[str]:
        """Names of ``root`` and below."""
        top = self.root / root if root else self.root
        found = []
        for directory, _, files in os.walk(top):
            if _ENTRY in files:
                found.append(Path(directory).relative_to(self.root).as_posix())
        return found
