"""Categories of spans; the trace viewer filters by them."""

from __future__ import annotations

from enum import StrEnum


class Category(StrEnum):
    """What a span is about."""

    COMPUTE = "compute"
    COMM = "comm"
    IO = "io"
    SYNC = "sync"
    SCHEDULER = "scheduler"
    INSTR = "instr"
    MISC = "misc"


_ALIASES = {
    "communication": Category.COMM,
    "synchronization": Category.SYNC,
    "scheduling": Category.SCHEDULER,
    "instrumentation": Category.INSTR,
}


def category_name(category: Category | str | None) -> str:
    """Text written to the trace: aliases become their category, other strings stay, None is ``misc``."""
    if category is None:
        return Category.MISC.value
    if isinstance(category, Category):
        return category.value
    alias = _ALIASES.get(category.lower())
    return alias.value if alias is not None else category
