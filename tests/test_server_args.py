"""Flags of vLLM and SGLang servers: what the user wrote wins, defaults follow device, model and trainer."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from areal.api.config.fields import DefaultStr
from areal.api.config.inference import SGLangConfig, vLLMConfig
from areal.api.config.server_args import (
    ServerPlace,
    command,
    model_limit,
    model_vocabulary,
    sglang_flags,
    unwritten_fields,
    vllm_flags,
)

MODEL = {
    "max_position_embeddings": 2048,
    "vocab_size": 1000,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
}


def cpu(**changes: Any) -> ServerPlace:
    return ServerPlace(**{"host": "127.0.0.1", "port": 1234, "device": "cpu", "model": MODEL, **changes})


def gpu(**changes: Any) -> ServerPlace:
    return cpu(device="cuda", **changes)


def test_vllm_build_cmd_on_gpus_has_the_section_and_the_fixed_flags() -> None:
    words = vLLMConfig.build_cmd(vLLMConfig(model="/m", python="/env/python"), tp_size=2, host="::", port=9)

    assert words[:3] == ["/env/python", "-m", "vllm.entrypoints.openai.api_server"]
    text = " ".join(words)
    for flag in (
        "--model /m",
        "--tokenizer /m",
        "--load-format auto",
        "--tensor-parallel-size 2",
        "--pipeline-parallel-size 1",
        "--host :: --port 9",
        "--dtype bfloat16",
        "--max-model-len 32768",
        "--gpu-memory-utilization 0.9",
        "--no-enable-prefix-caching",
        "--worker-extension-cls vllm_worker_extension.VLLMWorkerExtension",
        "--logprobs-mode processed_logprobs",
    ):
        assert flag in text
    assert "trust" not in text
    assert "--python" not in words
    assert "lora" not in text


def test_sglang_build_cmd_on_gpus_has_the_section_and_the_fixed_flags() -> None:
    words = SGLangConfig.build_cmd(SGLangConfig(model_path="/m"), tp_size=4, base_gpu_id=2, port=9, pp_size=2)

    text = " ".join(words)
    assert words[:3] == [sys.executable, "-m", "sglang.launch_server"]
    for flag in (
        "--model-path /m",
        "--tokenizer-path /m",
        "--tp-size 4",
        "--base-gpu-id 2",
        "--pp-size 2",
        "--nnodes 1",
        "--attention-backend fa3",
        "--mem-fraction-static 0.9",
        "--context-length 32768",
        "--disable-radix-cache",
    ):
        assert flag in text
    assert "--host" not in words
    assert "--device" not in words


def test_build_args_of_several_machines_name_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    first = vLLMConfig.build_args(vLLMConfig(), 8, 2, "h", 1, "10.0.0.1:29500", n_nodes=2, node_rank=0)
    second = vLLMConfig.build_args(vLLMConfig(), 8, 2, "h", 1, "10.0.0.1:29500", n_nodes=2, node_rank=1)
    sglang = SGLangConfig.build_args(SGLangConfig(), 16, 0, dist_init_addr="10.0.0.1:29500", n_nodes=2, node_rank=1)

    assert (first["nnodes"], first["node_rank"], first["master_addr"], first["master_port"]) == (
        2,
        0,
        "10.0.0.1",
        "29500",
    )
    assert (first["headless"], second["headless"]) == (False, True)
    assert (sglang["nnodes"], sglang["node_rank"], sglang["dist_init_addr"]) == (2, 1, "10.0.0.1:29500")


def test_vllm_flags_on_a_cpu_replace_unwritten_defaults_and_say_so() -> None:
    flags = vllm_flags(vLLMConfig(model="/m"), cpu())

    assert flags.args["dtype"] == "float32"
    assert flags.args["max_model_len"] == 2048
    assert flags.args["enforce_eager"] is True
    assert flags.args["no_enable_chunked_prefill"] is True
    assert flags.args["max_num_batched_tokens"] == 8192
    assert {"gpu_memory_utilization", "block_size", "cpu_offload_gb"}.isdisjoint(flags.args)
    assert flags.env["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert flags.env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert "dtype=float32 instead of the default bfloat16: the device is a CPU" in flags.changes
    assert "max_model_len=2048 instead of the default 32768: the model's limit" in flags.changes


def test_vllm_flags_on_a_cpu_prefill_budget_holds_a_whole_context() -> None:
    assert vllm_flags(vLLMConfig(max_model_len=20000), cpu()).args["max_num_batched_tokens"] == 20000
    assert "max_num_batched_tokens" not in vllm_flags(vLLMConfig(), gpu()).args


def test_sglang_flags_on_a_cpu_replace_unwritten_defaults_and_say_so() -> None:
    flags = sglang_flags(SGLangConfig(model_path="/m"), cpu())

    assert flags.args["device"] == "cpu"
    assert flags.args["dtype"] == "float32"
    assert flags.args["context_length"] == 2048
    assert "attention_backend" not in flags.args
    assert "base_gpu_id" not in flags.args
    assert flags.env == {"SGLANG_USE_CPU_ENGINE": "1"}
    assert "attention_backend is not passed: the device is a CPU" in flags.changes


def test_flags_written_values_win_even_where_a_cpu_refuses_them() -> None:
    vllm = vllm_flags(vLLMConfig(dtype="bfloat16", max_model_len=4096, block_size=64), cpu(dtype="float32"))
    sglang = sglang_flags(SGLangConfig(attention_backend="fa3", dtype="float16"), cpu())

    assert (vllm.args["dtype"], vllm.args["max_model_len"], vllm.args["block_size"]) == ("bfloat16", 4096, 64)
    assert (sglang.args["attention_backend"], sglang.args["dtype"]) == ("fa3", "float16")


def test_flags_marks_lost_on_the_way_are_replaced_by_the_list() -> None:
    written = vLLMConfig(dtype="bfloat16", max_model_len=32768)
    names = unwritten_fields(written)

    kept = vllm_flags(vLLMConfig(), cpu(unwritten=names))
    replaced = vllm_flags(written, cpu(unwritten=["dtype", "max_model_len"]))

    assert {"dtype", "max_model_len"}.isdisjoint(names)
    assert (kept.args["dtype"], kept.args["max_model_len"]) == ("bfloat16", 32768)
    assert (replaced.args["dtype"], replaced.args["max_model_len"]) == ("float32", 2048)


def test_flags_dtype_nobody_wrote_follows_the_trainer_on_gpus_too() -> None:
    assert vllm_flags(vLLMConfig(), gpu(dtype="float16")).args["dtype"] == "float16"
    assert sglang_flags(SGLangConfig(), gpu(dtype=DefaultStr("float32"))).args["dtype"] == "float32"
    assert vllm_flags(vLLMConfig(), gpu()).args["dtype"] == "bfloat16"


def test_flags_each_server_has_a_seed_of_its_own() -> None:
    assert vllm_flags(vLLMConfig(seed=5), gpu(index=3)).args["seed"] == 8
    assert sglang_flags(SGLangConfig(random_seed=5), gpu(index=3)).args["random_seed"] == 8


def test_flags_lora_settings_are_sent_only_with_lora() -> None:
    off, on = vllm_flags(vLLMConfig(), gpu()), vllm_flags(vLLMConfig(enable_lora=True), gpu())
    sglang = sglang_flags(SGLangConfig(enable_lora=True, max_lora_rank=8), cpu())

    assert {"max_lora_rank", "max_loras"}.isdisjoint(off.args)
    assert on.args["max_lora_rank"] == 16
    assert on.env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert (sglang.args["max_lora_rank"], sglang.args["lora_backend"]) == (8, "torch_native")
    assert "lora_backend" not in sglang_flags(SGLangConfig(), gpu()).args


def test_sglang_flags_multithread_load_becomes_loader_settings() -> None:
    args = sglang_flags(SGLangConfig(enable_multithread_load=True), gpu()).args

    assert json.loads(args["model_loader_extra_config"])["enable_multithread_load"] is True
    assert "enable_multithread_load" not in args


@pytest.mark.parametrize(
    ("gigabytes", "expected"),
    # 2 (k, v) * 2 layers * 2 heads * 16 * 4 bytes = 512 bytes a token
    [(512 * 10_000 / 2**30, 10_000), (1e-9, 2048), (100.0, 2048 * 256)],
)
def test_sglang_flags_cache_on_a_cpu_has_what_fits_at_least_a_sequence(gigabytes: float, expected: int) -> None:
    flags = sglang_flags(SGLangConfig(kv_cache_gb=gigabytes), cpu())

    assert flags.args["max_total_tokens"] == pytest.approx(expected, abs=1)


def test_command_renders_values_as_flags() -> None:
    args = {"a_b": 1, "off": False, "none": None, "empty": "", "no_items": [], "on": True, "list": [1, 2], "zero": 0}

    assert command("py", "m.n", args) == ["py", "-m", "m.n", "--a-b", "1", "--on", "--list", "1", "2", "--zero", "0"]


def test_model_facts_of_nested_and_empty_configs() -> None:
    assert model_limit({"text_config": {"max_position_embeddings": 7}}) == 7
    assert model_vocabulary({"vocab_size": 5}) == 5
    assert model_limit({}) is None
    assert model_vocabulary({"vocab_size": "many"}) is None
