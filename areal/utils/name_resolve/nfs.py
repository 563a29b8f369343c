"""Names as files below a shared directory: ``{root}/{name}/ENTRY`` holds the value.

An entry appears complete (written aside, then linked or renamed), exclusively when it must not exist yet. Stale handles
of network file systems are retried. An entry with a time to live ends with a mark that says how long; it counts from
the file's modification time, which a renewal sets anew, and whoever meets an expired entry removes it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from areal.utils.errors import NameEntryExistsError, NameEntryNotFoundError
from areal.utils.name_resolve.base import unreachable

_ENTRY = "ENTRY"
_RETRIES = 10
_RETRY_DELAY_S = 0.05
_LEASE_MARK = re.compile(r"\0lease ([0-9.e+-]+)\Z")


@dataclass
class _Entry:
    """What one look at a file showed."""

    value: str
    ttl_s: float | None
    stat: os.stat_result


class NfsBackend:
    """Files under ``root`` (created with the first entry)."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)

    def put(self, name: str, value: str, *, replace: bool, keepalive_ttl: float | None) -> None:
        """Write one entry."""
        path = self.root / name / _ENTRY
        text = value if keepalive_ttl is None else f"{value}\0lease {keepalive_ttl}"
        for attempt in range(_RETRIES):
            try:
                self._write(path, text, replace=replace)
            except FileNotFoundError as exc:  # a concurrent delete removed the empty directory
                if attempt == _RETRIES - 1:
                    raise self._unreachable(exc) from exc
            except FileExistsError as exc:
                if self._read(name) is not None:
                    raise NameEntryExistsError(f"name {name!r} is already registered in {self.root}") from exc
            except OSError as exc:
                raise self._unreachable(exc) from exc
            else:
                return
        raise NameEntryExistsError(f"name {name!r} is registered in {self.root} again and again by others")

    def _write(self, path: Path, text: str, *, replace: bool) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = _beside(path)
        try:
            aside.write_text(text, encoding="utf-8")
            if replace:
                os.replace(aside, path)
            else:
                os.link(aside, path)  # fails when the entry exists, atomically
        finally:
            with contextlib.suppress(OSError):
                aside.unlink()

    def renew(self, name: str, value: str, keepalive_ttl: float) -> bool:
        """Give the entry its full time again."""
        del keepalive_ttl  # the file has it
        entry = self._read(name)
        if entry is None or entry.ttl_s is None or entry.value != value:
            return False
        try:
            os.utime(self.root / name / _ENTRY)
        except FileNotFoundError:
            return False
        except OSError as exc:
            raise self._unreachable(exc) from exc
        return True

    def get(self, name: str) -> str:
        """Read one entry."""
        entry = self._read(name)
        if entry is None:
            raise self._missing(name)
        return entry.value

    def remove(self, name: str, *, only: str | None = None) -> None:
        """Remove one entry."""
        entry = self._read(name)
        if entry is None or only not in (None, entry.value):
            raise self._missing(name)
        path = self.root / name / _ENTRY
        try:
            path.unlink()
        except (FileNotFoundError, NotADirectoryError):
            raise self._missing(name) from None
        except OSError as exc:
            raise self._unreachable(exc) from exc
        self._prune(path.parent)

    def list_below(self, root: str) -> list[str]:
        """Names of ``root`` and below."""
        top = self.root / root if root else self.root
        found = []
        for directory, _, files in os.walk(top):
            name = Path(directory).relative_to(self.root).as_posix()
            if _ENTRY in files and self._read(name) is not None:
                found.append(name)
        return found

    def close(self) -> None:
        """Nothing to let go of."""

    def _read(self, name: str) -> _Entry | None:
        """The entry, None when it is not there or its time is over; then it is removed."""
        path = self.root / name / _ENTRY
        for attempt in range(_RETRIES):
            try:
                with path.open(encoding="utf-8", newline="") as file:
                    text, stat = file.read(), os.fstat(file.fileno())
            except (FileNotFoundError, NotADirectoryError):
                return None
            except OSError as exc:
                if exc.errno != errno.ESTALE or attempt == _RETRIES - 1:
                    raise self._unreachable(exc) from exc
                time.sleep(_RETRY_DELAY_S)
            else:
                break
        mark = _LEASE_MARK.search(text)
        if mark is None:
            return _Entry(text, None, stat)
        entry = _Entry(text[: mark.start()], float(mark[1]), stat)
        if self._is_over(entry):
            self._evict(path, entry)
            return None
        return entry

    def _is_over(self, entry: _Entry) -> bool:
        """Whether the lease has ended by the clock of this machine and by that of the file server, which may differ."""
        over_at = entry.stat.st_mtime + (entry.ttl_s or 0)
        if time.time() <= over_at:
            return False
        probe = self.root / f".clock-{secrets.token_hex(8)}"
        try:
            probe.touch()
            server_time = probe.stat().st_mtime
            probe.unlink()
        except OSError:
            return True  # a reader that may not write has its own clock only
        return server_time > over_at

    def _evict(self, path: Path, entry: _Entry) -> None:
        """Remove an expired entry, and put it back if it was renewed or replaced since it was read."""
        aside = _beside(path)
        with contextlib.suppress(OSError):  # someone else was faster, or may write and we may not
            os.rename(path, aside)
            stat = aside.stat()
            if (stat.st_ino, stat.st_mtime_ns) != (entry.stat.st_ino, entry.stat.st_mtime_ns):
                with contextlib.suppress(FileExistsError):
                    os.link(aside, path)
            aside.unlink()
        self._prune(path.parent)

    def _prune(self, directory: Path) -> None:
        with contextlib.suppress(OSError):  # not empty, or someone else was faster
            while directory != self.root:
                directory.rmdir()
                directory = directory.parent

    def _missing(self, name: str) -> NameEntryNotFoundError:
        return NameEntryNotFoundError(f"name {name!r} is not registered in {self.root}")

    def _unreachable(self, cause: OSError) -> Exception:
        remedy = "make the directory readable and writable"
        return unreachable("nfs", "nfs_record_root", str(self.root), cause, remedy)


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}-{secrets.token_hex(8)}")
