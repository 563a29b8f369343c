"""``python -m areal.infra.launcher.ray script.py --config c.yaml …``: processes are actors of a Ray cluster.

The cluster is the one that ``RAY_ADDRESS`` names, else one on this machine. It runs on a node of the cluster.
"""

from __future__ import annotations

import sys

from areal.infra.launcher.base import main
from areal.infra.launcher.plan import LaunchPlan, check_nodes, warn_if_not_shared
from areal.infra.run_context import RunContext
from areal.infra.scheduler.base import BaseScheduler
from areal.infra.utils.ray import ensure_ray


def check(plan: LaunchPlan) -> None:
    """Refuse what no placement group could hold, or a Ray that is not there."""
    check_nodes(plan)
    warn_if_not_shared(plan)
    ensure_ray()


def make_scheduler(context: RunContext) -> BaseScheduler:
    """The scheduler of one attempt."""
    from areal.infra.scheduler.ray import RayScheduler

    return RayScheduler(context)


if __name__ == "__main__":
    sys.exit(main("ray", make_scheduler, check=check))
