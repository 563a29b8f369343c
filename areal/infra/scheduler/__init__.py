"""Schedulers: who hosts the objects of a run. ``make_scheduler`` is called by the trainer's builder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal.utils.registry import Registry

if TYPE_CHECKING:
    from areal.api.scheduler_api import Scheduler
    from areal.infra.run_context import RunContext

__all__ = ["SCHEDULERS", "make_scheduler"]

SCHEDULERS: Registry[type] = Registry(
    "scheduler",
    {
        "inline": "areal.infra.scheduler.inline.InlineScheduler",
        "local": "areal.infra.scheduler.local.LocalScheduler",
        "ray": "areal.infra.scheduler.ray.RayScheduler",
        "slurm": "areal.infra.scheduler.slurm.SlurmScheduler",
    },
)


def make_scheduler(kind: str, context: RunContext | None = None) -> Scheduler:
    """The scheduler of one run.

    Args:
        kind: ``scheduler.type``: inline, local, ray or slurm.
        context: the run; only inline does without.

    Raises:
        ConfigError: an unknown kind.
    """
    cls = SCHEDULERS.get(kind)
    scheduler: Scheduler = cls() if kind == "inline" else cls(context)
    return scheduler
