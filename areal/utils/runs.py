"""Cutting a list into runs of neighbours of limited size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

__all__ = ["in_runs"]

_Item = TypeVar("_Item")


def in_runs(items: Iterable[_Item], size_of: Callable[[_Item], int], limit: int) -> Iterator[list[_Item]]:
    """Consecutive items, in order, of together at most ``limit``; a larger item is a run of its own.

    Args:
        items: anything; asked for one by one.
        size_of: size of an item, in the unit of ``limit``.
    """
    run: list[_Item] = []
    filled = 0
    for item in items:
        size = size_of(item)
        if run and filled + size > limit:
            yield run
            run, filled = [], 0
        run.append(item)
        filled += size
    if run:
        yield run
