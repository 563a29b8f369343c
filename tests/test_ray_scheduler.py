"""Workers of the Ray scheduler on a real Ray of two nodes: placement, calls, failures, ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from areal.api.config.cluster import NameResolveConfig
from areal.api.config.scheduling import SchedulingSpec, SchedulingStrategy
from areal.api.remote import remote
from areal.api.scheduler_api import Job
from areal.infra.rpc.rtensor import RTensor, localize, remotize
from areal.infra.scheduler.exceptions import GPUAllocationError, WorkerCreationError, WorkerFailedError
from areal.utils import name_resolve
from tests.components.ray_cluster import GPUS_PER_NODE, NODE_ADDRESSES, RayCluster, ray_environment, running_cluster
from tests.scheduler_engines import COMMAND, ENGINE, make_context, make_job, wait_gone

pytest.importorskip("ray", reason="the extra ray is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.ci]

Make = Callable[..., Any]
TENSORS = "tests.test_ray_scheduler.Tensors"
HOST = "areal.infra.service.asgi_host.AsgiHost"


class Tensors:
    """Makes tensors that stay with it, and adds up those of others."""

    @remote
    def make(self, rows: int) -> Any:
        return remotize({"x": torch.arange(rows * 1000, dtype=torch.float32).reshape(rows, 1000)})

    @remote
    def total(self, tree: Any) -> float:
        return float(localize(tree)["x"].double().sum())


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with running_cluster() as started:
        yield started


@pytest.fixture
def make(cluster: RayCluster, tmp_path: Path) -> Iterator[Make]:
    """Makes schedulers, closes them, and checks that Ray keeps nothing of theirs."""
    from areal.infra.scheduler.ray import RayScheduler

    made: list[RayScheduler] = []

    def build(**settings: Any) -> RayScheduler:
        made.append(RayScheduler(make_context(tmp_path, **settings)))
        return made[-1]

    yield build
    for scheduler in made:
        scheduler.close()
        assert left_of(scheduler) == ([], [])
    name_resolve.reconfigure(NameResolveConfig(type="memory"))


def start(scheduler: Any, role: str = "actor", replicas: int = 1, engine: str = ENGINE, **spec: Any) -> list[str]:
    """Ready workers with an engine each."""
    ids: list[str] = scheduler.create_workers(make_job(role, replicas, **spec))
    scheduler.get_workers(role)
    for worker in ids:
        scheduler.make_engine(worker, engine)
    return ids


def left_of(scheduler: Any, wait_s: float = 5.0) -> tuple[list[str], list[str]]:
    """Placement groups and actors of this run that Ray still has, after at most ``wait_s`` seconds."""
    import ray

    run, deadline = scheduler.context.identity.run_id, time.monotonic() + wait_s
    while True:
        table = ray.util.placement_group_table().values()
        groups = [group["name"] for group in table if run in group["name"] and group["state"] != "REMOVED"]
        actors = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True) if run in actor["name"]]
        if not (groups or actors) or time.monotonic() > deadline:
            return groups, actors
        time.sleep(0.1)


def wait_failed(scheduler: Any, worker: str, limit_s: float) -> str:
    """How the worker ended, once the scheduler knows."""
    deadline = time.monotonic() + limit_s
    while (failure := scheduler.worker_failure(worker)) is None:
        assert time.monotonic() < deadline, f"{worker} is not known to have failed after {limit_s:g} s"
        time.sleep(0.05)
    return str(failure)


# --- placement and calls -------------------------------------------------------------------------------------------
def test_create_workers_separate_uses_both_nodes_and_moves_tensors_between_them(make: Make) -> None:
    scheduler = make()
    first, second = start(scheduler, replicas=2, engine=TENSORS, gpu=3, ray_placement_strategy="separate")

    addresses = {worker.ip for worker in scheduler.get_workers("actor")}
    tree = scheduler.call_engine(first, "make", 64)
    sums = [scheduler.call_engine(worker, "total", tree) for worker in (first, second)]
    part = scheduler.call_engine(second, "total", {"x": tree["x"][10:20]})

    assert addresses == set(NODE_ADDRESSES)
    assert isinstance(tree["x"], RTensor)
    assert sums == [64000 * 63999 / 2] * 2
    assert part == sum(range(10_000, 20_000))


def test_create_workers_shared_makes_one_group_and_gives_each_its_device(make: Make) -> None:
    scheduler = make()
    workers = start(scheduler, replicas=3, gpu=1, env_vars={"FLAVOUR": "sweet", "OMP_NUM_THREADS": "3"})

    groups, actors = left_of(scheduler, wait_s=0)
    values = [
        [scheduler.call_engine(worker, "variable", name) for worker in workers]
        for name in ("CUDA_VISIBLE_DEVICES", "FLAVOUR", "OMP_NUM_THREADS")
    ]
    token = scheduler.context.identity.token
    command_lines = [Path(f"/proc/{pid_of(scheduler, worker)}/cmdline").read_bytes() for worker in workers]

    assert len(groups) == 1
    assert len(actors) == 3
    assert len(set(values[0])) == 3
    assert values[1:] == [["sweet"] * 3, ["3"] * 3]
    assert not any(token.encode() in line for line in command_lines)


def test_create_workers_default_spec_fits_small_nodes_role_after_role(make: Make) -> None:
    scheduler = make()
    for role in ("actor", "rollout", "ref"):  # 8 cores and 32 GB each; both nodes have 2 cores
        scheduler.create_workers(Job(role=role, replicas=1, tasks=[SchedulingSpec(cmd=COMMAND)]))

    ready = [worker.id for role in ("actor", "rollout", "ref") for worker in scheduler.get_workers(role)]

    assert ready == ["actor/0", "rollout/0", "ref/0"]
    scheduler.make_engine("actor/0", ENGINE)
    assert scheduler.call_engine("actor/0", "variable", "CUDA_VISIBLE_DEVICES") == ""


@pytest.mark.parametrize(("replicas", "gpu", "found"), [(1, 5, "0 of 1"), (3, 3, "2 of 3")])
def test_create_workers_more_devices_than_exist_is_refused_at_once(
    make: Make, replicas: int, gpu: int, found: str
) -> None:
    scheduler = make()
    began = time.monotonic()

    with pytest.raises(GPUAllocationError) as caught:
        scheduler.create_workers(make_job("actor", replicas, gpu=gpu))

    assert time.monotonic() - began < 20
    for part in ("'actor'", f"{replicas} x ({gpu} GPU", f"only {found} workers fit", f"{NODE_ADDRESSES[1]}: 4 GPU"):
        assert part in str(caught.value)
    assert left_of(scheduler, wait_s=0) == ([], [])


def test_get_workers_devices_held_by_others_waits_and_says_so(make: Make) -> None:
    other, scheduler = make(), make(startup_timeout_s=60)
    other.create_workers(make_job("theirs", 2, gpu=GPUS_PER_NODE))
    other.get_workers("theirs")
    scheduler.create_workers(make_job("actor", gpu=2))

    with pytest.raises(TimeoutError, match=r"actor/0.*not placed.*2 GPU.*other users of the cluster"):
        scheduler.get_workers("actor", timeout=4)
    other.delete_workers()

    assert [worker.id for worker in scheduler.get_workers("actor", timeout=30)] == ["actor/0"]


def test_create_workers_command_that_is_no_worker_server_is_refused(make: Make) -> None:
    with pytest.raises(WorkerCreationError, match=r"http\.server.*scheduler\.type=ray.*AsgiHost"):
        make().create_workers(make_job("actor", cmd="python -m http.server"))


@pytest.mark.parametrize("gpu", [0, 1, 2])
def test_create_workers_colocated_fork_shares_node_and_devices(make: Make, gpu: int) -> None:
    scheduler = make()
    (actor,) = start(scheduler, gpu=gpu)
    strategy = SchedulingStrategy(type="colocation", target="actor", fork=True)
    scheduler.create_workers(Job(role="ref", replicas=1, tasks=[], scheduling_strategy=strategy))
    scheduler.get_workers("ref")
    scheduler.make_engine("ref/0", ENGINE)

    devices = [scheduler.call_engine(worker, "variable", "CUDA_VISIBLE_DEVICES") for worker in (actor, "ref/0")]
    ips = {scheduler.get_workers(role)[0].ip for role in ("actor", "ref")}
    pids = {pid_of(scheduler, worker) for worker in (actor, "ref/0")}

    assert devices[0] == devices[1]
    assert len(devices[0].split(",")) == max(gpu, 1)
    assert len(ips) == 1
    assert len(pids) == 2
    scheduler.delete_workers("ref")
    assert scheduler.call_engine(actor, "add", 1) == 1


def test_fork_workers_deferred_gets_the_devices_that_the_worker_left(make: Make) -> None:
    scheduler = make()
    (rollout,) = start(scheduler, "rollout", gpu=1, ray_placement_strategy="deferred")
    (server,) = scheduler.fork_workers("server", "rollout")
    scheduler.get_workers("server")
    scheduler.make_engine(server, ENGINE)

    devices = [scheduler.call_engine(worker, "variable", "CUDA_VISIBLE_DEVICES") for worker in (rollout, server)]

    assert devices[0] == ""
    assert devices[1] != ""


def test_asgi_host_on_a_ray_worker_serves_http(make: Make) -> None:
    scheduler = make()
    (worker,) = scheduler.create_workers(make_job("proxy"))
    ip = scheduler.get_workers("proxy")[0].ip
    scheduler.make_engine(worker, HOST, "tests.test_asgi_host:make_app", greeting="from ray")

    address = scheduler.call_engine(worker, "start", ip)
    with urllib.request.urlopen(f"http://{address}/greet", timeout=5) as reply:
        text = json.loads(reply.read())["text"]

    assert text == "from ray"


# --- failures ------------------------------------------------------------------------------------------------------
def test_worker_killed_during_a_call_is_detected_and_restarts(make: Make) -> None:
    scheduler = make()
    first, second = start(scheduler, replicas=2)
    scheduler.call_engine(first, "say", "last words")
    pid, child = pid_of(scheduler, first), scheduler.call_engine(first, "leave_child")

    os.kill(pid, signal.SIGKILL)
    failure = wait_failed(scheduler, first, 5)
    with pytest.raises(WorkerFailedError, match=r"(?s)actor/0 failed.*process has died.*last words") as caught:
        scheduler.call_engine(first, "add", 1)
    worker = scheduler.restart_worker(first)

    assert "last words" in failure
    assert str(scheduler.context.log_dir / "actor-0.log") in str(caught.value)
    assert wait_gone([child], 1) == []
    assert worker.id == first
    scheduler.make_engine(first, ENGINE)
    assert scheduler.call_engine(first, "add", 1) == 1
    assert scheduler.call_engine(second, "add", 2) == 2
    assert pid_of(scheduler, first) != pid


def test_worker_that_is_stopped_by_a_signal_can_still_be_deleted(make: Make) -> None:
    scheduler = make()
    (worker,) = start(scheduler)
    pid = pid_of(scheduler, worker)
    os.kill(pid, signal.SIGSTOP)

    scheduler.stop_all(grace_s=1)

    assert wait_gone([pid], 5) == []


def test_worker_of_a_lost_node_fails_and_restarts_when_a_node_is_back(make: Make, cluster: RayCluster) -> None:
    scheduler = make()
    start(scheduler, replicas=2, gpu=3, ray_placement_strategy="separate")
    lost = next(worker for worker in scheduler.get_workers("actor") if worker.ip == NODE_ADDRESSES[1])

    cluster.remove_node(lost.ip)
    try:
        failure = wait_failed(scheduler, lost.id, 10)
        with pytest.raises(GPUAllocationError, match=r"only 0 of 1 workers fit.*127\.0\.0\.2: 1 GPU"):
            scheduler.restart_worker(lost.id)
    finally:
        cluster.add_node(lost.ip)
    restarted = scheduler.restart_worker(lost.id)

    assert "node" in failure
    assert restarted.ip == NODE_ADDRESSES[1]


def test_worker_whose_log_folder_is_not_shared_still_shows_its_log(make: Make, tmp_path: Path) -> None:
    scheduler = make()
    (worker,) = start(scheduler)
    scheduler.call_engine(worker, "say", "written elsewhere")
    here = tmp_path / "not-shared" / "actor-0.log"
    scheduler._table.worker(worker).log_path = here  # as if this machine saw another folder than the node

    os.kill(pid_of(scheduler, worker), signal.SIGKILL)

    assert "written elsewhere" in wait_failed(scheduler, worker, 10)
    assert "written elsewhere" in here.read_text()


# --- ends ----------------------------------------------------------------------------------------------------------
def test_delete_workers_leaves_no_actor_group_or_process(make: Make) -> None:
    scheduler = make()
    keep, drop = start(scheduler, "keep", gpu=1)[0], start(scheduler, "drop", 2, gpu=1)[0]
    pids = [pid_of(scheduler, drop), scheduler.call_engine(drop, "leave_child")]

    scheduler.delete_workers("drop")
    left = left_of(scheduler, wait_s=0)

    run = scheduler.context.identity.run_id
    assert left == ([f"areal-{run}-keep"], [f"areal-{run}-keep-0-0"])
    assert wait_gone(pids, 1) == []
    assert scheduler.call_engine(keep, "add", 1) == 1


def test_controller_killed_leaves_no_actor_and_no_process(make: Make, tmp_path: Path) -> None:
    observer = make()

    facts = run_and_kill(tmp_path / "killed", GPUS_PER_NODE)
    left = wait_gone(facts["pids"], 30)

    observer.context.identity = replace(observer.context.identity, run_id=facts["run_id"])
    assert left == []
    assert left_of(observer) == ([], [])


def test_controller_without_a_cluster_starts_one_that_ends_with_it(tmp_path: Path) -> None:
    with ray_environment() as values:
        noted = Path(values["RAY_TMPDIR"], "ray", "ray_current_cluster")
        noted.parent.mkdir()
        noted.write_text("127.0.0.1:9")  # of one that has ended
        facts = run_and_kill(tmp_path / "killed", 0)
        daemons = [process.pid for process in psutil.process_iter() if belongs_to(process, values["RAY_TMPDIR"])]

        left = wait_gone(facts["pids"] + daemons, 30)

    assert left == []


def run_and_kill(root: Path, gpu: int) -> dict[str, Any]:
    """Run a controller of two workers until they are ready, and kill it; returns what it said."""
    command = [sys.executable, "-m", "tests.components.ray_cluster", str(root), str(gpu)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as controller:
        assert controller.stdout is not None
        facts: dict[str, Any] = json.loads(controller.stdout.readline())
        controller.kill()
    return facts


def belongs_to(process: psutil.Process, ray_directory: str) -> bool:
    try:
        return process.environ().get("RAY_TMPDIR") == ray_directory and process.pid != os.getpid()
    except psutil.Error:
        return False


def pid_of(scheduler: Any, worker: str) -> int:
    return int(scheduler.call_engine(worker, "where")["pid"])
