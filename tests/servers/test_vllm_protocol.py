"""What is said to vLLM servers, and how their replies are read; no server."""

from __future__ import annotations

from typing import Any

import pytest

from areal.api.config.rollout import GenerationHyperparameters
from areal.api.io_struct import ModelRequest, ParamSpec
from areal.engine.core.shared_weights import WeightWriter
from areal.engine.core.weight_sources import DiskSource, WeightGroup, XcclSource
from areal.engine.core.weight_sync import ParamRecord
from areal.engine.inference.protocol import ReplyError
from areal.engine.native.requests import InvalidRequestError
from areal.engine.vllm_remote import VLLMProtocol
from areal.utils.errors import WeightSyncError
from tests.fakes import tiny_model

PROTOCOL = VLLMProtocol()


def sampling(seed: int | None = 1, **settings: Any) -> dict[str, Any]:
    """The sampling settings that vLLM is sent."""
    gconfig = GenerationHyperparameters(**settings)
    call = PROTOCOL.generate(ModelRequest(rid="a.0", input_ids=[3, 4], gconfig=gconfig), gconfig, seed)
    assert call.body is not None
    assert (call.body["token_ids"], call.body["request_id"]) == ([3, 4], "a.0")
    sent: dict[str, Any] = call.body["sampling_params"]
    return sent


def reply(**changes: Any) -> dict[str, Any]:
    """A good reply of two tokens, with changes to its choice."""
    content = [{"token_id": 5, "logprob": -0.5, "rank": 1}, {"token_id": 6, "logprob": -1.5, "rank": 2}]
    choice = {
        "token_ids": [5, 6],
        "finish_reason": "length",
        "logprobs": {"content": content},
        "weight_versions": [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}],
    }
    return {"choices": [choice | changes]}


def test_generate_every_setting_is_sent_in_vllms_terms() -> None:
    sent = sampling(
        seed=7,
        max_new_tokens=9,
        min_new_tokens=2,
        temperature=0.7,
        top_p=0.9,
        top_k=5,
        frequency_penalty=0.5,
        stop=["x"],
        stop_token_ids=[8],
    )

    assert sent == {
        "n": 1,
        "max_tokens": 9,
        "min_tokens": 2,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "frequency_penalty": 0.5,
        "seed": 7,
        "stop": ["x"],
        "stop_token_ids": [8],
        "ignore_eos": False,
        "skip_special_tokens": False,
        "detokenize": True,
        "logprobs": 0,
    }


@pytest.mark.parametrize("settings", [{"greedy": True}, {"temperature": 0.0}])
def test_generate_greedy_is_temperature_zero_without_truncation(settings: dict[str, Any]) -> None:
    sent = sampling(top_k=5, top_p=0.5, **settings)

    assert (sent["temperature"], sent["top_k"], sent["top_p"]) == (0.0, 0, 1.0)


def test_generate_ignore_eos_ends_at_no_stop_id_and_bans_none() -> None:
    sent = sampling(ignore_eos=True, stop_token_ids=[8], stop=["x"], min_new_tokens=3, max_new_tokens=9)

    assert (sent["ignore_eos"], sent["stop_token_ids"], sent["min_tokens"], sent["stop"]) == (True, [], 0, [])


def test_generate_defaults_leave_nothing_to_the_server() -> None:
    sent = sampling(seed=2**64 - 1, min_new_tokens=5, max_new_tokens=4)

    assert (sent["top_k"], sent["top_p"], sent["stop"], sent["detokenize"]) == (0, 1.0, [], False)
    assert (sent["seed"], sent["min_tokens"]) == (2**63 - 1, 4)
    assert sampling(seed=None)["seed"] is None


@pytest.mark.parametrize("temperature", [0.005, 2.01])
def test_check_temperature_that_vllm_bends_is_refused(temperature: float) -> None:
    with pytest.raises(InvalidRequestError, match=rf"gconfig.temperature={temperature}.*native"):
        PROTOCOL.check(GenerationHyperparameters(temperature=temperature))


def test_generate_images_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="image_data"):
        PROTOCOL.generate(ModelRequest(input_ids=[3], image_data=["x"]), GenerationHyperparameters(), 1)


def test_parse_reads_tokens_logprobs_and_the_version_of_each() -> None:
    part = PROTOCOL.parse(reply())

    assert (part.tokens, part.logprobs, part.versions, part.stop_reason) == ([5, 6], [-0.5, -1.5], [3, 4], "length")


def test_parse_request_that_was_aborted_in_the_queue_is_empty() -> None:
    part = PROTOCOL.parse(reply(token_ids=[], finish_reason="abort", logprobs=None, weight_versions=None))

    assert (part.tokens, part.logprobs, part.stop_reason, part.versions) == ([], [], "abort", None)


def test_parse_server_that_was_never_told_a_version_leaves_it_open() -> None:
    assert PROTOCOL.parse(reply(weight_versions=[{"version": "default", "start": 0, "end": 2}])).versions is None


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"token_ids": None}, "token_ids"),
        ({"token_ids": [5, "6"]}, "token_ids"),
        ({"token_ids": [5, 7]}, "token 7"),
        ({"token_ids": [5]}, "1 tokens came with"),
        ({"finish_reason": "error"}, "finish_reason"),
        ({"logprobs": None}, "logprobs None"),
        ({"logprobs": []}, "logprobs"),
        ({"logprobs": {"content": [1, 2]}}, "log-prob of token 5"),
        ({"logprobs": {"content": [{"token_id": 5, "logprob": -9999.0}, {}]}}, "-9999"),
        ({"logprobs": {"content": [{"token_id": 5, "logprob": float("nan")}, {}]}}, "nan"),
        ({"weight_versions": [{"version": "3", "start": 0, "end": 1}]}, "weight_versions"),
        ({"weight_versions": [{"version": "3", "start": 1, "end": 2}]}, "weight_versions"),
        ({"weight_versions": [{"version": "new", "start": 0, "end": 2}]}, "weight_versions"),
        ({"weight_versions": [{"start": 0}]}, "weight_versions"),
        ({"weight_versions": {"a": 1}}, "weight_versions"),
    ],
)
def test_parse_reply_that_cannot_be_used_names_the_field(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ReplyError, match=named):
        PROTOCOL.parse(reply(**changes))


@pytest.mark.parametrize("garbage", [{}, {"choices": []}, {"choices": [1]}, {"choices": "x"}, [], [1]])
def test_parse_garbage_is_a_reply_error(garbage: Any) -> None:
    with pytest.raises(ReplyError, match="choices"):
        PROTOCOL.parse(garbage)


def test_abort_uses_the_name_that_the_route_gives_a_request() -> None:
    assert PROTOCOL.abort("a.0").body == {"request_ids": ["generate-tokens-a.0"]}


@pytest.mark.parametrize(("keep", "mode"), [(True, "keep"), (False, "abort")])
def test_pause_always_drops_the_cache(keep: bool, mode: str) -> None:
    (call,) = PROTOCOL.pause(keep)

    assert call.path == f"/pause?mode={mode}&clear_cache=true"


def test_stage_shared_memory_travels_as_plain_json() -> None:
    writer = WeightWriter()
    manifest = writer.write([("w", tiny_model().lm_head.weight.detach())], 3)

    (call,) = PROTOCOL.stage(manifest, 3)
    writer.close()

    param = {"name": "w", "shape": [64, 32], "dtype": "float32", "offset": 0}
    expected = {"version": 3, "pid": manifest.pid, "fd": manifest.fd, "size_bytes": 8192, "params": [param]}
    assert (call.path, call.once) == ("/collective_rpc", True)
    assert call.body == {"method": "areal_stage_shm", "kwargs": expected}


def test_stage_disk_and_xccl_name_the_place() -> None:
    group = WeightGroup("g", "10.0.0.1", 5, 3, rank=1, timeout_s=20.0)
    source = XcclSource(4, group, [[ParamSpec("w", (2, 3), "bfloat16")]])

    (disk,), (xccl,), (join,) = (
        PROTOCOL.stage(DiskSource(4, "/weights"), 4),
        PROTOCOL.stage(source, 4),
        PROTOCOL.join_group(group),
    )

    assert disk.body == {"method": "areal_stage_disk", "kwargs": {"version": 4, "path": "/weights"}}
    kwargs = {"version": 4, "group": "g", "buckets": [[["w", [2, 3], "bfloat16"]]]}
    assert xccl.body == {"method": "areal_stage_xccl", "kwargs": kwargs}
    assert join.body is not None
    assert join.body["kwargs"]["group"] == {
        "name": "g",
        "host": "10.0.0.1",
        "port": 5,
        "rank": 1,
        "world_size": 3,
        "backend": "gloo",
        "stage": 0,
        "timeout_s": 20.0,
    }
    assert all(call.timeout_s == 50.0 and call.once for call in (xccl, join))


def test_commit_stamps_the_version_only_after_the_cache_is_dropped() -> None:
    assert [call.path.partition("?")[0] for call in PROTOCOL.commit(5)] == [
        "/collective_rpc",
        "/reset_prefix_cache",
        "/update_weight_version",
    ]


def test_records_of_two_workers_are_kept_apart() -> None:
    entry = ["w", [2], "float32", -7]

    ranks = PROTOCOL.records([{"results": [{"records": [entry]}, {"records": [entry, entry]}]}])

    record = ParamRecord("w", (2,), "float32", -7)
    assert ranks == [[record], [record, record]]


@pytest.mark.parametrize(
    "answer",
    [
        {"results": [{"records": []}, {"error": "worker 1, areal_stage_shm: no such file"}]},
        {"results": []},
        {"results": ["None"]},
        {"results": [{}]},
        {"results": [{"records": [["w"]]}]},
        {},
        None,
    ],
)
def test_records_of_a_stage_that_failed_is_a_weight_sync_error(answer: Any) -> None:
    with pytest.raises(WeightSyncError, match="vLLM"):
        PROTOCOL.records([answer])


def test_confirm_failed_worker_or_cache_is_a_weight_sync_error() -> None:
    PROTOCOL.confirm([{"results": [{"version": 5}]}, {"success": True}, {"success": True, "new_version": "5"}, None])
    for bad in ({"results": [{"error": "boom"}]}, {"success": False}):
        with pytest.raises(WeightSyncError, match=r"boom|prefix cache"):
            PROTOCOL.confirm([bad])
