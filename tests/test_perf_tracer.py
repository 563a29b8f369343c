"""perf_tracer: Chrome trace lines, session records, and that nothing happens when it is off."""

from __future__ import annotations

import asyncio
import json

import pytest

from areal.api.config.logging import PerfTracerConfig, SessionTracerConfig
from areal.utils import fs, perf_tracer
from areal.utils.perf_tracer import Category


@pytest.fixture(autouse=True)
def _reset():
    yield
    perf_tracer.reset()


@pytest.fixture
def config(tmp_path) -> PerfTracerConfig:
    return PerfTracerConfig(experiment_name="e", trial_name="t", fileroot=str(tmp_path), enabled=True)


def _lines(tmp_path, *parts: str) -> list[dict]:
    path = fs.get_log_path(tmp_path, "e", "t").joinpath(*parts)
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_scope_and_instant_are_written_as_chrome_events(tmp_path, config):
    perf_tracer.configure(config, rank=2, role="actor")
    with perf_tracer.trace_scope("step", category="communication", args={"global_step": 0}):
        perf_tracer.instant("mark", category=Category.IO)
    perf_tracer.save(force=True)

    events = _lines(tmp_path, "perf_tracer", "actor", "traces-r2.jsonl")
    by_name = {event["name"]: event for event in events}

    span = by_name["step"]
    assert (span["ph"], span["cat"]) == ("X", "comm")
    assert span["dur"] >= 1
    assert span["args"] == {"global_step": 0, "rank": 2, "role": "actor"}
    assert {"ts", "pid", "tid"} <= set(span)
    assert (by_name["mark"]["ph"], by_name["mark"]["s"], by_name["mark"]["cat"]) == ("i", "t", "io")
    assert by_name["process_name"]["args"]["name"] == "[actor] Rank 2, Process"
    assert {"process_sort_index", "thread_name"} <= set(by_name)


def test_scope_notes_the_exception_and_lets_it_pass(tmp_path, config):
    perf_tracer.configure(config, rank=0)
    with pytest.raises(ValueError, match="boom"), perf_tracer.trace_scope("bad"):
        raise ValueError("boom")
    perf_tracer.save(force=True)
    events = _lines(tmp_path, "perf_tracer", "traces-r0.jsonl")
    assert next(e for e in events if e["name"] == "bad")["args"]["exception"] == "ValueError: boom"


def test_save_writes_at_its_interval_and_appends(tmp_path, config):
    config.save_interval = 2
    tracer = perf_tracer.configure(config, rank=0)
    counts = []
    for step in range(4):
        with perf_tracer.trace_scope(f"s{step}"):
            pass
        perf_tracer.save(step=step)
        text = tracer.path.read_text() if tracer.path.exists() else ""
        counts.append(text.count('"ph": "X"'))
    assert counts == [0, 2, 2, 4]


def test_not_configured_or_disabled_does_nothing(tmp_path, config):
    with perf_tracer.trace_scope("x"):
        perf_tracer.instant("y")
    perf_tracer.save(force=True)
    assert not perf_tracer.is_configured()
    with pytest.raises(RuntimeError, match="not configured"):
        perf_tracer.get_tracer()

    config.enabled = False
    perf_tracer.configure(config, rank=0)
    with perf_tracer.trace_scope("x"):
        pass
    perf_tracer.save(force=True)
    assert not list(tmp_path.rglob("*.jsonl"))


def test_configure_twice_is_refused(config):
    perf_tracer.configure(config, rank=0)
    with pytest.raises(RuntimeError, match="already"):
        perf_tracer.configure(config, rank=0)


@pytest.mark.asyncio
async def test_async_scopes_of_two_tasks_have_rows_of_their_own(tmp_path, config):
    perf_tracer.configure(config, rank=0)

    @perf_tracer.trace_perf("decorated")
    async def work() -> None:
        async with perf_tracer.atrace_scope("inner", category="custom"):
            await asyncio.sleep(0.001)

    await asyncio.gather(work(), work())
    perf_tracer.save(force=True)

    events = _lines(tmp_path, "perf_tracer", "traces-r0.jsonl")
    inner = [e for e in events if e["name"] == "inner"]
    assert len({e["tid"] for e in inner}) == 2
    assert {e["cat"] for e in inner} == {"custom"}
    assert sum(e["name"] == "decorated" for e in events) == 2


def test_profiler_runs_on_chosen_steps_with_negative_rows(tmp_path, config):
    import torch

    config.profile_steps = [1]
    perf_tracer.configure(config, rank=0)
    for step in range(2):
        with (
            perf_tracer.trace_scope("outer", args={"global_step": step}),
            perf_tracer.trace_scope(f"inner{step}", enable_profiler=True),
        ):
            torch.ones(2).add(1)
    perf_tracer.save(force=True)

    events = _lines(tmp_path, "perf_tracer", "traces-r0.jsonl")
    from_torch = [e for e in events if e["tid"] < 0]
    assert any("add" in e["name"] for e in from_torch)
    span = next(e for e in events if e["name"] == "inner1")
    assert all(e["ts"] >= span["ts"] for e in from_torch)


def test_session_records_phases_counters_and_status(tmp_path, config):
    config.session_tracer = SessionTracerConfig(enabled=True, flush_threshold=1)
    perf_tracer.configure(config, rank=1, role="rollout")

    perf_tracer.register_task(7)
    session = perf_tracer.register_session(7)
    with perf_tracer.trace_session_phase("generate"):
        pass
    perf_tracer.trace_session_event("increment_counter", name="turns", value=2)
    perf_tracer.trace_session_event("mark_finalized", session_id=session, status="accepted")

    (record,) = _lines(tmp_path, "session_tracer", "rollout", "sessions-r1.jsonl")
    assert (record["task_id"], record["session_id"], record["rank"], record["role"]) == (7, session, 1, "rollout")
    assert record["status"] == "accepted"
    assert record["total_s"] >= record["generate_s"] >= 0
    assert set(record["phases"]["generate"][0]) == {"start_ts", "end_ts"}
    assert record["counters"] == {"turns": 2}
    assert "reason" not in record
    assert "reward_s" not in record


def test_session_flush_waits_for_its_threshold_and_force_writes_all(tmp_path, config):
    config.session_tracer = SessionTracerConfig(enabled=True, flush_threshold=2)
    tracer = perf_tracer.configure(config, rank=0)
    first, _ = perf_tracer.register_session(1), perf_tracer.register_session(2)
    perf_tracer.trace_session_event("mark_finalized", session_id=first, status="failed", reason="boom")
    assert not tracer.session_tracer.path.exists()

    perf_tracer.save(force=True)

    records = _lines(tmp_path, "session_tracer", "sessions-r0.jsonl")
    assert [(r["status"], r.get("reason")) for r in records] == [("failed", "boom"), ("pending", None)]


@pytest.mark.asyncio
async def test_session_context_gives_each_sample_its_session(tmp_path, config):
    config.session_tracer = SessionTracerConfig(enabled=True)
    perf_tracer.configure(config, rank=0)
    perf_tracer.set_task_id(3)

    @perf_tracer.trace_session("reward")
    async def score() -> None:
        await asyncio.sleep(0)

    @perf_tracer.session_context()
    async def sample() -> int:
        async with perf_tracer.atrace_session_phase("generate"):
            await asyncio.sleep(0)
        await score()
        return perf_tracer.get_session_id()

    ids = await asyncio.gather(sample(), sample())
    perf_tracer.trace_session_event("mark_finalized", task_id=3, status="accepted")
    perf_tracer.save(force=True)

    records = _lines(tmp_path, "session_tracer", "sessions-r0.jsonl")
    assert sorted(ids) == sorted(r["session_id"] for r in records)
    assert all({"generate", "reward"} == set(r["phases"]) and r["status"] == "accepted" for r in records)


def test_unknown_session_event_is_refused(config):
    config.session_tracer = SessionTracerConfig(enabled=True)
    perf_tracer.configure(config, rank=0)
    perf_tracer.register_session(1)
    with pytest.raises(ValueError, match="dance"):
        perf_tracer.trace_session_event("dance")
