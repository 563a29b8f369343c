"""Settings of the Megatron engine that need no second rank: fp8, layers of stages, a missing megatron-core."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from areal.api.alloc_mode import ModelAllocation
from areal.api.config.megatron import FP8EngineConfig, MegatronEngineConfig
from areal.engine.megatron_engine import MegatronEngine
from areal.engine.megatron_utils.device import runs_on
from areal.engine.megatron_utils.packed_cp import held_positions
from areal.engine.megatron_utils.parallel import MegatronDims, check_model
from areal.engine.megatron_utils.quantization import check_fp8, fp8_settings
from areal.engine.megatron_utils.shape import ModelShape, MoeShape, split_layers
from areal.models.rope import RopeArgs
from areal.utils.errors import ConfigError, UnsupportedFeatureError
from tests.engine_fakes import engine_config
from tests.fakes import save_tiny_model
from tests.moe_fakes import tiny_moe

CPU = torch.device("cpu")
MOE = MoeShape(num_experts=8, top_k=2, ffn_dim=16, normalized=True, layers=(True, *[False] * 5))


def _shape(**changes: Any) -> ModelShape:
    shape = ModelShape(
        model_type="qwen3",
        dim=8,
        n_layers=6,
        n_heads=2,
        n_kv_heads=1,
        head_dim=4,
        ffn_dim=16,
        vocab_size=16,
        max_positions=64,
        norm_eps=1e-6,
        rope=RopeArgs((1.0, 0.1)),
    )
    return dataclasses.replace(shape, **changes)


def test_engine_without_megatron_core_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron", None)
    path = save_tiny_model(tmp_path)

    with pytest.raises(UnsupportedFeatureError, match=r"areal\[megatron\]"):
        MegatronEngine(engine_config(path, backend="megatron:d1"))


def test_engine_with_another_megatron_core_names_both_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed; pip install 'areal[megatron]'")
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.19.1")

    with pytest.raises(UnsupportedFeatureError, match=r"0\.16\.\*, 0\.19\.1 is installed"):
        MegatronEngine(engine_config(save_tiny_model(tmp_path), backend="megatron:d1"))


def test_engine_with_megatron_core_that_is_no_package_names_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed; pip install 'areal[megatron]'")

    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", version)

    with pytest.raises(UnsupportedFeatureError, match=r"PYTHONPATH and pip install 'areal\[megatron\]'"):
        MegatronEngine(engine_config(save_tiny_model(tmp_path), backend="megatron:d1"))


def test_runs_on_a_gpu_makes_it_the_current_one() -> None:
    context = runs_on(torch.device("cuda", 1))

    assert isinstance(context, torch.cuda.device)
    assert context.idx == 1


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"dp": 3, "ep": 2}, ("ep=2", "3 ranks")),
        ({"dp": 2, "etp": 4}, ("etp=4", "2 ranks")),
        ({"dp": 4, "etp": 2}, ("etp=2", "tp=1", "an e")),
        ({"vpp": 2}, ("virtual_pipeline_parallel_size=2", "p1")),
    ],
)
def test_megatron_dims_that_do_not_fit_name_sizes_and_rule(sizes: dict[str, int], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        MegatronDims(**sizes)

    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("backend", "ep", "etp"),
    [
        ("megatron:d4", 1, 1),
        ("megatron:d2t2", 1, 2),
        ("megatron:(attn:d2t2|ffn:d2t2)", 1, 2),
        ("megatron:(attn:d4|ffn:e2t2)", 2, 2),
        ("megatron:(attn:d2t2|ffn:d2e2)", 2, 1),
    ],
)
def test_expert_sizes_are_those_of_the_backend_string(backend: str, ep: int, etp: int) -> None:
    dims = MegatronDims.from_strategy(ModelAllocation.from_str(backend).parallel, 1)

    assert (dims.ep, dims.etp) == (ep, etp)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"dp": 2, "ep": 2}, ("moe_token_dispatcher_type=allgather", "e2", "alltoall")),
        ({"pp": 2}, ("moe_token_dispatcher_type=allgather", "p2", "alltoall")),
    ],
)
def test_allgather_between_ranks_with_different_rows_is_refused(sizes: dict[str, int], words: tuple[str, ...]) -> None:
    dims = MegatronDims(**sizes)

    gathered = engine_config("m", megatron=MegatronEngineConfig(moe_token_dispatcher_type="allgather"))

    with pytest.raises(ConfigError) as caught:
        check_model(_shape(moe=MOE), dims, gathered)

    for word in words:
        assert word in str(caught.value)
    check_model(_shape(moe=MOE), dims, engine_config("m"))
    check_model(_shape(n_kv_heads=2, moe=MOE), MegatronDims(tp=2, etp=2), gathered)


def test_recomputed_units_that_do_not_fill_a_stage_are_refused() -> None:
    config = engine_config("m", gradient_checkpointing=True, megatron=MegatronEngineConfig(recompute_num_layers=2))

    check_model(_shape(), MegatronDims(), config)
    with pytest.raises(ConfigError, match=r"recompute_num_layers=2 must divide .* \[3, 3\]"):
        check_model(_shape(), MegatronDims(pp=2), config)

    config.megatron.recompute_method = "block"
    check_model(_shape(), MegatronDims(pp=2), config)


def test_one_expert_per_token_with_scores_scaled_to_one_names_both_keys() -> None:
    config = tiny_moe(num_experts_per_tok=1, norm_topk_prob=True).config

    with pytest.raises(UnsupportedFeatureError, match="num_experts_per_tok=1 and norm_topk_prob=true"):
        ModelShape.from_hf_config(config, is_critic=False, disable_dropout=False)

    config.norm_topk_prob = False
    shape = ModelShape.from_hf_config(config, is_critic=False, disable_dropout=False)
    assert shape.moe is not None
    assert shape.moe.top_k == 1


def test_split_layers_counts_embedding_and_head() -> None:
    assert split_layers(_shape(), MegatronDims(pp=2)) == [3, 3]
    assert split_layers(_shape(vocab_size=1000), MegatronDims(pp=3)) == [1, 4, 1]
    assert split_layers(_shape(vocab_size=1000, is_critic=True), MegatronDims(pp=2)) == [1, 5]
    assert split_layers(_shape(n_layers=2), MegatronDims(pp=2)) == [1, 1]


def test_split_layers_weighs_experts() -> None:
    assert split_layers(_shape(moe=MOE), MegatronDims(pp=2)) == [1, 5]
    assert split_layers(_shape(moe=MOE), MegatronDims(pp=2, dp=8, ep=8)) == [3, 3]  # each rank has one of eight


def test_held_positions_of_all_ranks_cover_the_row_and_balance_the_causal_mask() -> None:
    bounds = torch.tensor([0, 8, 12])

    found = [held_positions(bounds, 2, rank).tolist() for rank in range(2)]

    assert found == [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]
    assert sum(found[0]) == sum(found[1])


# -- fp8 ---------------------------------------------------------------------------------------------------------------


def _fp8(dtype: str = "bfloat16", ddp: dict[str, Any] | None = None, **fields: Any) -> Any:
    config = engine_config("m", dtype=dtype, megatron=MegatronEngineConfig(fp8_config=FP8EngineConfig(**fields)))
    for name, value in (ddp or {}).items():
        setattr(config.megatron.ddp, name, value)
    return config


def test_fp8_settings_are_fields_of_megatrons_config() -> None:
    fp8 = FP8EngineConfig(mode="hybrid", recipe="blockwise", wgrad=False, first_last_layers_bf16=True)

    found = fp8_settings(fp8)

    assert found["fp8"] == "hybrid"
    assert found["fp8_recipe"] == "blockwise"
    assert found["fp8_wgrad"] is False
    assert found["first_last_layers_bf16"] is True
    transformer = pytest.importorskip("megatron.core.transformer.transformer_config").TransformerConfig
    assert found.keys() <= {field.name for field in dataclasses.fields(transformer)}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (_fp8(dtype="float32"), ("dtype=float32", "dtype=bfloat16")),
        (_fp8(recipe="tensorwise", margin=1), ("fp8_config.margin=1", "recipe=delayed", "tensorwise")),
        (_fp8(num_layers_at_end_in_bf16=2), ("num_layers_at_end_in_bf16=2", "first_last_layers_bf16=true")),
        (_fp8(first_last_layers_bf16=True), ("first_last_layers_bf16=true", "recipe=delayed")),
        (_fp8(multi_head_attention=True), ("multi_head_attention=true", "dot_product_attention=true")),
        (_fp8(param=True), ("fp8_config.param=true", "false")),
        (_fp8(), ("fp8_config.mode=e4m3", "Hopper", "cpu")),
        (_fp8(recipe="mxfp8"), ("Blackwell", "cpu")),
    ],
    ids=lambda value: str(value)[:30],
)
def test_fp8_that_cannot_run_is_refused_with_key_value_and_rule(config: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"megatron\.") as caught:
        check_fp8(config, CPU)

    for word in words:
        assert word in str(caught.value)
