"""The pool of rollout workers: routing, reports, and workers that die. Workers are small objects in this process."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from areal.infra.controller.member import Member, choose
from areal.infra.controller.rollout_controller import merge_scalars
from areal.infra.controller.worker_pool import WorkerPool
from areal.infra.rollout.orders import GroupOrder, GroupReport, WorkerLostError
from areal.utils.errors import InfrastructureError


class FakeWorker:
    """Answers every order at once, unless it is told to hold them or is dead."""

    def __init__(self) -> None:
        self.dead = self.holding = False
        self.submitted: list[tuple[list[int], bool]] = []
        self.reports: list[GroupReport] = []
        self.recipes: list[int] = []

    async def acall(self, _: str, method: str, *args: Any, **__: Any) -> Any:
        await asyncio.sleep(0.001)
        if self.dead:
            raise InfrastructureError("connection refused")
        return await getattr(self, method)(*args)

    async def define(self, number: int, recipe: Any, accept: Any) -> None:
        self.recipes.append(number)

    async def submit(self, orders: list[GroupOrder], together: bool) -> None:
        self.submitted.append(([order.key for order in orders], together))
        if not self.holding:
            self.reports += [GroupReport(order.key, "accepted", succeeded=order.group_size) for order in orders]

    async def collect(self, acknowledged: int, timeout_s: float) -> tuple[int, list[GroupReport]]:
        while len(self.reports) <= acknowledged and not self.dead:  # noqa: ASYNC110 - other threads change it
            await asyncio.sleep(0.001)
        if self.dead:
            raise InfrastructureError("connection reset")
        return len(self.reports), self.reports[acknowledged:]


class FakeCrew:
    """Hosts fake workers; ``revive`` makes a new one, or fails as often as asked."""

    def __init__(self, ids: list[str]) -> None:
        self.workers = {worker_id: FakeWorker() for worker_id in ids}
        self.failing_revivals = 0
        self.revived: list[str] = []

    def client(self, worker_id: str) -> Any:
        return self.workers[worker_id]

    def failure(self, worker_id: str) -> str | None:
        return "signal SIGKILL" if self.workers[worker_id].dead else None

    def revive(self, worker_id: str) -> None:
        if self.failing_revivals:
            self.failing_revivals -= 1
            raise InfrastructureError("it ends as soon as it starts")
        self.revived.append(worker_id)
        self.workers[worker_id] = FakeWorker()


class Setting:
    """A pool of two fake workers and what it reported."""

    def __init__(self, max_deaths: int = 2) -> None:
        ids = ["rollout/0", "rollout/1"]
        self.crew = FakeCrew(ids)
        self.lost: list[tuple[str, int]] = []
        self.failures: list[BaseException] = []
        self.failed = threading.Event()
        self.pool = WorkerPool(self.crew, ids, max_deaths=max_deaths, on_lost=self.lost.append, on_failure=self._fail)
        self.pool.start()

    def _fail(self, error: BaseException) -> None:
        self.failures.append(error)
        self.failed.set()


@pytest.fixture
def setting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Setting]:
    monkeypatch.setattr("areal.infra.controller.worker_pool._FIRST_BACKOFF_S", 0.01)
    made = Setting()
    yield made
    made.pool.close()


def order(key: int, index: int = 0, group_size: int = 4) -> GroupOrder:
    """An order of row ``index``."""
    return GroupOrder(key, 0, key, {}, group_size, 0, index, index, key, True, False)


def until(condition: Callable[[], bool], limit_s: float = 60.0) -> None:
    """Wait for something that another thread does."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


def test_pool_submit_returns_report_and_maker(setting: Setting) -> None:
    setting.pool.recipe_number("workflow", None)
    report, owner = setting.pool.submit(order(setting.pool.new_key())).result(60.0)
    assert (report.status, report.succeeded) == ("accepted", 4)
    assert owner[0] in setting.crew.workers
    assert owner[1] == 0


def test_pool_held_orders_are_sent_together(setting: Setting) -> None:
    setting.pool.recipe_number("workflow", None)
    setting.pool.hold()
    futures = [setting.pool.submit(order(k, index=k)) for k in range(8)]
    time.sleep(0.05)
    assert not any(worker.submitted for worker in setting.crew.workers.values())
    setting.pool.release()
    for future in futures:
        future.result(60.0)
    batches = [batch for worker in setting.crew.workers.values() for batch in worker.submitted]
    assert sorted(key for keys, _ in batches for key in keys) == list(range(8))
    assert len(batches) <= 2
    assert all(together for _, together in batches)


def test_pool_dead_worker_loses_its_orders_and_returns(setting: Setting) -> None:
    setting.pool.recipe_number("workflow", None)
    for worker in setting.crew.workers.values():
        worker.holding = True
    futures = [setting.pool.submit(order(k, index=k)) for k in range(6)]
    until(lambda: sum(len(keys) for worker in setting.crew.workers.values() for keys, _ in worker.submitted) == 6)
    victim = next(worker_id for worker_id, worker in setting.crew.workers.items() if worker.submitted)
    mine = [key for keys, _ in setting.crew.workers[victim].submitted for key in keys]
    setting.crew.workers[victim].dead = True
    for key in mine:
        with pytest.raises(InfrastructureError, match="SIGKILL"):
            futures[key].result(60.0)
    assert setting.lost == [(victim, 0)]
    until(lambda: setting.crew.revived == [victim])
    until(lambda: all(member.alive for member in setting.pool.members))
    life = {member.worker_id: member.life for member in setting.pool.members}
    assert life[victim] == 1
    assert not any(future.done() for k, future in enumerate(futures) if k not in mine)


def test_pool_worker_that_never_comes_back_ends_the_run(setting: Setting) -> None:
    setting.crew.failing_revivals = 100
    setting.crew.workers["rollout/1"].dead = True
    assert setting.failed.wait(10.0)
    (error,) = setting.failures
    assert isinstance(error, WorkerLostError)
    assert "recover.retries=2" in str(error)
    assert "rollout/1" in str(error)


def test_pool_orders_wait_while_no_worker_is_in_service(setting: Setting) -> None:
    setting.pool.recipe_number("workflow", None)
    setting.crew.failing_revivals = 2
    for worker in setting.crew.workers.values():
        worker.dead = True
    until(lambda: not any(member.alive for member in setting.pool.members))
    future = setting.pool.submit(order(1))
    report, owner = future.result(10.0)
    assert report.key == 1
    assert owner[1] >= 1


def test_choose_keeps_a_row_with_its_worker_until_balance_costs() -> None:
    members = [Member(f"rollout/{i}", print, print) for i in range(4)]
    favourite = choose(members, 17, 4)
    assert choose(members, 17, 4) is favourite
    favourite.load = 5
    assert choose(members, 17, 4) is not favourite


def test_merge_scalars_weights_means_by_their_counts() -> None:
    parts = [
        {"rollout/reward": 1.0, "rollout/reward__count": 3, "rollout/accepted": 2.0},
        {"rollout/reward": 0.0, "rollout/reward__count": 1, "rollout/accepted": 1.0},
    ]
    assert merge_scalars(parts) == {"rollout/reward": 0.75, "rollout/reward__count": 4, "rollout/accepted": 3.0}
