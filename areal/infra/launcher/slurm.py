"""``python -m areal.infra.launcher.slurm script.py --config c.yaml …``: processes are tasks of Slurm jobs.

It runs where jobs are submitted. Job scripts and what Slurm wrote about them are below ``{log_dir}/slurm``.
"""

from __future__ import annotations

import sys

from areal.infra.launcher.base import main
from areal.infra.launcher.plan import LaunchPlan, check_nodes, warn_if_not_shared
from areal.infra.scheduler.slurm import SlurmScheduler
from areal.infra.utils import slurm


def check(plan: LaunchPlan) -> None:
    """Refuse what the cluster cannot hold, or a machine without Slurm's commands."""
    slurm.require_commands("python -m areal.infra.launcher.slurm")
    check_nodes(plan)
    warn_if_not_shared(plan)


if __name__ == "__main__":
    sys.exit(main("slurm", SlurmScheduler, check=check))
