"""A real Ray of two nodes on this machine: ``127.0.0.2`` and ``127.0.0.3``, each with 2 CPUs and 4 faked GPUs.

The daemons are children of the test process and end with it, by their own process ids; another Ray on the machine is
not touched. Starting takes about 4 s, so tests share one cluster per module. ``python -m tests.components.ray_cluster
ROOT GPUS``
is a controller that a test kills.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.scheduler_engines import ENGINE, make_context, make_job

NODE_ADDRESSES = ("127.0.0.2", "127.0.0.3")
CPUS_PER_NODE = 2
GPUS_PER_NODE = 4
RAY_ENV = {
    "RAY_AUTH_MODE": "disabled",  # a token file in the home directory otherwise
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_health_check_initial_delay_ms": "0",  # a lost node is noticed in about 3 s instead of 30
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}


@dataclass
class RayCluster:
    """The running cluster; ``address`` is what RAY_ADDRESS wants."""

    address: str
    cluster: Any
    nodes: dict[str, Any] = field(default_factory=dict)

    def add_node(self, node_address: str) -> None:
        self.nodes[node_address] = self.cluster.add_node(**node_options(node_address))

    def remove_node(self, node_address: str) -> None:
        self.cluster.remove_node(self.nodes.pop(node_address), allow_graceful=False)


def node_options(node_address: str) -> dict[str, Any]:
    return {
        "num_cpus": CPUS_PER_NODE,
        "num_gpus": GPUS_PER_NODE,
        "node_ip_address": node_address,
        "object_store_memory": 80 << 20,
        "include_dashboard": False,
    }


@contextlib.contextmanager
def ray_environment() -> Iterator[dict[str, str]]:
    """The variables a Ray of tests wants, with a short directory of its own, for a ``with`` block."""
    directory = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # socket paths below it must stay under 107 characters
    values = {**RAY_ENV, "RAY_TMPDIR": directory}
    before = {name: os.environ.get(name) for name in (*values, "RAY_ADDRESS")}
    os.environ.update(values)
    try:
        yield values
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def running_cluster() -> Iterator[RayCluster]:
    """Two nodes, with RAY_ADDRESS set for this process and its children."""
    import ray
    from ray.cluster_utils import Cluster

    with ray_environment():
        cluster = Cluster(initialize_head=True, head_node_args=node_options(NODE_ADDRESSES[0]))
        started = RayCluster(cluster.address, cluster)
        try:
            for node_address in NODE_ADDRESSES[1:]:
                started.add_node(node_address)
            os.environ["RAY_ADDRESS"] = started.address
            yield started
        finally:
            ray.shutdown()
            cluster.shutdown()


def main(root: str, gpu: str) -> None:
    """A controller of two workers with ``gpu`` devices each, and a child of one of them.

    Says who they are in one JSON line, then waits in a call.
    """
    from areal.infra.scheduler.ray import RayScheduler

    scheduler = RayScheduler(make_context(Path(root)))
    workers = scheduler.create_workers(make_job("actor", 2, gpu=int(gpu), ray_placement_strategy="separate"))
    scheduler.get_workers("actor")
    for worker in workers:
        scheduler.make_engine(worker, ENGINE)
    pids = [scheduler.call_engine(worker, "where")["pid"] for worker in workers]
    pids.append(scheduler.call_engine(workers[0], "leave_child"))
    sys.stdout.write(json.dumps({"pids": pids, "run_id": scheduler.context.identity.run_id}) + "\n")
    sys.stdout.flush()
    scheduler.call_engine(workers[1], "sleep", 600.0)


if __name__ == "__main__":
    main(*sys.argv[1:])
