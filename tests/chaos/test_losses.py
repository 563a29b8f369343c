"""Losses of workers at awkward moments, each found by the chaos runs or beside them."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from areal.api.alloc_mode import ParallelStrategy
from areal.api.config.scheduling import SchedulingSpec, SchedulingStrategy
from areal.api.config.timers import EvaluatorConfig, RecoverConfig, SaverConfig
from areal.api.io_struct import FinetuneSpec, StepInfo
from areal.api.trajectory import Row, TrajectoryRef
from areal.infra.controller import train_controller
from areal.infra.controller.train_controller import RankGroup, RoleSpec
from areal.infra.controller.worker_pool import WorkerPool
from areal.infra.rpc.errors import RPCConnectionError, TensorLostError
from areal.infra.scheduler.exceptions import WorkerTimeoutError
from areal.trainer import run
from areal.trainer.run import ClosingRun, RestartBudget, worker_death
from areal.trainer.samples import SampleWriter
from areal.utils.errors import EngineError, InfrastructureError, WorkerFailedError
from areal.utils.evaluator import Evaluator
from areal.utils.recover import RecoverHandler
from areal.utils.saver import Saver


class TwoRanks:
    """Stands for a scheduler with two workers."""

    def create_workers(self, job: Any) -> list[str]:
        return ["actor/0", "actor/1"]


@pytest.fixture
def ranks() -> RankGroup:
    spec = RoleSpec("actor", "", "", None, ParallelStrategy(), [SchedulingSpec()], SchedulingStrategy(), {})
    return RankGroup(TwoRanks(), spec)  # type: ignore[arg-type]


def test_ranks_dead_one_ends_the_wait_for_the_one_that_hangs(ranks: RankGroup) -> None:
    release = threading.Event()

    def call(rank: int) -> None:
        if rank == 0:
            release.wait(60.0)  # as in a collective with the dead rank
        raise WorkerFailedError("worker actor/1 failed")

    began = time.monotonic()
    with pytest.raises(WorkerFailedError):
        ranks.each(call)
    release.set()
    assert time.monotonic() - began < 30.0


def test_ranks_death_is_raised_before_the_error_that_it_caused(ranks: RankGroup) -> None:
    def call(rank: int) -> None:
        if rank == 0:
            raise EngineError("connection closed by peer")
        time.sleep(0.2)
        raise WorkerFailedError("worker actor/1 failed")

    with pytest.raises(WorkerFailedError):
        ranks.each(call)


def test_ranks_error_without_a_death_does_not_wait_for_ever(ranks: RankGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_controller, "_SETTLE_S", 0.1)
    release = threading.Event()

    def call(rank: int) -> None:
        if rank == 0:
            raise EngineError("out of memory")
        release.wait(60.0)

    with pytest.raises(EngineError, match="out of memory"):
        ranks.each(call)
    release.set()


def test_ranks_results_come_in_rank_order(ranks: RankGroup) -> None:
    def call(rank: int) -> int:
        time.sleep(0.05 * (1 - rank))
        return rank

    assert ranks.each(call) == [0, 1]


class DyingCrew:
    """A worker that dies again after it was started, before anyone has spoken to it."""

    def __init__(self) -> None:
        self.revivals = 0

    def client(self, worker_id: str) -> Any:
        if 0 < self.revivals < 3:
            raise WorkerFailedError("it ended by signal SIGKILL")
        return self

    def failure(self, worker_id: str) -> str | None:
        return None

    def revive(self, worker_id: str) -> None:
        self.revivals += 1

    async def acall(self, *args: Any, **kwargs: Any) -> Any:
        if self.revivals == 0:
            raise InfrastructureError("connection reset")
        await asyncio.sleep(60.0)  # a poll without anything to report


def test_pool_worker_that_dies_again_at_once_is_replaced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal.infra.controller.worker_pool._FIRST_BACKOFF_S", 0.01)
    crew = DyingCrew()
    failures: list[BaseException] = []
    pool = WorkerPool(crew, ["rollout/0"], max_deaths=5, on_lost=lambda owner: None, on_failure=failures.append)
    pool.start()
    deadline = time.monotonic() + 5.0
    while crew.revivals < 3 and not failures and time.monotonic() < deadline:
        time.sleep(0.01)
    pool.close()
    assert failures == []
    assert crew.revivals == 3


@pytest.mark.parametrize("error", [WorkerFailedError, WorkerTimeoutError, RPCConnectionError, TensorLostError])
def test_restart_mends_every_way_to_lose_a_worker(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_FIRST_RESTART_S", 0.0)
    budget = RestartBudget(RecoverConfig("e", "t", "/tmp", mode="auto", retries=1))
    failure = EngineError("the step failed")
    failure.__cause__ = error("lost")

    assert isinstance(worker_death(failure), error)
    budget.spend(failure)
    with pytest.raises(EngineError):
        budget.spend(failure)


class Reopened(ClosingRun):
    """Its background writer had a checkpoint on the worker that was lost."""

    opened = 0

    def close(self) -> None:
        raise EngineError("the checkpoint could not be written")

    def _open(self) -> None:
        self.opened += 1


def test_reopen_goes_on_when_the_lost_worker_spoils_the_closing() -> None:
    reopened = Reopened()
    reopened.reopen()
    assert reopened.opened == 1


def test_recover_point_waits_for_checkpoints_of_its_past(tmp_path: Path) -> None:
    names: dict[str, Any] = {"experiment_name": "e", "trial_name": "t", "fileroot": str(tmp_path)}
    spec = FinetuneSpec(total_train_epochs=1, dataset_size=8, train_batch_size=4)
    saver = Saver(SaverConfig(**names, mode="async"), spec)
    handler = RecoverHandler(RecoverConfig(**names, mode="auto", freq_steps=1), spec)
    evaluator, written = Evaluator(EvaluatorConfig(**names), spec), threading.Event()

    def write() -> None:
        time.sleep(0.3)
        written.set()

    assert saver._writer is not None
    saver._writer.submit("default", "a checkpoint", write)
    point = handler.dump({}, StepInfo(0, 0, 0, 2), saver, evaluator, NoStatistics())  # type: ignore[arg-type]

    assert written.is_set()
    assert point is not None
    saver.finalize()


class NoStatistics:
    """Stands for the statistics logger."""

    def state_dict(self) -> dict[str, Any]:
        return {}


class LostTable(dict[str, Any]):
    """A trajectory whose rollout worker is gone."""

    def __getitem__(self, key: str) -> Any:
        raise TensorLostError("worker rollout/0 is gone")


def test_samples_of_a_lost_worker_do_not_end_the_run(tmp_path: Path) -> None:
    ref = TrajectoryRef(Row(epoch=0, position=0, index=0), 0, (3,), (1.0,), 0, 0, LostTable())
    SampleWriter(tmp_path, None).write(0, [ref])
    assert not (tmp_path / "samples.jsonl").exists()
