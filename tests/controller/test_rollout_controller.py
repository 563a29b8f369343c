"""Calls of the rollout controller to all its workers at once, over workers that are small objects in this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from areal.api.config.scheduling import SchedulingSpec, SchedulingStrategy
from areal.infra.controller.rollout_controller import RolloutController, RolloutSpec
from areal.utils.errors import InfrastructureError
from tests.rollout_fakes import config


class FakeWorker:
    """Counts its pauses; a receive waits until this worker is told to leave."""

    def __init__(self, receiving: threading.Semaphore) -> None:
        self.pauses = 0
        self._receiving, self._left = receiving, threading.Event()
        self.lost = False

    def health(self, timeout_s: float) -> None:
        """It answers, unless it is lost."""
        if self.lost:
            raise InfrastructureError("no answer")

    def pause(self) -> None:
        if self.lost:
            raise InfrastructureError("connection reset")
        self.pauses += 1

    def resume(self) -> None:
        self.pauses -= 1

    def receive_weights(self) -> bool:
        self._receiving.release()
        return self._left.wait(30)

    def leave_weight_group(self) -> None:
        self._left.set()


class FakeScheduler:
    """What a controller asks of a scheduler before it is initialised."""

    def __init__(self) -> None:
        self.receiving = threading.Semaphore(0)
        self.workers: dict[str, FakeWorker] = {}

    def create_workers(self, job: Any) -> list[str]:
        self.workers = {f"{job.role}/{i}": FakeWorker(self.receiving) for i in range(job.replicas)}
        return list(self.workers)

    def call_engine(self, worker_id: str, method: str, *args: Any) -> Any:
        return getattr(self.workers[worker_id], method)(*args)

    def client(self, worker_id: str) -> FakeWorker:
        return self.workers[worker_id]


class Setting:
    """A controller that is not initialised, and its scheduler."""

    def __init__(self, replicas: int) -> None:
        self.scheduler = FakeScheduler()
        spec = RolloutSpec("rollout", replicas, None, [SchedulingSpec()], SchedulingStrategy(), {})
        self.controller = RolloutController(self.scheduler, spec, config(), config())  # type: ignore[arg-type]

    @property
    def pauses(self) -> list[int]:
        return [worker.pauses for worker in self.scheduler.workers.values()]


@pytest.fixture
def setting(request: pytest.FixtureRequest) -> Iterator[Setting]:
    made = Setting(getattr(request, "param", 2))
    yield made
    for worker in made.scheduler.workers.values():
        worker.leave_weight_group()
    made.controller._threads.shutdown(wait=False, cancel_futures=True)


@pytest.mark.parametrize("setting", [1, 4, 9], indirect=True)
def test_call_leave_reaches_workers_that_all_hang_in_a_receive(setting: Setting) -> None:
    controller = setting.controller
    with ThreadPoolExecutor(2) as threads:
        receiving = threads.submit(controller.call, controller.worker_ids, "receive_weights")
        assert all(setting.scheduler.receiving.acquire(timeout=10) for _ in controller.worker_ids)

        threads.submit(controller.call, controller.worker_ids, "leave_weight_group").result(10)

        assert receiving.result(10) == dict.fromkeys(controller.worker_ids, True)


def test_pause_of_two_callers_both_resumed_leaves_nobody_paused(setting: Setting) -> None:
    controller = setting.controller

    controller.pause()
    controller.pause()
    controller.resume()
    assert setting.pauses == [1, 1]
    controller.resume()
    controller.resume()  # one too many

    assert setting.pauses == [0, 0]


def test_pause_worker_lost_meanwhile_resumes_the_others_as_often_as_they_were_paused(setting: Setting) -> None:
    controller, workers = setting.controller, setting.scheduler.workers

    controller.pause()
    workers["rollout/0"].lost = True
    controller.pause()
    controller.resume()
    controller.resume()

    assert setting.pauses[1] == 0
