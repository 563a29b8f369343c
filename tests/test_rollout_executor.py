"""The executor end to end with fake engines: batches, order, staleness, filters, resume."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time

import pytest
import torch

from areal.infra.rollout.failures import RowsExhaustedError
from tests.rollout_fakes import (
    FakeEngine,
    FunctionWorkflow,
    GatedEngine,
    GeneratingWorkflow,
    InstantWorkflow,
    config,
    executor,
    loader,
    publish,
    reject_odd,
    run_steps,
    table,
)
from tests.timing import wait_until


def test_next_batch_is_ordered_by_row_and_fills_ids():
    engine, data = FakeEngine(), loader(10, 4)

    async def episode(engine, row):
        await asyncio.sleep(random.random() * 0.02)
        return table(row["x"])

    with executor(config(), engine) as made:
        first, second = run_steps(made, engine, data, FunctionWorkflow(episode), 2, group_size=2)
    assert [ref.row.index for ref in first + second] == list(range(8))
    data = first[1].data
    assert data["row_id"].tolist() == [1, 1]
    assert data["group_id"].tolist() == [first[1].group_id] * 2
    assert data["truncated"].tolist() == [False, False]
    assert len({ref.group_id for ref in first + second}) == 8
    assert (first[1].lengths, first[1].rewards) == ((4, 4), (1.0, 1.0))


def test_prepare_batch_returns_tables_and_set_version_ends_the_step():
    with executor(config()) as made:
        batch = made.prepare_batch(loader(8, 4), InstantWorkflow())
        made.set_version(1)
        assert made.ledger.counts["trained"] == 4
    assert [int(item["rewards"][0]) for item in batch] == [0, 1, 2, 3]


@pytest.mark.parametrize("eta", [0, 1, 4])
def test_wait_policy_no_sample_exceeds_the_bound_with_heavy_tails(eta):
    engine, rng = FakeEngine(), random.Random(eta)

    async def episode(engine, row):
        version = engine.version
        await asyncio.sleep(min(0.0005 * rng.paretovariate(1.1), 0.1))
        return table(version=version)

    ages = []
    with executor(config(8, eta), engine) as made:
        data = loader(800, 8)
        for step in range(40):
            batch = made.next_batch(data, FunctionWorkflow(episode))
            ages += [step - ref.min_version for ref in batch]
            time.sleep(0.001)
            publish(made, engine, step + 1)
        stats = made.staleness_manager.get_stats()
        assert stats.accepted + stats.running + stats.rejected + stats.enqueued >= 320
    assert len(ages) == 320
    assert max(ages) <= eta


def test_drop_policy_generates_overdue_rows_again():
    engine, calls, back = FakeEngine(), {}, []

    async def episode(engine, row):
        calls[row["x"]] = calls.get(row["x"], 0) + 1
        version = engine.version
        while row["x"] == 0 and calls[0] == 1 and engine.version < version + 3:  # noqa: ASYNC110 - set by the test
            await asyncio.sleep(0.001)
        back.extend([True] * (row["x"] == 0))
        return table(row["x"], version=version)

    with executor(config(2, 1, on_stale="drop", max_concurrent_rollouts=8), engine) as made:
        data, ages = loader(400, 2), []
        for step in range(60):
            batch = made.next_batch(data, FunctionWorkflow(episode))
            ages += [step - ref.min_version for ref in batch]
            publish(made, engine, step + 1)
            if step == 10:
                wait_until(lambda: back)  # too late: it is thrown away, and its row generated again
        stats = made.export_stats()
    assert max(ages) <= 1
    assert stats["rollout/stale"] == 1
    assert calls[0] == 2


def test_train_policy_uses_overdue_groups():
    engine, back = FakeEngine(), []

    async def episode(engine, row):
        version = engine.version
        while row["x"] == 0 and engine.version < version + 3:  # noqa: ASYNC110 - set by the test
            await asyncio.sleep(0.001)
        back.extend([True] * (row["x"] == 0))
        return table(row["x"], version=version)

    with executor(config(2, 1, on_stale="train"), engine) as made:
        data, ages = loader(400, 2), []
        for step in range(40):
            ages += [step - ref.min_version for ref in made.next_batch(data, FunctionWorkflow(episode))]
            publish(made, engine, step + 1)
            if step == 10:
                wait_until(lambda: back)
    assert max(ages) > 1


def test_synchronous_admission_is_one_sorted_set_per_step():
    def run():
        engine = GatedEngine()

        async def episode(engine, row):
            await asyncio.sleep(random.random() * 0.01)  # reaching the engine in any order
            return await GeneratingWorkflow().arun_episode(engine, row)

        with executor(config(4, 0), engine, run_seed=3) as made:
            batches = run_steps(made, engine, loader(64, 4, shuffle=True), FunctionWorkflow(episode), 4, group_size=3)
        return engine.admissions, torch.cat([ref.data["input_ids"] for batch in batches for ref in batch])

    (admissions, tokens), (again, same) = run(), run()
    assert admissions[:4] == again[:4]
    assert [len(admitted) for admitted in admissions[:4]] == [12] * 4
    assert all(admitted == sorted(admitted) for admitted in admissions)
    torch.testing.assert_close(tokens, same, rtol=0, atol=0)


def test_synchronous_run_is_at_most_one_batch_per_version():
    engine, started = FakeEngine(), []

    async def episode(engine, row):
        started.append((engine.version, row["x"]))
        return table(row["x"], version=engine.version)

    with executor(config(4, 0, max_concurrent_rollouts=64), engine) as made:
        run_steps(made, engine, loader(40, 4), FunctionWorkflow(episode), 3)
    assert started[:12] == [(i // 4, i) for i in range(12)]


def test_filter_replaces_rejected_groups_and_books_balance():
    engine = FakeEngine()
    failed = set()

    async def episode(engine, row):
        if row["x"] == 3 and not failed:
            failed.add(3)
            raise ValueError("one-off")
        return table(row["x"], version=engine.version)

    with executor(config(2, 0), engine) as made:
        batches = run_steps(made, engine, loader(64, 2), FunctionWorkflow(episode), 5, should_accept_fn=reject_odd)
        made.pause()
        time.sleep(0.05)
        stats = made.staleness_manager.get_stats()
        submitted = stats.accepted + stats.rejected
        counts = dict(made.ledger.counts)
    assert [int(ref.rewards[0]) for batch in batches for ref in batch] == [0, 2, 4, 6, 8, 10, 12, 14, 16, 18]
    assert stats.running == 0
    assert counts["trained"] == 10
    assert submitted == counts["trained"] + counts["filtered"] + (stats.accepted - 10) + 1  # one retry


def test_filter_given_as_import_string():
    with executor(config(2, 1)) as made:
        batch = made.next_batch(loader(64, 2), InstantWorkflow(), should_accept_fn="tests.rollout_fakes.reject_odd")
    assert [int(ref.rewards[0]) for ref in batch] == [0, 2]


def test_filter_errors_name_the_argument():
    with executor(config(2)) as made:
        with pytest.raises(ValueError, match=r"should_accept_fn='nowhere\.at_all'"):
            made.next_batch(loader(4, 2), InstantWorkflow(), should_accept_fn="nowhere.at_all")
        with pytest.raises(TypeError, match="must be callable"):
            made.next_batch(loader(4, 2), InstantWorkflow(), should_accept_fn="math.pi")


def test_dynamic_bs_counts_rejected_rows_and_stays_synchronous():
    engine = FakeEngine()
    with executor(config(4, 0), engine) as made:
        batches = run_steps(
            made, engine, loader(64, 4), InstantWorkflow(), 3, should_accept_fn=reject_odd, dynamic_bs=True
        )
    assert [[int(ref.rewards[0]) for ref in batch] for batch in batches] == [[0, 2], [4, 6], [8, 10]]
    assert all(ref.min_version == step for step, batch in enumerate(batches) for ref in batch)


def test_total_rows_stops_dispensing_when_reached():
    engine, started = FakeEngine(), []

    async def episode(engine, row):
        started.append(row["x"])
        return table(row["x"])

    with executor(config(4, 2), engine) as made:
        made.set_total_rows(8)
        run_steps(made, engine, loader(64, 4), FunctionWorkflow(episode), 2)
        assert sorted(started) == list(range(8))
        assert made.ledger.outstanding == 0
        with pytest.raises(RowsExhaustedError, match="total of 8"):
            made.next_batch(None, FunctionWorkflow(episode))


def test_pause_stops_starts_and_resume_refills_at_once():
    engine, running, open_gate = FakeEngine(), set(), threading.Event()
    open_gate.set()

    async def episode(engine, row):
        running.add(row["x"])
        try:
            while not open_gate.is_set():  # noqa: ASYNC110 - set by the test
                await asyncio.sleep(0.001)
        finally:
            running.discard(row["x"])
        return table(row["x"], version=engine.version)

    with executor(config(8, 1, max_concurrent_rollouts=8), engine) as made:
        data = loader(80, 8)
        made.next_batch(data, FunctionWorkflow(episode))
        made.pause()
        publish(made, engine, 1)
        wait_until(lambda: made.staleness_manager.get_stats().running == 0)
        open_gate.clear()
        time.sleep(0.1)
        assert not running
        made.resume()
        wait_until(lambda: len(running) == 8)  # all of them, although none can end
        open_gate.set()


def test_state_dict_resumes_every_row_exactly_once():
    engine, workflow = FakeEngine(), InstantWorkflow()
    with executor(config(4, 2), engine) as made:
        first = run_steps(made, engine, loader(16, 4, shuffle=True), workflow, 2)
        third = made.next_batch(None, workflow)  # in step, never published
        state = json.loads(json.dumps(made.state_dict()))
    engine = FakeEngine()
    with executor(config(4, 2), engine) as made:
        made.load_state_dict(state)
        publish(made, engine, 2)
        made.set_total_rows(16)
        again = []
        data = loader(16, 4, shuffle=True)
        for step in (2, 3):
            again += made.next_batch(data, workflow)
            publish(made, engine, step + 1)
    trained = [ref.row for batch in first for ref in batch] + [ref.row for ref in again]
    assert sorted(row.index for row in trained) == list(range(16))
    assert [ref.row for ref in third] == [ref.row for ref in again[:4]]


def test_foreign_loader_is_accepted_over_epochs():
    class Foreign:
        batch_size = 2

        def __iter__(self):
            return iter([[{"x": 0}, {"x": 1}], [{"x": 2}]])

    engine = FakeEngine()
    with executor(config(2), engine) as made:
        batches = run_steps(made, engine, Foreign(), InstantWorkflow(), 3)
    found = [(ref.row.epoch, ref.row.index) for batch in batches for ref in batch]
    assert found == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]


def test_queue_size_below_batch_is_refused():
    with executor(config(4, queue_size=3)) as made, pytest.raises(ValueError, match="queue_size=3"):
        made.next_batch(loader(8, 4), InstantWorkflow())
