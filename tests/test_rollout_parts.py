"""The parts of the rollout on their own: tables, context, resolving, failure window, ledger, grouped workflow."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from areal.api.io_struct import ModelRequest, ModelResponse
from areal.api.trajectory import Row
from areal.infra import workflow_context
from areal.infra.rollout.failures import FailureWindow, is_infrastructure_error
from areal.infra.rollout.groups import add_truncated, as_table, concat_tables, make_ref
from areal.infra.rollout.resolve import resolve_workflow
from areal.infra.rollout.task_runner import AsyncTaskRunner
from areal.infra.step_ledger import StepLedger
from areal.infra.workflow_context import EpisodeContext, WorkflowContext
from areal.utils.errors import EngineError, RewardError
from areal.utils.seeding import derive_seed
from areal.workflow.grouped import GroupedRolloutWorkflow
from tests.rollout_fakes import (
    FakeEngine,
    FunctionWorkflow,
    GeneratingWorkflow,
    InstantWorkflow,
    config,
    executor,
    loader,
    table,
)


def test_concat_tables_pads_right_and_keeps_every_column():
    short, long = table(1, 3, version=4), table(2, 5, version=5)
    short["multi_modal_input"], long["multi_modal_input"] = [{"pixel_values": 1}], [{"pixel_values": 2}]
    both = concat_tables([short, long])
    assert both["input_ids"].tolist() == [[0, 1, 2, 0, 0], [0, 1, 2, 3, 4]]
    assert both["attention_mask"].tolist() == [[True] * 3 + [False] * 2, [True] * 5]
    assert both["versions"].tolist() == [[-1, 4, 4, -1, -1], [-1, 5, 5, 5, 5]]
    assert both["rewards"].tolist() == [1.0, 2.0]
    assert both["multi_modal_input"] == [{"pixel_values": 1}, {"pixel_values": 2}]
    assert both["loss_mask"].dtype == torch.int32


def test_make_ref_versions_are_those_of_trained_tokens():
    both = concat_tables([table(1, 3, version=4), table(2, 5, version=7)])
    ref = make_ref(Row(0, 0, 9), 3, both)
    assert (ref.min_version, ref.max_version, ref.lengths) == (4, 7, (3, 5))


def test_add_truncated_follows_the_engine_not_the_width():
    for reasons, count, expected in (
        (["length"], 1, [True]),
        (["stop"], 1, [False]),
        (["length", "stop"], 1, [False]),
        (["stop", "length"], 2, [False, True]),
        ([], 2, [False, False]),
    ):
        item = concat_tables([table()] * count)
        add_truncated(item, reasons)
        assert item["truncated"].tolist() == expected
    own = {**table(), "truncated": torch.tensor([True])}
    add_truncated(own, ["stop"])
    assert own["truncated"].tolist() == [True]


def test_interactions_are_concatenated():
    interactions = {f"id{i}": SimpleNamespace(to_tensor_dict=lambda i=i: table(i, 3 + i)) for i in range(2)}
    assert as_table(interactions)["rewards"].tolist() == [0.0, 1.0]


def test_prepare_request_fills_seed_and_order_per_turn():
    episode = EpisodeContext(epoch=1, row=7, sample=2, position=3, run_seed=5)
    workflow_context.set(WorkflowContext(is_eval=True, task_id=4, episode=episode))
    try:
        first, second = (workflow_context.prepare_request(ModelRequest()) for _ in range(2))
        own = workflow_context.prepare_request(ModelRequest(seed=9, order=(0,)))
        workflow_context.note_response(ModelResponse(stop_reason="length"))
        assert workflow_context.stat_scope() == "eval-rollout"
    finally:
        workflow_context.set(None)
    assert (first.order, second.order) == ((1, 3, 2, 0), (1, 3, 2, 1))
    assert first.seed == derive_seed(5, 1, 7, 2, 0) != second.seed
    assert (own.seed, own.order) == (9, (0,))
    assert episode.stop_reasons == ["length"]
    assert workflow_context.stat_scope() == "rollout"
    assert workflow_context.prepare_request(ModelRequest()).seed is None


def test_executor_gives_each_sample_its_own_context():
    seen = []

    async def episode(engine, row):
        context = workflow_context.get()
        seen.append((context.is_eval, context.episode.row, context.episode.sample))
        return table()

    with executor(config(2)) as made:
        made.next_batch(loader(4, 2), FunctionWorkflow(episode), group_size=2)
    assert sorted(seen) == [(False, 0, 0), (False, 0, 1), (False, 1, 0), (False, 1, 1)]


def test_http_sessions_are_per_loop_and_closed_at_its_end():
    async def session():
        first = await workflow_context.get_aiohttp_session()
        assert await workflow_context.get_aiohttp_session() is first
        client = await workflow_context.get_httpx_client()
        assert await workflow_context.get_httpx_client() is client
        return first, client

    pytest.importorskip("aiohttp")
    pytest.importorskip("httpx")
    (one, client), (two, _) = asyncio.run(session()), asyncio.run(session())
    assert one is not two
    assert one.closed
    assert two.closed
    assert client.is_closed


def test_workflow_context_imports_no_torch():
    code = "import sys, areal.infra.workflow_context, areal.infra.rollout.staleness; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


class Agent:
    async def run(self, data, **extra):
        return 1.0


class NeedsArguments(InstantWorkflow):
    def __init__(self, size):
        self.size = size


def test_resolve_workflow_object_class_and_string():
    workflow = InstantWorkflow()
    assert resolve_workflow(workflow) is workflow
    assert resolve_workflow(NeedsArguments, {"size": 2}).size == 2
    assert isinstance(resolve_workflow("tests.rollout_fakes.InstantWorkflow", {}), InstantWorkflow)


@pytest.mark.parametrize(
    ("workflow", "error", "message"),
    [
        (None, ValueError, "workflow is None"),
        (InstantWorkflow, ValueError, "give workflow_kwargs"),
        ("tests.nowhere.Thing", ValueError, "cannot be imported"),
        ("tests.rollout_fakes.Nothing", ValueError, "cannot be imported"),
        (Agent(), ValueError, "proxy"),
        (Agent, ValueError, "proxy"),
        (3, TypeError, "must be a RolloutWorkflow"),
    ],
)
def test_resolve_workflow_errors(workflow, error, message):
    with pytest.raises(error, match=message):
        resolve_workflow(workflow)


def test_resolve_workflow_object_ignores_kwargs_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        resolve_workflow(InstantWorkflow(), {"size": 1})
    assert any("ignored" in record.message for record in caplog.records)


def test_group_size_below_one_is_refused():
    with pytest.raises(ValueError, match="group_size=0"):
        GroupedRolloutWorkflow(InstantWorkflow(), 0)
    with executor(config(2)) as made, pytest.raises(ValueError, match="group_size=0"):
        made.next_batch(loader(4, 2), InstantWorkflow(), group_size=0)


@pytest.mark.asyncio
async def test_grouped_workflow_concatenates_and_drops_failures(caplog):
    calls = []

    async def episode(engine, row):
        calls.append(1)
        if len(calls) == 2:
            raise RewardError("bad sample")
        return None if len(calls) == 3 else table(len(calls))

    grouped = GroupedRolloutWorkflow(FunctionWorkflow(episode), 4)
    with caplog.at_level(logging.WARNING):
        found = await grouped.arun_episode(FakeEngine(), {"x": 0})
    assert found["rewards"].tolist() == [1.0, 4.0]
    assert any("2 of 4 samples" in record.message for record in caplog.records)
    assert await GroupedRolloutWorkflow(FunctionWorkflow(lambda *_: None), 2).arun_episode(None, {"x": 0}) is None


def test_grouped_workflow_samples_have_their_own_seeds():
    class Recording(FakeEngine):
        def __init__(self):
            super().__init__()
            self.orders = []

        async def agenerate(self, req):
            response = await super().agenerate(req)
            self.orders.append(req.order)
            return response

    engine = Recording()
    with executor(config(1), engine) as made:
        made.next_batch(loader(4, 1), GroupedRolloutWorkflow(GeneratingWorkflow(), 3))
    assert sorted(engine.orders) == [(0, 0, 0, 0), (0, 0, 1, 0), (0, 0, 2, 0)]


def test_failure_window_counts_the_last_ones_and_keeps_the_first_error():
    window = FailureWindow(4, 0.5, 4)
    window.success()
    assert [window.failure(ValueError(str(i))) for i in range(2)] == [None, None]
    stop = window.failure(ValueError("2"))
    assert "3 of the last 4" in str(stop)
    assert str(stop.__cause__) == "0"


def test_failure_window_without_any_success_stops_early():
    window = FailureWindow(64, 0.5, 8)
    assert all(window.failure(ValueError()) is None for _ in range(7))
    assert window.failure(ValueError()) is not None


@pytest.mark.parametrize(("size", "group"), [(64, 8), (64, 64), (16, 256)])
def test_failure_window_one_bad_group_stops_nothing_a_run_of_them_does(size, group):
    fresh, worked = FailureWindow(size, 0.5, 8), FailureWindow(size, 0.5, 8)
    for window in (fresh, worked):
        window.expect_group(group)
    for _ in range(8 * group):
        worked.success()
    for window in (fresh, worked):
        assert all(window.failure(ValueError()) is None for _ in range(group))
        assert any(window.failure(ValueError()) for _ in range(7 * group))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (EngineError("x"), True),
        (ConnectionRefusedError(), True),
        (OSError("socket"), True),
        (FileNotFoundError("a file of the tool"), False),
        (TimeoutError(), False),
        (RewardError("x"), False),
        (ValueError(), False),
    ],
)
def test_infrastructure_errors_are_told_from_workflow_errors(error, expected):
    assert is_infrastructure_error(error) is expected


def test_step_ledger_phases_are_exclusive_and_sum_to_the_wall_time():
    now = [0.0]
    ledger = StepLedger(clock=lambda: now[0])

    def work(seconds):
        now[0] += seconds

    work(1)
    with ledger.phase("rollout"):
        work(2)
        with ledger.phase("wait"):
            work(4)
        work(8)
    with ledger.phase("train"):
        work(16)
    assert ledger.export() == {"other": 1.0, "rollout": 10.0, "wait": 4.0, "train": 16.0}
    with ledger.phase("train"):
        work(1)
        assert ledger.export() == {"other": 0.0, "train": 1.0}
        work(3)
    work(5)
    assert ledger.export() == {"train": 3.0, "other": 5.0}


def test_step_ledger_an_exception_closes_the_phase():
    ledger = StepLedger(clock=lambda: 0.0)
    with pytest.raises(ValueError, match="x"), ledger.phase("a"):
        raise ValueError("x")
    with ledger.phase("b"):
        pass
    assert set(ledger.export()) == {"other", "a", "b"}


def test_runner_reports_callback_errors_and_stops_cleanly():
    errors = []
    runner = AsyncTaskRunner("test", errors.append)
    runner.initialize()

    def broken():
        raise ValueError("ours")

    runner.call(broken)
    for _ in range(100):
        if errors:
            break
        runner.silence_s()
        asyncio.run(asyncio.sleep(0.01))
    runner.destroy()
    runner.destroy()
    assert str(errors[0]) == "ours"
    assert not runner.alive
