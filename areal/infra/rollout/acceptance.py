"""The acceptance filter: a user's ``should_accept_fn(trajectory) -> bool``, given as a function or an import string."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from areal.utils.dynamic_import import import_from_string

AcceptFn = Callable[[dict[str, Any]], Any]


def resolve_accept_fn(accept: AcceptFn | str | None) -> AcceptFn | None:
    """The filter itself.

    Raises:
        ValueError: the import string leads nowhere.
        TypeError: what was given or imported is not callable.
    """
    if accept is None:
        return None
    target: Any = accept
    if isinstance(accept, str):
        try:
            target = import_from_string(accept)
        except (ImportError, AttributeError, ValueError) as exc:
            raise ValueError(f"should_accept_fn={accept!r} cannot be imported: {exc}") from exc
    if not callable(target):
        raise TypeError(f"should_accept_fn={accept!r} is a {type(target).__name__}; it must be callable")
    return cast("AcceptFn", target)


def accepts(accept: AcceptFn | None, trajectory: dict[str, Any]) -> bool:
    """Whether the filter, if any, keeps this group; it sees the group's final table."""
    return accept is None or bool(accept(trajectory))
