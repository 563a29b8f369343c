"""Key-value store through which the processes of a run find each other.

``reconfigure(NameResolveConfig)`` picks the backend once per process; before it, names live in this process only. All
functions delegate to the current backend at call time, so importing one of them never keeps an old backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from areal.utils.errors import NameEntryExistsError, NameEntryNotFoundError, UnsupportedFeatureError
from areal.utils.name_resolve.base import NameStore
from areal.utils.name_resolve.memory import MemoryBackend
from areal.utils.name_resolve.nfs import NfsBackend

if TYPE_CHECKING:
    from areal.api.config.cluster import NameResolveConfig

__all__ = [
    "MemoryBackend",
    "NameEntryExistsError",
    "NameEntryNotFoundError",
    "NameStore",
    "NfsBackend",
    "add",
    "add_subentry",
    "clear_subtree",
    "current_store",
    "delete",
    "find_subtree",
    "get",
    "get_subtree",
    "reconfigure",
    "reset",
    "wait",
    "watch_names",
]

_store: NameStore = NameStore(MemoryBackend())


def reconfigure(config: NameResolveConfig) -> None:
    """Use the backend that ``config`` describes from now on; the old one's own entries are deleted.

    Raises:
        UnsupportedFeatureError: a backend that is not part of this build, or an unknown one (NotImplementedError).
    """
    global _store
    if config.type == "memory":
        store = NameStore(MemoryBackend())
    elif config.type == "nfs":
        store = NameStore(NfsBackend(config.nfs_record_root))
    elif config.type in ("redis", "etcd3", "ray"):
        raise UnsupportedFeatureError(
            f"cluster.name_resolve.type={config.type!r} comes with the cluster back ends; "
            "use 'nfs' (a shared directory) or 'memory' (one process)"
        )
    else:
        raise UnsupportedFeatureError(f"cluster.name_resolve.type={config.type!r} is unknown; use 'nfs' or 'memory'")
    _store.reset()
    _store = store


def current_store() -> NameStore:
    """The backend in use."""
    return _store


def add(
    name: str, value: str, delete_on_exit: bool = True, keepalive_ttl: float | None = None, replace: bool = False
) -> None:
    """Register ``value`` under ``name``.

    Args:
        name: slash-separated key.
        value: text; other values are turned into text.
        delete_on_exit: ``reset`` and the end of this process delete it.
        keepalive_ttl: seconds after which a dead owner's key goes; backends without leases ignore it.
        replace: overwrite an existing value.

    Raises:
        NameEntryExistsError: the name is taken and ``replace`` is false.
        ValueError: the name is empty or leaves the tree.
    """
    _store.add(name, value, delete_on_exit=delete_on_exit, keepalive_ttl=keepalive_ttl, replace=replace)


def add_subentry(name: str, value: str, delete_on_exit: bool = True, keepalive_ttl: float | None = None) -> str:
    """Register ``value`` under a random child of ``name``; returns the child's full name."""
    return _store.add_subentry(name, value, delete_on_exit=delete_on_exit, keepalive_ttl=keepalive_ttl)


def get(name: str) -> str:
    """Value of ``name``. Raises NameEntryNotFoundError."""
    return _store.get(name)


def wait(name: str, timeout: float | None = None, poll_frequency: float = 1) -> str:
    """Value of ``name`` as soon as it is there; polls every ``poll_frequency`` seconds.

    Raises:
        WaitTimeoutError: not there after ``timeout`` seconds (a ``TimeoutError``); None waits without limit.
    """
    return _store.wait(name, timeout=timeout, poll_frequency=poll_frequency)


def delete(name: str) -> None:
    """Remove ``name``. Raises NameEntryNotFoundError."""
    _store.delete(name)


def get_subtree(name_root: str) -> list[str]:
    """Values of ``name_root`` and everything below, in the order of their names."""
    return [_store.get(name) for name in _store.find_subtree(name_root)]


def find_subtree(name_root: str) -> list[str]:
    """Names of ``name_root`` and everything below, sorted."""
    return _store.find_subtree(name_root)


def clear_subtree(name_root: str) -> None:
    """Remove ``name_root`` and everything below; nothing there is fine."""
    _store.clear_subtree(name_root)


def watch_names(
    names: str | Sequence[str],
    call_back: Callable[[], None],
    poll_frequency: float = 15,
    wait_timeout: float = 300,
) -> None:
    """Call ``call_back()`` once, from a background thread, when all ``names`` are gone.

    Each name is waited for first, at most ``wait_timeout`` seconds; one that never came counts as gone.
    """
    wanted = [names] if isinstance(names, str) else list(names)
    _store.watch_names(wanted, call_back, poll_frequency=poll_frequency, wait_timeout=wait_timeout)


def reset() -> None:
    """Delete the entries that this process added with ``delete_on_exit``."""
    _store.reset()
