"""Key-value store through which the processes of a run find each other.

``reconfigure(NameResolveConfig)`` picks the backend once per process; before it, names live in this process only. All
functions delegate to the current backend at call time, so importing one of them never keeps an old backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from areal.utils.errors import NameEntryExistsError, NameEntryNotFoundError, UnsupportedFeatureError
from areal.utils.name_resolve.base import NameBackend, NameStore
from areal.utils.name_resolve.etcd_store import EtcdBackend
from areal.utils.name_resolve.memory import MemoryBackend
from areal.utils.name_resolve.nfs import NfsBackend
from areal.utils.name_resolve.ray_store import RayBackend
from areal.utils.name_resolve.redis_store import RedisBackend

if TYPE_CHECKING:
    from areal.api.config.cluster import NameResolveConfig

__all__ = [
    "NameBackend",
    "NameEntryExistsError",
    "NameEntryNotFoundError",
    "NameStore",
    "add",
    "add_subentry",
    "clear_subtree",
    "current_store",
    "delete",
    "find_subtree",
    "get",
    "get_subtree",
    "make_backend",
    "reconfigure",
    "reset",
    "wait",
    "watch_names",
]

_store: NameStore = NameStore(MemoryBackend())


def reconfigure(config: NameResolveConfig) -> None:
    """Use the backend that ``config`` describes from now on; the old one's own entries are deleted.

    Nothing is contacted before the first use, so reading the configuration of another machine works.

    Raises:
        UnsupportedFeatureError: an unknown backend (NotImplementedError).
        ConfigError: an address that is not ``host:port``.
    """
    global _store
    store = NameStore(make_backend(config))
    _store.close()
    _store = store


def make_backend(config: NameResolveConfig) -> NameBackend:
    """The backend that ``config`` describes; a ``NameStore`` on it is a second client beside the current one."""
    match config.type:
        case "memory":
            return MemoryBackend()
        case "nfs":
            return NfsBackend(config.nfs_record_root)
        case "redis":
            return RedisBackend(config.redis_addr)
        case "etcd3":
            return EtcdBackend(config.etcd3_addr)
        case "ray":
            return RayBackend(config.ray_actor_name)
    raise UnsupportedFeatureError(
        f"cluster.name_resolve.type={config.type!r} is unknown; use nfs, redis, etcd3, ray or memory"
    )


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
        keepalive_ttl: seconds after which a dead owner's key goes; while the owner lives a thread renews it. etcd3
            rounds up to whole seconds, 2 at least.
        replace: overwrite an existing value.

    Raises:
        NameEntryExistsError: the name is taken and ``replace`` is false.
        ValueError: the name is empty or leaves the tree, or the time to live is not positive.
        NetworkError: the store does not answer; every function here may raise it.
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
    return _store.get_subtree(name_root)


def find_subtree(name_root: str) -> list[str]:
    """Names of ``name_root`` and everything below, sorted."""
    return _store.find_subtree(name_root)


def clear_subtree(name_root: str) -> None:
    """Remove ``name_root`` and everything below, and nothing beside it; nothing there is fine.

    Raises:
        ValueError: the root is empty; a store may be shared with other runs.
    """
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
    """Delete the entries that this process added with ``delete_on_exit`` and that still have its values."""
    _store.reset()
