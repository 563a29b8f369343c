"""The adapters of the real servers against servers scripted in their formats: what real ones do rarely."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from areal.engine.inference.backends import protocol_class
from areal.engine.inference.protocol import ReplyError
from areal.engine.inference.traffic import StaleServerError
from areal.engine.vllm_remote import VLLMProtocol
from areal.utils.errors import WeightSyncError
from tests.server_fakes import FakeServer, Fault, ask, begin, draw, generate, limits, quick_waits, sampling

BACKENDS = ["sglang", "vllm"]


def scripted(backend: str, **settings: Any) -> FakeServer:
    """A server whose tokens depend on the prefix only: not every backend takes seeds."""
    return FakeServer(backend, model=lambda prefix, seed, version: draw(prefix, 0, 0), **settings)


def answer(count: int) -> list[int]:
    prefix = [5, 6, 7]
    for _ in range(count):
        prefix.append(draw(prefix, 0, 0)[0])
    return prefix[3:]


def test_agenerate_reply_of_the_backend_is_read() -> None:
    for backend in BACKENDS:
        with sampling(scripted(backend), protocol=protocol_class(backend)()) as sampler:
            response = generate(sampler, ask(max_new_tokens=6))
        assert response.output_tokens == answer(6)
        assert response.output_logprobs == [draw([5, 6, 7, *answer(i)], 0, 0)[1] for i in range(6)]
        assert (response.output_versions, response.stop_reason) == ([0] * 6, "length")


def test_commit_that_failed_on_a_worker_stamps_no_version_on_that_server() -> None:
    server = scripted("vllm")
    with sampling(server, protocol=VLLMProtocol()) as sampler:
        server.reply_to("/collective_rpc", lambda _: {"results": [{"version": 1}, {"error": "worker 1: no memory"}]})
        sampler.pause()
        with pytest.raises(WeightSyncError, match=rf"{server.address}.*worker 1: no memory"):
            sampler.commit_weights(1)
        assert server.calls("/reset_prefix_cache") == []
        assert server.calls("/update_weight_version") == [{"new_version": "0"}]  # from when it connected
    assert server.version == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_pause_versions_of_each_part_are_the_servers(backend: str) -> None:
    server = scripted(backend, token_s=0.01)
    with sampling(server, protocol=protocol_class(backend)()) as sampler:
        future = begin(sampler, ask(max_new_tokens=40))
        server.wait_for(lambda s: any(len(job.tokens) >= 5 for job in list(s.jobs.values())))
        sampler.pause()
        sampler.set_version(1)
        sampler.resume()
        response = future.result(30)
    assert response.output_tokens == answer(40)
    assert set(response.output_versions) == {0, 1}
    assert response.output_versions == sorted(response.output_versions)


@pytest.mark.parametrize("backend", BACKENDS)
def test_pause_before_the_first_token_request_is_not_lost(backend: str) -> None:
    server = scripted(backend, token_s=0.15)
    with sampling(server, protocol=protocol_class(backend)()) as sampler:
        future = begin(sampler, ask(max_new_tokens=3))
        server.wait_for(lambda s: len(s.jobs) == 1)
        sampler.pause()
        sampler.resume()
        assert future.result(30).output_tokens == answer(3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_update_storm_request_makes_progress(backend: str) -> None:
    server = scripted(backend, token_s=0.04)
    done = threading.Event()
    with sampling(server, protocol=protocol_class(backend)(), waits=quick_waits(slice_tokens=2)) as sampler:
        future = begin(sampler, ask(max_new_tokens=4))
        future.add_done_callback(lambda _: done.set())
        deadline = time.monotonic() + 8
        while not done.is_set() and time.monotonic() < deadline:
            sampler.pause()
            sampler.resume()
            time.sleep(0.005)
        assert future.result(30).output_tokens == answer(4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_stop_token_is_part_of_the_answer(backend: str) -> None:
    stop = answer(3)[-1]
    count = answer(3).index(stop) + 1
    with sampling(scripted(backend), protocol=protocol_class(backend)()) as sampler:
        response = generate(sampler, ask(max_new_tokens=9, stop_token_ids=[stop]))
    assert (response.output_tokens, response.stop_reason) == (answer(count), "stop")


def spoil_sglang(reply: dict[str, Any], value: Any) -> None:
    reply["meta_info"]["output_token_logprobs"][1][0] = value


def spoil_vllm(reply: dict[str, Any], value: Any) -> None:
    reply["choices"][0]["logprobs"]["content"][1]["logprob"] = value


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [float("nan"), None, "x", 3.0])
def test_logprob_that_is_none_is_refused(backend: str, value: Any) -> None:
    spoil = spoil_sglang if backend == "sglang" else spoil_vllm
    server = scripted(backend)
    server.fail_next(Fault("edit", edit=lambda reply: spoil(reply, value)))
    with sampling(server, protocol=protocol_class(backend)()) as sampler, pytest.raises(ReplyError):
        generate(sampler, ask(max_new_tokens=4))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reply", [{}, [], {"choices": []}, {"meta_info": {}}, {"choices": [{}]}, {"meta_info": 3}])
def test_reply_of_another_shape_is_refused(backend: str, reply: Any) -> None:
    server = scripted(backend)
    server.fail_next(Fault("edit", edit=lambda _: reply))
    with sampling(server, protocol=protocol_class(backend)()) as sampler, pytest.raises(ReplyError):
        generate(sampler, ask(max_new_tokens=4))


def test_limits_of_the_fake_are_those_of_the_requests() -> None:
    assert limits().vocab_size > max(answer(50))


@pytest.mark.parametrize("backend", BACKENDS)
def test_agenerate_server_started_again_with_its_first_weights_fails_the_sampler(backend: str) -> None:
    server = scripted(backend)
    with sampling(server, protocol=protocol_class(backend)()) as sampler:
        sampler.set_version(7)
        assert generate(sampler, ask(max_new_tokens=3)).output_versions == [7] * 3
        write = server.dialect.write

        def as_new(job: Any) -> Any:
            """What a server says that was never told a version."""
            reply = write(job)
            if backend == "sglang":
                reply["meta_info"]["weight_version"] = "default"
            else:
                for span in reply["choices"][0]["weight_versions"]:
                    span["version"] = "default"
            return reply

        server.dialect.write = as_new  # type: ignore[method-assign]
        with pytest.raises(StaleServerError, match="was told v7"):
            generate(sampler, ask(max_new_tokens=3))
        assert isinstance(sampler.failure, StaleServerError)
