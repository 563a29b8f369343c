"""Checkpoints of Archon models in one process: what transformers writes is read, and what is written it reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, GenerationConfig

from areal.api.config.optimizer import OptimizerConfig
from areal.api.io_struct import SaveLoadMeta
from areal.engine.core.engine_checkpoints import EngineCheckpoints
from areal.engine.core.hf_checkpoint import HfDirectory
from areal.engine.core.hf_load import load_streamed
from areal.engine.core.lr_schedule import LrSchedule
from areal.engine.core.model_layout import named_full_tensors, read_part
from areal.engine.core.optimizer import ClippedOptimizer
from areal.engine.core.parallel_dims import ParallelGroups
from areal.engine.fsdp_utils.optimizer import build_shards
from areal.experimental.engine.archon_checkpoint import ArchonLayout
from areal.experimental.models.archon.model_spec import get_model_spec
from areal.experimental.models.archon.pipeline_split import keep_modules, split_modules
from areal.utils.errors import CheckpointError
from tests.archon_fakes import FAMILIES, hf_logits, hf_model, packed_row

CPU = torch.device("cpu")
EXPERT = "model.layers.1.mlp.experts.2.gate_proj.weight"
FUSED = "model.layers.1.mlp.experts.gate_up_proj"


def _save(family: str, path: Path, **settings: Any) -> dict[str, Tensor]:
    """Save a model with a generation config; returns the tensors of its checkpoint."""
    hf_model(family, **settings).save_pretrained(path)
    GenerationConfig(max_new_tokens=7, eos_token_id=1).save_pretrained(path)
    return load_file(path / "model.safetensors")


def _empty(path: Path, *, stages: int = 1, dtype: torch.dtype = torch.float32, is_critic: bool = False) -> ArchonLayout:
    """The model of a directory without its weights, perhaps as several parts."""
    config = AutoConfig.from_pretrained(path)
    spec = get_model_spec(config.model_type)
    args = spec.model_args_class.from_hf_config(config, is_critic=is_critic)
    with torch.device("meta"):
        whole = spec.model_class(args).to(dtype)
    modules = split_modules(stages, args.n_layers, is_critic=is_critic)
    parts = [whole] if stages == 1 else [keep_modules(whole, names) for names in modules]
    return ArchonLayout(parts, spec.state_dict_adapter_class(args), config, str(path))


def _loaded(path: Path, source: Path | None = None, **settings: Any) -> ArchonLayout:
    layout = _empty(path, **settings)
    load_streamed(layout, source or path, CPU, None)
    return layout


def _engine(layout: ArchonLayout, dtype: torch.dtype = torch.float32, optimizer: bool = True) -> EngineCheckpoints:
    if not optimizer:
        return EngineCheckpoints(layout, None, None, ParallelGroups(), dtype)
    config = OptimizerConfig(lr=1e-2)
    shards = build_shards(layout, dtype, sharded=False)
    stepper = ClippedOptimizer(config, shards, LrSchedule(config, None), None)
    return EngineCheckpoints(layout, shards, stepper, ParallelGroups(), dtype)


def _step(engine: EngineCheckpoints, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for shard in engine.shards.shards.values():
        shard.grad = torch.randn(shard.shape, generator=generator)
    engine.optimizer.step()


def _weights(layout: ArchonLayout) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in named_full_tensors(layout, torch.float32)}


def _assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert sorted(actual) == sorted(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")


def _rewrite(path: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file({k: t.contiguous().clone() for k, t in tensors.items()}, path / "model.safetensors", {"format": "pt"})


def _fuse(tensors: dict[str, Tensor]) -> None:
    """Experts as transformers holds them in memory."""
    prefixes = sorted({key.split(".experts.")[0] for key in tensors if ".experts." in key})
    for prefix in prefixes:
        names = [f"{prefix}.experts.{expert}" for expert in range(4)]
        parts = {p: torch.stack([tensors.pop(f"{n}.{p}.weight") for n in names]) for p in ("gate_proj", "up_proj")}
        tensors[f"{prefix}.experts.gate_up_proj"] = torch.cat(list(parts.values()), dim=1)
        tensors[f"{prefix}.experts.down_proj"] = torch.stack([tensors.pop(f"{n}.down_proj.weight") for n in names])


# --- loading


@pytest.mark.parametrize("family", ["qwen2", "llama_tied_linear", "qwen3", "qwen3_moe", "qwen3_moe_mixed"])
def test_load_into_an_empty_model_gives_the_logits_of_transformers(family: str, tmp_path: Path) -> None:
    _save(family, tmp_path)
    row = packed_row()

    [model] = _loaded(tmp_path).parts

    torch.testing.assert_close(model(*row), hf_logits(hf_model(family), row[0]), rtol=1e-5, atol=1e-5)
    assert model.args.tied == (model.output.weight is model.tok_embeddings.weight)


def test_load_below_float32_rounds_once(tmp_path: Path) -> None:
    expected = _save("qwen3_moe", tmp_path)

    layout = _loaded(tmp_path, dtype=torch.bfloat16)

    assert {parameter.dtype for _, parameter in layout.named_parameters()} == {torch.bfloat16}
    _assert_same(dict(named_full_tensors(layout, torch.bfloat16)), {k: t.bfloat16() for k, t in expected.items()})


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_moe_mixed"])
def test_load_from_fused_experts_equals_load_from_single_ones(family: str, tmp_path: Path) -> None:
    expected = _save(family, tmp_path)
    _rewrite(tmp_path, _fuse)
    assert FUSED in load_file(tmp_path / "model.safetensors")

    _assert_same(_weights(_loaded(tmp_path)), expected)


@pytest.mark.parametrize("fused", [False, True])
def test_pieces_of_a_shard_of_experts_read_only_its_own(
    fused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save("qwen3_moe", tmp_path)
    if fused:
        _rewrite(tmp_path, _fuse)
    source = _empty(tmp_path).source(tmp_path)
    names = [f"layers.1.moe.experts.{weight}" for weight in ("w1", "w2", "w3")]
    whole = {name: read_part(source, name, tuple(slice(0, n) for n in source.shapes[name])) for name in names}
    sizes = []
    read = HfDirectory.read

    def counted(self: HfDirectory, *args: Any) -> Tensor:
        tensor = read(self, *args)
        sizes.append(tensor.numel())
        return tensor

    monkeypatch.setattr(HfDirectory, "read", counted)

    for name in names:
        index = (slice(1, 3), slice(4, 12), slice(2, 10))
        pieces = list(source.pieces(name, index))
        assert [place[0] for place, _ in pieces] == [slice(1, 2), slice(2, 3)]
        torch.testing.assert_close(read_part(source, name, index), whole[name][index], rtol=0, atol=0)

    assert set(sizes) == {8 * 8}


@pytest.mark.parametrize("where", ["head", "both"])
@pytest.mark.parametrize("stages", [1, 2])
def test_load_of_a_tied_model_finds_its_matrix_under_either_name(where: str, stages: int, tmp_path: Path) -> None:
    embedding = _save("qwen2", tmp_path)["model.embed_tokens.weight"]

    def use_head(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        if where == "head":
            del tensors["model.embed_tokens.weight"]

    _rewrite(tmp_path, use_head)
    layout = _loaded(tmp_path, stages=stages)

    for name in ("tok_embeddings", "output"):
        [weight] = [getattr(part, name).weight for part in layout.parts if getattr(part, name) is not None]
        torch.testing.assert_close(weight.detach(), embedding, rtol=0, atol=0)


def test_load_of_a_tied_model_whose_matrices_differ_is_refused(tmp_path: Path) -> None:
    _save("qwen2", tmp_path)
    _rewrite(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))

    with pytest.raises(CheckpointError, match=r"lm_head\.weight differ.*tie_word_embeddings=false"):
        _loaded(tmp_path)


def test_load_of_a_base_model_checkpoint_needs_no_prefix(tmp_path: Path) -> None:
    expected = _save("qwen2", tmp_path)
    _rewrite(tmp_path, lambda t: [t.update({k.removeprefix("model."): t.pop(k)}) for k in list(t)])

    _assert_same(_weights(_loaded(tmp_path)), expected)


def test_load_in_pipeline_parts_gives_each_its_own_and_complains_of_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = _save("qwen3_moe_mixed", tmp_path)
    whole = _empty(tmp_path, stages=3)
    found: dict[str, Tensor] = {}

    for part in whole.parts:
        layout = ArchonLayout([part], whole.adapter, whole.kind.config, str(tmp_path))
        load_streamed(layout, tmp_path, CPU, None)
        own = _weights(layout)
        assert own
        assert found.keys().isdisjoint(own)
        found.update(own)

    _assert_same(found, expected)
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(EXPERT), rf"1 of \d+ tensors are missing: {EXPERT}"),
        (lambda t: t.pop("model.norm.weight"), r"1 of \d+ tensors are missing: model\.norm\.weight"),
        (lambda t: t.update({EXPERT: torch.ones(3, 5)}), rf"{EXPERT} is \[3, 5\], the model needs \[16, 32\]"),
        (
            lambda t: (_fuse(t), t.update({FUSED: t[FUSED][:3]})),
            rf"{FUSED} is \[3, 32, 32\], the model needs \[4, 32, 32\]",
        ),
        (
            lambda t: (_fuse(t), t.pop(FUSED)),
            r"8 of \d+ tensors are missing: model\.layers\.1\.mlp\.experts\.0\.gate_proj\.weight",
        ),
    ],
)
def test_load_of_a_damaged_directory_names_the_tensor(
    change: Callable[[dict[str, Tensor]], Any], message: str, tmp_path: Path
) -> None:
    _save("qwen3_moe", tmp_path)
    _rewrite(tmp_path, change)
    layout = _empty(tmp_path)

    with pytest.raises(CheckpointError, match=message):
        load_streamed(layout, tmp_path, CPU, None)

    assert all(parameter.is_meta for _, parameter in layout.named_parameters())


def test_load_of_a_truncated_file_names_it(tmp_path: Path) -> None:
    _save("qwen2", tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])

    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing or damaged"):
        _loaded(tmp_path)


def test_load_of_other_formats_and_families_is_refused(tmp_path: Path) -> None:
    _save("qwen2", tmp_path / "qwen2")
    _save("llama", tmp_path / "llama")
    layout = _empty(tmp_path / "qwen2")

    with pytest.raises(CheckpointError, match=r"type llama, this engine trains qwen2 \(Qwen2ForCausalLM\)"):
        load_streamed(layout, tmp_path / "llama", CPU, None)
    (tmp_path / "qwen2" / "model.safetensors").rename(tmp_path / "qwen2" / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="no plain safetensors weights"):
        load_streamed(layout, tmp_path / "qwen2", CPU, None)


def test_load_of_unknown_tensors_reports_them_and_a_later_load_refuses_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _save("qwen3_moe", tmp_path)
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "mtp.weight": torch.ones(2)}
    extra["model.layers.1.mlp.experts.4.gate_proj.weight"] = torch.ones(16, 32)
    _rewrite(tmp_path, lambda t: t.update(extra))

    layout = _loaded(tmp_path)

    assert "2 tensors have no place: " in caplog.text
    with pytest.raises(CheckpointError, match=r"no place for 2 tensors: .*mtp\.weight"):
        _engine(layout, optimizer=False).load(SaveLoadMeta(str(tmp_path), "hf", False), 0)


# --- Hugging Face export


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "qwen3_moe_mixed"])
def test_hf_export_equals_the_directory_of_transformers(family: str, stages: int, tmp_path: Path) -> None:
    expected = _save(family, tmp_path / "in")
    engine = _engine(_loaded(tmp_path / "in", stages=stages), optimizer=False)

    engine.save(SaveLoadMeta(str(tmp_path / "out"), "hf", False), 0)
    engine.stage(SaveLoadMeta(str(tmp_path / "staged"), "hf", False), 0)()

    for name in ("out", "staged"):
        _assert_same(load_file(tmp_path / name / "model.safetensors"), expected)
        for file in ("config.json", "generation_config.json"):
            assert json.loads((tmp_path / name / file).read_text()) == json.loads((tmp_path / "in" / file).read_text())
    row = packed_row()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager", dtype=torch.float32)
    torch.testing.assert_close(hf_logits(theirs, row[0]), hf_logits(hf_model(family), row[0]), rtol=1e-5, atol=1e-5)


def test_hf_export_names_its_dtype_and_needs_no_generation_config(tmp_path: Path) -> None:
    expected = _save("qwen3_moe", tmp_path / "in")
    (tmp_path / "in" / "generation_config.json").unlink()
    engine = _engine(_loaded(tmp_path / "in"), torch.bfloat16)

    class Tokenizer:
        def save_pretrained(self, path: Path) -> None:
            (path / "tokenizer.json").write_text("{}")

    engine.save(SaveLoadMeta(str(tmp_path / "out"), "hf", False, tokenizer=Tokenizer()), 0)

    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert AutoConfig.from_pretrained(tmp_path / "out").dtype == torch.bfloat16
    _assert_same(load_file(tmp_path / "out" / "model.safetensors"), {k: t.bfloat16() for k, t in expected.items()})


def test_hf_with_optimizer_continues_like_the_original(tmp_path: Path) -> None:
    _save("qwen3_moe", tmp_path / "in")
    meta = SaveLoadMeta(str(tmp_path / "out"), "hf", True)
    first, second = (_engine(_loaded(tmp_path / "in")) for _ in range(2))
    _step(first, seed=1)
    first.save(meta, 0)

    second.load(meta, 0)
    for engine in (first, second):
        _step(engine, seed=2)

    _assert_same(_weights(second.layout), _weights(first.layout))


# --- recover points


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "stages"), [("qwen2", 1), ("qwen3_moe", 2)])
def test_dcp_round_trip_restores_weights_masters_optimizer_and_version(
    family: str, stages: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    _save(family, tmp_path / "in")
    meta = SaveLoadMeta(str(tmp_path / "recover"), "dcp", True)
    first = _engine(_loaded(tmp_path / "in", stages=stages), dtype)
    _step(first, seed=1)
    first.optimizer.schedule.step()
    first.save(meta, 5)

    second = _engine(_loaded(tmp_path / "in"), dtype)  # whole: names do not depend on the parts
    assert second.load(meta, 0) == 5

    assert second.optimizer.schedule.steps_done == 1
    for engine in (first, second):
        _step(engine, seed=2)
    _assert_same(_weights(second.layout), _weights(first.layout))
    _assert_same(second.shards.shards, first.shards.shards)


@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 1)])
def test_dcp_of_a_tied_model_is_the_same_with_its_head_in_another_part(first: int, second: int, tmp_path: Path) -> None:
    _save("qwen2", tmp_path / "in")
    meta = SaveLoadMeta(str(tmp_path / "recover"), "dcp", True)
    engines = [_engine(_loaded(tmp_path / "in", stages=stages)) for stages in (first, second)]
    shards = [engine.shards.shards for engine in engines]
    _step(engines[0], seed=1)
    if first == 2:  # as the engine keeps both
        moments = [engines[0].optimizer.state_tensors(f"{name}.weight") for name in ("tok_embeddings", "output")]
        shards[0]["output.weight"].data.copy_(shards[0]["tok_embeddings.weight"])
        for key, value in moments[0].items():
            moments[1][key].copy_(value)
    engines[0].save(meta, 0)

    engines[1].load(meta, 0)

    for name, shard in shards[1].items():
        kept = name if name in shards[0] else "tok_embeddings.weight"
        torch.testing.assert_close(shard, shards[0][kept], rtol=0, atol=0)
        expected = engines[0].optimizer.state_tensors(kept)
        for key, value in engines[1].optimizer.state_tensors(name).items():
            torch.testing.assert_close(value, expected[key], rtol=0, atol=0)


def test_dcp_of_wrapped_layers_has_the_same_names(tmp_path: Path) -> None:
    _save("qwen3_moe", tmp_path / "in")
    plain, wrapped = (_loaded(tmp_path / "in") for _ in range(2))
    for index, layer in wrapped.parts[0].layers.items():
        wrapped.parts[0].layers[index] = torch.compile(checkpoint_wrapper(layer), backend="eager")
    meta = SaveLoadMeta(str(tmp_path / "recover"), "dcp", True)
    first, second = _engine(plain), _engine(wrapped)
    _step(first, seed=1)
    first.save(meta, 0)

    second.load(meta, 0)

    _assert_same(second.shards.shards, first.shards.shards)
    _assert_same(_weights(wrapped), _weights(plain))


# --- critics


def test_critic_from_a_language_model_gets_the_same_fresh_head_every_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _save("qwen2_untied", tmp_path)

    first, second = (_loaded(tmp_path, is_critic=True) for _ in range(2))

    score = _weights(first)["score.weight"]
    assert score.shape == (1, 32)
    assert 0 < score.std() < 1
    _assert_same(_weights(second), _weights(first))
    assert caplog.text == ""
    with pytest.raises(CheckpointError, match=r"missing: score\.weight"):
        _engine(first, optimizer=False).load(SaveLoadMeta(str(tmp_path), "hf", False), 0)


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_critic_export_is_a_sequence_classifier_that_keeps_its_head(family: str, tmp_path: Path) -> None:
    _save(family, tmp_path / "in")
    critic = _engine(_loaded(tmp_path / "in", is_critic=True))
    _step(critic, seed=1)

    critic.save(SaveLoadMeta(str(tmp_path / "out"), "hf", False), 0)

    expected = _weights(critic.layout)
    _assert_same(_weights(_loaded(tmp_path / "out", is_critic=True)), expected)
    theirs, report = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    torch.testing.assert_close(theirs.score.weight.detach(), expected["score.weight"], rtol=0, atol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_layout_of_every_family_knows_all_names_of_its_checkpoint(family: str, tmp_path: Path) -> None:
    tensors = _save(family, tmp_path)
    layout = _empty(tmp_path)

    assert sorted(key for keys in layout.whole_names.values() for key in keys) == sorted(tensors)
    assert layout.source(tmp_path).unexpected == []
