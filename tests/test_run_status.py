"""What a running executor and a run say about themselves: numbers, JSON, stacks of episodes."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from areal.infra.rollout import probe
from areal.infra.run_status import (
    ErrorStatus,
    RolloutStatus,
    RunStatus,
    WaitStatus,
    WorkerStatus,
    executor_status,
    from_json,
    to_json,
)
from areal.utils.errors import DataError, RolloutTimeoutError
from areal.utils.stacks import thread_stacks
from tests.rollout_fakes import (
    FakeEngine,
    FunctionWorkflow,
    InstantWorkflow,
    config,
    executor,
    loader,
    publish,
    run_steps,
    table,
)
from tests.timing import wait_until


class Gate:
    """Episodes wait here until it opens."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    async def episode(self, engine: Any, row: dict[str, Any]) -> Any:
        while not self.opened.is_set():  # noqa: ASYNC110 - another thread opens it
            await asyncio.sleep(0.005)
        return table(row["x"], version=engine.version)


def in_background(function: Any, *args: Any) -> threading.Thread:
    thread = threading.Thread(target=function, args=args, daemon=True)
    thread.start()
    return thread


def test_status_while_groups_run_counts_them_and_says_why_it_waits():
    gate = Gate()
    with executor(config(4, eta=1, max_concurrent_rollouts=6)) as made:
        thread = in_background(made.next_batch, loader(32, 4), FunctionWorkflow(gate.episode))
        wait_until(lambda: executor_status(made).running == 6 and executor_status(made).wait)

        found = executor_status(made)

        gate.opened.set()
        thread.join(30)
    assert (found.name, found.version, found.running, found.capacity) == ("rollout", 0, 6, 0)
    assert (found.ready, found.in_step, found.paused, found.exact) == (0, 0, False, True)
    assert found.wait.reason.startswith("waiting for 4 of 4 groups: 6 running, capacity 0, bound v0")
    assert found.wait.kind == "wait_generation"
    assert 0 <= time.time() - found.wait.since < 60


def test_status_after_a_batch_shows_the_open_step_and_no_wait():
    with executor(config(4)) as made:
        made.next_batch(loader(8, 4), InstantWorkflow())
        found = executor_status(made)
    assert (found.in_step, found.ready, found.wait) == (4, 0, None)


def test_counts_after_an_export_go_on_from_the_start():
    def episode(engine, row):
        if row["x"] == 2:
            raise KeyError("no such row")
        return table(row["x"])

    with executor(config(2, max_row_retries=1, failure_window=64)) as made:
        engine = FakeEngine()
        run_steps(made, engine, loader(8, 2), FunctionWorkflow(episode), 2)
        made.export_stats()
        made.next_batch(loader(8, 2), FunctionWorkflow(episode))
        publish(made, engine, 3)
        found = executor_status(made)
    assert found.counts["trained"] == 6
    assert found.counts["accepted"] == 6
    assert found.counts["failed"] == 1  # the retry is counted apart
    assert found.counts["retried"] == 1
    assert (found.last_error.type, found.last_error.text) == ("KeyError", "'no such row'")


def test_staleness_histogram_counts_samples_by_age():
    engine = FakeEngine()
    with executor(config(2, eta=2), engine) as made:
        data = loader(32, 2)
        for step in range(4):
            made.next_batch(data, InstantWorkflow(), group_size=3)
            publish(made, engine, step + 1)
        found = executor_status(made)
    assert sum(found.staleness.values()) == 4 * 2 * 3
    assert set(found.staleness) <= {0, 1, 2}
    assert max(found.staleness) > 0


def test_status_with_the_lock_taken_reads_without_it(monkeypatch):
    monkeypatch.setattr(probe, "LOCK_LIMIT_S", 0.05)
    with executor(config(2)) as made:
        held, release = threading.Event(), threading.Event()

        def hold() -> None:
            with made._dispatcher.condition:
                held.set()
                release.wait(30)

        thread = in_background(hold)
        held.wait(30)
        found = executor_status(made)
        release.set()
        thread.join(30)
    assert not found.exact
    assert found.running == 0


def test_timeout_of_a_wait_names_the_file_that_the_hook_wrote():
    told: list[str] = []

    def hook(message: str) -> str:
        told.append(message)
        return "/logs/stacks-1.txt"

    gate = Gate()
    with executor(config(2, wait_timeout_s=0.2)) as made:
        made.waiter.on_timeout = hook
        with pytest.raises(RolloutTimeoutError, match="wait_timeout_s\nStacks of all workers: /logs/stacks-1.txt"):
            made.next_batch(loader(8, 2), FunctionWorkflow(gate.episode))
    assert len(told) == 1
    assert "2 of 2 groups" in told[0]


def test_timeout_that_the_caller_expects_calls_no_hook():
    told: list[str] = []
    gate = Gate()
    with executor(config(2)) as made:
        made.waiter.on_timeout = told.append
        made.submit({"x": 1}, FunctionWorkflow(gate.episode))
        assert made.wait(1, timeout=0.05, raise_timeout=False) == []
        with pytest.raises(RolloutTimeoutError, match="raise timeout$"):
            made.wait(1, timeout=0.05)
    assert len(told) == 1


def test_timeout_hook_runs_without_the_lock():
    free: list[bool] = []
    gate = Gate()
    with executor(config(2, wait_timeout_s=0.2)) as made:

        def take() -> None:
            free.append(made._dispatcher.condition.acquire(timeout=5))
            made._dispatcher.condition.release()

        def hook(message: str) -> None:
            in_background(take).join(10)

        made.waiter.on_timeout = hook
        with pytest.raises(RolloutTimeoutError):
            made.next_batch(loader(8, 2), FunctionWorkflow(gate.episode))
    assert free == [True]


def test_task_stacks_of_equal_episodes_are_shown_once():
    gate = Gate()
    with executor(config(3)) as made:
        thread = in_background(made.next_batch, loader(8, 3), FunctionWorkflow(gate.episode))
        wait_until(lambda: executor_status(made).running == 3)
        wait_until(lambda: "Gate.episode" in made.probe.tasks())
        text = made.probe.tasks()
        gate.opened.set()
        thread.join(30)
    assert text.count("Gate.episode") == 1
    assert "3 tasks at:" in text
    assert "test_run_status.py" in text


def test_thread_stacks_name_every_thread_with_the_main_one_first():
    release = threading.Event()
    thread = threading.Thread(target=release.wait, name="waits-for-release", daemon=True)
    thread.start()
    text = thread_stacks()
    release.set()
    assert text.startswith("Thread MainThread")
    assert "Thread waits-for-release" in text
    assert "test_thread_stacks_name_every_thread_with_the_main_one_first" in text


def test_json_of_a_status_gives_the_same_status_back():
    status = RunStatus(
        "exp",
        "trial",
        run_id="r1",
        step=3,
        version=3,
        rollouts=[RolloutStatus("rollout", staleness={0: 4, 2: 1}, wait=WaitStatus("why", "wait_data", 12.5))],
        workers=[WorkerStatus("actor", 0, address="127.0.0.1:1", last_seen=1.5)],
        last_error=ErrorStatus.of(ValueError("x" * 5000)),
    )
    assert from_json(to_json(status)) == status
    assert len(status.last_error.text) == 2000
    assert status.waiting.reason == "why"
    assert status.workers[0].id == "actor/0"


def test_json_of_something_else_is_refused():
    with pytest.raises(DataError, match="no run status"):
        from_json(b'{"experiment": 1}')
