"""Adapters under names on scripted servers: loaded beside the old one, asked for after the switch, unloaded then."""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import AbstractContextManager
from typing import Any

import pytest
from aiohttp import web

from areal.api.config.rollout import GenerationHyperparameters
from areal.api.io_struct import ModelRequest
from areal.engine.core.weight_sources import DiskSource
from areal.engine.inference.backends import protocol_class
from areal.engine.inference.http_client import ServerRefusedError
from areal.engine.inference.remote import RemoteSampler, keeps_requests
from areal.engine.inference.traffic import StaleServerError
from areal.engine.sglang_remote import SGLangProtocol
from areal.engine.vllm_remote import VLLMProtocol
from areal.utils.errors import EngineStoppedError, UnsupportedFeatureError, WeightSyncError
from tests.server_dialects import Asked
from tests.server_fakes import FakeServer, Fault, ask, generate, remote_config, sampling

BACKENDS = pytest.mark.parametrize("backend", ["vllm", "sglang"])


class AdapterServer(FakeServer):
    """Refuses what vLLM and SGLang refuse, in their words: names that are loaded, and names that are not.

    Attributes:
        loaded: name to path.
        unloaded: names, in order; refused calls are not among them.
        wanted: adapter that each request asked for; empty: none.
        unload_s: time until an adapter is unloaded.
    """

    def __init__(self, backend: str) -> None:
        super().__init__(backend)
        self.backend, self.loaded, self.unloaded, self.wanted = backend, dict[str, str](), list[str](), list[str]()
        self.unload_s = 0.0
        prefix, self._key = {"vllm": ("/v1", "model"), "sglang": ("", "lora_path")}[backend]
        self.load_path, self.unload_path = f"{prefix}/load_lora_adapter", f"{prefix}/unload_lora_adapter"
        self.reply_to(self.load_path, self._load)
        self.reply_to(self.unload_path, self._unload)
        self._wishes: dict[str, str] = {}
        read = self.dialect.read

        def noted(body: Any) -> Asked:
            asked = read(body)
            self._wishes[asked.rid] = body.get(self._key, "")
            return asked

        self.dialect.read = noted  # type: ignore[method-assign]

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == self.unload_path:
            await asyncio.sleep(self.unload_s)
        return await super()._handle(request)

    async def _generate(self, asked: Asked, fault: Fault | None) -> Any:
        name = self._wishes[asked.rid]
        self.wanted.append(name)
        if not name or name in self.loaded:
            return await super()._generate(asked, fault)
        if self.backend == "vllm":
            return self._refusal(404, f"The model `{name}` does not exist.")
        return self._refusal(400, f"Got LoRA adapter that has never been loaded: {name}\nAll loaded adapters: .")

    def _load(self, body: Any) -> Any:
        name = body["lora_name"]
        if name in self.loaded:
            return self._refusal(400, f"The lora adapter '{name}' has already been loaded.")
        self.loaded[name] = body["lora_path"]
        return {"success": True}

    def _unload(self, body: Any) -> Any:
        name = body["lora_name"]
        if name not in self.loaded:
            if self.backend == "vllm":
                return self._refusal(404, f"The lora adapter '{name}' cannot be found.")
            message = f"LoRA with name {name} does not exist. Loaded LoRAs: dict_keys([])"
            return web.Response(status=400, text=json.dumps({"success": False, "error_message": message}))
        del self.loaded[name]
        self.unloaded.append(name)
        return {"success": True}

    def _refusal(self, status: int, message: str) -> web.Response:
        return web.Response(status=status, text=json.dumps({"error": {"message": message, "code": status}}))


def connected(*servers: AdapterServer) -> AbstractContextManager[RemoteSampler]:
    """A sampler whose versions are adapters."""
    return sampling(*servers, protocol=protocol_class(servers[0].backend)(), config=remote_config(use_lora=True))


def source(version: int) -> DiskSource:
    return DiskSource(version, f"/weights/v{version}", adapter=f"lora-v{version}")


def update(sampler: RemoteSampler, version: int) -> None:
    assert sampler.stage_source(source(version), version) is None
    sampler.commit_weights(version)


@BACKENDS
def test_adapters_requests_ask_for_the_newest_after_the_switch_and_old_ones_go(backend: str) -> None:
    servers = [AdapterServer(backend), AdapterServer(backend)]
    with connected(*servers) as sampler:
        generate(sampler, ask(max_new_tokens=1))
        for version in (1, 2):
            assert sampler.stage_source(source(version), version) is None
            generate(sampler, ask(max_new_tokens=1))  # still the one before
            sampler.commit_weights(version)
            assert generate(sampler, ask(max_new_tokens=1)).output_versions == [version]
        assert sampler.get_version() == 2
    for made in servers:
        assert [body["lora_name"] for body in made.calls(made.load_path)] == ["lora-v1", "lora-v2"]
        assert made.loaded == {"lora-v2": "/weights/v2"}
        assert made.unloaded == ["lora-v1"]
        assert made.calls("/collective_rpc") == made.calls("/update_weights_from_disk") == []
    asked = sorted(name for made in servers for name in made.wanted)
    assert asked == ["", "", "lora-v1", "lora-v1", "lora-v2"]


@BACKENDS
def test_adapter_that_a_server_refuses_leaves_the_old_one_in_service(backend: str) -> None:
    servers = [AdapterServer(backend), AdapterServer(backend)]
    servers[1].fail_next(Fault("status", 400, '{"error": "rank 64 is too large"}'), path=servers[1].load_path)
    with connected(*servers) as sampler:
        with pytest.raises(WeightSyncError, match="loading adapter lora-v1 failed: .*rank 64 is too large"):
            sampler.stage_source(source(1), 1)
        sampler.discard_weights()
        assert generate(sampler, ask(max_new_tokens=2)).output_versions == [0, 0]
    assert servers[0].loaded == servers[1].loaded == {}
    assert servers[0].wanted + servers[1].wanted == [""]


@BACKENDS
def test_adapter_that_was_given_up_is_unloaded(backend: str) -> None:
    made = AdapterServer(backend)
    with connected(made) as sampler:
        sampler.stage_source(source(1), 1)
        sampler.discard_weights()
        generate(sampler, ask(max_new_tokens=1))
    assert (made.unloaded, made.wanted) == (["lora-v1"], [""])


@BACKENDS
def test_adapter_name_that_a_server_knows_already_is_loaded_anew(backend: str) -> None:
    made = AdapterServer(backend)
    made.loaded["lora-v1"] = "/weights/of/a/run/before"
    with connected(made) as sampler:
        update(sampler, 1)
        generate(sampler, ask(max_new_tokens=1))
    assert made.loaded == {"lora-v1": "/weights/v1"}
    assert made.wanted == ["lora-v1"]


@BACKENDS
def test_adapter_that_stays_loaded_is_logged_and_does_not_keep_others_from_going(
    backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    servers = [AdapterServer(backend) for _ in range(3)]
    with connected(*servers) as sampler:
        update(sampler, 1)
        sampler.stage_source(source(2), 2)
        for made in servers[:2]:
            made.fail_next(Fault("status", 400, "{}"), path=made.unload_path)
        servers[1].unload_s = servers[2].unload_s = 0.2  # later than the first error
        with caplog.at_level(logging.WARNING):
            sampler.commit_weights(2)
        generate(sampler, ask(max_new_tokens=1))
    assert [made.unloaded for made in servers] == [[], [], ["lora-v1"]]
    assert [name for made in servers for name in made.wanted] == ["lora-v2"]
    kept = [record.getMessage() for record in caplog.records if "keeps adapter lora-v1" in record.getMessage()]
    assert sorted(line.partition(" ")[0] for line in kept) == sorted(made.address for made in servers[:2])


@BACKENDS
def test_adapter_lost_by_a_server_that_was_started_again_fails_the_sampler(backend: str) -> None:
    made = AdapterServer(backend)
    told: list[BaseException] = []
    with connected(made) as sampler:
        sampler.on_failure = told.append
        update(sampler, 1)
        made.loaded.clear()
        with pytest.raises(StaleServerError, match="has lost adapter lora-v1"):
            generate(sampler, ask(max_new_tokens=1))
        with pytest.raises(EngineStoppedError):
            generate(sampler, ask(max_new_tokens=1))
    assert len(told) == 1


@BACKENDS
def test_request_that_is_refused_for_another_reason_fails_alone(backend: str) -> None:
    made = AdapterServer(backend)
    with connected(made) as sampler:
        update(sampler, 1)
        made.fail_next(Fault("status", 400, '{"error": "the prompt is too long"}'))
        with pytest.raises(ServerRefusedError, match="the prompt is too long"):
            generate(sampler, ask(max_new_tokens=1))
        assert generate(sampler, ask(max_new_tokens=1)).output_versions == [1]


@pytest.mark.parametrize("protocol", [VLLMProtocol(), SGLangProtocol()], ids=["vllm", "sglang"])
def test_adapters_of_real_servers_travel_in_their_own_words(protocol: Any) -> None:
    prefix = "/v1" if protocol.name == "vllm" else ""
    first, load = protocol.load_adapter("lora-v3", "/weights/v3")
    (unload,) = protocol.unload_adapter("lora-v2")
    assert [first] == protocol.unload_adapter("lora-v3")
    assert (load.method, load.path, load.once) == ("POST", f"{prefix}/load_lora_adapter", True)
    assert load.body == {"lora_name": "lora-v3", "lora_path": "/weights/v3"}
    assert (unload.path, unload.body) == (f"{prefix}/unload_lora_adapter", {"lora_name": "lora-v2"})
    gconfig = GenerationHyperparameters()
    plain = protocol.generate(ModelRequest(rid="r", input_ids=[5, 6], gconfig=gconfig), gconfig, 1)
    adapted = protocol.with_adapter(plain, "lora-v3")
    key = "model" if protocol.name == "vllm" else "lora_path"
    assert adapted.body == {**plain.body, key: "lora-v3"}
    assert key not in plain.body


def test_kept_requests_and_named_adapters_exclude_each_other() -> None:
    protocol = VLLMProtocol()
    assert keeps_requests(remote_config(), protocol)
    assert not keeps_requests(remote_config(use_lora=True), protocol)
    with pytest.raises(UnsupportedFeatureError, match=r"on_weight_update=keep with rollout\.use_lora=true"):
        keeps_requests(remote_config(use_lora=True, on_weight_update="keep"), protocol)
