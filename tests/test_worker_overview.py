"""Status and stacks of many workers at once: those that answer, hang, fail, or are not there yet."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from areal.api.config.cluster import NameResolveConfig
from areal.infra.scheduler.local import LocalScheduler
from areal.infra.service import worker_overview
from areal.infra.service.worker_overview import WorkerOverview, ask_all
from areal.utils import name_resolve
from areal.utils.errors import NetworkError, SchedulerError
from tests.scheduler_engines import make_context, make_job
from tests.timing import wait_until


class Connection:
    """A worker that answers at once, or as its name says."""

    def __init__(self, worker_id: str, release: threading.Event) -> None:
        self.address = f"127.0.0.1:{4000 + int(worker_id[-1])}"
        self._id, self._release = worker_id, release

    def health(self, timeout_s: float = 2.0) -> dict[str, object]:
        self._answer()
        return {"engine_busy_s": 0.25}

    def stats(self) -> dict[str, object]:
        return {"engine_busy_s": 0.25, self._id: {"version": 7}, "tensors": {"count": 1}}

    def stack(self) -> str:
        self._answer()
        return f"stack of {self._id}"

    def _answer(self) -> None:
        if "hangs" in self._id:
            self._release.wait(60)
        if "refuses" in self._id:
            raise NetworkError("connection refused")


class Source:
    """A scheduler whose workers behave as their role says."""

    def __init__(self) -> None:
        self.release = threading.Event()

    def client(self, worker_id: str) -> Connection:
        if "starts" in worker_id:
            raise SchedulerError("pending: Resources")
        return Connection(worker_id, self.release)

    def worker_failure(self, worker_id: str) -> str | None:
        return "exit code 3\nlast lines of its log" if "failed" in worker_id else None


@pytest.fixture
def source():
    made = Source()
    yield made
    made.release.set()


def test_statuses_of_every_kind_of_worker_arrive_within_the_limit(source, monkeypatch):
    monkeypatch.setattr(worker_overview, "STATUS_LIMIT_S", 1.0)
    roles = ("ok", "hangs", "refuses", "starts", "failed")
    began = time.time()
    found = {worker.role: worker for worker in WorkerOverview(source, lambda: [f"{r}/0" for r in roles]).statuses()}
    assert time.time() - began < 30
    assert {role: worker.state for role, worker in found.items()} == {
        "ok": "alive",
        "hangs": "silent",
        "refuses": "silent",
        "starts": "starting",
        "failed": "failed",
    }
    assert (found["ok"].version, found["ok"].engine_busy_s, found["ok"].address) == (7, 0.25, "127.0.0.1:4000")
    assert found["ok"].last_seen >= began
    assert found["hangs"].detail == "no answer within 1 s"
    assert found["refuses"].detail == "NetworkError: connection refused"
    assert found["starts"].detail == "pending: Resources"
    assert found["failed"].detail == "exit code 3"


def test_stacks_hold_every_worker_that_answers(source, monkeypatch):
    monkeypatch.setattr(worker_overview, "STACKS_LIMIT_S", 1.0)
    found = WorkerOverview(source, lambda: ["ok/1", "hangs/0", "refuses/0"]).stacks()
    assert found == {
        "ok/1": "stack of ok/1",
        "hangs/0": "(no answer within 1 s)",
        "refuses/0": "(NetworkError: connection refused)",
    }


def test_ask_all_of_many_keeps_order_and_raises_what_a_call_raised():
    names = [f"w/{i}" for i in range(100)]
    assert list(ask_all(names, len, 30.0)) == names
    with pytest.raises(ZeroDivisionError):
        ask_all(["w/0"], lambda _: 1 / 0, 30.0)
    assert ask_all([], len, 1.0) == {}


@pytest.fixture
def scheduler(tmp_path):
    made = LocalScheduler(make_context(tmp_path), gpu_devices=[])
    yield made
    made.close()
    name_resolve.reconfigure(NameResolveConfig(type="memory"))


def test_overview_of_a_local_worker_follows_it_until_it_is_killed(scheduler):
    (worker,) = scheduler.create_workers(make_job("actor", 1))
    overview = WorkerOverview(scheduler, lambda: [worker])
    early = overview.statuses()[0].state
    scheduler.get_workers("actor")
    (alive,) = overview.statuses()
    stacks = overview.stacks()
    os.kill(int(scheduler.client(worker).health()["pid"]), signal.SIGKILL)
    wait_until(lambda: overview.statuses()[0].state == "failed")
    (gone,) = overview.statuses()
    assert early in ("starting", "alive")
    assert (alive.id, alive.state, alive.engine_busy_s) == ("actor/0", "alive", 0.0)
    assert "Thread MainThread" in stacks[worker]
    assert "SIGKILL" in gone.detail
    assert gone.last_seen >= alive.last_seen
