"""Generation on a scripted server across weight updates: parts, versions, seeds, budgets, stop rules."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from areal.engine.inference.traffic import StarvedRequestError
from areal.utils.errors import EngineStoppedError, UnsupportedFeatureError
from areal.utils.seeding import derive_named_seed
from tests.server_fakes import (
    FakeProtocol,
    FakeServer,
    Fault,
    ask,
    begin,
    draw,
    expected,
    generate,
    outcome,
    quick_waits,
    remote_config,
    sampling,
    update,
    wait_until,
)

PROMPT = [5, 6, 7]


class Letters:
    """A tokenizer: one letter per token."""

    eos_token_id = 1

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(ord("A") + i) for i in ids)


def drawn(server: FakeServer, count: int) -> bool:
    """Whether some job has ``count`` tokens."""
    return any(len(job.tokens) >= count for job in list(server.jobs.values()))


def test_agenerate_undisturbed_returns_what_the_server_drew() -> None:
    with sampling(FakeServer()) as sampler:
        response = generate(sampler, ask(max_new_tokens=8))
    assert outcome(response) == expected(PROMPT, [(8, 1, 0)])
    assert (response.stop_reason, response.input_tokens) == ("length", PROMPT)
    assert 0 < response.ttft <= response.latency < 5


@pytest.mark.parametrize("dialect_stamps", [True, False])
def test_agenerate_update_with_abort_continues_with_derived_seed_and_new_version(dialect_stamps: bool) -> None:
    server = FakeServer(token_s=0.005, stamps=dialect_stamps)
    with sampling(server, protocol=FakeProtocol(keeps=False)) as sampler:
        future = begin(sampler, ask(max_new_tokens=60))
        server.wait_for(lambda s: drawn(s, 5))
        update(sampler, 1)
        response = future.result(30)
    first = response.output_versions.count(0)
    assert 5 <= first < 60
    assert outcome(response) == expected(PROMPT, [(first, 1, 0), (60 - first, derive_named_seed(1, "part", first), 1)])
    assert [body["most"] for body in server.calls()] == [60, 60 - first]
    assert response.stop_reason == "length"


def test_agenerate_update_with_keep_stays_in_place_and_switches_version() -> None:
    server = FakeServer(token_s=0.005)
    with sampling(server) as sampler:
        future = begin(sampler, ask(max_new_tokens=60))
        server.wait_for(lambda s: drawn(s, 5))
        update(sampler, 1)
        response = future.result(30)
    first = response.output_versions.count(0)
    assert 5 <= first < 60
    assert outcome(response) == expected(PROMPT, [(first, 1, 0), (60 - first, 1, 1)])
    assert len(server.calls()) == 1


def test_agenerate_update_in_the_middle_of_many_all_tokens_follow_their_version() -> None:
    server = FakeServer(token_s=0.003)
    with sampling(server, protocol=FakeProtocol(keeps=False)) as sampler:
        futures = [begin(sampler, ask([9, number], seed=number, max_new_tokens=40)) for number in range(16)]
        server.wait_for(lambda s: len(s.jobs) == 16 and drawn(s, 8))
        update(sampler, 1)
        server.wait_for(lambda s: drawn(s, 4))
        update(sampler, 2)
        responses = [future.result(30) for future in futures]
    for number, response in enumerate(responses):
        counts = [response.output_versions.count(version) for version in range(3)]
        assert response.output_versions == sorted(response.output_versions)
        parts, done = [], 0
        for version, count in enumerate(counts):
            parts.append((count, derive_named_seed(number, "part", done) if done else number, version))
            done += count
        assert outcome(response) == expected([9, number], parts)


def test_keep_without_stamps_update_in_flight_is_refused() -> None:
    server = FakeServer(token_s=0.005, stamps=False)
    with sampling(server) as sampler:
        future = begin(sampler, ask(max_new_tokens=60))
        server.wait_for(lambda s: drawn(s, 5))
        update(sampler, 1)
        with pytest.raises(ValueError, match="without saying which version drew which token"):
            future.result(30)


def test_keep_with_server_that_cannot_is_refused() -> None:
    with (
        pytest.raises(UnsupportedFeatureError, match="rollout.on_weight_update=keep.*native or vllm"),
        sampling(FakeServer(), protocol=FakeProtocol(keeps=False), config=remote_config(on_weight_update="keep")),
    ):
        pass


def test_on_weight_update_abort_overrides_a_server_that_keeps() -> None:
    server = FakeServer(token_s=0.005)
    with sampling(server, config=remote_config(on_weight_update="abort")) as sampler:
        future = begin(sampler, ask(max_new_tokens=30))
        server.wait_for(lambda s: drawn(s, 5))
        update(sampler, 1)
        future.result(30)
    assert len(server.calls()) == 2
    assert server.calls("/pause") == [{"mode": "abort"}]


def test_pause_nested_request_waits_for_the_last_resume() -> None:
    server = FakeServer()
    with sampling(server) as sampler:
        sampler.pause()
        sampler.pause()
        future = begin(sampler, ask(max_new_tokens=4))
        sampler.resume()
        with pytest.raises(TimeoutError):
            future.result(0.2)
        sent_while_paused = server.calls()
        sampler.resume()
        response = future.result(30)
    assert sent_while_paused == []
    assert response.output_len == 4
    assert len(server.calls("/pause")) == len(server.calls("/resume")) == 1


def test_pause_for_ever_waiting_request_ends_with_the_setting_named() -> None:
    with sampling(FakeServer(), waits=quick_waits(request_s=0.2)) as sampler:
        sampler.pause()
        with pytest.raises(TimeoutError, match="rollout.request_timeout"):
            generate(sampler, ask(max_new_tokens=4))
        sampler.resume()


def test_abort_before_first_token_request_is_sent_again_with_its_own_seed() -> None:
    server = FakeServer(token_s=0.2)
    with sampling(server, protocol=FakeProtocol(keeps=False)) as sampler:
        future = begin(sampler, ask(max_new_tokens=3))
        server.wait_for(lambda s: len(s.jobs) == 1)
        update(sampler, 1)
        server.token_s = 0.0
        response = future.result(30)
    assert outcome(response) == expected(PROMPT, [(3, 1, 1)])
    assert [body["seed"] for body in server.calls()] == [1, 1]
    assert len({body["rid"] for body in server.calls()}) == 2


@pytest.mark.parametrize("deaf", [False, True])
def test_pause_request_that_arrives_after_it_is_called_back_and_not_lost(deaf: bool) -> None:
    server = FakeServer()
    server.arrival_s, server.deaf = 0.1, deaf
    with sampling(server, protocol=FakeProtocol(keeps=False)) as sampler:
        future = begin(sampler, ask(max_new_tokens=3))
        server.wait_for(lambda s: len(s.calls()) == 1)
        update(sampler, 1)
        response = future.result(30)
    assert outcome(response) == expected(PROMPT, [(3, 1, 1)])
    assert len(server.calls()) == 2
    assert server.calls("/abort")[0] == {"rid": server.calls()[0]["rid"]}


def test_pause_aborted_replies_that_trickle_in_keep_their_tokens() -> None:
    server = FakeServer(token_s=0.005)
    waits = quick_waits(straggler_s=0.05, give_up_s=2.0)
    with sampling(server, protocol=FakeProtocol(keeps=False), waits=waits) as sampler:
        futures = [begin(sampler, ask([5, i], rid=str(i), max_new_tokens=400)) for i in range(2, 12)]
        server.wait_for(lambda s: len(s.jobs) == 10 and all(len(job.tokens) > 3 for job in list(s.jobs.values())))
        server.answer_s.extend(0.3 * (i + 1) for i in range(10))  # the last one long after one wait for all
        update(sampler, 1)
        server.token_s = 0.0
        responses = [future.result(30) for future in futures]
    assert [sorted(set(response.output_versions)) for response in responses] == [[0, 1]] * 10
    assert len(server.calls()) == 20


def test_pause_aborted_reply_that_never_comes_is_sent_again() -> None:
    server = FakeServer(token_s=0.005)
    with sampling(server, protocol=FakeProtocol(keeps=False)) as sampler:
        future = begin(sampler, ask(max_new_tokens=400))
        server.wait_for(lambda s: drawn(s, 3))
        server.answer_s.append(3600.0)
        update(sampler, 1)
        server.token_s = 0.0
        assert set(future.result(30).output_versions) == {1}


def test_update_storm_request_makes_progress() -> None:
    server = FakeServer(token_s=0.04)
    done = threading.Event()
    with sampling(server, protocol=FakeProtocol(keeps=False)) as sampler:
        future = begin(sampler, ask(max_new_tokens=4))
        future.add_done_callback(lambda _: done.set())
        deadline, version = time.monotonic() + 8, 0
        while not done.is_set() and time.monotonic() < deadline:
            version += 1
            update(sampler, version)
            time.sleep(0.005)
        response = future.result(30)
    assert response.output_len == 4
    assert version > 3


def test_slice_of_a_protected_part_continues_up_to_the_budget() -> None:
    server = FakeServer()
    server.fail_next(*[Fault("abort") for _ in range(3)])
    with sampling(server, protocol=FakeProtocol(keeps=False), waits=quick_waits(slice_tokens=4)) as sampler:
        response = generate(sampler, ask(max_new_tokens=10, min_new_tokens=9))
    assert [(body["most"], body["least"]) for body in server.calls()] == [(10, 9)] * 3 + [(4, 4), (6, 5)]
    assert outcome(response) == expected(PROMPT, [(4, 1, 0), (6, derive_named_seed(1, "part", 4), 0)])


def test_frequency_penalty_aborted_answer_starts_over() -> None:
    server = FakeServer(token_s=0.005)
    with sampling(server, protocol=FakeProtocol(keeps=False)) as sampler:
        future = begin(sampler, ask(max_new_tokens=20, frequency_penalty=0.5))
        server.wait_for(lambda s: drawn(s, 5))
        update(sampler, 1)
        response = future.result(30)
    assert outcome(response) == expected(PROMPT, [(20, 1, 1)])


def test_frequency_penalty_update_storm_ends_the_request_by_name() -> None:
    server = FakeServer(token_s=0.02)
    waits = quick_waits(protected_s=0.02)
    with sampling(server, protocol=FakeProtocol(keeps=False), waits=waits) as sampler:
        future = begin(sampler, ask(max_new_tokens=200, frequency_penalty=0.5))
        version = 0
        while not future.done() and version < 60:
            version += 1
            server.wait_for(lambda s: len(s.jobs) == 1 or future.done())
            update(sampler, version)
        with pytest.raises(StarvedRequestError, match="on_weight_update=keep"):
            future.result(30)


def test_server_that_aborts_by_itself_request_continues_after_a_pause() -> None:
    server = FakeServer()
    server.fail_next(Fault("abort", after=0), Fault("abort", after=3), Fault("abort", after=0))
    with sampling(server) as sampler:
        response = generate(sampler, ask(max_new_tokens=8))
    assert outcome(response) == expected(PROMPT, [(3, 1, 0), (5, derive_named_seed(1, "part", 3), 0)])


def test_server_that_always_aborts_request_ends_by_name() -> None:
    server = FakeServer()
    server.fail_next(*[Fault("abort") for _ in range(40)])
    waits = quick_waits(fruitless=100)
    with sampling(server, waits=waits) as sampler, pytest.MonkeyPatch.context() as patch:
        patch.setattr("areal.engine.inference.traffic.pause_before_retry", lambda _: 0.0)
        with pytest.raises(StarvedRequestError, match="12 times in a row"):
            generate(sampler, ask(max_new_tokens=8))


def scripted(tokens: list[int]) -> object:
    """A model that continues PROMPT with ``tokens``, whatever seed and version."""
    return lambda prefix, seed, version: (tokens[len(prefix) - len(PROMPT)], -0.5)


def test_stop_string_across_two_parts_ends_the_answer_where_it_ends() -> None:
    text = [ord(c) - ord("A") for c in "HELLOWORLDANDMORE"]
    server = FakeServer(model=scripted(text), decode=Letters().decode)  # type: ignore[arg-type]
    server.fail_next(Fault("abort", after=7))
    with sampling(server, tokenizer=Letters()) as sampler:
        response = generate(sampler, ask(max_new_tokens=len(text), stop=["OWOR"]))
    assert Letters().decode(response.output_tokens) == "HELLOWOR"
    assert response.stop_reason == "stop"
    assert len(response.output_logprobs) == len(response.output_versions) == 8


def test_stop_string_within_the_second_part_is_the_servers() -> None:
    text = [ord(c) - ord("A") for c in "HELLOWORLDANDMORE"]
    server = FakeServer(model=scripted(text), decode=Letters().decode)  # type: ignore[arg-type]
    server.fail_next(Fault("abort", after=4))
    with sampling(server, tokenizer=Letters()) as sampler:
        response = generate(sampler, ask(max_new_tokens=len(text), stop=["LD"]))
    assert Letters().decode(response.output_tokens) == "HELLOWORLD"


def test_stop_string_across_parts_before_min_new_tokens_does_not_count() -> None:
    text = [ord(c) - ord("A") for c in "ABABABABABCC"]
    server = FakeServer(model=scripted(text), decode=lambda ids: "")  # type: ignore[arg-type]
    server.fail_next(Fault("abort", after=3))
    with sampling(server, tokenizer=Letters()) as sampler:
        response = generate(sampler, ask(max_new_tokens=12, min_new_tokens=6, stop=["AB"]))
    assert Letters().decode(response.output_tokens) == "ABABAB"


def test_min_new_tokens_across_parts_is_what_is_left() -> None:
    server = FakeServer()
    server.fail_next(Fault("abort", after=4), Fault("abort", after=8))
    with sampling(server) as sampler:
        generate(sampler, ask(max_new_tokens=20, min_new_tokens=10))
    assert [(body["most"], body["least"]) for body in server.calls()] == [(20, 10), (16, 6), (8, 0)]
    assert [body["ids"][:3] for body in server.calls()] == [PROMPT] * 3


def test_stop_token_ends_the_answer_and_is_part_of_it() -> None:
    stop = draw([*PROMPT, draw(PROMPT, 1, 0)[0]], 1, 0)[0]
    with sampling(FakeServer()) as sampler:
        response = generate(sampler, ask(max_new_tokens=8, stop_token_ids=[stop]))
    assert (response.output_len, response.output_tokens[-1], response.stop_reason) == (2, stop, "stop")


def test_budget_is_the_least_of_three_limits() -> None:
    server = FakeServer()
    with sampling(server) as sampler:
        generate(sampler, ask([2] * 250, max_new_tokens=100))
        generate(sampler, ask([2] * 50, max_new_tokens=100, max_tokens=60))
    assert [body["most"] for body in server.calls()] == [6, 10]


def test_seeds_server_without_them_is_sent_none() -> None:
    server = FakeServer()
    with sampling(server, protocol=FakeProtocol(seeds=False)) as sampler:
        generate(sampler, ask(max_new_tokens=2, seed=7))
    assert server.calls()[0]["seed"] is None


def test_set_version_stamps_the_servers_and_what_they_draw() -> None:
    server = FakeServer()
    with sampling(server) as sampler:
        sampler.set_version(7)
        sampler.set_version(7)
        response = generate(sampler, ask(max_new_tokens=2))
        assert sampler.get_version() == 7
    assert server.calls("/stamp") == [{"version": 0}, {"version": 7}]
    assert response.output_versions == [7, 7]


def test_cancelled_request_is_aborted_on_its_server() -> None:
    server = FakeServer(token_s=0.01)
    with sampling(server) as sampler:
        future = begin(sampler, ask(max_new_tokens=200))
        server.wait_for(lambda s: drawn(s, 2))
        future.stop()  # type: ignore[attr-defined]
        with pytest.raises(asyncio.CancelledError):
            future.result(30)
        server.wait_for(lambda s: not s.jobs and len(s.calls("/abort")) == 1)
        assert generate(sampler, ask(max_new_tokens=2)).output_len == 2


def test_stop_with_requests_in_flight_ends_them_and_leaves_nothing_behind() -> None:
    server = FakeServer(token_s=0.01)
    before = set(threading.enumerate())
    with sampling(server) as sampler:
        futures = [begin(sampler, ask(max_new_tokens=200)) for _ in range(8)]
        server.wait_for(lambda s: len(s.jobs) == 8)
        started = time.monotonic()
        sampler.stop()
        took_s = time.monotonic() - started
        for future in futures:
            with pytest.raises(EngineStoppedError, match="stopped"):
                future.result(30)
        sampler.stop()
        with pytest.raises(EngineStoppedError):
            generate(sampler, ask(max_new_tokens=2))
        server.wait_for(lambda s: not s.jobs and not s.open_connections())
    assert took_s < 20
    wait_until(lambda: set(threading.enumerate()) <= before)


def test_stop_while_paused_leaves_the_servers_running() -> None:
    server = FakeServer()
    with sampling(server) as sampler:
        sampler.pause()
        sampler.stop()
        assert not server.paused


def test_agenerate_from_several_loops_at_once_works() -> None:
    with sampling(FakeServer(token_s=0.001)) as sampler:
        futures = [begin(sampler, ask([number], max_new_tokens=5)) for number in range(2, 34)]
        responses = [future.result(30) for future in futures]
    assert [outcome(r) for r in responses] == [expected([n], [(5, 1, 0)]) for n in range(2, 34)]


def test_many_requests_and_updates_leave_no_task_and_no_connection() -> None:
    server = FakeServer(token_s=0.002)
    with sampling(server, protocol=FakeProtocol(keeps=False)) as sampler:
        loop = sampler._loop._runner.loop
        wait_until(lambda: len(asyncio.all_tasks(loop)) == 2)  # those that look after the servers
        for version in range(1, 4):
            futures = [begin(sampler, ask([number], max_new_tokens=20)) for number in range(2, 12)]
            server.wait_for(lambda s: len(s.jobs) == 10)
            futures[0].stop()  # type: ignore[attr-defined]
            update(sampler, version)
            for future in futures[1:]:
                future.result(30)
        wait_until(lambda: len(asyncio.all_tasks(loop)) == 2)
        assert not sampler._traffic._sent
        sampler.stop()
        server.wait_for(lambda s: s.open_connections() == 0 and not s.jobs)
