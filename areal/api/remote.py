"""Which methods other processes may call, and how; standard library only, so that every engine can be marked.

A worker runs calls in one of two lanes: in order of arrival on its engine thread (the default: collectives and models
need one order), or beside it (``concurrent=True``: answers while the engine thread works). Marks are read by
``areal.infra.rpc.server``; :class:`ObjectRef` is replaced there by the object of that name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, overload

_MARK = "__areal_remote__"
_Method = TypeVar("_Method", bound=Callable[..., Any])


@dataclass(frozen=True)
class RemoteSpec:
    """How a marked method is run: beside the engine thread or on it, and whether it may be sent twice."""

    concurrent: bool = False
    idempotent: bool = False


@dataclass(frozen=True)
class ObjectRef:
    """Stands, in the arguments of a call to a worker, for the object that the worker hosts under ``name``."""

    name: str


@overload
def remote(method: _Method) -> _Method: ...


@overload
def remote(*, concurrent: bool = False, idempotent: bool = False) -> Callable[[_Method], _Method]: ...


def remote(method: Any = None, *, concurrent: bool = False, idempotent: bool = False) -> Any:
    """Mark a method as callable from other processes; an overriding method inherits the mark.

    Args:
        concurrent: run beside the engine thread: ``async def`` on the worker's event loop (it must not block), plain
            functions in a small thread pool (they must be thread-safe).
        idempotent: running it twice does the same as running it once, so a client may send it again when the
            connection broke.
    """

    def mark(target: Any) -> Any:
        setattr(target, _MARK, RemoteSpec(concurrent=concurrent, idempotent=idempotent))
        return target

    return mark if method is None else mark(method)


def remote_spec(cls: type, name: str) -> RemoteSpec | None:
    """Mark of the method ``name``, from the class or the nearest base class that has one; None: not callable."""
    for base in cls.__mro__:
        spec = getattr(base.__dict__.get(name), _MARK, None)
        if isinstance(spec, RemoteSpec):
            return spec
    return None
