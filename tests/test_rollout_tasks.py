"""Submitted tasks, evaluation, life cycle, dumps and time booking of the executor."""

from __future__ import annotations

import asyncio
import json
import threading
import time

import pytest

from areal.infra.rollout.failures import RolloutStoppedError
from tests.rollout_fakes import (
    FakeEngine,
    FunctionWorkflow,
    InstantWorkflow,
    config,
    executor,
    loader,
    publish,
    reject_odd,
    rows,
    table,
)


def test_submit_and_wait_return_start_order_and_none_for_rejected():
    with executor(config(8, 4)) as made:
        ids = [made.submit({"x": i}, InstantWorkflow(), should_accept_fn=reject_odd) for i in range(4)]
        found = made.wait(4, timeout=60)
    assert ids == [0, 1, 2, 3]
    assert [None if item is None else int(item["rewards"][0]) for item in found] == [0, None, 2, None]


def test_wait_timeouts_and_bad_arguments():
    async def never(engine, row):
        await asyncio.sleep(60)

    with executor(config(4)) as made:
        task = made.submit({"x": 0}, FunctionWorkflow(never))
        with pytest.raises(TimeoutError):
            made.wait(1, timeout=0.05)
        assert made.wait(1, timeout=0.05, raise_timeout=False) == []
        with pytest.raises(TimeoutError):
            made.wait_for_task(task, timeout=0.05)
        assert made.wait_for_task(task, timeout=0.05, raise_timeout=False) is None
        with pytest.raises(ValueError, match="count=0"):
            made.wait(0)
        with pytest.raises(ValueError, match="never submitted"):
            made.wait_for_task(77)
        with pytest.raises(ValueError, match="in use"):
            made.submit({"x": 0}, FunctionWorkflow(never), task_id=task)


def test_wait_for_task_consumes_the_result():
    with executor(config(4)) as made:
        task = made.submit({"x": 5}, InstantWorkflow(), task_id=41)
        assert int(made.wait_for_task(task, timeout=60)["rewards"][0]) == 5
        with pytest.raises(ValueError, match="taken already"):
            made.wait_for_task(task)


def test_rollout_batch_keeps_order_and_drops_rejected():
    with executor(config(8, 4), is_eval=True) as made:
        found = made.rollout_batch(rows(20), InstantWorkflow())
        assert [int(item["rewards"][0]) for item in found] == list(range(20))
        stats = made.export_stats()
    assert stats["eval-rollout/accepted"] == 20


def test_evaluation_has_no_staleness_bound_but_keeps_concurrency():
    running, most = 0, 0

    async def episode(engine, row):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.005)
        running -= 1
        return table(row["x"])

    with executor(config(4, 0, max_concurrent_rollouts=3), is_eval=True) as made:
        assert len(made.rollout_batch(rows(12), FunctionWorkflow(episode))) == 12
    assert most == 3


def test_submitted_tasks_are_bound_by_staleness_until_the_version_moves():
    engine = FakeEngine()
    with executor(config(2, 0), engine) as made:
        for i in range(4):
            made.submit({"x": i}, InstantWorkflow())
        made.wait(2, timeout=60)
        with pytest.raises(TimeoutError):
            made.wait(2, timeout=0.1)
        publish(made, engine, 1)
        assert len(made.wait(2, timeout=60)) == 2


def test_calls_before_initialize_and_after_destroy_are_refused():
    from areal.infra.rollout.executor import WorkflowExecutor

    made = WorkflowExecutor(config(2), FakeEngine())
    with pytest.raises(RolloutStoppedError, match="initialize"):
        made.submit({"x": 0}, InstantWorkflow())
    made.initialize()
    made.destroy()
    made.destroy()
    with pytest.raises(RolloutStoppedError, match="destroyed"):
        made.next_batch(loader(8, 2), InstantWorkflow())


def test_destroy_frees_a_waiting_thread():
    async def never(engine, row):
        await asyncio.sleep(60)

    errors = []
    with executor(config(2)) as made:

        def wait():
            try:
                made.next_batch(loader(8, 2), FunctionWorkflow(never))
            except RolloutStoppedError as exc:
                errors.append(exc)

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.05)
        made.destroy()
        thread.join(5)
    assert not thread.is_alive()
    assert len(errors) == 1


def test_dump_writes_one_line_per_sequence(tmp_path):
    class Tokenizer:
        def decode(self, ids):
            return " ".join(map(str, ids))

    with executor(config(2), tokenizer=Tokenizer(), dump_dir=tmp_path) as made:
        made.next_batch(loader(4, 2), InstantWorkflow(), group_size=2)
    files = sorted((tmp_path / "rollout" / "0").glob("*.jsonl"))
    lines = [json.loads(line) for line in files[0].read_text().splitlines()]
    assert len(files) == 2
    assert len(lines) == 2
    assert {key: lines[1][key] for key in ("sample_idx", "seqlen", "prompt_len", "head_version", "tail_version")} == {
        "sample_idx": 1,
        "seqlen": 4,
        "prompt_len": 1,
        "head_version": 0,
        "tail_version": 0,
    }
    assert (lines[0]["prompt"], lines[0]["completion"], lines[0]["status"]) == ("0", "1 2 3", "accepted")


def test_dump_to_file_goes_under_the_run_directory(tmp_path):
    settings = config(2, dump_to_file=True, fileroot=str(tmp_path), experiment_name="e", trial_name="t")
    with executor(settings) as made:
        made.next_batch(loader(4, 2), InstantWorkflow())
    assert len(list(tmp_path.glob("logs/*/e/t/rollout/0/*.jsonl"))) == 2


def test_waits_are_booked_by_reason_in_the_step_ledger():
    from areal.infra.step_ledger import StepLedger

    async def episode(engine, row):
        await asyncio.sleep(0.1)
        return table()

    with executor(config(2)) as made:
        ledger = StepLedger()
        made.use_ledger(ledger)
        began = time.perf_counter()
        with ledger.phase("rollout"):
            made.next_batch(loader(4, 2), FunctionWorkflow(episode))
        seconds = ledger.export()
        wall_s = time.perf_counter() - began
    assert 0.08 < seconds["wait_generation"] <= wall_s
