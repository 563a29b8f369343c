"""Servers that keep no records are asked what they hold: which tensors, how it is compared, and what follows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from torch import Tensor

from areal.api.io_struct import ParamSpec, WeightUpdateMeta
from areal.engine.core.weight_heads import HEAD, ServerHeads, compare_heads, head_names
from areal.engine.core.weight_sources import WeightGroup, XcclSource
from areal.engine.core.weight_sync import ParamRecord
from areal.engine.core.weight_transfer import compare_ranks
from areal.engine.inference.protocol import ReplyError
from areal.engine.inference.remote import RemoteSampler
from areal.engine.sglang_remote import RemoteSGLangEngine, SGLangProtocol
from areal.infra.rpc import serialization
from areal.utils.errors import WeightSyncError
from tests.engine_fakes import build_engine
from tests.fakes import save_tiny_model, tiny_model
from tests.native_helpers import weights_of
from tests.server_fakes import FakeServer, limits, remote_config, sampling, serving, wait_until

Weights = dict[str, Tensor]
GROUP = WeightGroup("g", "127.0.0.1", 1, world_size=2, rank=1, timeout_s=5.0)
LAST = "model.layers.1.mlp.up_proj.weight"


def llama(seed: int = 0) -> Weights:
    return dict(weights_of(tiny_model("llama", seed)))


def sent_of(weights: Weights) -> list[ParamRecord]:
    """What a sender says of them."""
    shown = head_names({name: tensor.shape for name, tensor in weights.items()})
    return [ParamRecord.of(name, tensor, head=name in shown) for name, tensor in weights.items()]


def source_of(weights: Weights) -> XcclSource:
    specs = [ParamSpec(name, tuple(tensor.shape), "float32") for name, tensor in weights.items()]
    return XcclSource(1, GROUP, [specs])


def server_of(weights: Weights, dtype: torch.dtype = torch.float32, **info: Any) -> FakeServer:
    """An SGLang server that holds ``weights``, cast to ``dtype``, whatever it is sent."""
    server = FakeServer("sglang")
    server.reply_to("/openapi.json", lambda _: {"paths": dict.fromkeys(SGLangProtocol.endpoints, {})})
    server.reply_to("/server_info", lambda _: {"dtype": str(dtype).removeprefix("torch."), "quantization": None} | info)

    def show(body: dict[str, Any]) -> Any:
        return weights[body["name"]].to(dtype).float().tolist()[: body["truncate_size"]]

    server.reply_to("/get_weights_by_name", show)
    return server


@contextmanager
def receiving(server: FakeServer) -> Iterator[RemoteSampler]:
    with sampling(server, protocol=SGLangProtocol()) as sampler:
        yield sampler


# -- which -------------------------------------------------------------------------------------------------------------


def test_head_names_are_of_the_first_layer_the_last_one_and_the_model() -> None:
    shapes = {name: tensor.shape for name, tensor in weights_of(tiny_model("llama", num_hidden_layers=12))}
    names = head_names(shapes)
    assert names[:2] == ["model.norm.weight", "model.embed_tokens.weight"]
    assert {name.split(".")[2] for name in names[2:]} == {"0", "11"}
    assert set(names) <= set(shapes)
    assert len(names) == 8


def test_head_names_large_tensors_are_left_out() -> None:
    shapes = {"model.embed_tokens.weight": (128_256, 4096), "model.norm.weight": (4096,)}
    assert head_names(shapes) == ["model.norm.weight"]


def test_head_names_key_heads_that_a_server_would_look_for_elsewhere_are_left_out() -> None:
    wide = {"self_attn.q_proj.weight": (64, 32), "self_attn.k_proj.weight": (32, 32)}
    assert head_names({f"model.layers.0.{name}": shape for name, shape in wide.items()}) == []


# -- compared ----------------------------------------------------------------------------------------------------------


def heads_of(weights: Weights, dtype: torch.dtype, named: str | None = None) -> ServerHeads:
    values = {
        record.name: tuple(weights[record.name].to(dtype).float().reshape(-1)[:HEAD].tolist())
        for record in sent_of(weights)
        if record.head
    }
    return ServerHeads(str(dtype).removeprefix("torch.") if named is None else named, values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("named", [None, "", "auto"])
def test_compare_heads_cast_to_the_dtype_of_the_server_is_equal(dtype: torch.dtype, named: str | None) -> None:
    weights = llama()
    compare_heads(sent_of(weights), heads_of(weights, dtype, named), 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("named", [None, ""])
def test_compare_heads_one_value_that_is_off_by_one_bit_is_named(dtype: torch.dtype, named: str | None) -> None:
    weights = llama()
    found = heads_of(weights, dtype, named)
    first, *others = found.values[LAST]
    found.values[LAST] = (first * (1 + torch.finfo(dtype).eps), *others)
    with pytest.raises(WeightSyncError, match=f"v3: {LAST} was sent with the first values"):
        compare_heads(sent_of(weights), found, 3)


def test_compare_heads_old_weights_that_only_round_to_the_sent_ones_are_found() -> None:
    weights = llama()
    old = heads_of(weights, torch.bfloat16, "float32")  # a server in float32 that still has a checkpoint in bfloat16
    with pytest.raises(WeightSyncError, match="model.embed_tokens.weight"):
        compare_heads(sent_of(weights), old, 1)


def test_compare_heads_weights_that_are_no_numbers_are_found() -> None:
    weights = llama()
    found = heads_of(weights, torch.float32)
    found.values[LAST] = (math.nan, *found.values[LAST][1:])
    with pytest.raises(WeightSyncError, match=LAST):
        compare_heads(sent_of(weights), found, 1)


def test_server_heads_travel_between_processes() -> None:
    found = heads_of(llama(), torch.float32)
    assert serialization.decode(bytes(serialization.encode([found]))) == [found]
    sent = sent_of(llama())
    assert [record.head for record in serialization.decode(bytes(serialization.encode(sent)))] == [r.head for r in sent]


# -- asked -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stage_server_that_took_the_weights_agrees(dtype: torch.dtype) -> None:
    weights = llama()
    server = server_of(weights, dtype)
    with receiving(server) as sampler:
        received = sampler.stage_source(source_of(weights), 1)
    compare_ranks(sent_of(weights), received, 1, "rollout/0")
    asked = {body["name"]: body["truncate_size"] for body in server.calls("/get_weights_by_name")}
    assert len(asked) == 8
    assert (asked["model.norm.weight"], asked[LAST]) == (HEAD, 1)


@pytest.mark.parametrize("stale", ["model.norm.weight", "model.layers.0.self_attn.k_proj.weight", LAST])
def test_stage_server_that_kept_an_old_tensor_is_named_with_it(stale: str) -> None:
    weights, old = llama(), llama(1)
    old["model.norm.weight"] += 0.5
    with receiving(server_of({**weights, stale: old[stale]})) as sampler:
        received = sampler.stage_source(source_of(weights), 1)
    with pytest.raises(WeightSyncError, match=rf"rollout/0, rank 0: weights v1: {stale} was sent"):
        compare_ranks(sent_of(weights), received, 1, "rollout/0")


def test_stage_server_whose_model_cannot_be_asked_is_asked_once(caplog: pytest.LogCaptureFixture) -> None:
    weights = llama()
    server = server_of(weights)
    refusal = '{"error": {"message": "Get parameter by name failed"}}'
    server.reply_to("/get_weights_by_name", lambda _: web.Response(status=400, text=refusal))
    with receiving(server) as sampler:
        assert [sampler.stage_source(source_of(weights), 1) for _ in range(3)] == [None] * 3
        assert sampler.failure is None
    assert len(server.calls("/get_weights_by_name")) == 1
    assert caplog.text.count("does not tell what weights it holds") == 1


def test_stage_quantized_server_is_not_compared() -> None:
    weights = llama()
    with receiving(server_of(llama(1), quantization="fp8")) as sampler:
        compare_ranks(sent_of(weights), sampler.stage_source(source_of(weights), 1), 1, "rollout/0")


@pytest.mark.parametrize("reply", [None, "text", {"a": 1}, [[None, 1.0]], [1.0, "x"]])
def test_read_heads_reply_that_makes_no_sense_is_named(reply: Any) -> None:
    with pytest.raises(ReplyError, match=LAST):
        SGLangProtocol().read_heads([LAST], [{"dtype": "float32"}, reply])


def test_read_heads_of_data_parallel_ranks_are_those_of_the_first() -> None:
    found = SGLangProtocol().read_heads([LAST], [{"dtype": "half"}, [[[1.0, 2.0]], [[1.0, 2.0]]]])
    assert found == ServerHeads("float16", {LAST: (1.0, 2.0)})


# -- in an update ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("right", [True, False])
def test_update_weights_of_a_script_sglang_server_with_other_weights_is_never_in_service(
    tmp_path: Path, right: bool
) -> None:
    policy = save_tiny_model(tmp_path / "policy", "llama")
    actor = build_engine(policy)
    weights = dict(actor.named_full_tensors())
    server = server_of(weights if right else {**weights, LAST: weights[LAST] + 1})
    rollout = RemoteSGLangEngine(remote_config(backend="sglang:d1"), limits=limits())
    told: list[BaseException] = []
    with serving(server):
        try:
            rollout.initialize(addr=server.address)
            rollout.sampler.on_failure = told.append
            meta = WeightUpdateMeta.from_disk("test", "test", str(tmp_path))
            actor.connect_engine(rollout, meta)
            if right:
                actor.update_weights(meta.with_version(1))
                assert rollout.sampler.get_version() == 1
            else:
                with pytest.raises(WeightSyncError, match=f"{LAST} was sent with the first values"):
                    actor.update_weights(meta.with_version(1))
                wait_until(lambda: len(told) == 1)
                assert rollout.sampler.get_version() == 0
        finally:
            rollout.destroy()
            actor.destroy()
