"""Workers of the Slurm scheduler on a real cluster of two virtual nodes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from areal.api.config.cluster import NameResolveConfig
from areal.infra.scheduler.exceptions import (
    GPUAllocationError,
    WorkerConfigurationError,
    WorkerCreationError,
    WorkerFailedError,
    WorkerTimeoutError,
)
from areal.infra.scheduler.slurm import SlurmScheduler
from areal.utils import name_resolve
from tests.components.slurm import GPUS_PER_NODE, SlurmCluster, running_cluster
from tests.scheduler_engines import ENGINE, make_context, make_job, wait_gone

pytestmark = [pytest.mark.slow, pytest.mark.ci]
VARIABLES = ("SLURMD_NODENAME", "CUDA_VISIBLE_DEVICES")
Make = Callable[..., SlurmScheduler]


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with running_cluster() as started:
        yield started


@pytest.fixture
def make(cluster: SlurmCluster, tmp_path: Path) -> Iterator[Make]:
    """Makes schedulers and closes them; nothing of theirs may be left in the queue."""
    made: list[SlurmScheduler] = []

    def build(**settings: Any) -> SlurmScheduler:
        context = make_context(tmp_path, n_gpus_per_node=GPUS_PER_NODE, **settings)
        made.append(SlurmScheduler(context, poll_interval_s=0.5))
        return made[-1]

    yield build
    for scheduler in made:
        scheduler.close()
    name_resolve.reconfigure(NameResolveConfig(type="memory"))
    assert cluster.jobs() == []


def start(scheduler: SlurmScheduler, role: str = "actor", replicas: int = 1, **spec: Any) -> list[str]:
    """Ready workers with an engine each."""
    ids = scheduler.create_workers(make_job(role, replicas, **{"mem": 1, **spec}))
    scheduler.get_workers(role, timeout=60)
    for worker in ids:
        scheduler.make_engine(worker, ENGINE)
    return ids


def pid_of(scheduler: SlurmScheduler, worker: str) -> int:
    return int(scheduler.call_engine(worker, "where")["pid"])


def place_of(scheduler: SlurmScheduler, worker: str) -> tuple[str | None, str | None]:
    """Node and devices."""
    node, devices = (scheduler.call_engine(worker, "variable", name) for name in VARIABLES)
    return node, devices


def job_of(scheduler: SlurmScheduler, worker: str) -> int:
    return int(scheduler._table.worker(worker).backend.job_id)


def failure_of(scheduler: SlurmScheduler, worker: str, timeout_s: float = 15.0) -> str:
    deadline = time.monotonic() + timeout_s
    while scheduler.worker_failure(worker) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    return scheduler.worker_failure(worker) or "none"


# --- placement and calls -------------------------------------------------------------------------------------------
def test_create_workers_of_whole_nodes_run_on_two_nodes_until_deleted(make: Make, cluster: SlurmCluster) -> None:
    scheduler = make()

    ids = start(scheduler, replicas=2, gpu=GPUS_PER_NODE)
    places = [place_of(scheduler, worker) for worker in ids]
    sums = [scheduler.call_engine(worker, "add", 2) for worker in ids]
    jobs = cluster.jobs()
    scheduler.delete_workers("actor")

    assert places == [("n1", "0,1,2,3"), ("n2", "0,1,2,3")]
    assert sums == [2, 2]
    assert [job.split()[1] for job in jobs] == ["RUNNING"]  # one job for the role
    assert cluster.jobs() == []


def test_create_workers_of_part_of_a_node_get_devices_of_their_own(make: Make) -> None:
    scheduler = make()

    ids = start(scheduler, replicas=3, gpu=1)
    other = start(scheduler, "ref", gpu=1)
    places = [place_of(scheduler, worker) for worker in ids + other]

    assert len(set(places)) == 4
    assert {node for node, _ in places[:3]} == {places[0][0]}  # the role fits on one node


def test_create_workers_uneven_number_fills_nodes_evenly(make: Make) -> None:
    scheduler = make()

    ids = start(scheduler, replicas=3, gpu=2)

    assert [place_of(scheduler, worker) for worker in ids] == [("n1", "0,1"), ("n1", "2,3"), ("n2", "0,1")]


def test_create_workers_without_devices_see_none_and_their_variables(make: Make) -> None:
    scheduler = make()
    shell = ["export FROM_SHELL='a b'  # set up", "cd /"]

    worker = start(scheduler, env_vars={"FROM_SPEC": "it's"}, additional_bash_cmds=shell)[0]
    seen = [scheduler.call_engine(worker, "variable", name) for name in ("FROM_SPEC", "FROM_SHELL")]

    assert seen == ["it's", "a b"]
    assert place_of(scheduler, worker)[1] == ""
    assert scheduler.call_engine(worker, "where")["cwd"] == "/"


def test_fork_workers_run_beside_their_target_and_end_alone(make: Make) -> None:
    scheduler = make()
    actors = start(scheduler, replicas=2, gpu=GPUS_PER_NODE)

    forked = scheduler.fork_workers("proxy", "actor")
    scheduler.get_workers("proxy", timeout=60)
    for worker in forked:
        scheduler.make_engine(worker, ENGINE)
    same = [place_of(scheduler, a) == place_of(scheduler, f) for a, f in zip(actors, forked, strict=True)]
    pids = [pid_of(scheduler, worker) for worker in forked]
    scheduler.delete_workers("proxy")
    left = wait_gone(pids, 0.0)

    assert same == [True, True]
    assert left == []
    assert scheduler.call_engine(actors[0], "add", 1) == 1


def test_delete_workers_reverse_order_empties_the_queue(make: Make, cluster: SlurmCluster) -> None:
    scheduler = make()
    ids = start(scheduler, replicas=2, gpu=GPUS_PER_NODE)
    pids = [pid_of(scheduler, worker) for worker in ids]

    scheduler.delete_workers(reverse_order=True)

    assert cluster.jobs() == []
    assert wait_gone(pids, 0.0) == []


# --- requests that cannot be met -----------------------------------------------------------------------------------
def test_get_workers_reason_that_never_clears_raises_at_once(make: Make, cluster: SlurmCluster) -> None:
    scheduler = make()

    scheduler.create_workers(make_job("actor", 3, gpu=GPUS_PER_NODE, mem=1))
    with pytest.raises(WorkerFailedError, match=r"can never start: PartitionNodeLimit.*--nodes=3"):
        scheduler.get_workers("actor")

    assert cluster.wait_empty(5.0) == []


def test_create_workers_more_memory_than_a_node_raises(make: Make) -> None:
    with pytest.raises(
        WorkerCreationError, match=r"Requested node configuration is not available.*actor\.scheduling_spec"
    ):
        make().create_workers(make_job("actor", mem=99))


def test_create_workers_more_devices_than_a_node_raises(make: Make) -> None:
    with pytest.raises(GPUAllocationError, match="cluster.n_gpus_per_node=4"):
        make().create_workers(make_job("actor", gpu=5, mem=1))


def test_create_workers_options_of_a_missing_plugin_raise(make: Make) -> None:
    with pytest.raises(WorkerConfigurationError, match="pyxis"):
        make().create_workers(make_job("actor", mem=1, srun_additional_args="--container-image=x.sqsh"))


def test_get_workers_full_cluster_timeout_names_the_reason(make: Make) -> None:
    scheduler = make()
    start(scheduler, replicas=2, gpu=GPUS_PER_NODE)

    scheduler.create_workers(make_job("ref", gpu=1, mem=1))
    with pytest.raises(WorkerTimeoutError, match="waits in the queue: (Resources|Priority)"):
        scheduler.get_workers("ref", timeout=6.0)


def test_get_workers_srun_that_fails_shows_what_it_said(make: Make) -> None:
    scheduler = make()

    scheduler.create_workers(make_job("actor", mem=1, srun_additional_args="--no-such-option"))
    with pytest.raises(WorkerFailedError, match=r"is FAILED(.|\n)*no-such-option"):
        scheduler.get_workers("actor", timeout=30)


@pytest.fixture
def broken_node(cluster: SlurmCluster) -> Iterator[Callable[[], None]]:
    """Takes node n2 out of service; it is back after the test."""

    def set_state(state: str) -> None:
        subprocess.run(["scontrol", "update", "nodename=n2", f"state={state}", "reason=test"], check=state == "down")

    yield lambda: set_state("down")
    set_state("resume")  # fails where the node came back by itself
    deadline = time.monotonic() + 10.0
    while cluster.node_state("n2") != "idle" and time.monotonic() < deadline:
        time.sleep(0.1)


def test_get_workers_node_out_of_service_raises_at_once(make: Make, broken_node: Callable[[], None]) -> None:
    broken_node()
    scheduler = make()

    scheduler.create_workers(make_job("actor", mem=1, nodelist="n2"))
    with pytest.raises(WorkerFailedError, match=r"can never start: ReqNodeNotAvail.*out of service: n2 down"):
        scheduler.get_workers("actor")


def test_worker_failure_node_lost_names_the_state(make: Make, broken_node: Callable[[], None]) -> None:
    scheduler = make()
    ids = start(scheduler, replicas=2, gpu=GPUS_PER_NODE)

    broken_node()
    failures = [failure_of(scheduler, worker) for worker in ids]

    assert all("is NODE_FAIL" in failure for failure in failures)


# --- ends ----------------------------------------------------------------------------------------------------------
def test_call_engine_job_cancelled_from_outside_raises(make: Make) -> None:
    scheduler = make()
    worker = start(scheduler)[0]
    scheduler.call_engine(worker, "say", "the last words")

    subprocess.run(["scancel", str(job_of(scheduler, worker))], check=True)
    with pytest.raises(WorkerFailedError, match=r"is CANCELLED(.|\n)*the last words"):
        scheduler.call_engine(worker, "sleep", 60.0)


def test_restart_worker_after_kill_takes_its_old_place(make: Make) -> None:
    scheduler = make()
    ids = start(scheduler, replicas=4, gpu=2)
    before = place_of(scheduler, ids[3])
    scheduler.call_engine(ids[0], "add", 5)

    os.kill(pid_of(scheduler, ids[3]), signal.SIGKILL)
    failure = failure_of(scheduler, ids[3])
    scheduler.restart_worker(ids[3])
    scheduler.make_engine(ids[3], ENGINE)

    assert "SIGKILL" in failure
    assert place_of(scheduler, ids[3]) == before == ("n2", "2,3")
    assert job_of(scheduler, ids[3]) == job_of(scheduler, ids[0])
    assert scheduler.call_engine(ids[0], "add", 1) == 6  # the others went on


def test_restart_worker_whose_job_ended_gets_a_job_of_its_own(make: Make) -> None:
    scheduler = make()
    worker = start(scheduler, gpu=1)[0]
    job = job_of(scheduler, worker)

    os.kill(pid_of(scheduler, worker), signal.SIGKILL)
    failure_of(scheduler, worker)
    scheduler.restart_worker(worker)
    scheduler.make_engine(worker, ENGINE)

    assert job_of(scheduler, worker) != job
    assert scheduler.call_engine(worker, "add", 1) == 1


def test_restart_worker_that_hangs_ends_the_old_process(make: Make) -> None:
    scheduler = make(heartbeat_timeout_s=2.0)
    ids = start(scheduler, replicas=2)
    old = pid_of(scheduler, ids[1])

    os.kill(old, signal.SIGSTOP)
    failure = failure_of(scheduler, ids[1])
    scheduler.restart_worker(ids[1])

    assert "no answer" in failure
    assert wait_gone([old], 0.0) == []


@pytest.mark.parametrize("reaper_too", [False, True])
def test_controller_killed_leaves_no_job(cluster: SlurmCluster, tmp_path: Path, reaper_too: bool) -> None:
    command = [sys.executable, "-m", "tests.components.slurm", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as controller:
        assert controller.stdout is not None
        pids = json.loads(controller.stdout.readline())["pids"]
        before = sorted(job.split()[1] for job in cluster.jobs())
        children = psutil.Process(controller.pid).children()
        controller.kill()
        for child in children if reaper_too else []:
            child.kill()
    began = time.monotonic()
    if reaper_too:  # then only what runs can end itself
        subprocess.run(["scancel", "--state=PENDING", "--me"], check=True)
    left = cluster.wait_empty(10.0)

    assert before == ["PENDING", "RUNNING"]
    assert left == []
    assert wait_gone(pids, 10.0 - (time.monotonic() - began)) == []
