"""What failing, hanging and blocking episodes cost, and how a run that cannot go on ends."""

from __future__ import annotations

import asyncio
import threading
import time
import traceback

import pytest
import torch

from areal.infra.rollout.failures import RolloutFailedError, RolloutStoppedError
from areal.utils.errors import EngineError, RolloutTimeoutError
from tests.rollout_fakes import (
    FakeEngine,
    FunctionWorkflow,
    InstantWorkflow,
    config,
    executor,
    loader,
    run_steps,
    table,
)


def test_partial_group_goes_on_and_is_counted():
    calls = []

    async def episode(engine, row):
        calls.append(row["x"])
        if len([c for c in calls if c == row["x"]]) == 2:
            raise ValueError("sample 1 fails")
        return table(row["x"])

    with executor(config(2)) as made:
        batch = made.next_batch(loader(8, 2), FunctionWorkflow(episode), group_size=4)
        stats = made.export_stats()
    assert [len(ref.rewards) for ref in batch] == [3, 3]
    assert stats["rollout/dropped/error"] == 2
    assert stats["rollout/accepted"] == 2


def test_row_that_always_fails_ends_as_failed_and_is_replaced():
    attempts = []

    async def episode(engine, row):
        if row["x"] == 1:
            attempts.append(1)
            raise ValueError("bad row")
        return table(row["x"])

    with executor(config(2, max_row_retries=2)) as made:
        batch = made.next_batch(loader(8, 2), FunctionWorkflow(episode))
        counts = dict(made.ledger.counts)
    assert [ref.row.index for ref in batch] == [0, 2]
    assert len(attempts) == 3
    assert counts["failed"] == 1


def always_broken(engine, row):
    raise KeyError("the original problem")


def test_workflow_that_always_fails_raises_the_first_original_traceback():
    with executor(config(4)) as made:
        with pytest.raises(RolloutFailedError, match="KeyError: 'the original problem'") as caught:
            made.next_batch(loader(64, 4), FunctionWorkflow(always_broken))
        cause = caught.value.__cause__
        assert isinstance(cause, KeyError)
        assert "always_broken" in "".join(traceback.format_exception(cause))
        with pytest.raises(RolloutFailedError):  # and again in every later call
            made.submit({"x": 1}, InstantWorkflow())


def test_failures_below_the_share_go_on():
    engine = FakeEngine()

    async def episode(engine, row):
        if row["x"] % 4 == 0:
            raise ValueError("a quarter of the rows is bad")
        return table(row["x"])

    with executor(config(4, failure_window=16, max_row_retries=0), engine) as made:
        batches = run_steps(made, engine, loader(400, 4), FunctionWorkflow(episode), 20)
    assert all(len(batch) == 4 for batch in batches)


def test_late_run_of_failures_stops_the_run():
    engine = FakeEngine()

    async def episode(engine, row):
        if engine.version >= 3:
            raise ValueError(f"broken since row {row['x']}")
        return table(row["x"])

    settings = config(4, failure_window=8, max_failure_share=0.5)
    with executor(settings, engine) as made, pytest.raises(RolloutFailedError, match="broken since row 12"):
        run_steps(made, engine, loader(400, 4), FunctionWorkflow(episode), 20)


@pytest.mark.parametrize("error", [EngineError("server lost"), ConnectionResetError("peer"), OSError(113, "no route")])
def test_infrastructure_error_queues_the_row_again(error):
    attempts = []

    async def episode(engine, row):
        attempts.append(row["x"])
        if attempts.count(row["x"]) <= 1 and row["x"] == 1:
            raise error
        return table(row["x"])

    with executor(config(2, max_row_retries=0)) as made:
        batch = made.next_batch(loader(8, 2), FunctionWorkflow(episode))
        assert made.export_stats()["rollout/lost"] == 1
    assert [ref.row.index for ref in batch] == [0, 1]


def test_lost_engine_raises_its_error_within_the_limit():
    async def episode(engine, row):
        raise EngineError("the server died")

    began = time.monotonic()
    with executor(config(4)) as made, pytest.raises(RolloutFailedError, match="the server died"):
        made.next_batch(loader(64, 4), FunctionWorkflow(episode))
    assert time.monotonic() - began < 30


def test_blocked_loop_is_reported_with_the_blocking_line():
    released = threading.Event()

    def blocks_the_loop(engine, row):
        released.wait(60)
        return table()

    settings = config(2, wait_timeout_s=1.0, log_wait_interval_s=0.1)
    with executor(settings) as made:
        try:
            with pytest.raises(RolloutTimeoutError, match="blocks_the_loop"):
                made.next_batch(loader(8, 2), FunctionWorkflow(blocks_the_loop))
        finally:
            released.set()


def test_wait_limit_says_what_was_waited_for(caplog):
    async def never(engine, row):
        await asyncio.sleep(60)

    settings = config(2, wait_timeout_s=0.3, log_wait_interval_s=0.1)
    expected = pytest.raises(
        RolloutTimeoutError, match="2 of 2 groups: 2 running, capacity 0, bound v0.*wait_timeout_s"
    )
    with caplog.at_level("INFO"), executor(settings) as made, expected:
        made.next_batch(loader(8, 2), FunctionWorkflow(never))
    assert any("waiting for 2 of 2 groups" in record.message for record in caplog.records)


def test_wait_that_nothing_can_end_is_an_error_not_a_hang():
    settings = config(2, wait_timeout_s=None, episode_timeout_s=0.3, log_wait_interval_s=0.1)
    with executor(settings) as made:
        made.next_batch(loader(8, 2), InstantWorkflow())
        with pytest.raises(RolloutTimeoutError, match="step_done"):  # no version is ever published
            made.next_batch(None, InstantWorkflow())


def test_straggler_times_out_while_other_groups_are_trained():
    engine = FakeEngine()

    async def episode(engine, row):
        version = engine.version
        if row["x"] == 0:
            await asyncio.sleep(60)
        return table(row["x"], version=version)

    with executor(config(4, 2, episode_timeout_s=1.0, max_row_retries=0), engine) as made:
        batches = run_steps(made, engine, loader(64, 4), FunctionWorkflow(episode), 6)
        stats = made.export_stats()
        counts = dict(made.ledger.counts)
    assert 0 not in [ref.row.index for batch in batches for ref in batch]
    assert stats["rollout/dropped/timeout"] == 1
    assert stats["rollout/staleness/max"] <= 2
    assert counts["failed"] == 1


def test_sample_that_ignores_its_cancellation_does_not_hold_up_the_group():
    released = threading.Event()

    async def episode(engine, row):
        if row["x"] == 0:
            while not released.is_set():
                try:
                    await asyncio.sleep(0.05)
                except asyncio.CancelledError:
                    continue
        return table(row["x"])

    with executor(config(2, episode_timeout_s=0.5, max_row_retries=0)) as made:
        batch = made.next_batch(loader(8, 2), FunctionWorkflow(episode))
        released.set()
    assert [ref.row.index for ref in batch] == [1, 2]


def test_loader_without_rows_is_an_error():
    class Empty:
        batch_size = 4

        def __iter__(self):
            return iter([])

    with executor(config(4)) as made, pytest.raises(RolloutStoppedError, match="gave no rows in epoch 0"):
        made.next_batch(Empty(), InstantWorkflow())


def test_data_error_surfaces_with_its_cause():
    class Broken:
        def __len__(self):
            return 8

        def __getitem__(self, index):
            raise OSError("disk gone")

    from areal.utils.dataloader import RowLoader

    with executor(config(4)) as made, pytest.raises(RolloutStoppedError, match="disk gone") as caught:
        made.next_batch(RowLoader(Broken(), 4), InstantWorkflow())
    assert isinstance(caught.value.__cause__, OSError)


def test_non_finite_rewards_are_dropped_and_counted():
    values = {0: [1.0, float("nan")], 1: [float("nan"), float("inf")]}

    async def episode(engine, row):
        both = [table(reward) for reward in values.get(row["x"], [1.0, 2.0])]
        return {key: torch.cat([item[key] for item in both]) for key in both[0]}

    with executor(config(2, max_row_retries=0)) as made:
        batch = made.next_batch(loader(8, 2), FunctionWorkflow(episode))
        stats = made.export_stats()
    assert [ref.rewards for ref in batch] == [(1.0,), (1.0, 2.0)]
    assert [ref.row.index for ref in batch] == [0, 2]
    assert stats["rollout/dropped/reward"] == 1


def test_malformed_trajectory_stops_the_run_with_the_reason():
    async def episode(engine, row):
        out = table()
        del out["attention_mask"]
        return out

    with executor(config(2)) as made, pytest.raises(RolloutFailedError, match="lacks attention_mask"):
        made.next_batch(loader(64, 2), FunctionWorkflow(episode))


def test_filter_that_refuses_everything_ends_the_run():
    settings = config(2, 1)
    with executor(settings) as made, pytest.raises(RolloutFailedError, match="200 rows in a row.*should_accept_fn"):
        made.next_batch(loader(64, 2), InstantWorkflow(), should_accept_fn=lambda trajectory: False)


def test_system_exit_of_a_workflow_costs_only_its_sample():
    async def episode(engine, row):
        if row["x"] == 0:
            raise SystemExit(3)
        return table(row["x"])

    with executor(config(2, max_row_retries=0)) as made:
        assert [ref.row.index for ref in made.next_batch(loader(8, 2), FunctionWorkflow(episode))] == [1, 2]
