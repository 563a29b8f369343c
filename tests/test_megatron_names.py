"""Names and shapes of the Megatron engine's tensors against Hugging Face checkpoints of every kind it reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from areal.engine.core.hf_checkpoint import HfDirectory
from areal.engine.core.tensor_parts import relative_index
from areal.engine.megatron_utils.names import EMBEDDING, HEAD, MegatronSource, NameMap, own_name
from areal.engine.megatron_utils.shape import ModelShape
from areal.utils.errors import CheckpointError
from tests.archon_fakes import hf_model

FAMILIES = ("qwen2", "qwen2_untied", "qwen3", "llama", "qwen3_moe", "qwen3_moe_mixed")


def _saved(path: Path, family: str) -> tuple[NameMap, dict[str, Tensor]]:
    model = hf_model(family)
    model.save_pretrained(path)
    shape = ModelShape.from_hf_config(model.config, is_critic=False, disable_dropout=False)
    return NameMap(shape), load_file(path / "model.safetensors")


def _source(path: Path, names: NameMap) -> MegatronSource:
    return MegatronSource(HfDirectory(path), names, list(names.shapes), set())


def _read(source: MegatronSource, name: str, index: tuple[slice, ...] | None = None) -> Tensor:
    index = index or tuple(slice(0, size) for size in source.shapes[name])
    whole = torch.full([part.stop - part.start for part in index], float("nan"))
    for place, piece in source.pieces(name, index):
        whole[relative_index(place, index)] = piece
    return whole


def _rewrite(path: Path, tensors: dict[str, Tensor]) -> None:
    save_file(
        {key: tensor.contiguous() for key, tensor in tensors.items()}, path / "model.safetensors", {"format": "pt"}
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_every_checkpoint_tensor_is_read_and_written_again_bit_by_bit(tmp_path: Path, family: str) -> None:
    names, saved = _saved(tmp_path, family)
    source = _source(tmp_path, names)

    written = [pair for name in names.shapes for pair in names.split(name, _read(source, name))]

    assert source.unexpected == []
    assert sorted(key for key, _ in written) == sorted(saved)
    for key, tensor in written:
        assert torch.equal(tensor, saved[key]), key


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_parts_that_cut_groups_and_halves_are_those_of_the_whole(tmp_path: Path, family: str) -> None:
    names, _ = _saved(tmp_path, family)
    source = _source(tmp_path, names)

    for name, shape in names.shapes.items():
        index = tuple(slice(size // 3, max(size // 3 + 1, size - size // 5)) for size in shape)
        assert torch.equal(_read(source, name, index), _read(source, name)[index]), name


def test_experts_in_one_tensor_are_read_as_single_ones(tmp_path: Path) -> None:
    names, saved = _saved(tmp_path, "qwen3_moe")
    expected = {name: _read(_source(tmp_path, names), name) for name in names.shapes}
    fused: dict[str, Any] = {key: tensor for key, tensor in saved.items() if ".experts." not in key}
    for layer in range(names.shape.n_layers):
        block = f"model.layers.{layer}.mlp.experts"
        pairs = [[saved[f"{block}.{e}.{part}_proj.weight"] for part in ("gate", "up")] for e in range(4)]
        fused[f"{block}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        fused[f"{block}.down_proj"] = torch.stack([saved[f"{block}.{e}.down_proj.weight"] for e in range(4)])
    _rewrite(tmp_path, fused)

    source = _source(tmp_path, names)

    assert source.unexpected == []
    for name, tensor in expected.items():
        assert torch.equal(_read(source, name), tensor), name


def test_checkpoint_of_a_body_alone_is_read_under_its_shorter_names(tmp_path: Path) -> None:
    names, saved = _saved(tmp_path, "qwen2")
    _rewrite(tmp_path, {key.removeprefix("model."): tensor for key, tensor in saved.items()})

    source = _source(tmp_path, names)

    assert torch.equal(_read(source, EMBEDDING), saved["model.embed_tokens.weight"])
    assert source.unexpected == []


def test_tied_embedding_that_is_saved_as_head_only_is_read_from_there(tmp_path: Path) -> None:
    names, saved = _saved(tmp_path, "qwen2")
    saved["lm_head.weight"] = saved.pop("model.embed_tokens.weight")
    _rewrite(tmp_path, saved)

    assert HEAD not in names.shapes
    assert torch.equal(_read(_source(tmp_path, names), EMBEDDING), saved["lm_head.weight"])


def test_tied_matrices_that_differ_are_refused(tmp_path: Path) -> None:
    names, saved = _saved(tmp_path, "qwen2")
    saved["lm_head.weight"] = saved["model.embed_tokens.weight"] + 1
    _rewrite(tmp_path, saved)

    with pytest.raises(CheckpointError, match="tie_word_embeddings=false"):
        _source(tmp_path, names)


def test_missing_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    names, saved = _saved(tmp_path, "qwen3")
    key = "model.layers.1.self_attn.k_proj.weight"
    _rewrite(tmp_path, {k: t for k, t in saved.items() if k != key})
    with pytest.raises(CheckpointError, match=key):
        _source(tmp_path, names)

    _rewrite(tmp_path, {**saved, key: saved[key][1:]})
    with pytest.raises(CheckpointError, match=key):
        _source(tmp_path, names)


def test_tensor_without_a_place_is_told(tmp_path: Path) -> None:
    names, saved = _saved(tmp_path, "qwen3")
    _rewrite(tmp_path, {**saved, "model.extra": torch.zeros(1), "model.rotary_emb.inv_freq": torch.zeros(1)})

    assert _source(tmp_path, names).unexpected == ["model.extra"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("decoder.final_layernorm.weight", "decoder.final_layernorm.weight"),
        ("decoder.layers.0.mlp.linear_fc2.weight", "decoder.layers.5.mlp.linear_fc2.weight"),
        (
            "decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight",
            "decoder.layers.5.mlp.experts.3.linear_fc1.weight",
        ),
        ("decoder.layers.0.mlp.experts.linear_fc2.weight1", "decoder.layers.5.mlp.experts.3.linear_fc2.weight"),
        (
            "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
            "decoder.layers.5.input_layernorm.weight",
        ),
        ("decoder.layers.0.mlp.linear_fc1.layer_norm_weight", "decoder.layers.5.pre_mlp_layernorm.weight"),
    ],
)
def test_own_name_is_that_of_the_whole_model_for_every_layer_spec(name: str, expected: str) -> None:
    assert own_name(name, 5, first_expert=2) == expected
