"""Adapters in the FSDP engine, one process: against peft, in checkpoints, merged, and what is refused."""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from areal.api.alloc_mode import ModelAllocation
from areal.api.engine_api import TrainEngine
from areal.api.io_struct import SaveLoadMeta
from areal.engine.core.lora import adapted_layers, is_adapter, plain_name
from areal.engine.core.lora_layout import ADAPTER_PREFIX, SCALING, adapter_pairs
from areal.engine.fsdp_engine import FSDPEngine
from areal.engine.fsdp_utils.lora import add_lora
from areal.experimental.engine.archon_dims import ArchonParallelDims
from areal.experimental.engine.archon_engine import ArchonEngine
from areal.experimental.models.archon.lora import check_lora
from areal.utils.errors import CheckpointError, ConfigError, UnsupportedFeatureError
from tests.engine_fakes import (
    adamw,
    batch,
    build_engine,
    engine_config,
    loss_fn,
    reference_logprobs,
    reference_step,
    weight_fn,
)
from tests.fakes import tiny_model

LORA: dict[str, Any] = {"use_lora": True, "lora_rank": 4, "lora_alpha": 8}
TWO_TARGETS = ["q_proj", "v_proj"]


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A tied and an untied model of two families."""
    root = tmp_path_factory.mktemp("models")
    tiny_model("qwen2").save_pretrained(root / "tied")
    tiny_model("llama", tie_word_embeddings=False).save_pretrained(root / "untied")
    return {name: str(root / name) for name in ("tied", "untied")}


def step(engine: FSDPEngine) -> dict[str, float]:
    return engine.train_batch(batch(), loss_fn, weight_fn)


def save(engine: FSDPEngine, path: Path, **settings: Any) -> str:
    engine.save(
        SaveLoadMeta(str(path), settings.pop("weight_format", "hf"), settings.pop("with_optim", False), **settings)
    )
    return str(path)


def base_weights(engine: FSDPEngine) -> dict[str, Tensor]:
    assert engine.module is not None
    named = engine.module.named_parameters()
    return {name: parameter.detach().clone() for name, parameter in named if not is_adapter(name)}


def assert_scores_of(model: Any, engine: FSDPEngine) -> None:
    """The engine's log-probs are those of a transformers model."""
    for row, found in zip(batch(), engine.eval().forward_batch(batch()), strict=True):
        expected = reference_logprobs(model.eval(), row)[0].detach()
        torch.testing.assert_close(found[0, : expected.shape[0]], expected, rtol=0, atol=2e-5)
    engine.train()


@pytest.mark.parametrize("name", ["tied", "untied"])
@pytest.mark.parametrize("targets", [[], TWO_TARGETS], ids=["all", "two"])
def test_lora_three_steps_equal_peft_and_torch(
    model_dirs: dict[str, str], name: str, targets: list[str], tmp_path: Path
) -> None:
    engine = build_engine(model_dirs[name], target_modules=targets, **LORA)
    start = save(engine, tmp_path / "start")
    plain = AutoModelForCausalLM.from_pretrained(model_dirs[name], dtype=torch.float32, attn_implementation="eager")
    reference = PeftModel.from_pretrained(plain, start, is_trainable=True)
    optimizer = adamw(reference)

    for _ in range(3):
        _, norm = reference_step(reference, batch(), optimizer)
        assert step(engine)["grad_norm"] == pytest.approx(norm, rel=2e-5)

    end = load_file(Path(save(engine, tmp_path / "end")) / "adapter_model.safetensors")
    expected = {n.replace(".default", ""): p for n, p in reference.named_parameters() if p.requires_grad}
    assert end.keys() == expected.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(end[key], tensor.detach(), rtol=1e-5, atol=1e-6, msg=key)
    assert any(tensor.abs().max() > 1e-3 for key, tensor in end.items() if "lora_B" in key)


def test_lora_start_adds_nothing_and_every_engine_starts_alike(model_dirs: dict[str, str], tmp_path: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(model_dirs["tied"], dtype=torch.float32, attn_implementation="eager")
    one, other = (build_engine(model_dirs["tied"], **LORA) for _ in range(2))

    assert_scores_of(plain, one)
    first, second = (
        load_file(Path(save(e, tmp_path / str(i))) / "adapter_model.safetensors") for i, e in enumerate((one, other))
    )
    assert first.keys() == second.keys()
    for key, tensor in first.items():
        assert torch.equal(tensor, second[key])
        assert bool(tensor.any()) == ("lora_A" in key)


def test_lora_base_stays_frozen_and_only_adapters_are_in_the_optimizer(
    model_dirs: dict[str, str], tmp_path: Path
) -> None:
    engine = build_engine(model_dirs["tied"], target_modules=TWO_TARGETS, **LORA)
    before = base_weights(engine)
    step(engine)

    for name, tensor in base_weights(engine).items():
        assert torch.equal(tensor, before[name]), name
    assert engine._shards is not None
    assert len(engine._shards.shards) == 2 * 2 * 2  # layers, targets, A and B
    assert all(is_adapter(name) for name in engine._shards.shards)
    point = save(engine, tmp_path / "point", weight_format="dcp", with_optim=True)
    saved = [
        key for key in dcp.FileSystemReader(point).read_metadata().state_dict_metadata if not key.startswith("rng.")
    ]
    assert len(saved) == len(engine._shards.shards) * 4  # the weight, two moments and a step each
    assert all(".lora_" in key for key in saved)


def test_lora_below_float32_only_adapters_have_masters(model_dirs: dict[str, str]) -> None:
    engine = build_engine(model_dirs["tied"], dtype="bfloat16", **LORA)
    before = base_weights(engine)
    step(engine)

    assert {tensor.dtype for tensor in before.values()} == {torch.bfloat16}
    assert engine._shards is not None
    assert {shard.dtype for shard in engine._shards.shards.values()} == {torch.float32}
    for name, tensor in base_weights(engine).items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lora_recover_point_goes_on_bit_for_bit(model_dirs: dict[str, str], tmp_path: Path, dtype: str) -> None:
    engine = build_engine(model_dirs["tied"], dtype=dtype, **LORA)
    step(engine)
    engine.set_version(7)
    point = save(engine, tmp_path / "point", weight_format="dcp", with_optim=True)
    step(engine)
    expected = {name: tensor.clone() for name, tensor in engine.named_full_tensors()}

    resumed = build_engine(model_dirs["tied"], dtype=dtype, **LORA)
    resumed.load(SaveLoadMeta(point, "dcp", True))
    assert resumed.get_version() == 7
    step(resumed)

    found = dict(resumed.named_full_tensors())
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_lora_recover_point_of_another_scale_is_refused(model_dirs: dict[str, str], tmp_path: Path) -> None:
    point = save(build_engine(model_dirs["tied"], **LORA), tmp_path / "point", weight_format="dcp")
    with pytest.raises(CheckpointError, match=r"lora=.*'alpha': 8.* this engine has lora=.*'alpha': 16"):
        build_engine(model_dirs["tied"], **{**LORA, "lora_alpha": 16}).load(SaveLoadMeta(point, "dcp", False))


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_lora_adapter_export_loads_in_peft_and_back(model_dirs: dict[str, str], name: str, tmp_path: Path) -> None:
    engine = build_engine(model_dirs[name], **LORA)
    for _ in range(2):
        step(engine)
    path = save(engine, tmp_path / "adapter")

    assert sorted(file.name for file in Path(path).iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    plain = AutoModelForCausalLM.from_pretrained(model_dirs[name], dtype=torch.float32, attn_implementation="eager")
    assert_scores_of(PeftModel.from_pretrained(plain, path), engine)
    again = build_engine(model_dirs[name], **LORA)
    again.load(SaveLoadMeta(path, "hf", False))
    for (key, ours), (_, theirs) in zip(engine.named_full_tensors(), again.named_full_tensors(), strict=True):
        assert torch.equal(ours, theirs), key


def test_lora_staged_export_equals_the_one_that_waits(model_dirs: dict[str, str], tmp_path: Path) -> None:
    engine = build_engine(model_dirs["tied"], **LORA)
    step(engine)
    waited = load_file(Path(save(engine, tmp_path / "waited")) / "adapter_model.safetensors")
    write = engine.stage_save(SaveLoadMeta(str(tmp_path / "staged"), "hf", False))
    step(engine)
    write()

    staged = load_file(tmp_path / "staged" / "adapter_model.safetensors")
    assert staged.keys() == waited.keys()
    assert all(torch.equal(staged[key], tensor) for key, tensor in waited.items())


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_lora_merged_export_and_published_weights_equal_merge_and_unload(
    model_dirs: dict[str, str], name: str, tmp_path: Path
) -> None:
    engine = build_engine(model_dirs[name], **LORA)
    for _ in range(2):
        step(engine)
    plain = AutoModelForCausalLM.from_pretrained(model_dirs[name], dtype=torch.float32, attn_implementation="eager")
    merged = PeftModel.from_pretrained(plain, save(engine, tmp_path / "adapter")).merge_and_unload()
    expected = dict(merged.named_parameters())

    path = save(engine, tmp_path / "merged", merged=True)

    published = dict(engine.named_full_tensors())
    assert published.keys() == expected.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(published[key], tensor.detach(), rtol=0, atol=1e-6, msg=key)
    exported = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    assert_scores_of(exported, engine)


def test_lora_sent_adapter_is_what_its_directory_holds(model_dirs: dict[str, str], tmp_path: Path) -> None:
    engine = build_engine(model_dirs["tied"], target_modules=TWO_TARGETS, **LORA)
    step(engine)
    path = save(engine, tmp_path / "adapter")
    engine.send_adapter()

    sent, held = dict(engine.named_full_tensors()), dict(adapter_pairs(path))
    assert sent.keys() == held.keys()
    assert all(name == SCALING or name.startswith(ADAPTER_PREFIX) for name in sent)
    assert sent[SCALING].tolist() == [2.0]
    for name, tensor in held.items():
        assert torch.equal(sent[name], tensor), name


def test_send_adapter_without_one_is_refused(model_dirs: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"actor\.use_lora=true"):
        build_engine(model_dirs["tied"]).send_adapter()


def test_lora_critic_trains_its_head_too_and_loads_in_peft(model_dirs: dict[str, str], tmp_path: Path) -> None:
    engine = build_engine(model_dirs["tied"], is_critic=True, **LORA)

    def squared(values: Tensor, packed: dict[str, Any]) -> Tensor:
        return (values - 1.0).square().mean()

    before = dict(engine.named_full_tensors())["score.weight"].clone()
    for _ in range(3):
        engine.train_batch(batch(), squared, weight_fn)
    path = save(engine, tmp_path / "adapter")

    assert not torch.equal(dict(engine.named_full_tensors())["score.weight"], before)
    plain = AutoModelForSequenceClassification.from_pretrained(model_dirs["tied"], num_labels=1, dtype=torch.float32)
    model = PeftModel.from_pretrained(plain, path).eval()
    row = batch()[0]
    length = int(row["attention_mask"].sum())
    inner = model.base_model.model
    expected = inner.score(inner.base_model(row["input_ids"][:, :length]).last_hidden_state[0])[:, 0].detach()
    found = engine.eval().forward_batch([row])[0][0, :length]
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("target", ["qkv_proj", "lm_head", "embed_tokens", "input_layernorm", "proj"])
def test_lora_unknown_target_lists_the_names_there_are(model_dirs: dict[str, str], target: str) -> None:
    with pytest.raises(ConfigError, match=rf"no linear layer {target} .*down_proj, gate_proj, k_proj, o_proj, q_proj"):
        build_engine(model_dirs["untied"], target_modules=["q_proj", target], **LORA)


@pytest.mark.parametrize("letter", ["t", "e"])
def test_lora_with_tensor_or_expert_parallelism_is_refused_by_the_engines(letter: str) -> None:
    strategy = ModelAllocation.from_str(f"archon:d2{letter}2").parallel
    with pytest.raises(UnsupportedFeatureError, match=f"use_lora=true with {letter}2: "):
        add_lora(tiny_model("qwen2"), engine_config("m", **LORA), strategy)
    dims = ArchonParallelDims.from_strategy(strategy, "cpu")
    with pytest.raises(UnsupportedFeatureError, match="adapters are not cut by t, p or e"):
        check_lora(engine_config("m", **LORA), dims, has_experts=False)


def test_lora_target_by_full_name_adapts_that_layer_alone(model_dirs: dict[str, str]) -> None:
    engine = build_engine(model_dirs["tied"], target_modules=["layers.1.self_attn.q_proj"], **LORA)
    assert engine._shards is not None
    assert {name.partition(".lora_")[0] for name in engine._shards.shards} == {"model.layers.1.self_attn.q_proj"}


@pytest.mark.parametrize("settings", [{}, LORA], ids=["plain", "lora"])
@pytest.mark.parametrize("kind", [FSDPEngine, ArchonEngine])
def test_adapter_directory_as_the_model_names_the_remedies(
    model_dirs: dict[str, str], tmp_path: Path, kind: Any, settings: dict[str, Any]
) -> None:
    path = save(build_engine(model_dirs["tied"], **LORA), tmp_path / "trained")
    backend = f"{kind.__name__.removesuffix('Engine').lower()}:d1"
    remedies = r"merge it into its base \(peft's PeftModel\.merge_and_unload, or SaveLoadMeta\(merged=True\) "
    with pytest.raises(ConfigError, match=remedies):
        kind(engine_config(path, backend=backend, **settings)).initialize(None, None)


@pytest.mark.parametrize("backend", ["fsdp:d1", "archon:d1"])
def test_lora_recover_point_of_another_base_is_refused(
    model_dirs: dict[str, str], tmp_path: Path, backend: str
) -> None:
    other = AutoModelForCausalLM.from_pretrained(model_dirs["tied"], dtype=torch.float32)
    for name, parameter in other.named_parameters():
        if name.endswith("_proj.weight"):
            parameter.data.mul_(1.05)
    other.save_pretrained(tmp_path / "other")

    def engine(path: str, **settings: Any) -> Any:
        kind = FSDPEngine if backend.startswith("fsdp") else ArchonEngine
        made: Any = kind(engine_config(path, backend=backend, **LORA, **settings))
        made.initialize(None, None)
        return made

    point = save(engine(model_dirs["tied"]), tmp_path / "point", weight_format="dcp")
    shutil.copytree(model_dirs["tied"], tmp_path / "moved")
    engine(str(tmp_path / "moved"), dtype="bfloat16").load(SaveLoadMeta(point, "dcp", False))
    with pytest.raises(CheckpointError, match=r"base_model_fingerprint=\w+, this engine has base_model_f\w+=\w+;"):
        engine(str(tmp_path / "other")).load(SaveLoadMeta(point, "dcp", False))


def test_send_adapter_of_an_engine_that_knows_none_is_refused() -> None:
    methods = {name: lambda self: None for name in TrainEngine.__abstractmethods__}
    methods.pop("send_adapter", None)
    engine = type("OwnEngine", (TrainEngine,), methods)()
    assert engine.sends_adapter is False
    with pytest.raises(ConfigError, match=r"rollout\.use_lora=true: OwnEngine publishes no adapter"):
        engine.send_adapter()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lora_alpha": 4}, "scales by 1, this engine by 2"),
        ({"r": 8, "lora_alpha": 16}, "have another shape"),
        ({"use_dora": True}, "use_dora=True; only plain LoRA"),
        ({"peft_type": "IA3"}, "peft_type=IA3"),
        ({"lora_alpha": None}, "no complete adapter"),
    ],
)
def test_lora_adapter_of_another_kind_is_refused(
    model_dirs: dict[str, str], tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    engine = build_engine(model_dirs["tied"], **LORA)
    rank = change.get("r", 4)
    path = Path(save(build_engine(model_dirs["tied"], **{**LORA, "lora_rank": rank}), tmp_path / "adapter"))
    config = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps({**config, **change}))

    with pytest.raises(CheckpointError, match=message):
        engine.load(SaveLoadMeta(str(path), "hf", False))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("whole model", r"is no complete adapter: adapter_config\.json cannot be read"),
        ("no weights", r"adapter_model\.safetensors is missing or damaged"),
        ("cut off", r"adapter_model\.safetensors is missing or damaged"),
    ],
)
def test_lora_load_of_no_adapter_is_refused(
    model_dirs: dict[str, str], tmp_path: Path, damage: str, message: str
) -> None:
    engine = build_engine(model_dirs["tied"], **LORA)
    path = Path(model_dirs["tied"]) if damage == "whole model" else Path(save(engine, tmp_path / "trained"))
    if damage == "no weights":
        (path / "adapter_model.safetensors").unlink()
    if damage == "cut off":
        data = (path / "adapter_model.safetensors").read_bytes()
        (path / "adapter_model.safetensors").write_bytes(data[: len(data) // 2])

    with pytest.raises(CheckpointError, match=message):
        engine.load(SaveLoadMeta(str(path), "hf", False))


@pytest.mark.parametrize("kind", [FSDPEngine, ArchonEngine])
def test_lora_without_peft_names_what_to_install(
    model_dirs: dict[str, str], monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    engine = kind(
        engine_config(model_dirs["tied"], backend=f"{kind.__name__.removesuffix('Engine').lower()}:d1", **LORA)
    )
    engine.create_process_group()
    with pytest.raises(ConfigError, match=r"peft cannot be imported .*pip install 'areal\[lora\]'"):
        engine.initialize(None, None)


@pytest.mark.parametrize("backend", ["fsdp:d1", "archon:d1"])
def test_lora_recomputed_activations_change_nothing(model_dirs: dict[str, str], backend: str, tmp_path: Path) -> None:
    ends = []
    for recompute in (False, True):
        kind = FSDPEngine if backend.startswith("fsdp") else ArchonEngine
        engine: Any = kind(engine_config(model_dirs["tied"], backend=backend, gradient_checkpointing=recompute, **LORA))
        engine.create_process_group()
        engine.initialize(None, None)
        engine.train()
        for _ in range(2):
            step(engine)
        engine.send_adapter()
        ends.append({name: tensor.clone() for name, tensor in engine.named_full_tensors()})
    plain, recomputed = ends
    assert plain.keys() == recomputed.keys()
    for name, tensor in plain.items():
        torch.testing.assert_close(recomputed[name], tensor, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("shape", [(5,), (1, 5), (3, 5)], ids=["rows", "one", "three"])
def test_lora_layer_adds_in_one_product_what_peft_adds(model_dirs: dict[str, str], shape: tuple[int, ...]) -> None:
    engine = build_engine(model_dirs["tied"], **LORA)
    _, layer = next(adapted_layers(engine.module))
    torch.nn.init.normal_(layer.lora_B["default"].weight)
    trained = [layer.lora_A["default"].weight, layer.lora_B["default"].weight]
    results = []
    for variants in (layer.lora_variant, {}):  # without a variant peft computes
        layer.lora_variant = variants
        x = torch.linspace(-1, 1, math.prod(shape) * 32).view(*shape, 32).requires_grad_()
        output = layer(x)
        results.append((output, *torch.autograd.grad(output.square().sum(), [x, *trained])))
    for ours, reference in zip(*results, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-4)


def test_plain_name_of_base_layers_only() -> None:
    assert plain_name("model.layers.0.mlp.up_proj.base_layer.weight") == "model.layers.0.mlp.up_proj.weight"
    assert plain_name("model.norm.weight") == "model.norm.weight"
    assert plain_name("model.base_layer.up_proj.weight") == "model.base_layer.up_proj.weight"
