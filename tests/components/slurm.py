"""A real Slurm of two virtual nodes on this machine, ``n1`` and ``n2``, with 8 faked CPUs and 4 faked GPUs each.

It starts in about a second, so each test module has its own. ``python -m tests.components.slurm ROOT`` is a controller
that a test kills.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal.utils import environ
from tests.components.services import require_program
from tests.scheduler_engines import ENGINE, make_context, make_job

SCRIPTS = Path(__file__).parent
GPUS_PER_NODE = 4


class SlurmCluster:
    """The running cluster; ``SLURM_CONF`` names it for this process and its children."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @property
    def conf(self) -> str:
        return str(self.directory / "slurm.conf")

    def jobs(self) -> list[str]:
        """``id state`` of each job that has not ended."""
        shown = subprocess.run(["squeue", "-h", "-o", "%i %T"], capture_output=True, text=True, check=True)
        return shown.stdout.splitlines()

    def node_state(self, name: str) -> str:
        """``idle``, ``allocated``, ``down``, ..."""
        shown = subprocess.run(["sinfo", "-h", "-n", name, "-o", "%T"], capture_output=True, text=True, check=True)
        return shown.stdout.strip()

    def wait_empty(self, timeout_s: float) -> list[str]:
        """What is left in the queue after at most ``timeout_s`` seconds."""
        deadline = time.monotonic() + timeout_s
        while (left := self.jobs()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left


@contextlib.contextmanager
def running_cluster() -> Iterator[SlurmCluster]:
    """Two nodes for a ``with`` block."""
    for program in ("slurmctld", "slurmd", "munged", "sbatch"):
        require_program(program)
    if os.getuid() != 0:
        pytest.skip("a Slurm of its own can be started by root only")
    with tempfile.TemporaryDirectory(prefix="slurm") as parent:
        cluster = SlurmCluster(Path(parent) / "cluster")
        Path(parent).chmod(0o755)
        directory = str(cluster.directory)
        subprocess.run(["bash", str(SCRIPTS / "slurm_up.sh"), directory, "2", str(GPUS_PER_NODE)], check=True)
        try:
            with environ.temporary_env({"SLURM_CONF": cluster.conf}):
                yield cluster
        finally:
            subprocess.run(["bash", str(SCRIPTS / "slurm_down.sh"), directory], check=True)


def main(root: str) -> None:
    """A controller with a worker on each node and a job in the queue; says so in one JSON line, waits in a call."""
    from areal.infra.scheduler.slurm import SlurmScheduler

    scheduler = SlurmScheduler(make_context(Path(root), n_gpus_per_node=GPUS_PER_NODE))
    workers = scheduler.create_workers(make_job("actor", 2, gpu=GPUS_PER_NODE, mem=1))
    scheduler.get_workers("actor")
    for worker in workers:
        scheduler.make_engine(worker, ENGINE)
    scheduler.create_workers(make_job("waiting", 1, gpu=1, mem=1))
    pids = [scheduler.call_engine(worker, "where")["pid"] for worker in workers]
    sys.stdout.write(json.dumps({"pids": pids}) + "\n")
    sys.stdout.flush()
    scheduler.call_engine(workers[1], "sleep", 600.0)


if __name__ == "__main__":
    main(sys.argv[1])
