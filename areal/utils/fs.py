"""Where a run's files are, and how they are written: aside, fsynced, then renamed, so no reader sees half a file.

Layout: ``{fileroot}/logs/{user}/{experiment}/{trial}`` and ``{fileroot}/checkpoints/{user}/{experiment}/{trial}``.
Called by the saver, recover handler, stats logger and trainers. Local and NFS file systems.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from areal.utils import environ
from areal.utils.errors import ConfigError, DataError

PathLike = str | os.PathLike[str]

_MISSING = ("", "???", "None")  # "???" is how the configuration marks a value that must be given
_ASIDE = ".aside-"  # in the name of everything that is not complete yet, or no longer
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of linux/fcntl.h and linux/fs.h


def get_log_path(fileroot: PathLike, experiment_name: str, trial_name: str) -> Path:
    """Directory of a trial's logs, created."""
    return _trial_dir("logs", fileroot, experiment_name, trial_name)


def get_save_root(fileroot: PathLike, experiment_name: str, trial_name: str) -> Path:
    """Directory of a trial's checkpoints, created."""
    return _trial_dir("checkpoints", fileroot, experiment_name, trial_name)


def _trial_dir(kind: str, fileroot: PathLike, experiment_name: str, trial_name: str) -> Path:
    parts = {"fileroot": fileroot, "experiment_name": experiment_name, "trial_name": trial_name}
    missing = [key for key, value in parts.items() if str(value) in _MISSING]
    if missing:
        raise ConfigError(f"{', '.join(missing)} must be set to find the {kind} directory")
    path = Path(fileroot, kind, environ.login_user(), experiment_name, trial_name)
    path.mkdir(parents=True, exist_ok=True)
    return path


# --- atomic writes -----------------------------------------------------------------------------------------------
def atomic_write_bytes(path: PathLike, data: bytes, *, mode: int | None = None) -> None:
    """Replace ``path`` by ``data`` in one step; a crash leaves the old content or the new one.

    Args:
        path: target; its directory must exist.
        data: whole content.
        mode: permission bits, such as ``0o600`` for secrets; None keeps the default.
    """
    target = Path(path)
    aside = aside_path(target)
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with os.fdopen(os.open(aside, flags, 0o666 if mode is None else mode), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, target)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    _fsync_path(target.parent)


def atomic_write_text(path: PathLike, text: str) -> None:
    """``atomic_write_bytes`` for UTF-8 text."""
    atomic_write_bytes(path, text.encode())


def atomic_write_json(path: PathLike, value: Any) -> None:
    """``atomic_write_bytes`` for a JSON value, indented, keys in their order."""
    atomic_write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def read_json(path: PathLike) -> Any:
    """Parsed content of a JSON file.

    Raises:
        FileNotFoundError: no such file.
        DataError: it is not JSON; the message names the file.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as exc:
        raise DataError(f"{os.fspath(path)}: not valid JSON: {exc}") from exc


@contextlib.contextmanager
def atomic_directory(path: PathLike) -> Iterator[Path]:
    """Yield an empty directory aside; on success it becomes ``path`` (replacing an old one), on error it is removed.

    One process only; several ranks that write one directory use ``prepare_aside`` and ``publish_directory``.
    """
    target = Path(path)
    aside = aside_path(target)
    aside.mkdir(parents=True)
    try:
        yield aside
        publish_directory(aside, target)
    except BaseException:
        remove_tree(aside)
        raise


def aside_path(target: PathLike, token: str | None = None) -> Path:
    """Hidden sibling of ``target`` for content that is not complete yet; random unless ``token`` is given."""
    final = Path(target)
    return final.with_name(f".{final.name}{_ASIDE}{token or secrets.token_hex(4)}")


def publish_directory(aside: PathLike, target: PathLike) -> None:
    """Fsync everything under ``aside`` and rename it to ``target``; an existing target is replaced and removed.

    Where the system can swap two names (Linux), ``target`` is complete at every moment; elsewhere it is missing between
    two renames.
    """
    final = Path(target)
    fsync_tree(aside)
    if final.exists() and _swap(Path(aside), final):
        _fsync_path(final.parent)
        remove_tree(aside)
        return
    old = aside_path(final) if final.exists() else None
    if old is not None:
        os.rename(final, old)
    os.rename(aside, final)
    _fsync_path(final.parent)
    if old is not None:
        remove_tree(old)


def retire_directory(path: PathLike) -> None:
    """Delete a directory that counts as complete: it loses its name first, so that no half of it ever has it."""
    old = aside_path(path)
    os.rename(path, old)
    remove_tree(old)


def replace_symlink(link: PathLike, target: PathLike) -> None:
    """Point ``link`` at ``target`` (relative to the link's directory), atomically; does nothing without symlinks.

    Raises:
        FileExistsError: a real file or directory has the link's name.
    """
    final = Path(link)
    if final.exists() and not final.is_symlink():
        raise FileExistsError(f"{final} exists and is no symbolic link; move it away")
    final.parent.mkdir(parents=True, exist_ok=True)
    aside = aside_path(final)
    with contextlib.suppress(NotImplementedError, PermissionError):
        os.symlink(os.path.relpath(target, final.parent), aside)
        os.replace(aside, final)


def clean_leftovers(directory: PathLike) -> list[str]:
    """Remove what killed writers left aside in ``directory``; returns the names. No writer may be active."""
    root = Path(directory)
    left = list(root.glob(f".*{_ASIDE}*")) if root.is_dir() else []
    for entry in left:
        if entry.is_dir() and not entry.is_symlink():
            remove_tree(entry)
        else:
            entry.unlink(missing_ok=True)
    return [entry.name for entry in left]


def remove_tree(path: PathLike) -> None:
    """Delete a directory tree; a missing one is fine."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path)


def fsync_file(path: PathLike) -> None:
    """Flush one file to the disk; for ranks on other machines, whose writes the publishing rank cannot flush."""
    _fsync_path(Path(path))


def fsync_tree(path: PathLike) -> None:
    """Flush every file and directory under ``path`` to the disk."""
    for directory, _, files in os.walk(path):
        for name in files:
            _fsync_path(Path(directory, name))
        _fsync_path(Path(directory))


def _swap(first: Path, second: Path) -> bool:
    """Exchange two names in one step; False where the system or the file system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    done: int = renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE)
    return done == 0


def _fsync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems refuse to sync a directory
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
