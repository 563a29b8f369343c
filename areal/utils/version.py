"""Which AReaL and which libraries are running: package version and, in a git checkout, commit and branch."""

from __future__ import annotations

import functools
import importlib.metadata
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_GIT_TIMEOUT_S = 5


@dataclass(frozen=True)
class VersionInfo:
    """Version of this installation; ``commit`` and ``branch`` are None outside a git checkout."""

    version: str
    commit: str | None
    branch: str | None
    is_dirty: bool | None

    @property
    def full_version(self) -> str:
        """``1.0.0`` or ``1.0.0+abc1234`` or ``1.0.0+abc1234.dirty``."""
        if self.commit is None:
            return self.version
        return f"{self.version}+{self.commit[:7]}{'.dirty' if self.is_dirty else ''}"


@functools.lru_cache(maxsize=1)
def get_version_info() -> VersionInfo:
    """Version of the running package; asks git at most once per process."""
    release = str(sys.modules["areal"].__version__)  # the parent package is loaded before this module
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return VersionInfo(release, None, None, None)
    commit = _git(root, "rev-parse", "HEAD")
    branch = _git(root, "rev-parse", "--abbrev-ref", "HEAD")
    status = _git(root, "status", "--porcelain", "--untracked-files=no")
    return VersionInfo(release, commit, branch, None if status is None else bool(status))


def pkg_version(package: str) -> str | None:
    """Version of an installed distribution, or None; imports nothing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def __getattr__(name: str) -> VersionInfo:
    """``version.version_info``, worked out at first use."""
    if name == "version_info":
        return get_version_info()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _git(root: Path, *args: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *args], capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
