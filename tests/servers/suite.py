"""The checks that every kind of inference server must pass; subclass :class:`ServerSuite` and give it a ``peer``.

    @pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
    def peer(request, tmp_path_factory): yield Peer(...)

    class TestMyServer(ServerSuite): ...

The server must run ``save_suite_model(path, 0, tied)`` in float32, with room for 16 requests of 450 tokens. Checks
leave it serving, at whatever version they published last.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from areal.engine.core.weight_sources import DiskSource
from areal.engine.core.weight_sync import ParamRecord
from areal.engine.native.requests import InvalidRequestError
from areal.utils.errors import ArealError, EngineError, WeightSyncError
from tests.fakes import VOCAB
from tests.servers.peer import (
    LONGEST,
    PROMPTS,
    Broadcast,
    Peer,
    error_of,
    named_weights,
    request,
    rows_of,
    suite_tokenizer,
)

TOLERANCE = 1e-3  # nats
MODES = ("disk", "xccl", "shm")


def _can(peer: Peer, mode: str) -> None:
    if mode not in peer.protocol.capabilities.weight_modes:
        pytest.skip(f"a {peer.protocol.name} server takes no weights by {mode}")


class GenerationSuite:
    """Log-probs, seeds, stop rules, refusals."""

    def test_greedy_tokens_are_those_of_transformers(self, peer: Peer) -> None:
        responses = peer.generate(*(request(ids, greedy=True, max_new_tokens=24) for ids in PROMPTS))

        for response in responses:
            assert response.output_tokens == rows_of(peer.model, response).argmax(-1).tolist()
            assert error_of(peer.models, response) < TOLERANCE
            assert (response.stop_reason, response.output_len) == ("length", 24)

    @pytest.mark.parametrize("temperature", [1.0, 0.7, 1.5])
    def test_sampled_logprobs_are_those_of_transformers_at_the_temperature(
        self, peer: Peer, temperature: float
    ) -> None:
        responses = peer.generate(
            *(request(ids, seed=i, temperature=temperature, max_new_tokens=40) for i, ids in enumerate(PROMPTS))
        )

        assert max(error_of(peer.models, response, temperature) for response in responses) < TOLERANCE
        assert len({tuple(response.output_tokens) for response in responses}) == len(PROMPTS)

    def test_seed_fixes_the_tokens(self, peer: Peer) -> None:
        if not peer.protocol.capabilities.seeds:
            pytest.skip(f"a {peer.protocol.name} server does not promise that a seed fixes the tokens")
        same, again, other = peer.generate(
            *(request(PROMPTS[2], seed=s, max_new_tokens=30) for s in (2**62 + 5,) * 2 + (6,))
        )

        assert same.output_tokens == again.output_tokens != other.output_tokens

    def test_unseeded_requests_differ(self, peer: Peer) -> None:
        responses = peer.generate(*(request(PROMPTS[2], seed=None, max_new_tokens=30) for _ in range(4)))

        assert len({tuple(response.output_tokens) for response in responses}) == 4

    def test_stop_token_ends_a_request_and_is_kept(self, peer: Peer) -> None:
        (free,) = peer.generate(request(PROMPTS[1], greedy=True, max_new_tokens=24))
        stop = free.output_tokens[7]

        stopped, ignoring = peer.generate(
            *(
                request(PROMPTS[1], greedy=True, max_new_tokens=24, stop_token_ids=[stop], ignore_eos=ignore)
                for ignore in (False, True)
            )
        )

        first = free.output_tokens.index(stop) + 1
        ends = [i + 1 for i, token in enumerate(free.output_tokens[:first]) if token in (stop, 1)]
        assert (stopped.stop_reason, stopped.output_tokens) == ("stop", free.output_tokens[: ends[0]])
        assert error_of(peer.models, stopped) < TOLERANCE
        if ignoring.stop_reason == "length":  # vLLM and the others differ in whether ignore_eos covers stop ids
            assert ignoring.output_tokens == free.output_tokens

    def test_stop_string_ends_a_request(self, peer: Peer) -> None:
        tokenizer = suite_tokenizer()
        (free,) = peer.generate(request(PROMPTS[1], greedy=True, max_new_tokens=24))
        stop = tokenizer.decode(free.output_tokens[9:11], skip_special_tokens=False)

        (stopped,) = peer.generate(request(PROMPTS[1], greedy=True, max_new_tokens=24, stop=[stop]))

        text = tokenizer.decode(free.output_tokens, skip_special_tokens=False)
        assert stopped.stop_reason == "stop"
        assert (
            tokenizer.decode(stopped.output_tokens, skip_special_tokens=False) == text[: text.index(stop) + len(stop)]
        )

    def test_min_new_tokens_keeps_stop_tokens_away(self, peer: Peer) -> None:
        settings = {"max_new_tokens": 30, "min_new_tokens": 12, "ignore_eos": False}
        stops = list(range(2, VOCAB // 2))

        responses = peer.generate(
            *(request(ids, seed=i, stop_token_ids=stops, **settings) for i, ids in enumerate(PROMPTS))  # type: ignore[arg-type]
        )

        for response in responses:
            assert response.output_len > 12
            assert not set(response.output_tokens[:12]) & {1, *stops}
            assert response.stop_reason == "stop"

    def test_frequency_penalty_spreads_the_tokens(self, peer: Peer) -> None:
        plain, spread = peer.generate(
            *(request(PROMPTS[3], greedy=True, max_new_tokens=60, frequency_penalty=p) for p in (0.0, 2.0))
        )

        assert len(set(spread.output_tokens)) > len(set(plain.output_tokens))

    @pytest.mark.parametrize("ids", [[], [5, VOCAB], [5, -1], [5] * LONGEST], ids=["empty", "high", "low", "long"])
    def test_prompt_that_cannot_be_served_is_refused(self, peer: Peer, ids: list[int]) -> None:
        with pytest.raises(InvalidRequestError):
            peer.generate(request(ids, max_new_tokens=4))

        assert peer.generate(request([5], max_new_tokens=4))[0].output_len == 4

    def test_budget_ends_at_the_context(self, peer: Peer) -> None:
        (response,) = peer.generate(request([5] * (LONGEST - 20), max_new_tokens=50))

        assert response.stop_reason == "length"
        assert 12 <= response.output_len <= 20  # servers keep different margins
        assert error_of(peer.models, response) < TOLERANCE


class PauseSuite:
    """Frozen servers lose nothing."""

    @pytest.mark.parametrize("mode", ["keep", "abort"])
    def test_pause_in_the_middle_loses_nothing(self, peer: Peer, mode: str) -> None:
        _use(peer, mode)
        running = peer.start_running(*(request(ids, seed=i, max_new_tokens=450) for i, ids in enumerate(PROMPTS)))

        with peer.paused():
            ended = running.done()  # a busy machine may hold up the pause
            late = peer.start(request(PROMPTS[0], max_new_tokens=5))
            time.sleep(0.5)
            frozen = not late.done() and running.done() == ended

        assert frozen
        for response in running.result(120):
            assert (response.output_len, response.stop_reason) == (450, "length")
            assert error_of(peer.models, response) < TOLERANCE
        assert late.result(60)[0].output_len == 5

    def test_pause_an_idle_server_twice_and_go_on(self, peer: Peer) -> None:
        with peer.paused():
            with peer.paused():
                pass
            late = peer.start(request(PROMPTS[0], max_new_tokens=5))
            time.sleep(0.3)
            frozen = not late.done()

        assert frozen
        assert late.result(60)[0].output_len == 5

    def test_health_answers_while_paused(self, peer: Peer) -> None:
        with peer.paused():
            started = time.monotonic()
            peer.call(peer.protocol.health())
            took_s = time.monotonic() - started

        assert took_s < 60.0

    def test_cancelled_request_leaves_the_server_free(self, peer: Peer) -> None:
        async def cancel() -> None:
            task = asyncio.create_task(peer.sampler.agenerate(request(PROMPTS[0], max_new_tokens=900)))
            await asyncio.sleep(0.2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(cancel())

        assert peer.generate(request(PROMPTS[0], max_new_tokens=5))[0].output_len == 5


class WeightSuite:
    """Updates by every mode the server takes."""

    @pytest.mark.parametrize("mode", MODES)
    def test_update_serves_the_new_model(self, peer: Peer, mode: str) -> None:
        _can(peer, mode)
        version, model = peer.next_model()
        asked = [request(ids, greedy=True, max_new_tokens=24) for ids in PROMPTS]
        before = peer.generate(*asked)

        peer.publish(mode, version, model)
        after = peer.generate(*(request(ids, greedy=True, max_new_tokens=24) for ids in PROMPTS))

        assert max(error_of(peer.models, response) for response in before) < TOLERANCE
        assert {v for response in after for v in response.output_versions} == {version}
        assert max(error_of(peer.models, response) for response in after) < TOLERANCE
        pairs = zip(before, after, strict=True)
        assert all(old.output_tokens != new.output_tokens for old, new in pairs)
        assert all(_difference(old, new) > 0.01 for old, new in zip(before, after, strict=True))

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("running", ["keep", "abort"])
    def test_update_in_the_middle_tags_every_token_with_its_version(self, peer: Peer, mode: str, running: str) -> None:
        _can(peer, mode)
        _use(peer, running)
        asked = [request(PROMPTS[i % 8], seed=i, max_new_tokens=450) for i in range(16)]
        mixed: list[Any] = []
        for _ in range(5):  # a busy machine may hold up the publisher until every generation is done
            version, model = peer.next_model()
            generations = peer.start_running(*asked)
            peer.publish(mode, version, model)
            responses = generations.result(120)
            for response in responses:
                assert response.output_versions == sorted(response.output_versions)
                assert response.output_len == 450
                assert error_of(peer.models, response) < TOLERANCE
            mixed = [response for response in responses if len(set(response.output_versions)) == 2]
            if mixed:
                break
        assert mixed, "no generation was under way in five updates"

    def test_prefix_cache_does_not_survive_an_update(self, peer: Peer) -> None:
        prompt = (PROMPTS[7] * 8)[:300]
        first, second = (peer.generate(request(prompt, greedy=True, max_new_tokens=8))[0] for _ in range(2))
        version, model = peer.next_model()

        peer.publish("disk", version, model)
        after = [peer.generate(request(prompt, greedy=True, max_new_tokens=8))[0] for _ in range(2)]

        assert first.output_tokens == second.output_tokens
        assert max(error_of(peer.models, response) for response in (second, *after)) < TOLERANCE

    def test_updates_in_a_row_by_every_mode(self, peer: Peer) -> None:
        for mode in [mode for mode in MODES if mode in peer.protocol.capabilities.weight_modes] * 2:
            version, model = peer.next_model()
            peer.publish(mode, version, model)
            (response,) = peer.generate(request(PROMPTS[4], max_new_tokens=12))
            assert set(response.output_versions) == {version}
            assert error_of(peer.models, response) < TOLERANCE

    @pytest.mark.parametrize("damage", ["absent", "empty", "truncated", "lacks a tensor", "other shape"])
    def test_directory_that_cannot_be_loaded_leaves_the_old_version_serving(self, peer: Peer, damage: str) -> None:
        version, model = peer.next_model()
        source = _damaged(peer, version, model, damage)
        before = peer.version

        with pytest.raises(WeightSyncError):
            _try(peer, source, version)

        _serves(peer, before)

    def test_sender_that_dies_on_the_way_leaves_the_old_version_serving(self, peer: Peer) -> None:
        _can(peer, "xccl")
        if peer.protocol.capabilities.applies_at_once:
            pytest.skip(f"a {peer.protocol.name} server applies weights as they arrive: see its own test")
        version, model = peer.next_model()
        before = peer.version
        pairs = named_weights(model)

        sender = Broadcast(peer, version, pairs[: len(pairs) // 2], pairs)
        sent = sender.send()
        with pytest.raises(WeightSyncError):
            _try(peer, sender.source, version)

        assert isinstance(sent.exception(30), WeightSyncError)
        sender.close(failed=True)
        _serves(peer, before)
        peer.publish("xccl", version, model)
        _serves(peer, version)

    def test_sender_that_dies_where_weights_apply_at_once_fails_the_sampler(self, peer: Peer) -> None:
        _can(peer, "xccl")
        if not peer.protocol.capabilities.applies_at_once:
            pytest.skip(f"a {peer.protocol.name} server keeps the old weights until all have arrived")
        version, model = peer.next_model()
        pairs = named_weights(model)

        sender = Broadcast(peer, version, pairs[: len(pairs) // 2], pairs)
        sent = sender.send()
        with pytest.raises(WeightSyncError), peer.paused():
            peer.sampler.stage_source(sender.source, version)
        sent.exception(30)
        sender.close(failed=True)
        with pytest.raises(EngineError, match="mix of weight versions"):
            peer.generate(request(PROMPTS[0], max_new_tokens=4))
        told = [str(error) for error in peer.failures]
        peer.repair()

        assert len(told) == 1
        assert "mix of weight versions" in told[0]
        _serves(peer, max(peer.models))

    def test_wrong_shape_leaves_the_old_version_serving(self, peer: Peer) -> None:
        _can(peer, "shm")
        before = peer.version
        version, model = peer.next_model()
        pairs = named_weights(model)
        name, tensor = pairs[3]
        pairs[3] = (name, torch.cat([tensor, tensor]))

        with pytest.raises(WeightSyncError, match=name):
            _try(peer, peer._writer.write(pairs, version), version)

        _serves(peer, before)


class ServerSuite(GenerationSuite, PauseSuite, WeightSuite):
    """Everything; see the module docstring."""


def _use(peer: Peer, running: str) -> None:
    if running == "keep" and not peer.protocol.capabilities.keeps_requests:
        pytest.skip(f"a {peer.protocol.name} server keeps no requests through an update")
    peer.on_update(running)


def _difference(first: Any, second: Any) -> float:
    return float((torch.tensor(first.output_logprobs) - torch.tensor(second.output_logprobs)).abs().max())


def _try(peer: Peer, source: Any, version: int) -> None:
    """Stage as the trainer's side does; what fails is discarded."""
    with contextlib.nullcontext() if peer.protocol.name == "native" else peer.paused():
        try:
            peer.sampler.stage_source(source, version)
        except ArealError:
            peer.sampler.discard_weights()
            raise


def _serves(peer: Peer, version: int) -> None:
    responses = peer.generate(*(request(ids, max_new_tokens=12) for ids in PROMPTS))

    assert not peer.failures
    assert {v for response in responses for v in response.output_versions} == {version}
    assert max(error_of(peer.models, response) for response in responses) < TOLERANCE


def _damaged(peer: Peer, version: int, model: Any, damage: str) -> DiskSource:
    path: Path = peer.directory / f"damaged-{version}-{damage.replace(' ', '-')}"
    shutil.rmtree(path, ignore_errors=True)
    records = [ParamRecord.of(name, tensor) for name, tensor in named_weights(model)]
    source = DiskSource(version, str(path), records)
    if damage == "absent":
        return source
    model.save_pretrained(path)
    file = path / "model.safetensors"
    if damage == "empty":
        file.unlink()
    elif damage == "truncated":
        file.write_bytes(file.read_bytes()[:-5000])
    else:
        tensors = load_file(file)
        name = "model.layers.1.mlp.down_proj.weight"
        tensor = tensors.pop(name)
        if damage == "other shape":
            tensors[name] = tensor[:-8].clone()
        save_file(tensors, file, {"format": "pt"})
    return source


__all__ = ["GenerationSuite", "PauseSuite", "Peer", "ServerSuite", "WeightSuite"]
