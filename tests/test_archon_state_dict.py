"""Archon's state dicts under their Hugging Face names, against what transformers writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import PreTrainedModel

from areal.experimental.models.archon.state_dict import LAYER_MODULES, StateDictAdapter
from areal.utils.errors import CheckpointError
from tests.archon_fakes import FAMILIES, archon_model, hf_logits, hf_model, packed_row

EXACT = {"rtol": 0.0, "atol": 0.0}


def _saved(hf: PreTrainedModel, path: Path) -> dict[str, Tensor]:
    """The tensors of the checkpoint that transformers writes."""
    hf.save_pretrained(path)
    return load_file(path / "model.safetensors")


def _assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert sorted(actual) == sorted(expected)
    for key, tensor in expected.items():
        torch.testing.assert_close(actual[key], tensor, **EXACT, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("family", FAMILIES)
def test_to_hf_of_a_model_equals_the_checkpoint_of_transformers(family: str, tmp_path: Path) -> None:
    hf = hf_model(family)
    model = archon_model(hf)

    actual = StateDictAdapter(model.args).to_hf(model.state_dict())

    _assert_same(actual, _saved(hf, tmp_path))


@pytest.mark.parametrize("family", FAMILIES)
def test_from_hf_of_a_checkpoint_fills_every_parameter_in_its_shape(family: str, tmp_path: Path) -> None:
    hf = hf_model(family)
    model = archon_model(hf)
    expected = model.state_dict()

    actual = StateDictAdapter(model.args).from_hf(_saved(hf, tmp_path))

    _assert_same(actual, dict(expected))


@pytest.mark.parametrize("family", FAMILIES)
def test_to_hf_after_from_hf_gives_the_checkpoint_back(family: str, tmp_path: Path) -> None:
    hf = hf_model(family)
    checkpoint = _saved(hf, tmp_path)
    adapter = StateDictAdapter(archon_model(hf).args)

    _assert_same(adapter.to_hf(adapter.from_hf(checkpoint)), checkpoint)


@pytest.mark.parametrize("family", FAMILIES)
def test_convert_single_to_hf_one_by_one_equals_all_together_without_duplicates(family: str) -> None:
    model = archon_model(hf_model(family))
    adapter = StateDictAdapter(model.args)

    pairs = [pair for name, tensor in model.named_parameters() for pair in adapter.convert_single_to_hf(name, tensor)]

    assert len({key for key, _ in pairs}) == len(pairs)
    _assert_same(dict(pairs), adapter.to_hf(model.state_dict()))


def test_convert_single_to_hf_aliases_the_parameter() -> None:
    model = archon_model(hf_model("qwen3_moe"))
    adapter = StateDictAdapter(model.args)

    for name, parameter in model.named_parameters():
        for _, tensor in adapter.convert_single_to_hf(name, parameter):
            assert tensor.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr(), name


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_convert_single_to_hf_of_wrapped_layers_gives_the_same_names(family: str) -> None:
    model = archon_model(hf_model(family))
    adapter = StateDictAdapter(model.args)
    expected = list(adapter.to_hf(model.state_dict()))

    for index, layer in model.layers.items():
        model.layers[index] = torch.compile(checkpoint_wrapper(layer), backend="eager")
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    actual = [key for name in names for key, _ in adapter.convert_single_to_hf(name, model.get_parameter(name))]

    assert any("_orig_mod._checkpoint_wrapped_module" in name for name in names)
    assert actual == expected


@pytest.mark.parametrize("name", ["layers.0.attention.unknown.weight", "layers.0.x", "rope_cache", "score.weight"])
def test_convert_single_to_hf_of_a_name_without_counterpart_is_empty(name: str) -> None:
    adapter = StateDictAdapter(archon_model(hf_model("qwen2")).args)

    assert adapter.convert_single_to_hf(name, torch.zeros(1)) == []


def test_from_hf_of_a_tied_model_uses_the_embedding_only_where_the_head_is_missing() -> None:
    tied = StateDictAdapter(archon_model(hf_model("qwen2")).args)
    untied = StateDictAdapter(archon_model(hf_model("qwen2_untied")).args)
    embedding = {"model.embed_tokens.weight": torch.ones(2, 3)}

    assert tied.from_hf(embedding)["output.weight"] is embedding["model.embed_tokens.weight"]
    assert list(untied.from_hf(embedding)) == ["tok_embeddings.weight"]
    both = {**embedding, "lm_head.weight": torch.zeros(2, 3)}
    assert tied.from_hf(both)["output.weight"] is both["lm_head.weight"]


def test_from_hf_of_a_critic_leaves_the_language_head_out(caplog: pytest.LogCaptureFixture) -> None:
    hf = hf_model("qwen2_untied")
    critic = archon_model(hf, is_critic=True)

    state_dict = StateDictAdapter(critic.args).from_hf(hf.state_dict())

    assert set(critic.state_dict()) - set(state_dict) == {"score.weight"}
    assert "output.weight" not in state_dict
    assert caplog.text == ""


def test_from_hf_of_unknown_tensors_names_them_but_skips_rotary_frequencies(caplog: pytest.LogCaptureFixture) -> None:
    adapter = StateDictAdapter(archon_model(hf_model("qwen2")).args)
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2), "visual.patch.weight": torch.ones(2)}

    assert adapter.from_hf(extra) == {}

    assert "no place in the model for 1 checkpoint tensor(s): ['visual.patch.weight']" in caplog.text
    assert "inv_freq" not in caplog.text


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_weights_written_by_the_adapter_load_in_transformers(family: str, tmp_path: Path) -> None:
    """Archon trains, transformers loads: the whole way round, through files."""
    hf = hf_model(family)
    model = archon_model(hf)
    row = packed_row()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    hf.config.save_pretrained(tmp_path)
    tensors = StateDictAdapter(model.args).to_hf(model.state_dict())
    save_file({k: v.contiguous().clone() for k, v in tensors.items()}, tmp_path / "model.safetensors", {"format": "pt"})

    loaded = type(hf).from_pretrained(tmp_path, attn_implementation="eager", dtype=torch.float32)

    torch.testing.assert_close(model(*row), hf_logits(loaded, row[0]), rtol=1e-5, atol=1e-5)


def _composite(checkpoint: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors as a checkpoint with a vision tower has them, without the tower; the head keeps its name."""
    return {key.replace("model.", "model.language_model.", 1): tensor for key, tensor in checkpoint.items()}


@pytest.mark.parametrize("family", ["qwen2_untied", "qwen3_moe"])
def test_from_hf_of_composite_names_equals_that_of_plain_names(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hf = hf_model(family)
    checkpoint = _saved(hf, tmp_path)
    adapter = StateDictAdapter(archon_model(hf).args)

    actual = adapter.from_hf({**_composite(checkpoint), "model.visual.patch_embed.weight": torch.ones(1)})

    _assert_same(actual, adapter.from_hf(checkpoint))
    assert "1 checkpoint tensor(s): ['model.visual.patch_embed.weight']" in caplog.text


@pytest.mark.parametrize("with_index", [False, True])
@pytest.mark.parametrize("family", ["qwen2_untied", "qwen3_moe"])
def test_to_hf_writes_the_kind_of_names_that_the_source_has(family: str, with_index: bool, tmp_path: Path) -> None:
    hf = hf_model(family)
    model = archon_model(hf)
    plain = _saved(hf, tmp_path / "plain")
    composite = _composite(plain)
    (tmp_path / "composite").mkdir()
    file = "model-00001-of-00001.safetensors" if with_index else "model.safetensors"
    save_file(composite, tmp_path / "composite" / file, {"format": "pt"})
    if with_index:
        index = {"weight_map": dict.fromkeys(composite, file)}
        (tmp_path / "composite" / "model.safetensors.index.json").write_text(json.dumps(index))

    from_plain = StateDictAdapter(model.args, tmp_path / "plain").to_hf(model.state_dict())
    from_composite = StateDictAdapter(model.args, tmp_path / "composite").to_hf(model.state_dict())

    _assert_same(from_plain, plain)
    _assert_same(from_composite, composite)


def test_fqn_to_index_mapping_of_several_files_numbers_them_as_their_names_do(tmp_path: Path) -> None:
    hf = hf_model("qwen2")
    hf.save_pretrained(tmp_path, max_shard_size="20KB")
    args = archon_model(hf).args

    mapping = StateDictAdapter(args, tmp_path).fqn_to_index_mapping

    assert mapping is not None
    assert max(mapping.values()) > 1
    assert sorted(mapping) == sorted(StateDictAdapter(args).to_hf(archon_model(hf).state_dict()))
    n_files = max(mapping.values())
    for key, number in mapping.items():
        assert key in load_file(tmp_path / f"model-{number:05d}-of-{n_files:05d}.safetensors")


def test_fqn_to_index_mapping_without_index_is_none(tmp_path: Path) -> None:
    hf = hf_model("qwen2")
    hf.save_pretrained(tmp_path / "one_file")
    args = archon_model(hf).args

    for path in (None, "organisation/model", tmp_path / "absent", tmp_path / "one_file"):
        assert StateDictAdapter(args, path).fqn_to_index_mapping is None


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_adapter_of_a_damaged_checkpoint_names_the_directory(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("{")

    with pytest.raises(CheckpointError, match=f"{tmp_path}.*names cannot be read"):
        StateDictAdapter(archon_model(hf_model("qwen2")).args, tmp_path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("shards", ["1GB", "20KB"])
def test_get_hf_storage_reader_fills_a_model_through_distributed_checkpointing(shards: str, tmp_path: Path) -> None:
    hf = hf_model("qwen3_moe")
    hf.save_pretrained(tmp_path, max_shard_size=shards)
    model = archon_model(hf)
    adapter = StateDictAdapter(model.args, tmp_path)
    wanted = {key: torch.zeros_like(tensor) for key, tensor in adapter.to_hf(model.state_dict()).items()}

    dcp.load(wanted, storage_reader=adapter.get_hf_storage_reader(tmp_path), no_dist=True)

    _assert_same(adapter.from_hf(wanted), dict(model.state_dict()))


def test_adapter_with_other_tables_translates_both_ways() -> None:
    class Renamed(StateDictAdapter):
        layer_modules = {**LAYER_MODULES, "ffn_norm": "other_norm"}

    model = archon_model(hf_model("qwen2"))
    adapter = Renamed(model.args)
    state_dict = model.state_dict()

    checkpoint = adapter.to_hf(state_dict)

    assert "model.layers.1.other_norm.weight" in checkpoint
    assert not any("post_attention_layernorm" in key for key in checkpoint)
    _assert_same(adapter.from_hf(checkpoint), dict(state_dict))
