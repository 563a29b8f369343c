"""Memory of FSDPEngine in one process: streamed loading, offload and onload, figures per phase."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from areal.api.config.fsdp import FSDPEngineConfig
from areal.api.io_struct import SaveLoadMeta
from areal.engine.core import offload
from areal.engine.core.empty_model import empty_causal_lm
from areal.engine.fsdp_engine import FSDPEngine
from areal.engine.fsdp_utils.loading import find_weights, load_streamed, weights_directory
from areal.utils import stats_tracker
from areal.utils.errors import CheckpointError, ConfigError, EngineError
from tests.engine_fakes import batch, build_engine, engine_config, loss_fn, weight_fn
from tests.fakes import tiny_model

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "llama": {"tie_word_embeddings": True},
    "mistral": {},
    "gemma": {"head_dim": 8},
    "gemma3_text": {"head_dim": 8},
    "phi3": {},
    "olmo2": {},
    "gpt_neox": {},
    "qwen3_moe": EXPERTS,
    "mixtral": EXPERTS,
    "olmoe": EXPERTS,
}


def _save(path: Path, family: str, **settings: Any) -> str:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES.get(family, {}), **settings})
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    GenerationConfig(max_new_tokens=7, eos_token_id=1).save_pretrained(path)
    return str(path)


def _streamed(path: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    model = empty_causal_lm(path, "sdpa", dtype, CPU)
    load_streamed(model, path, CPU, None)
    return model


def _tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return dict([*model.named_parameters(), *model.named_buffers()])


# --- streamed loading


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_load_streamed_equals_from_pretrained(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    path = _save(tmp_path, family)
    ours = _streamed(path, dtype)
    theirs = AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa", dtype=dtype)
    expected = _tensors(theirs)
    assert _tensors(ours).keys() == expected.keys()
    for name, tensor in _tensors(ours).items():
        assert tensor.dtype == expected[name].dtype, name
        assert torch.equal(tensor, expected[name]), name
    assert type(ours) is type(theirs)
    assert ours.training == theirs.training
    assert [p.requires_grad for p in ours.parameters()] == [p.requires_grad for p in theirs.parameters()]
    assert ours.config.to_dict() == theirs.config.to_dict()
    assert ours.generation_config.to_dict() == theirs.generation_config.to_dict()
    assert [str(c) for c in ours._weight_conversions] == [str(c) for c in theirs._weight_conversions]


def test_load_streamed_several_files_and_base_model_names(tmp_path: Path) -> None:
    model = tiny_model("llama", tie_word_embeddings=False)
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    for name, tensor in _streamed(str(tmp_path)).named_parameters():
        assert torch.equal(tensor, model.get_parameter(name)), name


def _rewrite(path: Path, change: Any) -> str:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return str(path)


def test_load_streamed_base_model_checkpoint_gets_its_prefix(tmp_path: Path) -> None:
    _save(tmp_path, "qwen2", tie_word_embeddings=True)

    def strip(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for name, tensor in _streamed(_rewrite(tmp_path, strip)).named_parameters():
        assert torch.equal(tensor, expected.get_parameter(name)), name


@pytest.mark.parametrize("both", [False, True])
def test_load_streamed_tied_weight_is_found_under_its_other_name(tmp_path: Path, both: bool) -> None:
    _save(tmp_path, "llama", tie_word_embeddings=True)

    def use_head(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        if not both:
            del tensors["model.embed_tokens.weight"]

    expected = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    model = _streamed(_rewrite(tmp_path, use_head))
    assert torch.equal(model.get_input_embeddings().weight, expected)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_load_streamed_tied_weights_that_differ_are_refused(tmp_path: Path) -> None:
    _save(tmp_path, "llama", tie_word_embeddings=True)
    path = _rewrite(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differ.*tie_word_embeddings=false"):
        _streamed(path)


def test_load_streamed_missing_tensors_are_listed(tmp_path: Path) -> None:
    _save(tmp_path, "llama")
    names = ("model.norm.weight", "model.layers.1.self_attn.k_proj.weight")
    path = _rewrite(tmp_path, lambda t: [t.pop(name) for name in names])
    with pytest.raises(CheckpointError, match="2 of .* tensors are missing") as caught:
        build_engine(path)
    assert all(name in str(caught.value) for name in names)


def test_load_streamed_misshapen_tensor_is_named(tmp_path: Path) -> None:
    _save(tmp_path, "llama")
    path = _rewrite(tmp_path, lambda t: t.update({"model.norm.weight": torch.ones(7)}))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is \[7\], the model needs \[32\]"):
        build_engine(path)


@pytest.mark.parametrize(
    ("key", "message"),
    [("gate_proj", "another shape|cannot be made"), ("up_proj", "another shape|cannot be made")],
)
def test_load_streamed_missing_expert_is_named(tmp_path: Path, key: str, message: str) -> None:
    _save(tmp_path, "qwen3_moe")
    path = _rewrite(tmp_path, lambda t: t.pop(f"model.layers.1.mlp.experts.2.{key}.weight"))
    with pytest.raises(CheckpointError, match=message) as caught:
        _streamed(path)
    assert "model.layers.1.mlp.experts.gate_up_proj" in str(caught.value)


def test_load_streamed_unexpected_tensor_is_only_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _save(tmp_path, "llama")
    path = _rewrite(tmp_path, lambda t: t.update({"mtp.weight": torch.ones(2)}))
    _streamed(path)


@pytest.mark.parametrize("change", ["bin", "quantised", "adapter"])
def test_weights_directory_other_formats_are_left_to_transformers(tmp_path: Path, change: str) -> None:
    _save(tmp_path, "llama")
    assert weights_directory(str(tmp_path)) == tmp_path
    if change == "bin":
        torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
        (tmp_path / "model.safetensors").unlink()
        engine = build_engine(str(tmp_path))
        assert engine.train_batch(batch(), loss_fn, weight_fn)["update_successful"] == 1.0
    elif change == "quantised":
        config = json.loads((tmp_path / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "fp8"}
        (tmp_path / "config.json").write_text(json.dumps(config))
    else:
        (tmp_path / "adapter_config.json").write_text("{}")
    assert weights_directory(str(tmp_path)) is None
    config = engine_config(str(tmp_path), fsdp=FSDPEngineConfig(memory_efficient_load=True))
    with pytest.raises(ConfigError, match=r"fsdp\.memory_efficient_load=true"):
        find_weights(config, None)


_GROWTH = """
import sys, torch
from tests.engine_fakes import build_engine
from tests.memory_probe import PeakRssAnon
small, path, dtype = sys.argv[1:]
torch.set_num_threads(1)
build_engine(small, dtype=dtype).destroy()
with PeakRssAnon() as peak:
    engine = build_engine(path, dtype=dtype)
count = sum(p.numel() for p in engine.module.parameters())
largest = max(p.numel() for p in engine.module.parameters())
print(peak.growth, count * (4 if dtype == "float32" else 6), largest * 4)
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_load_streamed_memory_grows_by_the_model_and_one_tensor(tmp_path: Path, dtype: str) -> None:
    # bfloat16: what stays is 4 bytes of master and 2 bytes of computing weight per parameter.
    small, path = _save(tmp_path / "small", "llama"), big_model(tmp_path / "big")
    command = [sys.executable, "-c", _GROWTH, small, path, dtype]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    growth, stays, largest = (int(word) for word in done.stdout.split())
    assert growth <= stays + largest + 64 * 2**20
    assert growth >= stays * 0.95


# --- offload and onload


def _state(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    """Copies of everything that offloading moves."""
    tensors = {f"p.{n}": p for n, p in engine.module.named_parameters()}
    tensors.update({f"b.{n}": b for n, b in engine.module.named_buffers()})
    optimizer = engine.loop._optimizer
    if optimizer is not None:
        for name, shard in optimizer.shards.shards.items():
            tensors[f"s.{name}"] = shard
            tensors.update({f"o.{name}.{k}": v for k, v in optimizer.state_tensors(name).items()})
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _assert_state(engine: FSDPEngine, expected: dict[str, torch.Tensor]) -> None:
    actual = _state(engine)
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        assert torch.equal(tensor.view(-1).view(torch.uint8), expected[name].view(-1).view(torch.uint8)), name


ENGINES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "adam_bf16": {"dtype": "bfloat16", "optimizer": {"type": "adam_bf16", "lr": 1e-3}},
    "sgd": {"optimizer": {"type": "sgd", "lr": 1e-3}},
    "per_layer": {"fsdp": FSDPEngineConfig(per_layer_optim_step=True)},
    "scorer": {"optimizer": None},
}


@pytest.mark.parametrize("kind", ENGINES)
def test_offload_onload_state_is_bit_equal_and_training_goes_on(tmp_path: Path, kind: str) -> None:
    path = _save(tmp_path, "qwen2", tie_word_embeddings=True)
    engine, other = (build_engine(path, **ENGINES[kind]) for _ in range(2))
    trains = ENGINES[kind].get("optimizer", True) is not None
    if trains:
        for each in (engine, other):
            each.train_batch(batch(), loss_fn, weight_fn)
    expected = _state(engine)
    engine.offload()
    engine.offload()
    assert engine.is_offload
    assert all(p.untyped_storage().nbytes() == 0 for p in engine.module.parameters())
    assert all(p.grad is None for p in engine.module.parameters())
    engine.onload()
    engine.onload()
    assert not engine.is_offload
    _assert_state(engine, expected)
    engine.offload()
    if trains:
        results = [each.train_batch(batch(seed=1), loss_fn, weight_fn) for each in (engine, other)]
        assert results[0] == results[1]
        assert not engine.is_offload
    for ours, theirs in zip(engine.forward_batch(batch()), other.forward_batch(batch()), strict=True):
        assert torch.equal(ours, theirs)
    assert not engine.is_offload
    _assert_state(engine, _state(other))


def test_offload_before_the_first_step_makes_no_optimizer_state(tmp_path: Path) -> None:
    engine = build_engine(_save(tmp_path, "llama"))
    engine.offload()
    assert not engine.loop.optimizer.torch_optimizer.state
    assert engine.train_batch(batch(), loss_fn, weight_fn)["update_successful"] == 1.0


@pytest.mark.parametrize("weight_format", ["hf", "dcp"])
def test_offloaded_engine_saves_loads_and_publishes_and_stays_offloaded(tmp_path: Path, weight_format: str) -> None:
    path = _save(tmp_path / "model", "qwen2")
    engine = build_engine(path)
    engine.train_batch(batch(), loss_fn, weight_fn)
    expected = _state(engine)
    meta = SaveLoadMeta(str(tmp_path / "saved"), weight_format, True)
    engine.offload()
    engine.save(meta)
    assert engine.is_offload
    engine.stage_save(SaveLoadMeta(str(tmp_path / "staged"), weight_format, True))()
    assert engine.is_offload
    engine.export_stats()
    published = {name: tensor.clone() for name, tensor in engine.named_full_tensors()}
    assert engine.is_offload
    assert all(p.untyped_storage().nbytes() == 0 for p in engine.module.parameters())
    assert torch.equal(published["model.norm.weight"], expected["p.model.norm.weight"])
    for name in ("saved", "staged"):
        other = build_engine(path)
        other.offload()
        other.load(SaveLoadMeta(str(tmp_path / name), weight_format, True))
        assert other.is_offload
        other.onload()
        _assert_state(other, expected)
    engine.onload()
    _assert_state(engine, expected)


def test_offloader_zeros_are_not_kept_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, zeros = torch.arange(1000.0), torch.zeros(3000)
    sizes: list[int] = []
    park = offload._park_in_file

    def counted(storages: list[torch.UntypedStorage]) -> Any:
        sizes.append(sum(storage.nbytes() for storage in storages))
        return park(storages)

    monkeypatch.setattr(offload, "_park_in_file", counted)
    offloader = offload.Offloader(lambda: [kept], torch.device("cpu"), lambda: None, lambda: [zeros])

    for _ in range(2):
        offloader.offload()
        assert (kept.untyped_storage().nbytes(), zeros.untyped_storage().nbytes()) == (0, 0)
        torch.full((3000,), 7.0)  # memory that is given away next is not zero
        offloader.onload()

        assert torch.equal(kept, torch.arange(1000.0))
        assert torch.equal(zeros, torch.zeros(3000))
    assert sizes == [4000, 4000]


def test_resident_is_reentrant_and_offloads_only_at_the_outermost_end(tmp_path: Path) -> None:
    engine = build_engine(_save(tmp_path, "llama"))
    engine.offload()
    with engine.resident():
        assert not engine.is_offload
        with engine.resident():
            assert len(list(engine.named_full_tensors())) > 0
        assert not engine.is_offload
    assert engine.is_offload
    with pytest.raises(ZeroDivisionError), engine.resident():
        raise ZeroDivisionError
    assert engine.is_offload
    engine.eval()
    assert not engine.is_offload
    with engine.resident():
        pass
    assert not engine.is_offload


def test_offload_full_disk_is_named_and_the_engine_stays_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FullDisk:
        def write(self, _: Any) -> int:
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            pass

    engine = build_engine(_save(tmp_path, "llama"))
    expected = _state(engine)
    monkeypatch.setattr("tempfile.TemporaryFile", lambda **_: FullDisk())
    with pytest.raises(EngineError, match=r"No space left on device.*TMPDIR"):
        engine.offload()
    assert not engine.is_offload
    _assert_state(engine, expected)


def test_offload_before_initialize_is_an_engine_error(tmp_path: Path) -> None:
    engine = FSDPEngine(engine_config(str(tmp_path)))
    with pytest.raises(EngineError, match="not initialized"):
        engine.offload()
    engine.onload()


def test_destroy_while_offloaded_frees_everything(tmp_path: Path) -> None:
    engine = build_engine(_save(tmp_path, "llama"))
    engine.offload()
    engine.destroy()
    assert not engine.is_offload


_OFFLOAD = """
import sys, torch
from tests.engine_fakes import build_engine
from tests.memory_probe import rss_anon
small, path = sys.argv[1:]
torch.set_num_threads(1)
build_engine(small).destroy()
before = rss_anon()
engine = build_engine(path)
for name in engine.loop.optimizer.shards.shards:
    for tensor in engine.loop.optimizer.state_tensors(name).values():
        tensor.fill_(1)
loaded = rss_anon()
figures = [loaded - before, 12 * sum(p.numel() for p in engine.module.parameters())]
for _ in range(2):
    engine.offload()
    figures.append(rss_anon() - before)
    engine.onload()
    figures.append(rss_anon() - before)
print(*figures)
"""


def test_offload_really_releases_memory(tmp_path: Path) -> None:
    small, path = _save(tmp_path / "small", "llama"), big_model(tmp_path / "big")
    done = subprocess.run(
        [sys.executable, "-c", _OFFLOAD, small, path], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    loaded, state, *turns = (int(word) for word in done.stdout.split())
    assert loaded >= state  # weights and two moments
    for out, back in zip(turns[::2], turns[1::2], strict=True):
        assert out <= 0.05 * state + 32 * 2**20
        assert back == pytest.approx(state, rel=0.1)


def test_offload_params_on_a_cpu_is_a_config_error(tmp_path: Path) -> None:
    path = _save(tmp_path, "llama")
    with pytest.raises(ConfigError, match=r"fsdp\.offload_params=true: torch's CPU offload does not run on a CPU"):
        build_engine(path, fsdp=FSDPEngineConfig(offload_params=True))


# --- figures per phase


def test_memory_of_each_phase_is_recorded(tmp_path: Path) -> None:
    engine = build_engine(_save(tmp_path / "model", "llama"))
    stats_tracker.export_all()
    for _ in range(2):
        engine.train_batch(batch(), loss_fn, weight_fn)
    engine.forward_batch(batch())
    engine.eval_batch(batch(), loss_fn, weight_fn)
    engine.save(SaveLoadMeta(str(tmp_path / "out"), "hf", False))
    stats = engine.export_stats()
    for phase in ("train", "forward", "eval", "save"):
        assert stats[f"memory/{phase}/peak_gb"] >= stats[f"memory/{phase}/allocated_gb"] > 0.01
    assert stats["memory/train/calls"] == 2


def big_model(path: Path) -> str:
    """150 MB of float32: a peak of two copies cannot hide behind the allowance."""
    config = AutoConfig.for_model(
        "llama", **{**SIZES, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 5, "vocab_size": 16000}
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return str(path)
