"""Bad input and bad servers: named errors, other servers, no hang."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from aiohttp import web

from areal.api.io_struct import ModelRequest
from areal.engine.inference.http_client import ServerRefusedError, ServerUnavailableError
from areal.engine.inference.protocol import ReplyError
from areal.engine.inference.remote import RemoteSampler
from areal.engine.inference.traffic import StaleServerError
from areal.engine.native.requests import InvalidRequestError
from areal.infra.rollout.failures import is_infrastructure_error
from areal.utils.errors import ConfigError, EngineError, EngineStoppedError
from tests.server_fakes import (
    FakeProtocol,
    FakeServer,
    Fault,
    ask,
    begin,
    generate,
    limits,
    quick_waits,
    remote_config,
    sampling,
    serving,
    wait_until,
)


def edited(**changes: Any) -> Fault:
    """A reply in which fields were replaced."""
    return Fault("edit", edit=lambda reply: {**reply, **changes})


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (ask([5, 64]), r"input_ids holds 64: token ids are 0..63"),
        (ask([5, -1]), r"input_ids holds -1"),
        (ask([]), "input_ids is empty"),
        (ask([2] * 256), "the prompt has 256 tokens.*prompt plus output may have 256"),
        (ask([2] * 300), "the prompt has 300 tokens"),
        (ask([2] * 9, max_tokens=9), "max_tokens=9"),
        (ask(max_new_tokens=0), "max_new_tokens=0"),
        (ask(n_samples=2), "n_samples=2"),
        (ask(use_beam_search=True), "gconfig.use_beam_search=True: .*use vllm"),
        (ask(stop=["x"]), "needs a tokenizer"),
        (ModelRequest(input_ids=[5], image_data=["iVBOR"]), "text models only"),
    ],
)
def test_agenerate_bad_request_is_named_and_never_sent(request_: ModelRequest, words: str) -> None:
    server = FakeServer()
    with sampling(server) as sampler, pytest.raises(InvalidRequestError, match=words) as caught:
        generate(sampler, request_)
    assert server.calls() == []
    assert not is_infrastructure_error(caught.value)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (edited(tokens=[3, 4, 5]), "3 tokens but 4 log-probs"),
        (edited(logprobs=[-0.1, float("nan"), -0.1, -0.1]), "log-prob nan of token 1"),
        (edited(logprobs=[-0.1, None, -0.1, -0.1]), "log-prob None of token 1"),
        (edited(logprobs=[-0.1, float("-inf"), -0.1, -0.1]), "log-prob -inf of token 1"),
        (edited(logprobs=[-0.1, -0.1, -0.1, 0.5]), "log-prob 0.5 of token 3.*at most 0"),
        (edited(tokens=[3, 4, 5, 10**12]), r"token 1000000000000 is not in the vocabulary \(0..63\)"),
        (edited(tokens=[3, 4, 5, -2]), "token -2"),
        (edited(tokens=[3, 4, 5, "6"]), "token '6'"),
        (edited(tokens=[3, 4, 5, True]), "token True"),
        (edited(tokens=[3] * 5, logprobs=[-0.1] * 5, versions=None), "5 tokens, 4 were asked for"),
        (edited(tokens=[], logprobs=[], versions=[]), "no token, yet the stop reason is 'length'"),
        (edited(reason="exhausted"), "stop reason 'exhausted'"),
        (edited(versions=[0, 0]), "4 tokens but versions for 2"),
        (Fault("edit", edit=lambda reply: {"tokens": [1]}), "field 'logprobs' is missing"),
        (Fault("edit", edit=lambda reply: 7), "with '7', not with a JSON object"),
        (Fault("html"), "web page"),
        (Fault("truncated"), "no JSON"),
    ],
)
def test_agenerate_garbage_reply_is_named_and_lost_not_trained(fault: Fault, words: str) -> None:
    server = FakeServer()
    server.fail_next(fault)
    with sampling(server) as sampler:
        with pytest.raises(ReplyError, match=words) as caught:
            generate(sampler, ask(max_new_tokens=4))
        assert is_infrastructure_error(caught.value)  # the row is queued again
        assert server.address in str(caught.value)
        assert generate(sampler, ask(max_new_tokens=4)).output_len == 4


def test_agenerate_refused_request_says_the_servers_words_and_fails_as_the_rows_own() -> None:
    server = FakeServer()
    server.fail_next(Fault("status", 400, '{"error": {"message": "no such adapter"}}'))
    with sampling(server) as sampler, pytest.raises(ServerRefusedError, match="no such adapter") as caught:
        generate(sampler, ask(max_new_tokens=4))
    assert not is_infrastructure_error(caught.value)
    assert len(server.calls()) == 1


@pytest.mark.parametrize("fault", [Fault("status", 500), Fault("drop"), Fault("cut")])
def test_agenerate_one_failure_of_one_server_is_tried_again(fault: Fault) -> None:
    server = FakeServer()
    server.fail_next(fault)
    with sampling(server) as sampler:
        assert generate(sampler, ask(max_new_tokens=4)).output_len == 4
    assert len(server.calls()) == 2


def test_agenerate_server_down_waits_until_it_is_back() -> None:
    server = FakeServer()
    with sampling(server) as sampler:
        server.stop()
        timer = threading.Timer(1.5, server.start)
        timer.start()
        assert generate(sampler, ask(max_new_tokens=4)).output_len == 4
        timer.join()


def test_agenerate_server_down_for_good_is_named_at_the_limit() -> None:
    server = FakeServer()
    with sampling(server, config=remote_config(setup_timeout=1.0)) as sampler:
        server.stop()
        started = time.monotonic()
        with pytest.raises(EngineStoppedError, match=rf"{server.address}.*rollout.setup_timeout") as caught:
            generate(sampler, ask(max_new_tokens=4))
        assert time.monotonic() - started < 20
        assert is_infrastructure_error(caught.value)


def test_agenerate_stalled_server_ends_at_the_limit_and_is_told_to_abort() -> None:
    server = FakeServer()
    server.fail_next(Fault("stall"))
    with sampling(
        server, config=remote_config(request_timeout=0.3, request_retries=1), waits=quick_waits(attempts=1)
    ) as s:
        with pytest.raises(ServerUnavailableError, match="no answer within 0.3 s"):
            generate(s, ask(max_new_tokens=4))
        server.wait_for(lambda fake: len(fake.calls("/abort")) == 1)


def test_agenerate_one_of_two_servers_down_the_other_answers() -> None:
    servers = [FakeServer(), FakeServer()]
    with sampling(*servers) as sampler:
        servers[0].stop()
        responses = [generate(sampler, ask(max_new_tokens=4)) for _ in range(6)]
        assert [response.output_len for response in responses] == [4] * 6
        assert len(servers[1].calls()) == 6
        servers[0].start()
        wait_until(lambda: all(server.healthy for server in sampler._pool.servers))
        for _ in range(4):
            generate(sampler, ask(max_new_tokens=4))
    assert len(servers[0].calls()) == 2


@pytest.mark.parametrize("status", [401, 404])
def test_revive_server_whose_health_call_is_refused_stays_out_and_harms_nobody(status: int) -> None:
    servers = [FakeServer(), FakeServer()]
    told: list[BaseException] = []
    with sampling(*servers) as sampler:
        sampler.on_failure = told.append
        servers[0].reply_to("/health", lambda _: web.Response(status=status, text="restarting"))
        servers[0].fail_next(Fault("status", 500), Fault("status", 500))
        for _ in range(2):
            generate(sampler, ask(max_new_tokens=2))
        servers[0].wait_for(lambda fake: len(fake.calls("/health")) >= 3)  # the first one was the start's
        answered = generate(sampler, ask(max_new_tokens=2)).output_len
        servers[0].reply_to("/health", lambda _: {})
        wait_until(lambda: all(server.healthy for server in sampler._pool.servers))
    assert (answered, told) == (2, [])


def test_agenerate_after_a_garbage_reply_the_row_goes_to_another_server() -> None:
    servers = [FakeServer(), FakeServer()]
    servers[0].fail_next(edited(logprobs=[float("nan")] * 4))
    with sampling(*servers) as sampler:
        with pytest.raises(ReplyError):
            generate(sampler, ask(max_new_tokens=4, rid="row"))
        generate(sampler, ask(max_new_tokens=4, rid="row"))
    assert (len(servers[0].calls()), len(servers[1].calls())) == (1, 1)


def test_watch_server_that_ended_fails_what_waits_and_is_told_once() -> None:
    server = FakeServer(token_s=0.01)
    ended: list[str] = []
    told: list[BaseException] = []
    with sampling(server, watch=lambda: ended[0] if ended else None) as sampler:
        sampler.on_failure = told.append
        futures = [begin(sampler, ask(max_new_tokens=200)) for _ in range(3)]
        server.wait_for(lambda s: len(s.jobs) == 3)
        ended.append("exit code 137; last lines: out of memory")
        for future in futures:
            with pytest.raises(EngineStoppedError, match="exit code 137.*out of memory"):
                future.result(30)
        with pytest.raises(EngineStoppedError, match="out of memory"):
            generate(sampler, ask())
        with pytest.raises(EngineStoppedError, match="out of memory"):
            sampler.pause()
        sampler.resume()
        server.wait_for(lambda s: not s.jobs)
    assert [str(error) for error in told] == [f"the inference server at {server.address} ended: {ended[0]}"]


def test_stale_server_restarted_behind_our_back_fails_the_sampler() -> None:
    server = FakeServer()
    told: list[BaseException] = []
    with sampling(server) as sampler:
        sampler.on_failure = told.append
        sampler.set_version(3)
        server.version = 0  # somebody started it again from the first checkpoint
        with pytest.raises(StaleServerError, match="weights v0, but v3 was in service"):
            generate(sampler, ask(max_new_tokens=4))
        with pytest.raises(EngineStoppedError):
            generate(sampler, ask(max_new_tokens=4))
    assert len(told) == 1


def test_servers_that_answer_health_but_never_work_fail_the_sampler() -> None:
    server = FakeServer()
    server.fail_next(*[Fault("status", 500) for _ in range(1000)])
    told: list[BaseException] = []
    with sampling(server, config=remote_config(setup_timeout=0.5), waits=quick_waits(attempts=1)) as sampler:
        sampler.on_failure = told.append
        deadline = time.monotonic() + 8
        while not told and time.monotonic() < deadline:
            with pytest.raises(EngineError):
                generate(sampler, ask(max_new_tokens=4))
    assert "none has worked for" in str(told[0])
    assert "rollout.setup_timeout" in str(told[0])


@pytest.mark.parametrize("pausing", [True, False])
def test_pause_or_resume_server_that_does_not_follow_fails_the_sampler(pausing: bool) -> None:
    server = FakeServer()
    server.fail_next(*[Fault("status", 500)] * 2, path="/pause" if pausing else "/resume")
    told: list[BaseException] = []
    with sampling(server) as sampler:
        sampler.on_failure = told.append
        if not pausing:
            sampler.pause()
        with pytest.raises(EngineError, match="the inference servers failed: .* answered 500"):
            (sampler.pause if pausing else sampler.resume)()
        wait_until(lambda: len(told) == 1)


def test_pause_one_of_two_servers_fails_the_other_is_not_left_paused() -> None:
    servers = [FakeServer(), FakeServer()]
    servers[1].fail_next(*[Fault("status", 500)] * 2, path="/pause")
    with sampling(*servers) as sampler:
        with pytest.raises(EngineError):
            sampler.pause()
        sampler.stop()
        assert not servers[0].paused


def test_pause_hanging_server_ends_at_the_limit() -> None:
    server = FakeServer()
    server.fail_next(Fault("stall"), Fault("stall"), path="/pause")
    started = time.monotonic()
    with (
        sampling(server, waits=quick_waits(control_s=0.2)) as sampler,
        pytest.raises(EngineError, match="no answer within 0.2 s"),
    ):
        sampler.pause()
    assert time.monotonic() - started < 20


def test_pause_before_start_is_refused_and_harms_nothing() -> None:
    server = FakeServer()
    with serving(server):
        sampler = RemoteSampler(FakeProtocol(), [server.address], remote_config(), limits())
        with pytest.raises(EngineStoppedError, match="call start"):
            sampler.pause()
        sampler.start()
        assert generate(sampler, ask(max_new_tokens=2)).output_len == 2
        sampler.stop()


def test_start_server_that_never_answers_names_the_setting_and_leaves_nothing() -> None:
    before = set(threading.enumerate())
    server = FakeServer()
    with serving(server):
        server.stop()
        sampler = RemoteSampler(FakeProtocol(), [server.address], remote_config(setup_timeout=0.6), limits())
        with pytest.raises(ServerUnavailableError, match=r"0.6 s \(rollout.setup_timeout\).*[Cc]onnect"):
            sampler.start()
    wait_until(lambda: set(threading.enumerate()) <= before)


def test_start_unhealthy_server_that_recovers_is_waited_for() -> None:
    server = FakeServer()
    server.healthy = False
    threading.Timer(0.3, lambda: setattr(server, "healthy", True)).start()
    with sampling(server) as sampler:
        assert generate(sampler, ask(max_new_tokens=2)).output_len == 2


def test_start_server_that_ended_meanwhile_is_not_waited_for() -> None:
    server = FakeServer()
    server.healthy = False
    started = time.monotonic()
    with (
        pytest.raises(EngineError, match="ended before it was healthy: exit code 1"),
        sampling(server, config=remote_config(setup_timeout=60), watch=lambda: "exit code 1"),
    ):
        pass
    assert time.monotonic() - started < 20


def test_start_twice_connects_once() -> None:
    server = FakeServer()
    with sampling(server) as sampler:
        sampler.start()
    assert len(server.calls("/health")) == 1


def test_no_address_is_refused() -> None:
    with pytest.raises(ConfigError, match="no address"):
        RemoteSampler(FakeProtocol(), [], remote_config(), limits())
