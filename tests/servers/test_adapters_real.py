"""Adapters on real vLLM and SGLang servers: loaded under versioned names while requests run, and bad ones refused."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from areal.engine.core.weight_sources import DiskSource
from areal.engine.inference.http_client import ServerRefusedError
from areal.engine.inference.protocol import ServerCall
from areal.engine.sglang_remote import SGLangProtocol
from areal.engine.vllm_remote import VLLMProtocol
from areal.utils.errors import WeightSyncError
from tests.servers.conftest import ServerFactory
from tests.servers.peer import LONGEST, PROMPTS, Peer, error_of, request, save_suite_model, suite_model
from tests.servers.suite import TOLERANCE

pytestmark = pytest.mark.slow

RANK = 8


class AdapterPeer(Peer):
    """A peer whose versions from 1 on are adapters of the model of seed 0."""

    use_lora = True

    def next_adapter(self, rank: int = RANK, targets: list[str] | str = "all-linear") -> tuple[int, Any, str]:
        """The next version, its merged model, and its adapter's directory."""
        version = max(self.models) + 1
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, task_type="CAUSAL_LM")
        model = get_peft_model(suite_model(0, self.tied), config)
        generator = torch.Generator().manual_seed(version)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
        path = str(self.directory / f"adapter-v{version}-{rank}")
        model.save_pretrained(path)
        return version, model.merge_and_unload().eval(), path

    def publish_adapter(self, version: int, model: Any, path: str) -> None:
        """Bring the server to an adapter, as the trainer's side does."""
        source = DiskSource(version, path, adapter=f"lora-v{version}")
        with self.paused():
            assert self.sampler.stage_source(source, version) is None
            self.models[version] = model
            self.sampler.commit_weights(version)

    def names(self) -> set[str]:
        """Adapters that the server offers."""
        listed = self.call(ServerCall("GET", "/v1/models"))
        return {entry["id"] for entry in listed["data"] if entry["id"].startswith("lora-")}


@pytest.fixture(
    scope="module",
    params=[pytest.param("vllm", marks=pytest.mark.ci), "sglang"],
)
def peer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdapterPeer]:
    """A server with room for adapters of rank 8; its prefix cache is on."""
    kind: str = request.param
    factory: ServerFactory = request.getfixturevalue(f"{kind}_server")
    directory = tmp_path_factory.mktemp(f"adapters-{kind}")
    model = save_suite_model(directory / "v0", 0, True)
    length = {"vllm": "max_model_len", "sglang": "context_length"}[kind]
    settings: dict[str, Any] = {length: LONGEST, "enable_lora": True, "max_lora_rank": RANK}
    if kind == "sglang":
        settings["disable_radix_cache"] = False
    protocol = VLLMProtocol() if kind == "vllm" else SGLangProtocol()
    served = AdapterPeer(protocol, factory(model, **settings).address, True, directory)
    yield served
    served.close()
    assert not served.failures


def test_adapter_updates_serve_each_version_and_unload_the_one_before(peer: AdapterPeer) -> None:
    asked = [request(ids, greedy=True, max_new_tokens=24) for ids in PROMPTS]
    for targets in ("all-linear", ["q_proj", "v_proj"]):
        before = peer.generate(*asked)
        version, model, path = peer.next_adapter(targets=targets)
        peer.publish_adapter(version, model, path)
        after = peer.generate(*asked)

        shutil.rmtree(path)  # the server reads it once
        after += peer.generate(*asked)

        assert max(error_of(peer.models, response) for response in (*before, *after)) < TOLERANCE
        assert {v for response in after for v in response.output_versions} == {version}
        pairs = zip(before, after[: len(before)], strict=True)
        assert any(old.output_tokens != new.output_tokens for old, new in pairs)
        assert peer.names() == {f"lora-v{version}"}


def test_adapter_update_in_the_middle_tags_every_token_with_its_version(peer: AdapterPeer) -> None:
    asked = [request(PROMPTS[i], seed=i, max_new_tokens=450) for i in range(8)]
    mixed: list[Any] = []
    for _ in range(5):  # a busy machine may hold up the publisher until every generation is done
        update = peer.next_adapter()
        generations = peer.start_running(*asked)
        peer.publish_adapter(*update)
        responses = generations.result(120)
        for response in responses:
            assert response.output_versions == sorted(response.output_versions)
            assert response.output_len == 450
            assert error_of(peer.models, response) < TOLERANCE
        mixed = [response for response in responses if len(set(response.output_versions)) == 2]
        if mixed:
            break
    assert mixed, "no generation was under way in five updates"


def test_adapter_of_a_name_that_is_loaded_already_replaces_it(peer: AdapterPeer) -> None:
    version, model, path = peer.next_adapter()
    peer.publish_adapter(version, model, path)
    asked = [request(ids, greedy=True, max_new_tokens=24) for ids in PROMPTS]
    peer.generate(*asked)  # leaves prefixes in the server's cache
    peer.models.pop(version)
    again = peer.next_adapter(targets=["q_proj", "v_proj"])
    assert again[0] == version

    peer.publish_adapter(*again)  # as a run that is resumed does

    responses = peer.generate(*asked)
    assert max(error_of(peer.models, response) for response in responses) < TOLERANCE
    assert peer.names() == {f"lora-v{version}"}


def test_adapter_that_the_server_lost_is_told_from_a_bad_request(peer: AdapterPeer) -> None:
    call = peer.protocol.generate(request(PROMPTS[0]), request(PROMPTS[0]).gconfig, None)
    with pytest.raises(ServerRefusedError, match="lora-v9999"):
        peer.call(peer.protocol.with_adapter(call, "lora-v9999"))
    for unload in peer.protocol.unload_adapter("lora-v9999"):
        assert peer.call(unload) is None


@pytest.mark.parametrize("damage", ["rank", "absent"])
def test_adapter_that_cannot_be_loaded_leaves_the_old_one_serving(peer: AdapterPeer, damage: str) -> None:
    before = peer.version
    version, _, path = peer.next_adapter(rank=4 * RANK)
    if damage == "absent":
        path = str(Path(path) / "no-such-directory")

    with peer.paused():
        with pytest.raises(WeightSyncError, match=f"loading adapter lora-v{version} failed"):
            peer.sampler.stage_source(DiskSource(version, path, adapter=f"lora-v{version}"), version)
        peer.sampler.discard_weights()

    (response,) = peer.generate(request(PROMPTS[0], max_new_tokens=12))
    assert set(response.output_versions) == {before}
    assert error_of(peer.models, response) < TOLERANCE
    assert f"lora-v{version}" not in peer.names()
