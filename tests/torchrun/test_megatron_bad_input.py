"""What the Megatron engine refuses: with key, value and rule, on every rank, before any weight is read.

The model directories hold a config and no weights, so an engine that came as far as loading would say something else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from areal.api.config.megatron import FP8EngineConfig
from areal.utils.errors import CheckpointError
from tests.fakes import tiny_config
from tests.moe_fakes import tiny_moe
from tests.torchrun.live_group import LiveGroup

pytest.importorskip("megatron.core", reason="megatron-core is not installed; pip install 'areal[megatron]'")
from tests.torchrun import megatron_cells as cells  # noqa: E402 - needs megatron-core

NARROW = {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 24}
E2 = "(attn:d2|ffn:e2)"


def _config_only(path: Path, arch: str = "qwen2", **overrides: Any) -> str:
    config = tiny_moe(**overrides).config if arch == "qwen3_moe" else tiny_config(arch, **overrides)
    config.save_pretrained(path)
    return str(path)


def test_directory_without_weights_is_a_checkpoint_error(tmp_path: Path) -> None:
    """The others of this file are refused before that."""
    with (
        pytest.raises(CheckpointError, match="safetensors"),
        cells.built(_config_only(tmp_path), "megatron:d1"),
    ):
        pass


@pytest.mark.parametrize("model_type", ["mistral", "gemma3_text", "qwen3_5_text", "qwen3_5"])
def test_unsupported_model_type_lists_the_supported_ones_and_names_fsdp(tmp_path: Path, model_type: str) -> None:
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)

    with pytest.raises(ValueError, match=f"'{model_type}'") as caught:
        cells.megatron_engine(str(tmp_path), "megatron:d1")

    for word in ("llama", "qwen2", "qwen3", "qwen3_moe", "fsdp"):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "word"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"use_sliding_window": True, "max_window_layers": 0}, "use_sliding_window=True"),
        ({"attention_dropout": 0.1}, "disable_dropout=true"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type='dynamic'"),
    ],
    ids=str,
)
def test_unsupported_model_setting_is_named(tmp_path: Path, overrides: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match="backend fsdp|FSDP engine|disable_dropout=true") as caught:
        cells.megatron_engine(_config_only(tmp_path, **overrides), "megatron:d1")

    assert word in str(caught.value)


# What one process is given, words of the message.
SETTINGS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"use_lora": True}, ("use_lora=true", "all weights", "fsdp")),
    ({"enable_tree_training": True}, ("enable_tree_training=True", "set it to false")),
    ({"dtype": "float16"}, ("dtype=float16", "bfloat16")),
    ({"backend": "megatron:d4"}, ("megatron:d4", "needs 4 processes", "this job has 1")),
    ({"megatron": {"virtual_pipeline_parallel_size": 2}}, ("virtual_pipeline_parallel_size=2", "p1")),
    ({"megatron": {"use_custom_fsdp": True}}, ("megatron.use_custom_fsdp=True", "fsdp")),
    ({"megatron": {"wrap_with_ddp": False}}, ("megatron.wrap_with_ddp=False", "true")),
    ({"megatron": {"moe_token_dispatcher_type": "flex"}}, ("moe_token_dispatcher_type=flex", "alltoall")),
    ({"megatron": {"moe_router_dtype": "fp8"}}, ("megatron.moe_router_dtype='fp8'", "fp32")),
    ({"megatron": {"bridge_type": "megatron-bridge"}}, ("megatron.bridge_type=megatron-bridge", "leave it out")),
    ({"megatron": {"use_precision_aware_optimizer": True}}, ("use_precision_aware_optimizer=True", "float32")),
    ({"megatron": {"exp_avg_dtype": "bfloat16"}}, ("megatron.exp_avg_dtype=bfloat16", "float32")),
    ({"megatron": {"moe_permute_fusion": True}}, ("megatron.moe_permute_fusion=true", "Transformer Engine", "cpu")),
    ({"megatron": {"ddp": {"overlap_param_gather": True}}}, ("megatron.ddp.overlap_param_gather=True", "false")),
    (
        {"gradient_checkpointing": True, "megatron": {"recompute_num_layers": None}},
        ("megatron.recompute_num_layers=null", "selective"),
    ),
    (
        {"gradient_checkpointing": True, "megatron": {"recompute_granularity": None}},
        ("megatron.recompute_granularity=null", "full or selective"),
    ),
    (
        {"gradient_checkpointing": True, "megatron": {"recompute_modules": ["mlp"]}},
        ("megatron.recompute_modules=['mlp']", "recompute_granularity=selective"),
    ),
    (
        {
            "gradient_checkpointing": True,
            "megatron": {"recompute_granularity": "selective", "recompute_modules": ["mlp", "layernorm", "norm"]},
        },
        (
            "megatron.recompute_modules=['layernorm', 'norm']",
            "core_attn, mlp, moe",
            "with Transformer Engine layernorm",
        ),
    ),
    (
        {"gradient_checkpointing": True, "megatron": {"recompute_num_layers": 3}},
        ("megatron.recompute_num_layers=3", "layers of every stage", "[2]"),
    ),
    ({"grad_reduce_dtype": "bfloat16"}, ("grad_reduce_dtype=bfloat16", "megatron.ddp.grad_reduce_in_fp32")),
    ({"megatron": {"ddp": {"fp8_param_gather": True}}}, ("megatron.ddp.fp8_param_gather=True", "false")),
    (
        {"dtype": "bfloat16", "megatron": {"fp8_config": FP8EngineConfig(direct_convert=False)}},
        ("megatron.fp8_config.direct_convert=False", "true"),
    ),
    ({"optimizer": {"type": "adam_bf16"}}, ("optimizer.type=adam_bf16", "use adam")),
]


@pytest.mark.parametrize(("settings", "words"), SETTINGS, ids=str)
def test_setting_that_cannot_run_is_refused_with_key_and_remedy(
    tmp_path: Path, settings: dict[str, Any], words: tuple[str, ...]
) -> None:
    arguments = {"path": _config_only(tmp_path), "backend": "megatron:d1", **settings}

    kind, message, is_value_error = cells.refusal(**arguments)

    assert is_value_error, f"{kind}: {message or 'nothing was refused'}"
    for word in words:
        assert word in message


# Layout, model, sizes of the model, what the engine is given, words of the message.
REFUSALS: list[tuple[str, str, dict[str, Any], dict[str, Any], tuple[str, ...]]] = [
    ("t2", "qwen2", {"num_key_value_heads": 1}, {}, ("num_key_value_heads=1", "multiple of t (2)")),
    ("t2", "qwen2", NARROW, {}, ("num_attention_heads=3", "multiple of t (2)")),
    ("t2", "qwen2", {"vocab_size": 63}, {}, ("vocab_size=63", "multiple of t (2)")),
    ("t2", "qwen2", {"intermediate_size": 33}, {}, ("intermediate_size=33", "multiple of t (2)")),
    (E2, "qwen3_moe", {"num_experts": 3}, {}, ("num_experts=3", "multiple of e (2)")),
    (E2, "qwen2", {}, {}, ("e2", "no experts")),
    ("(attn:d2|ffn:t2)", "qwen3_moe", {}, {}, ("etp=2", "tp=1", "an e")),
    (
        E2,
        "qwen3_moe",
        {},
        {"megatron": {"moe_token_dispatcher_type": "allgather"}},
        ("moe_token_dispatcher_type=allgather", "e2", "alltoall"),
    ),
    ("t2", "qwen3_moe", {"moe_intermediate_size": 15}, {}, ("moe_intermediate_size=15", "multiple of")),
    ("(attn:d2|ffn:e4)", "qwen3_moe", {}, {}, ("ffn", "4", "2")),
    ("d4", "qwen2", {}, {}, ("megatron:d4", "needs 4 processes", "this job has 2")),
    ("p2", "qwen2", {"num_hidden_layers": 1}, {}, ("num_hidden_layers=1", "at least", "2")),
    (
        "p2",
        "qwen2",
        {"num_hidden_layers": 3},
        {"megatron": {"virtual_pipeline_parallel_size": 2}},
        ("num_hidden_layers=3", "virtual_pipeline_parallel_size=4"),
    ),
    (
        "p2",
        "qwen3_moe",
        {},
        {"megatron": {"moe_token_dispatcher_type": "allgather"}},
        ("moe_token_dispatcher_type=allgather", "p2", "alltoall"),
    ),
]


@pytest.mark.parametrize(("layout", "arch", "model", "settings", "words"), REFUSALS, ids=lambda row: str(row)[:40])
def test_two_ranks_impossible_layout_is_refused_on_every_rank(  # noqa: PLR0913 - one row of the table
    two_ranks: LiveGroup,
    tmp_path: Path,
    layout: str,
    arch: str,
    model: dict[str, Any],
    settings: dict[str, Any],
    words: tuple[str, ...],
) -> None:
    path = _config_only(tmp_path, arch, **model)

    answers = two_ranks.run(cells.refusal, path=path, backend=f"megatron:{layout}", **settings)

    for kind, message, is_value_error in answers:
        assert is_value_error, f"{kind}: {message or 'nothing was refused'}"
        for word in words:
            assert word in message


def test_two_ranks_after_a_refusal_the_same_ranks_train(two_ranks: LiveGroup, tmp_path: Path) -> None:
    settings = {"path": _config_only(tmp_path, "qwen2", num_hidden_layers=2), "init_from_scratch": True}

    refused = two_ranks.run(
        cells.refusal, backend="megatron:p2", megatron={"virtual_pipeline_parallel_size": 2}, **settings
    )
    accepted = two_ranks.run(cells.refusal, backend="megatron:p2", **settings)

    assert all(is_value_error for _, _, is_value_error in refused)
    assert accepted == [("", "", False)] * 2


def test_two_engines_of_one_process_must_have_one_layout(two_ranks: LiveGroup, tmp_path: Path) -> None:
    path = _config_only(tmp_path, "qwen2", num_hidden_layers=2)

    for message in two_ranks.run(cells.second_layout, path=path, first="megatron:d2", second="megatron:t2"):
        assert "another Megatron engine of this process" in message
        assert "one layout" in message
