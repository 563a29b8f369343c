"""Workers of the local scheduler: real processes with tiny engines."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from areal.api.config.cluster import NameResolveConfig
from areal.api.config.scheduling import SchedulingSpec, SchedulingStrategy
from areal.api.scheduler_api import Job
from areal.infra.rpc.client import WorkerClient
from areal.infra.scheduler import process_tree
from areal.infra.scheduler.exceptions import (
    EngineCreationError,
    EngineImportError,
    GPUAllocationError,
    SchedulerError,
    WorkerConfigurationError,
    WorkerCreationError,
    WorkerFailedError,
    WorkerNotFoundError,
    WorkerTimeoutError,
)
from areal.infra.scheduler.handles import WorkerHandle
from areal.infra.scheduler.local import LocalScheduler
from areal.utils import name_resolve
from tests.scheduler_engines import ENGINE, make_context, make_job, wait_gone

Make = Callable[..., LocalScheduler]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes schedulers and closes them."""
    made: list[LocalScheduler] = []

    def build(devices: list[int] | None = None, **settings: Any) -> LocalScheduler:
        made.append(LocalScheduler(make_context(tmp_path, **settings), gpu_devices=devices or []))
        return made[-1]

    yield build
    for scheduler in made:
        scheduler.close()
    name_resolve.reconfigure(NameResolveConfig(type="memory"))


def start(scheduler: LocalScheduler, role: str = "actor", replicas: int = 1, **spec: Any) -> list[str]:
    """Ready workers with an engine each."""
    ids = scheduler.create_workers(make_job(role, replicas, **spec))
    scheduler.get_workers(role)
    for worker in ids:
        scheduler.make_engine(worker, ENGINE)
    return ids


def pid_of(scheduler: LocalScheduler, worker: str) -> int:
    return int(scheduler.call_engine(worker, "where")["pid"])


# --- life and calls ------------------------------------------------------------------------------------------------
def test_call_engine_on_two_roles_keeps_their_objects_apart(make: Make) -> None:
    scheduler = make()
    actor, ref = start(scheduler, "actor")[0], start(scheduler, "ref")[0]

    sums = [scheduler.call_engine(actor, "add", 2), scheduler.call_engine(actor, "add", count=3)]
    other = asyncio.run(scheduler.async_call_engine(ref, "add", 1))

    assert (actor, ref) == ("actor/0", "ref/0")
    assert (sums, other) == ([2, 5], 1)
    assert pid_of(scheduler, actor) != pid_of(scheduler, ref) != os.getpid()


def test_delete_workers_role_ends_its_processes_and_descendants_only(make: Make) -> None:
    scheduler = make()
    actor, ref = start(scheduler, "actor")[0], start(scheduler, "ref")[0]
    pids = [pid_of(scheduler, actor), scheduler.call_engine(actor, "leave_child")]
    others = [pid_of(scheduler, ref), scheduler.call_engine(ref, "leave_child")]

    scheduler.delete_workers("actor", reverse_order=True)

    assert wait_gone(pids, 0.5) == []
    assert wait_gone(others, 0.0) == others
    with pytest.raises(WorkerNotFoundError, match=r"no workers of role 'actor'.*ref"):
        scheduler.call_engine(actor, "add", 1)
    scheduler.delete_workers()
    assert wait_gone(others, 0.5) == []
    scheduler.delete_workers("actor")  # unknown by now: logged only


def test_create_engine_trouble_is_typed_and_leaves_the_worker_usable(make: Make) -> None:
    scheduler = make()
    (worker,) = start(scheduler)

    with pytest.raises(EngineCreationError, match=r"actor/0.*Counter.*start=-1 must be >= 0"):
        scheduler.make_engine(worker, ENGINE, -1, engine_name="second")
    with pytest.raises(EngineImportError, match=r"tests\.no_such_module"):
        scheduler.make_engine(worker, "tests.no_such_module.Engine", engine_name="second")
    with pytest.raises(KeyError, match="no such row") as caught:
        scheduler.call_engine(worker, "fail")

    assert any("scheduler_engines.py" in note for note in caught.value.__notes__)
    scheduler.make_engine(worker, ENGINE, start=4, engine_name="second")
    assert scheduler.call_engine(worker, "add", 1, engine_name="second") == 5
    assert scheduler.call_engine(worker, "add", 1) == 1


def test_worker_environment_has_threads_variables_and_import_paths(make: Make, monkeypatch: Any) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    scheduler = make()
    (worker,) = start(scheduler, env_vars={"MKL_NUM_THREADS": "3", "COLOUR": "red"})

    asyncio.run(scheduler.set_worker_env(worker, {"SHAPE": "round"}))

    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "COLOUR", "SHAPE", "CUDA_VISIBLE_DEVICES")
    assert [scheduler.call_engine(worker, "variable", name) for name in names] == ["1", "3", "red", "round", ""]
    assert scheduler.call_engine(worker, "where")["cwd"] == os.getcwd()


def test_worker_output_goes_to_its_log_and_prefixed_to_merged_log(make: Make) -> None:
    scheduler = make()
    first, second = start(scheduler, replicas=2)

    scheduler.call_engine(first, "say", "apple")
    scheduler.call_engine(second, "say", "pear")

    log_dir = scheduler.context.log_dir
    assert "apple" in scheduler.log_tail(first)
    assert "apple" not in scheduler.log_tail(second)
    assert (log_dir / "actor-1.log").read_text().count("pear") == 1
    scheduler.close()
    assert {"[actor/0] apple", "[actor/1] pear"} <= set((log_dir / "merged.log").read_text().splitlines())


def test_sixteen_workers_at_once_all_get_distinct_ports(make: Make) -> None:
    scheduler = make()

    scheduler.create_workers(make_job("actor", 16, port_count=3))

    ports = [int(port) for worker in scheduler.get_workers("actor", 60) for port in worker.worker_ports]
    assert len(ports) == 48
    assert len(set(ports)) == 48
    assert all(0 < port <= 65535 for port in ports)


def test_two_runs_with_the_same_names_do_not_reach_each_other(make: Make) -> None:
    first, second = make(), make()
    (worker,) = start(first)
    start(second)

    first.call_engine(worker, "add", 1)
    first.restart_worker(worker)  # overwrites the name that both runs use
    first.make_engine(worker, ENGINE)

    assert second.call_engine(worker, "add", 5) == 5
    assert first.call_engine(worker, "add", 1) == 1
    port = second.get_workers("actor")[0].worker_ports[0]
    foreign = WorkerClient(f"127.0.0.1:{port}", first.context.identity)
    with pytest.raises(SchedulerError, match=r"run|token"):
        foreign.health()
    foreign.close()


# --- colocation ----------------------------------------------------------------------------------------------------
def colocated(role: str, replicas: int, *, fork: bool, target: str = "actor") -> Job:
    return Job(role, replicas, [], SchedulingStrategy(type="colocation", target=target, fork=fork))


def test_colocation_without_fork_uses_the_targets_workers(make: Make) -> None:
    scheduler = make()
    start(scheduler, replicas=2)

    ids = scheduler.create_workers(colocated("ref", 2, fork=False))
    scheduler.make_engine(ids[1], ENGINE, 7, engine_name="ref/1")

    assert ids == ["actor/0", "actor/1"]
    assert [worker.id for worker in scheduler.get_workers("ref")] == ids
    assert scheduler.call_engine("ref/1", "add", 1) == 8
    scheduler.delete_workers("ref")
    assert scheduler.call_engine("actor/1", "add", 1) == 1


def test_colocation_with_fork_gets_processes_of_its_own_on_the_same_devices(make: Make) -> None:
    scheduler = make(devices=[4, 6])
    targets = start(scheduler, replicas=2, gpu=1)

    ids = scheduler.create_workers(colocated("ref", 2, fork=True))
    forked = scheduler.fork_workers("proxy", "actor")
    for role, names in (("ref", ids), ("proxy", forked)):
        scheduler.get_workers(role)
        for name in names:
            scheduler.make_engine(name, ENGINE)

    everyone = [*targets, *ids, *forked]
    devices = [scheduler.call_engine(name, "variable", "CUDA_VISIBLE_DEVICES") for name in everyone]
    pids = [pid_of(scheduler, name) for name in everyone]
    assert (ids, forked) == (["ref/0", "ref/1"], ["proxy/0", "proxy/1"])
    assert devices == ["4", "6"] * 3
    assert len(set(pids)) == 6
    scheduler.delete_workers("proxy")
    assert wait_gone(pids, 0.0) == pids[:4]
    scheduler.delete_workers("actor")  # takes along those beside it
    assert wait_gone(pids, 0.5) == []


# --- jobs that are refused -----------------------------------------------------------------------------------------
SPEC = SchedulingSpec(cmd="python -m areal.infra.rpc.rpc_server")


@pytest.mark.parametrize(
    ("job", "error", "message"),
    [
        (Job("actor", 0, [SPEC]), WorkerCreationError, "asks for 0 workers"),
        (Job("actor", 3, [SPEC, SPEC]), WorkerCreationError, "2 scheduling specs for 3 workers"),
        (Job("actor", 1, []), WorkerCreationError, "0 scheduling specs for 1 workers"),
        (Job("actor", 1, [SchedulingSpec()]), WorkerConfigurationError, r"scheduling_spec\.cmd=None must be a command"),
        (Job("actor", 1, [SchedulingSpec(cmd="x --port 1")]), WorkerConfigurationError, "must not contain --port"),
        (Job("actor", 1, [SchedulingSpec(cmd="/no/such/program")]), WorkerCreationError, "/no/such/program"),
        (Job("../actor", 1, [SPEC]), WorkerCreationError, "becomes a file name"),
        (colocated("ref", 1, fork=True), WorkerCreationError, r"scheduling_strategy\.target.*Create the target"),
    ],
)
def test_create_workers_bad_job_is_refused_and_leaves_nothing(
    make: Make, job: Job, error: type[Exception], message: str
) -> None:
    scheduler = make()

    with pytest.raises(error, match=message):
        scheduler.create_workers(job)

    with pytest.raises(WorkerNotFoundError):
        scheduler.get_workers(job.role)
    assert process_tree.find_marked([scheduler.context.identity.run_id]) == []


def test_create_workers_duplicate_role_and_other_replica_count_are_refused(make: Make) -> None:
    scheduler = make()
    scheduler.create_workers(make_job("actor"))

    with pytest.raises(WorkerCreationError, match="'actor' has workers already"):
        scheduler.create_workers(make_job("actor"))
    with pytest.raises(WorkerCreationError, match="'ref' asks for 2 workers .* which has 1"):
        scheduler.create_workers(colocated("ref", 2, fork=False))


def test_create_workers_more_devices_than_are_free_is_refused_until_some_are(make: Make) -> None:
    scheduler = make(devices=[0, 1, 2])
    scheduler.create_workers(make_job("actor", 2, gpu=1))

    with pytest.raises(GPUAllocationError, match=r"'rollout'.*gpu=2 need 2 devices; 1 of 3 .*actor.*colocation"):
        scheduler.create_workers(make_job("rollout", 1, gpu=2))

    assert scheduler.n_gpus_per_node == 3
    scheduler.delete_workers("actor")
    scheduler.create_workers(make_job("rollout", 1, gpu=2))


# --- failures ------------------------------------------------------------------------------------------------------
def test_worker_that_exits_at_start_fails_with_its_last_50_log_lines(make: Make) -> None:
    scheduler = make()
    script = "for i in range(80): print('line', i, flush=True)\nraise SystemExit(3)"
    told = threading.Event()
    scheduler.on_failure(lambda worker, cause: told.set() if "exit code 3" in cause else None)

    scheduler.create_workers(make_job("actor", 2, cmd=f'python -c "{script}"'))
    with pytest.raises(WorkerFailedError, match=r"worker actor/\d failed: it ended with exit code 3") as caught:
        scheduler.get_workers("actor")

    lines = str(caught.value).splitlines()
    assert [line for line in lines if line.startswith("line ")] == [f"line {i}" for i in range(30, 80)]
    assert told.wait(30.0)


def test_worker_that_never_answers_times_out_with_reason(make: Make) -> None:
    scheduler = make(startup_timeout_s=1.0)
    scheduler.create_workers(make_job("actor", cmd="python -c 'import time; print(1, flush=True); time.sleep(60)'"))

    with pytest.raises(WorkerTimeoutError, match=r"actor/0 is not ready after 1 s.*not registered.*startup_timeout_s"):
        scheduler.get_workers("actor")
    with pytest.raises(WorkerTimeoutError, match=r"after 0\.1 s.*get_workers more time"):
        scheduler.get_workers("actor", 0.1)
    with pytest.raises(SchedulerError, match=r"actor/0 is starting.*get_workers\('actor'\)"):
        scheduler.call_engine("actor/0", "add", 1)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_worker_killed_during_a_call_fails_the_call_within_seconds(make: Make, asynchronous: bool) -> None:
    scheduler = make()
    (worker,) = start(scheduler)
    pid = pid_of(scheduler, worker)
    threading.Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()
    began = time.monotonic()

    def call() -> Any:
        if asynchronous:
            return asyncio.run(scheduler.async_call_engine(worker, "sleep", 60.0))
        return scheduler.call_engine(worker, "sleep", 60.0)

    with pytest.raises(WorkerFailedError, match=r"(?s)actor/0 failed: it was ended by signal SIGKILL.*restart_worker"):
        call()

    assert time.monotonic() - began < 30.0  # the call takes a minute
    assert "SIGKILL" in (scheduler.worker_failure(worker) or "")
    with pytest.raises(WorkerFailedError):
        scheduler.call_engine(worker, "add", 1)


def test_worker_that_is_stopped_fails_after_heartbeat_timeout_and_can_be_restarted(make: Make) -> None:
    scheduler = make(heartbeat_interval_s=0.2, heartbeat_timeout_s=1.5)
    (worker,) = start(scheduler)
    pid = pid_of(scheduler, worker)
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()

    with pytest.raises(WorkerFailedError, match=r"no answer for \d s .*heartbeat_timeout_s=1\.5"):
        scheduler.call_engine(worker, "add", 1)

    assert 0.5 < time.monotonic() - began < 30.0  # not at once, and not never
    scheduler.restart_worker(worker)
    assert scheduler.worker_failure(worker) is None
    assert wait_gone([pid], 0.0) == []
    scheduler.make_engine(worker, ENGINE)
    assert scheduler.call_engine(worker, "add", 2) == 2


def test_restart_worker_keeps_devices_environment_and_the_other_workers(make: Make) -> None:
    scheduler = make(devices=[5, 7])
    first, second = start(scheduler, replicas=2, gpu=1)
    asyncio.run(scheduler.set_worker_env(first, {"SHAPE": "round"}))
    scheduler.call_engine(second, "add", 9)
    pids = [pid_of(scheduler, first), scheduler.call_engine(first, "leave_child")]

    restarted = scheduler.restart_worker(first)
    scheduler.make_engine(first, ENGINE)

    assert restarted.id == first
    assert wait_gone(pids, 0.0) == []
    assert scheduler.call_engine(first, "variable", "CUDA_VISIBLE_DEVICES") == "5"
    assert scheduler.call_engine(first, "variable", "SHAPE") == "round"
    assert scheduler.call_engine(second, "add", 1) == 10


def test_long_call_of_a_busy_worker_is_not_a_failure(make: Make) -> None:
    scheduler = make(heartbeat_interval_s=0.2, heartbeat_timeout_s=1.0)
    (worker,) = start(scheduler)

    assert scheduler.call_engine(worker, "sleep", 2.5) == "slept"
    assert scheduler.worker_failure(worker) is None


def test_failure_callback_may_restart_the_worker_itself(make: Make) -> None:
    scheduler = make()
    first, second = start(scheduler, replicas=2)
    restarted: list[str] = []
    done = threading.Event()

    def restart(worker: str, cause: str) -> None:
        restarted.append(f"{scheduler.restart_worker(worker).id}: {cause.splitlines()[0]}")
        done.set()

    scheduler.on_failure(restart)
    os.kill(pid_of(scheduler, first), signal.SIGKILL)

    assert done.wait(10.0)
    assert restarted == ["actor/0: it was ended by signal SIGKILL. Last 1 lines of its log:"]
    assert scheduler.worker_ids() == [first, second]
    scheduler.make_engine(first, ENGINE)
    assert scheduler.call_engine(first, "add", 1) == 1


def test_workers_of_a_role_that_is_deleted_while_they_start_are_stopped(make: Make, monkeypatch: Any) -> None:
    scheduler = make()
    start_processes = scheduler._start

    def start_and_delete(handles: list[WorkerHandle]) -> None:
        scheduler.delete_workers("actor")
        start_processes(handles)

    monkeypatch.setattr(scheduler, "_start", start_and_delete)

    with pytest.raises(WorkerCreationError, match="'actor' was deleted while its workers were being started"):
        scheduler.create_workers(make_job("actor", 2))

    assert process_tree.find_marked([scheduler.context.identity.run_id]) == []
