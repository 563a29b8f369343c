"""Checkpoints of FSDPEngine in one process: Hugging Face export and import, recover points."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from areal.api.io_struct import FinetuneSpec, SaveLoadMeta
from areal.engine.core import checkpoint, hf_checkpoint
from areal.engine.fsdp_engine import FSDPEngine
from areal.utils.errors import CheckpointError, EngineError
from tests.engine_fakes import batch, build_engine, loss_fn, weight_fn
from tests.fakes import tiny_model

SPEC = FinetuneSpec(total_train_epochs=1, dataset_size=20, train_batch_size=1)
COSINE = {"lr": 1e-2, "lr_scheduler_type": "cosine", "warmup_steps_proportion": 0.2, "min_lr_ratio": 0.1}


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    tiny_model("qwen2").save_pretrained(root / "tied")
    tiny_model("qwen3", tie_word_embeddings=False).save_pretrained(root / "untied")
    return {name: str(root / name) for name in ("tied", "untied")}


class _Tokenizer:
    def save_pretrained(self, path: Path) -> None:
        (path / "tokenizer.json").write_text("{}")


def _files(path: Path) -> dict[str, set[str]]:
    """Tensor names by safetensors file."""
    found = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as handle:
            found[file.name] = set(handle.keys())
    return found


def _run(engine: FSDPEngine, steps: int) -> list[dict[str, float]]:
    results = []
    for _ in range(steps):
        rows = batch(seed=random.randrange(1000))  # depends on the random state, which a recover point restores
        results.append(engine.train_batch(rows, loss_fn, weight_fn))
        engine.lr_scheduler_step()
        engine.set_version(engine.get_version() + 1)
    return results


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["tied", "untied"])
def test_hf_export_loads_with_equal_logits(model_dirs: dict[str, str], name: str, dtype: str, tmp_path: Path) -> None:
    engine = build_engine(model_dirs[name], dtype=dtype)
    engine.train_batch(batch(), loss_fn, weight_fn)
    engine.save(SaveLoadMeta(str(tmp_path / "out"), "hf", False, tokenizer=_Tokenizer()))
    files = _files(tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert str(loaded.dtype) == f"torch.{dtype}"
    assert str(AutoConfig.from_pretrained(tmp_path / "out").dtype) == f"torch.{dtype}"
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    tied = name == "tied"
    assert ("lm_head.weight" in files["model.safetensors"]) != tied
    assert (loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()) == tied
    ids = batch((9,))[0]["input_ids"][:, :9]
    engine.module.eval()
    engine.module.config._attn_implementation = "sdpa"
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, engine.module(ids).logits, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_hf_export_sharded_index_lists_exactly_the_tensors(
    model_dirs: dict[str, str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf_checkpoint, "MAX_FILE_BYTES", 20_000)
    engine = build_engine(model_dirs[name])
    engine.save(SaveLoadMeta(str(tmp_path / "out"), "hf", False))
    files = _files(tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(files) > 1
    assert index["weight_map"] == {tensor: file for file, tensors in files.items() for tensor in tensors}
    assert index["metadata"]["total_size"] == sum(p.numel() * 4 for p in engine.module.parameters())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for ours, theirs in zip(engine.module.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_hf_load_replaces_weights_and_masters(model_dirs: dict[str, str], tmp_path: Path) -> None:
    tiny_model("qwen2", seed=5).save_pretrained(tmp_path / "other")
    for dtype in ("float32", "bfloat16"):
        engine = build_engine(model_dirs["tied"], dtype=dtype)
        engine.load(SaveLoadMeta(str(tmp_path / "other"), "hf", False))
        expected = build_engine(str(tmp_path / "other"), dtype=dtype)
        for e in (engine, expected):
            e.train_batch(batch(), loss_fn, weight_fn)
        for (name, ours), (_, theirs) in zip(engine.named_full_tensors(), expected.named_full_tensors(), strict=True):
            assert torch.equal(ours, theirs), name


def test_hf_load_other_architecture_is_refused(model_dirs: dict[str, str], tmp_path: Path) -> None:
    tiny_model("qwen2", hidden_size=16).save_pretrained(tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight is \[64, 16\], the model needs \[64, 32\]"):
        build_engine(model_dirs["tied"]).load(SaveLoadMeta(str(tmp_path / "other"), "hf", False))
    tiny_model("llama").save_pretrained(tmp_path / "llama")
    with pytest.raises(CheckpointError, match=r"type llama, this engine trains qwen2 \(.*Qwen2ForCausalLM\)"):
        build_engine(model_dirs["tied"]).load(SaveLoadMeta(str(tmp_path / "llama"), "hf", False))


def _edit_weights(path: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def test_hf_load_missing_or_unknown_tensors_are_named_and_nothing_is_loaded(
    model_dirs: dict[str, str], tmp_path: Path
) -> None:
    other = tmp_path / "other"
    tiny_model("qwen2", seed=5).save_pretrained(other)
    gone = ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"]
    engine = build_engine(model_dirs["tied"])
    before = {name: tensor.clone() for name, tensor in engine.named_full_tensors()}

    _edit_weights(other, lambda tensors: [tensors.pop(name) for name in gone])
    with pytest.raises(CheckpointError, match="2 of 26 tensors are missing") as missing:
        engine.load(SaveLoadMeta(str(other), "hf", False))
    tiny_model("qwen2", seed=5, num_hidden_layers=3).save_pretrained(other)
    with pytest.raises(CheckpointError, match=r"no place for 12 tensors: model\.layers\.2\."):
        engine.load(SaveLoadMeta(str(other), "hf", False))

    assert all(name in str(missing.value) for name in gone)
    assert all(torch.equal(before[name], tensor) for name, tensor in engine.named_full_tensors())


def test_hf_load_reads_older_checkpoints_and_refuses_damaged_ones(model_dirs: dict[str, str], tmp_path: Path) -> None:
    other = tmp_path / "other"
    model = tiny_model("qwen2", seed=5)
    model.save_pretrained(other)
    _edit_weights(
        other, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    )
    engine = build_engine(model_dirs["tied"])
    engine.load(SaveLoadMeta(str(other), "hf", False))  # a tied head that was written too
    assert torch.equal(engine.module.model.norm.weight, model.model.norm.weight)

    torch.save(model.state_dict(), other / "pytorch_model.bin")
    weights = (other / "model.safetensors").rename(other / "weights")
    engine = build_engine(model_dirs["tied"])
    engine.load(SaveLoadMeta(str(other), "hf", False))
    assert torch.equal(engine.module.model.embed_tokens.weight, model.model.embed_tokens.weight)

    (other / "pytorch_model.bin").unlink()
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        engine.load(SaveLoadMeta(str(other), "hf", False))
    (other / "model.safetensors").write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(CheckpointError, match="model.safetensors is missing or damaged"):
        engine.load(SaveLoadMeta(str(other), "hf", False))


@pytest.mark.parametrize(("weight_format", "with_optim"), [("hf", False), ("hf", True), ("dcp", True)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_staged_save_writes_the_snapshot_while_training_goes_on(
    model_dirs: dict[str, str], weight_format: str, with_optim: bool, dtype: str, tmp_path: Path
) -> None:
    engine = build_engine(model_dirs["tied"], dtype=dtype)
    tokenizer = _Tokenizer()
    for number in range(2):  # the second snapshot uses the buffers of the first
        _run(engine, 1)
        engine.save(SaveLoadMeta(str(tmp_path / f"sync{number}"), weight_format, with_optim, tokenizer))
        write = engine.stage_save(SaveLoadMeta(str(tmp_path / f"async{number}"), weight_format, with_optim, tokenizer))
        _run(engine, 1)
        with pytest.raises(EngineError, match="still being written"):
            engine.stage_save(SaveLoadMeta(str(tmp_path / "third"), weight_format, with_optim))
        thread = threading.Thread(target=write)
        thread.start()
        _run(engine, 1)
        thread.join()
        _assert_same_checkpoint(tmp_path / f"async{number}", tmp_path / f"sync{number}", model_dirs["tied"], with_optim)


def _assert_same_checkpoint(ours: Path, theirs: Path, path: str, with_optim: bool) -> None:
    """Equal files, or for recover points an equal engine after loading."""
    names = {file.name for file in theirs.iterdir()}
    assert {file.name for file in ours.iterdir()} == names
    if "config.json" in names:
        for name in names - {file for file in names if file.endswith(".pt")}:
            assert (ours / name).read_bytes() == (theirs / name).read_bytes(), name
        return
    engines = []
    for directory in (ours, theirs):
        engines.append(build_engine(path))
        engines[-1].load(SaveLoadMeta(str(directory), "dcp", with_optim))
        _run(engines[-1], 1)
    assert engines[0].get_version() == engines[1].get_version()
    for (name, mine), (_, other) in zip(engines[0].named_full_tensors(), engines[1].named_full_tensors(), strict=True):
        assert torch.equal(mine, other), name


def test_save_overwrites_in_one_step(model_dirs: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    engine = build_engine(model_dirs["tied"])
    engine.save(SaveLoadMeta(str(out), "hf", False))
    incomplete, done = [], threading.Event()

    def watch() -> None:
        while not done.is_set():
            if not (out / "model.safetensors").is_file():
                incomplete.append(out)

    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(20):
        engine.save(SaveLoadMeta(str(out), "hf", False))
    done.set()
    watcher.join()
    assert not incomplete


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dcp_resume_equals_uninterrupted_run(model_dirs: dict[str, str], dtype: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"optimizer": COSINE, "ft_spec": SPEC, "dtype": dtype}
    meta = SaveLoadMeta(str(tmp_path / "recover"), "dcp", True)
    random.seed(3)
    engine = build_engine(model_dirs["tied"], **settings)
    _run(engine, 3)
    engine.save(meta)
    expected = _run(engine, 4)

    random.seed(99)
    torch.manual_seed(99)
    resumed = build_engine(model_dirs["tied"], **settings)
    resumed.load(meta)
    assert resumed.get_version() == 3
    assert _run(resumed, 4) == expected
    for (name, ours), (_, theirs) in zip(resumed.named_full_tensors(), engine.named_full_tensors(), strict=True):
        assert torch.equal(ours, theirs), name


def test_dcp_without_optimizer_restores_weights_and_version(model_dirs: dict[str, str], tmp_path: Path) -> None:
    meta = SaveLoadMeta(str(tmp_path / "recover"), "dcp", False)
    engine = build_engine(model_dirs["untied"])
    _run(engine, 1)
    engine.save(meta)
    scorer = build_engine(model_dirs["untied"], optimizer=None)
    scorer.load(meta)
    assert scorer.get_version() == 1
    for ours, theirs in zip(scorer.forward_batch(batch()), engine.forward_batch(batch()), strict=True):
        assert torch.equal(ours, theirs)


def test_hf_with_optimizer_continues_like_the_original(model_dirs: dict[str, str], tmp_path: Path) -> None:
    meta = SaveLoadMeta(str(tmp_path / "out"), "hf", True)
    engine = build_engine(model_dirs["tied"])
    engine.train_batch(batch(), loss_fn, weight_fn)
    engine.save(meta)
    assert (tmp_path / "out" / "optim_world_size_1_rank_0.pt").is_file()
    other = build_engine(model_dirs["tied"])
    other.load(meta)
    for e in (engine, other):
        e.train_batch(batch(seed=1), loss_fn, weight_fn)
    for (name, ours), (_, theirs) in zip(other.named_full_tensors(), engine.named_full_tensors(), strict=True):
        assert torch.equal(ours, theirs), name
    (tmp_path / "out" / "optim_world_size_1_rank_0.pt").unlink()
    with pytest.raises(CheckpointError, match="optim_world_size_1_rank_0"):
        other.load(meta)


@pytest.mark.parametrize("weight_format", ["hf", "dcp"])
def test_save_that_fails_leaves_the_old_checkpoint(
    model_dirs: dict[str, str], weight_format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meta = SaveLoadMeta(str(tmp_path / "out"), weight_format, weight_format == "dcp")
    engine = build_engine(model_dirs["tied"])
    engine.save(meta)
    before = {f.name: f.read_bytes() for f in (tmp_path / "out").iterdir()}
    engine.train_batch(batch(), loss_fn, weight_fn)

    def disk_full(*args: Any, **kwargs: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(hf_checkpoint, "save_file", disk_full)
    monkeypatch.setattr(checkpoint.json, "dumps", disk_full)
    with pytest.raises(CheckpointError, match=r"what was there before is unchanged.*no space"):
        engine.save(meta)
    monkeypatch.undo()
    assert [f.name for f in tmp_path.iterdir()] == ["out"]  # the space is given back
    assert {f.name: f.read_bytes() for f in (tmp_path / "out").iterdir()} == before
    engine.save(meta)  # leftovers do not stand in the way
    assert [f.name for f in tmp_path.iterdir()] == ["out"]
    assert {f.name: f.read_bytes() for f in (tmp_path / "out").iterdir()} != before


def test_dcp_load_incomplete_or_foreign_is_an_error(model_dirs: dict[str, str], tmp_path: Path) -> None:
    engine = build_engine(model_dirs["tied"])
    meta = SaveLoadMeta(str(tmp_path / "recover"), "dcp", False)
    with pytest.raises(CheckpointError, match="no complete recover point"):
        engine.load(meta)
    engine.save(meta)
    with pytest.raises(CheckpointError, match=r"tensors are missing: optim\.model\.embed_tokens\.weight\.step"):
        engine.load(SaveLoadMeta(meta.path, "dcp", True))
    for arch, overrides, message in (
        ("llama", {}, "model_type=qwen2, this engine has model_type=llama"),
        ("qwen2", {"intermediate_size": 32}, r"up_proj.weight is \[64, 32\], the model needs \[32, 32\]"),
        ("qwen2", {"num_hidden_layers": 3}, r"12 of 38 tensors are missing: model\.model\.layers\.2\."),
    ):
        tiny_model(arch, **overrides).save_pretrained(tmp_path / "foreign")
        with pytest.raises(CheckpointError, match=message):
            build_engine(str(tmp_path / "foreign")).load(meta)
    state = json.loads((tmp_path / "recover" / "engine.json").read_text())
    (tmp_path / "recover" / "engine.json").write_text(json.dumps({**state, "format": 99}))
    with pytest.raises(CheckpointError, match="format 99"):
        engine.load(meta)


def test_save_unknown_format_is_refused(model_dirs: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="allowed: hf, dcp"):
        build_engine(model_dirs["tied"]).save(SaveLoadMeta(str(tmp_path), "gguf", False))


def test_named_full_tensors_names_are_those_of_the_checkpoint(model_dirs: dict[str, str]) -> None:
    for name in ("tied", "untied"):
        with safe_open(Path(model_dirs[name]) / "model.safetensors", "pt") as handle:
            expected = {key: handle.get_tensor(key) for key in handle.keys()}  # noqa: SIM118 - not a dict
        ours = dict(build_engine(model_dirs[name]).named_full_tensors())
        assert ours.keys() == expected.keys()
        assert all(torch.equal(ours[key], expected[key]) for key in expected)
        assert not any(tensor.requires_grad for tensor in ours.values())


def test_named_full_tensors_left_half_way_keeps_gradients_on(model_dirs: dict[str, str]) -> None:
    engine = build_engine(model_dirs["tied"])
    pairs, other = engine.named_full_tensors(), engine.named_full_tensors()
    next(pairs)
    next(other)
    del pairs
    assert torch.is_grad_enabled()
