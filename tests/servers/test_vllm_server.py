"""A real vLLM server against the suite of all servers, and what only it does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from areal.engine.inference.remote import RemoteSampler
from areal.engine.native.requests import InvalidRequestError, Limits
from areal.engine.vllm_remote import VLLMProtocol
from areal.utils.errors import WeightSyncError
from tests.fakes import VOCAB
from tests.native_helpers import generate as native_generate
from tests.native_helpers import running
from tests.servers.conftest import ServerFactory
from tests.servers.peer import (
    LONGEST,
    PROMPTS,
    TIMEOUT_S,
    Peer,
    error_of,
    named_weights,
    request,
    save_suite_model,
    suite_tokenizer,
)
from tests.servers.suite import TOLERANCE, ServerSuite

pytestmark = pytest.mark.slow

STOP_RULES: list[dict[str, Any]] = [
    {"max_new_tokens": 5},
    {"max_tokens": len(PROMPTS[1]) + 4},
    *({"stop_at": 7, "ignore_eos": False, "min_new_tokens": least} for least in (0, 7, 8, 9, 24, 40)),
    {"stop_at": 7, "ignore_eos": True},
    *({"stop_text_at": 9, "ignore_eos": ignore} for ignore in (False, True)),
    *(
        {"stop_text_at": 9, "ignore_eos": ignore, "min_new_tokens": least}
        for ignore in (False, True)
        for least in (9, 10, 11, 30)
    ),
    {"frequency_penalty": 0.7},
    {"frequency_penalty": -1.0, "min_new_tokens": 5, "ignore_eos": False},
]


@contextlib.contextmanager
def vllm_peer(factory: ServerFactory, directory: Path, tied: bool, **settings: Any) -> Iterator[Peer]:
    """A peer on a server of its own, which must not have failed at the end."""
    model = save_suite_model(directory / "v0", 0, tied)
    server = factory(model, max_model_len=LONGEST, **settings)
    cls = TensorPeer if "tensor" in settings else Peer
    peer = cls(VLLMProtocol(), server.address, tied, directory)
    yield peer
    peer.close()
    assert not peer.failures


class TestVLLMServer(ServerSuite):
    """With the prefix cache, which must not survive an update, and without."""

    @pytest.fixture(
        scope="class",
        params=[pytest.param(True, id="tied-cached", marks=pytest.mark.ci), pytest.param(False, id="untied")],
    )
    def peer(
        self, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, vllm_server: ServerFactory
    ) -> Iterator[Peer]:
        tied: bool = request.param
        with vllm_peer(vllm_server, tmp_path_factory.mktemp("vllm"), tied, no_enable_prefix_caching=not tied) as found:
            yield found

    def test_stop_rules_are_those_of_the_native_engine(self, peer: Peer) -> None:
        tokenizer = suite_tokenizer()
        (free,) = peer.generate(request(PROMPTS[1], greedy=True, max_new_tokens=24))
        asked = [dict(settings) for settings in STOP_RULES]
        for settings in asked:
            if (at := settings.pop("stop_at", None)) is not None:
                settings["stop_token_ids"] = [free.output_tokens[at]]
            if (at := settings.pop("stop_text_at", None)) is not None:
                settings["stop"] = [tokenizer.decode(free.output_tokens[at : at + 2], skip_special_tokens=False)]
        requests = [request(PROMPTS[1], **{"greedy": True, "max_new_tokens": 24, **settings}) for settings in asked]

        found = peer.generate(*requests)

        with running(peer.model, tokenizer) as native:
            expected = native_generate(native, requests)
        for settings, ours, theirs in zip(asked, expected, found, strict=True):
            assert (settings, theirs.output_tokens, theirs.stop_reason) == (
                settings,
                ours.output_tokens,
                ours.stop_reason,
            )

    def test_temperature_that_vllm_would_change_is_refused(self, peer: Peer) -> None:
        for temperature in (0.001, 2.5):
            with pytest.raises(InvalidRequestError, match=r"gconfig.temperature.*native"):
                peer.generate(request(PROMPTS[0], temperature=temperature))

    def test_version_given_by_name_is_stamped_on_the_tokens(self, peer: Peer) -> None:
        version = max(peer.models) + 1
        peer.models[version] = peer.model

        peer.sampler.set_version(version)

        (response,) = peer.generate(request(PROMPTS[0], max_new_tokens=4))
        assert response.output_versions == [version] * 4

    def test_staged_weights_that_are_discarded_never_serve(self, peer: Peer) -> None:
        before = peer.version
        version, model = peer.next_model()
        manifest = peer._writer.write(named_weights(model), version)
        generations = peer.start(*(request(ids, max_new_tokens=100) for ids in PROMPTS))

        records = peer.sampler.stage_source(manifest, version)
        peer.sampler.discard_weights()

        assert records == [[param.record() for param in manifest.params]]
        for response in generations.result(TIMEOUT_S):
            assert set(response.output_versions) == {before}
            assert error_of(peer.models, response) < TOLERANCE

    @pytest.mark.parametrize("damage", ["no such process", "no such descriptor", "unknown parameter", "given twice"])
    def test_shared_memory_that_is_not_the_weights_leaves_the_old_version_serving(
        self, peer: Peer, damage: str
    ) -> None:
        version, model = peer.next_model()
        pairs = named_weights(model)
        if damage == "unknown parameter":
            pairs.append(("model.extra.weight", pairs[0][1]))
        elif damage == "given twice":
            pairs.append(pairs[0])
        manifest = peer._writer.write(pairs, version)
        if damage == "no such process":
            manifest.pid = 2**22 + 1
        elif damage == "no such descriptor":
            manifest.fd = 0

        with pytest.raises(WeightSyncError, match="areal_stage_shm"):
            peer.sampler.stage_source(manifest, version)

        (response,) = peer.generate(request(PROMPTS[0], max_new_tokens=4))
        assert set(response.output_versions) == {peer.version}
        assert error_of(peer.models, response) < TOLERANCE


class TensorPeer(Peer):
    """A peer whose server has two workers."""

    def _connect(self, mode: Any, version: int) -> RemoteSampler:
        plain = super()._connect(mode, version)
        plain.stop()
        limits = Limits(VOCAB, LONGEST, frozenset({1}))
        sampler = RemoteSampler(
            self.protocol, [self.address], plain.config, limits, tokenizer=suite_tokenizer(), ranks_per_server=2
        )
        sampler.on_failure = self.failures.append
        sampler.set_version(version)
        sampler.start()
        return sampler


class TestTensorParallelVLLMServer:
    """Two workers in one server: each receives all, as a rank of its own, and says what it holds."""

    @pytest.fixture(scope="class")
    def peer(self, tmp_path_factory: pytest.TempPathFactory, vllm_server: ServerFactory) -> Iterator[Peer]:
        with vllm_peer(vllm_server, tmp_path_factory.mktemp("vllm"), True, tensor=2) as found:
            yield found

    @pytest.mark.parametrize("mode", ["disk", "xccl", "shm"])
    def test_update_reaches_every_worker(self, peer: Peer, mode: str) -> None:
        version, model = peer.next_model()

        peer.publish(mode, version, model)

        responses = peer.generate(*(request(ids, seed=i, max_new_tokens=24) for i, ids in enumerate(PROMPTS)))
        assert {v for response in responses for v in response.output_versions} == {version}
        assert max(error_of(peer.models, response) for response in responses) < TOLERANCE

    def test_stage_returns_the_records_of_each_worker(self, peer: Peer) -> None:
        version, model = peer.next_model()
        manifest = peer._writer.write(named_weights(model), version)

        records = peer.sampler.stage_source(manifest, version)
        peer.sampler.discard_weights()

        assert records == [[param.record() for param in manifest.params]] * 2
