"""Life of the native engine: sharing, admission, abort, pause, stop, failure."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from areal.engine.native import slots
from areal.engine.native.requests import InvalidRequestError
from areal.utils.errors import EngineStoppedError
from tests.fakes import tiny_model
from tests.native_helpers import (
    assert_greedy_match,
    assert_logprobs_match,
    before_step,
    generate,
    random_prompts,
    request,
    running,
)


@pytest.fixture(scope="module")
def model() -> object:
    return tiny_model("qwen2")


def wait_until(condition, timeout_s: float = 30) -> None:
    """Poll until ``condition()``; fail after ``timeout_s``."""
    limit = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < limit, "condition never held"
        time.sleep(0.001)


def test_group_samples_share_one_prefill(model: object) -> None:
    prompts = random_prompts((10, 17, 4))
    sent = [request(p, seed=i, max_new_tokens=12) for i, p in enumerate(p for p in prompts for _ in range(8))]
    with running(model) as engine:
        engine.hold_admission()
        futures = [engine.submit(s) for s in sent]
        engine.release_admission()
        responses = [f.result(60) for f in futures]
    assert engine.stats.prefill_tokens == 10 + 17 + 4
    assert engine.stats.shared_prefill_tokens == 7 * (10 + 17 + 4)
    assert len({tuple(r.output_tokens) for r in responses}) > 12
    for response in responses:
        assert_logprobs_match(model, response)


def test_late_request_shares_the_prompt_of_a_running_one(model: object) -> None:
    with running(model) as engine:
        first = engine.submit(request([5, 6, 7, 8], seed=1, max_new_tokens=400))
        wait_until(lambda: engine.stats.decode_steps > 10)
        (late,) = generate(engine, [request([5, 6, 7, 8], greedy=True, max_new_tokens=15)])
        assert not first.done()
        assert engine.stats.prefill_tokens == 4
        engine.abort()
    assert_greedy_match(model, late)
    assert_logprobs_match(model, late)


def test_share_prefill_off_computes_every_prompt(model: object) -> None:
    with running(model, share_prefill=False) as engine:
        responses = generate(engine, [request([5, 6, 7], seed=i, max_new_tokens=5) for i in range(4)])
    assert engine.stats.prefill_tokens == 12
    for response in responses:
        assert_logprobs_match(model, response)


@pytest.mark.parametrize("block_cost", [slots._BLOCK_COST, 0])
def test_slots_are_reused_and_moved_without_mixing_requests(
    model: object, block_cost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "_BLOCK_COST", block_cost)
    prompts = random_prompts([1 + i % 13 for i in range(60)])
    sent = [request(p, seed=i, max_new_tokens=1 + (7 * i) % 23) for i, p in enumerate(prompts)]
    with running(model, max_running_requests=7) as engine:
        responses = generate(engine, sent)
    for one, response in zip(sent, responses, strict=True):
        assert response.output_len == one.gconfig.max_new_tokens
        assert_logprobs_match(model, response)
    assert engine.stats.running == engine.stats.waiting == 0


def test_admission_follows_order_then_arrival(model: object) -> None:
    finished = []
    with running(model, max_running_requests=1) as engine:
        engine.hold_admission()
        for name, order in (("c", (0, 2)), ("a", (0, 1)), ("d", (1, 0)), ("b", (0, 1))):
            future = engine.submit(request([5], order=order, max_new_tokens=2))
            future.add_done_callback(lambda _, name=name: finished.append(name))
        assert not finished
        engine.release_admission()
        wait_until(lambda: len(finished) == 4)
    assert finished == ["a", "b", "c", "d"]


def test_admission_into_a_full_engine_waits_for_more_than_one_slot(model: object) -> None:
    fills = 0
    with running(model, max_running_requests=16) as engine:
        scheduler = engine._scheduler
        plain = scheduler._fill

        def fill() -> None:
            nonlocal fills
            fills += 1
            plain()

        scheduler._fill = fill  # type: ignore[method-assign]
        engine.hold_admission()
        sent = [request([5, 6], seed=i, max_new_tokens=20 + i) for i in range(16)]  # one ends at every step
        futures = [engine.submit(one) for one in [*sent, *(request([7], seed=i, max_new_tokens=60) for i in range(16))]]
        engine.release_admission()
        responses = [future.result(60) for future in futures]
    assert [response.output_len for response in responses] == [*range(20, 36), *[60] * 16]
    assert 2 <= fills <= 8  # 17 if each were filled for itself


def test_held_requests_wait_while_running_ones_go_on(model: object) -> None:
    with running(model) as engine:
        first = engine.submit(request([5], max_new_tokens=100))
        wait_until(lambda: engine.stats.running == 1 or first.done())
        engine.hold_admission()
        second = engine.submit(request([6], max_new_tokens=3))
        first.result(30)
        assert not second.done()
        engine.release_admission()
        assert second.result(30).output_len == 3


def test_abort_by_rid_returns_partial_tokens_and_spares_others(model: object) -> None:
    with running(model) as engine:
        sent = [request([5, 6, i + 2], seed=i, max_new_tokens=450) for i in range(3)]
        futures = [engine.submit(s) for s in sent]
        wait_until(lambda: engine.stats.decode_steps > 15)
        engine.abort(sent[1].rid)
        partial = futures[1].result(30)
        rest = [futures[0].result(60), futures[2].result(60)]
    assert partial.stop_reason == "abort"
    assert 0 < partial.output_len < 450
    assert len(partial.output_logprobs) == len(partial.output_versions) == partial.output_len
    for response in [partial, *rest]:
        assert_logprobs_match(model, response)
    assert [r.output_len for r in rest] == [450, 450]


def test_abort_all_reaches_running_and_queued(model: object) -> None:
    with running(model, max_running_requests=2) as engine:
        before_step(engine, {6: engine.pause})
        engine.pause()
        futures = [engine.submit(request([5, i + 2], seed=i, max_new_tokens=450)) for i in range(5)]
        engine.resume()
        wait_until(lambda: engine.stats.decode_steps > 5)
        engine.abort()
        responses = [f.result(30) for f in futures]
        engine.resume()
        assert all(r.stop_reason == "abort" for r in responses)
        assert [r.output_len > 0 for r in responses] == [True, True, False, False, False]
        (again,) = generate(engine, [request([5, 6], max_new_tokens=4)])
    assert again.output_len == 4


def test_abort_while_paused_or_of_unknown_rid(model: object) -> None:
    with running(model) as engine:
        engine.abort("nobody")
        future = engine.submit(request([5], max_new_tokens=450))
        wait_until(lambda: engine.stats.decode_steps > 3)
        engine.pause()
        engine.abort()
        assert future.result(30).stop_reason == "abort"
        engine.resume()


def test_pause_freezes_between_steps_and_resume_goes_on(model: object) -> None:
    with running(model) as engine:
        future = engine.submit(request([5, 6], greedy=True, max_new_tokens=400))
        wait_until(lambda: engine.stats.decode_steps > 5)
        engine.pause()
        steps = engine.stats.decode_steps
        time.sleep(0.05)
        assert engine.stats.decode_steps == steps
        assert not future.done()
        engine.resume()
        assert_greedy_match(model, future.result(60))


def test_duplicate_live_rid_is_refused_and_free_again_later(model: object) -> None:
    with running(model) as engine:
        sent = request([5], max_new_tokens=450)
        future = engine.submit(sent)
        with pytest.raises(InvalidRequestError, match="live already"):
            engine.submit(sent)
        engine.abort(sent.rid)
        future.result(30)
        wait_until(lambda: sent.rid not in engine._worker._live)
        sent.gconfig.max_new_tokens = 2
        assert engine.submit(sent).result(30).output_len == 2


def test_set_version_renames_the_current_weights(model: object) -> None:
    with running(model) as engine:
        engine.set_version(41)
        (response,) = generate(engine, [request([5], max_new_tokens=3)])
        assert engine.get_version() == 41
    assert response.output_versions == [41] * 3


def test_stop_resolves_pending_requests_and_is_idempotent(model: object) -> None:
    others = set(threading.enumerate())
    with running(model, max_running_requests=1) as engine:
        futures = [engine.submit(request([5], max_new_tokens=450)) for _ in range(2)]
        wait_until(lambda: engine.stats.decode_steps > 3)
        engine.stop()
        engine.stop()
        assert [f.result(30).stop_reason for f in futures] == ["abort", "abort"]
        assert not [t for t in set(threading.enumerate()) - others if t.name == "NativeEngine"]
        with pytest.raises(EngineStoppedError, match="start"):
            engine.submit(request([5]))
        engine.start()
        (response,) = generate(engine, [request([5], max_new_tokens=3)])
    assert response.output_len == 3


def test_worker_failure_reaches_every_future_and_later_calls(model: object) -> None:
    def explode(*_: object) -> None:
        raise MemoryError("cache of step 3")

    with running(model) as engine:
        engine._scheduler.model.decode = explode  # type: ignore[method-assign]
        engine.hold_admission()
        futures = [engine.submit(request([5, i], max_new_tokens=9)) for i in range(2, 5)]
        engine.release_admission()
        for future in futures:
            with pytest.raises(MemoryError, match="cache of step 3") as caught:
                future.result(30)
        assert "explode" in [entry.name for entry in caught.traceback]
        with pytest.raises(MemoryError):
            engine.submit(request([5]))
        with pytest.raises(MemoryError):
            engine.pause()


@pytest.mark.parametrize("idle", [True, False])
def test_worker_failure_is_told_once_before_the_callers_hear_of_it(model: object, idle: bool) -> None:
    def explode(*_: object) -> None:
        raise MemoryError("cache of step 3")

    told: list[BaseException] = []
    with running(model) as engine:
        engine.on_failure = lambda error: told.append(error)
        engine._scheduler.model.decode = explode  # type: ignore[method-assign]
        if idle:
            with pytest.raises(MemoryError):
                engine._worker.call(explode)
        else:
            heard: list[int] = []
            future = engine.submit(request([5], max_new_tokens=9))
            future.add_done_callback(lambda _: heard.append(len(told)))
            with pytest.raises(MemoryError):
                future.result(30)
            assert heard == [1]
        with pytest.raises(MemoryError):
            engine.submit(request([5]))
    assert told == [engine.failure]


def test_worker_failure_whose_listener_fails_still_reaches_the_callers(model: object) -> None:
    def explode(*_: object) -> None:
        raise MemoryError("cache of step 3")

    def listen(_: BaseException) -> None:
        raise KeyError("nobody")

    with running(model) as engine, pytest.MonkeyPatch.context() as patch:
        patch.setattr("threading.excepthook", lambda _: None)
        engine.on_failure = listen
        engine._scheduler.model.decode = explode  # type: ignore[method-assign]
        with pytest.raises(MemoryError):
            engine.submit(request([5], max_new_tokens=9)).result(20)


@pytest.mark.asyncio
async def test_agenerate_serves_many_tasks_and_cancellation_aborts(model: object) -> None:
    with running(model) as engine:
        responses = await asyncio.gather(
            *(engine.agenerate(request([5, 6], seed=i, max_new_tokens=5)) for i in range(100))
        )
        assert [r.output_len for r in responses] == [5] * 100
        task = asyncio.create_task(engine.agenerate(request([7], max_new_tokens=450)))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for _ in range(1000):
            if not engine.stats.running:
                break
            await asyncio.sleep(0.005)
        assert engine.stats.running == 0


def test_response_carries_request_details(model: object) -> None:
    with running(model) as engine:
        sent = request([5, 6], max_new_tokens=3)
        sent.tokenizer = "tok"
        (response,) = generate(engine, [sent])
    assert response.input_tokens == [5, 6]
    assert response.tokenizer == "tok"
    assert 0 <= response.ttft <= response.latency < 60
