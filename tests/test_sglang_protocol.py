"""What is sent to SGLang and native servers, and what of their replies is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from areal.api.config.rollout import GenerationHyperparameters
from areal.api.io_struct import ModelRequest, ParamSpec
from areal.engine.core.shared_weights import WeightWriter
from areal.engine.core.weight_sources import DiskSource, WeightGroup, XcclSource
from areal.engine.core.weight_sync import ParamRecord
from areal.engine.inference.protocol import ReplyError
from areal.engine.native import wire
from areal.engine.native.requests import InvalidRequestError
from areal.engine.native_remote import NativeProtocol
from areal.engine.sglang_remote import SGLangProtocol
from areal.utils.errors import UnsupportedFeatureError, WeightSyncError
from tests.fakes import tiny_model
from tests.native_helpers import weights_of

GROUP = WeightGroup("g", "host", 1234, 3, rank=1, timeout_s=7.0)
BUCKETS = [[ParamSpec("a", (2, 3), "float32")], [ParamSpec("b", (4,), "bfloat16"), ParamSpec("c", (), "float32")]]
REPLY: dict[str, Any] = {
    "text": "x",
    "output_ids": [7, 8],
    "meta_info": {
        "id": "r",
        "finish_reason": {"type": "length", "length": 2},
        "weight_version": "3",
        "output_token_logprobs": [[-0.5, 7, None], [-1.5, 8, None]],
    },
}


def _reply(**meta: Any) -> dict[str, Any]:
    reply = copy.deepcopy(REPLY)
    reply["meta_info"].update(meta)
    return reply


# -- generation --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [SGLangProtocol(), NativeProtocol()], ids=["sglang", "native"])
def test_generate_every_setting_is_sent_in_the_servers_terms(protocol: Any) -> None:
    gconfig = GenerationHyperparameters(
        max_new_tokens=9, min_new_tokens=2, temperature=0.7, top_p=0.9, top_k=5, stop_token_ids=[3], stop=["ab"],
        ignore_eos=True, skip_special_tokens=False, frequency_penalty=0.5,
    )  # fmt: skip

    call = protocol.generate(ModelRequest("r.1", [5, 6]), gconfig, 2**40 + 1)

    assert (call.method, call.path, call.once) == ("POST", "/generate", False)
    assert call.body is not None
    params = call.body.pop("sampling_params")
    assert call.body == {"rid": "r.1", "input_ids": [5, 6], "return_logprob": True, "stream": False}
    assert params.pop("sampling_seed") == (1 if protocol.name == "sglang" else 2**40 + 1)
    assert params == {
        "max_new_tokens": 9, "min_new_tokens": 2, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "stop": ["ab"],
        "stop_token_ids": [3], "ignore_eos": True, "skip_special_tokens": False, "frequency_penalty": 0.5,
    }  # fmt: skip


def test_generate_greedy_and_defaults_are_sent_as_off() -> None:
    call = SGLangProtocol().generate(ModelRequest("r", [5]), GenerationHyperparameters(greedy=True), None)

    params = (call.body or {})["sampling_params"]
    assert (params["temperature"], params["top_k"]) == (0.0, -1)
    assert not {"sampling_seed", "stop"} & set(params)


def test_generate_images_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="image_data"):
        SGLangProtocol().generate(ModelRequest("r", [5], image_data=["x"]), GenerationHyperparameters(), None)


def test_native_reads_every_body_that_its_protocol_sends() -> None:
    gconfig = GenerationHyperparameters(max_new_tokens=9, stop=["a"], top_k=4, temperature=0.5, frequency_penalty=-1.0)
    call = NativeProtocol().generate(ModelRequest("r", [5]), gconfig, 7)

    read = wire.read_generate(json.loads(json.dumps(call.body)), None)

    assert (read.many, read.logprobs) == (False, True)
    (request,) = read.requests
    assert (request.rid, request.input_ids, request.seed) == ("r", [5], 7)
    assert request.gconfig.new(max_tokens=gconfig.max_tokens) == gconfig


def test_parse_stamps_all_tokens_with_the_reply_or_each_with_its_own() -> None:
    whole, each, unnamed = (
        SGLangProtocol().parse(reply)
        for reply in (_reply(), _reply(output_token_versions=[2, 3]), _reply(weight_version="default"))
    )

    assert (whole.tokens, whole.logprobs, whole.stop_reason) == ([7, 8], [-0.5, -1.5], "length")
    assert (whole.versions, each.versions, unnamed.versions) == ([3, 3], [2, 3], None)


def test_parse_abort_in_the_queue_has_no_tokens() -> None:
    reply = {
        "text": "",
        "output_ids": [],
        "meta_info": {"finish_reason": {"type": "abort", "message": "Abort in waiting queue"}, "weight_version": "3"},
    }

    part = SGLangProtocol().parse(reply)

    assert (part.tokens, part.logprobs, part.stop_reason) == ([], [], "abort")


@pytest.mark.parametrize(
    ("reply", "named"),
    [
        ([], "meta_info"),
        ({"output_ids": [1]}, "meta_info"),
        (_reply(finish_reason=None), "finish_reason"),
        (_reply(finish_reason={"type": "tired"}), "finish_reason"),
        (_reply(finish_reason={"type": "abort", "status_code": 500, "message": "NaN"}), "NaN"),
        (_reply(output_token_logprobs=[[-0.5, 7, None]]), "2 tokens"),
        (_reply(output_token_logprobs=[[-0.5, 7], [-1.5, 9]]), "2 tokens"),
        (_reply(output_token_logprobs=[[None, 7], [-1.5, 8]]), "output_token_logprobs"),
        (_reply(output_token_logprobs={}), "output_token_logprobs"),
        ({**_reply(), "output_ids": ["7", "8"]}, "output_ids"),
        ({**_reply(), "output_ids": None}, "tokens"),
    ],
)
def test_parse_wrong_reply_is_named(reply: Any, named: str) -> None:
    with pytest.raises(ReplyError, match=named):
        SGLangProtocol().parse(reply)


def test_sglang_keep_is_refused() -> None:
    with pytest.raises(UnsupportedFeatureError, match="on_weight_update"):
        SGLangProtocol().pause(keep=True)


# -- weights -----------------------------------------------------------------------------------------------------------


def test_sglang_broadcast_is_one_call_per_bucket_without_a_flush() -> None:
    calls = SGLangProtocol().stage(XcclSource(4, GROUP, BUCKETS), 4)

    assert [call.path for call in calls] == ["/update_weights_from_distributed"] * 2
    assert all(call.once and call.timeout_s == 7.0 for call in calls)
    assert calls[1].body == {
        "names": ["b", "c"], "dtypes": ["bfloat16", "float32"], "shapes": [[4], []], "group_name": "g",
        "flush_cache": False, "abort_all_requests": False,
    }  # fmt: skip


def test_sglang_commit_flushes_before_it_stamps() -> None:
    flush, stamp = SGLangProtocol().commit(4)

    assert flush.path.startswith("/flush_cache?timeout=")
    assert (stamp.path, (stamp.body or {})["new_version"]) == ("/update_weight_version", "4")


def test_sglang_failed_update_says_whether_the_old_weights_are_whole() -> None:
    protocol, disk = SGLangProtocol(), DiskSource(1, "/d")

    assert protocol.harmed(XcclSource(1, GROUP, BUCKETS), WeightSyncError("any"))
    assert protocol.harmed(disk, WeightSyncError("Failed to update weights: x. Rolling back to original weights."))
    assert not protocol.harmed(disk, WeightSyncError("400: Failed to get weights iterator: no such directory"))


@pytest.mark.parametrize("reply", [{"success": False, "message": "no"}, {}, None, "done"])
def test_sglang_reply_without_success_is_a_failed_update(reply: Any) -> None:
    with pytest.raises(WeightSyncError):
        SGLangProtocol().records([{"success": True}, reply])

    assert SGLangProtocol().records([{"success": True}]) is None


def test_sglang_shared_memory_is_refused() -> None:
    writer = WeightWriter()
    with pytest.raises(UnsupportedFeatureError, match="weight_update_mode"):
        SGLangProtocol().stage(writer.write(weights_of(tiny_model()), 1), 1)
    writer.close()


@pytest.mark.parametrize(
    "lost",
    [
        "model.norm.weight",
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "lm_head.weight",
    ],
)
@pytest.mark.parametrize("recorded", [True, False])
def test_sglang_directory_that_lacks_a_tensor_is_never_sent(tmp_path: Path, lost: str, recorded: bool) -> None:
    model = tiny_model(tie_word_embeddings=False)
    model.save_pretrained(tmp_path)
    records = [ParamRecord.of(name, tensor) for name, tensor in weights_of(model)] if recorded else []
    whole = SGLangProtocol().stage(DiskSource(1, str(tmp_path), records), 1)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[lost]
    save_file(tensors, tmp_path / "model.safetensors")

    with pytest.raises(WeightSyncError, match=lost):
        SGLangProtocol().stage(DiskSource(1, str(tmp_path), records), 1)

    assert [call.path for call in whole] == ["/update_weights_from_disk"]


@pytest.mark.parametrize("mode", ["disk", "xccl", "shm"])
def test_native_stage_waits_for_commit_and_is_read_back(tmp_path: Path, mode: str) -> None:
    writer = WeightWriter()
    manifest = writer.write(weights_of(tiny_model()), 4)
    source: Any = {"disk": DiskSource(4, str(tmp_path)), "xccl": XcclSource(4, GROUP, BUCKETS), "shm": manifest}[mode]

    (call,) = NativeProtocol().stage(source, 4)

    body = json.loads(json.dumps(call.body))
    assert (body["commit"], body["weight_version"]) == (False, 4)
    if mode == "disk":
        assert wire.read_disk(body, 4) == source
    elif mode == "xccl":
        assert wire.read_broadcast(body, 4, GROUP) == source
    else:
        assert wire.read_manifest(body, 4).params == manifest.params
    writer.close()


def test_native_group_is_read_back() -> None:
    (call,) = NativeProtocol().join_group(GROUP)

    assert wire.read_group(json.loads(json.dumps(call.body))) == GROUP


def test_native_token_goes_with_every_call() -> None:
    assert NativeProtocol("t").headers() == {"Authorization": "Bearer t"}
    assert NativeProtocol().headers() == {}


def test_native_reply_without_records_is_a_failed_update() -> None:
    with pytest.raises(WeightSyncError, match="records"):
        NativeProtocol().records([{"success": True}])
