"""Streamed loading, offload and the optimizers on two live ranks against one process."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.engine_fakes import batch, build_engine, loss_fn, weight_fn
from tests.test_engine_memory import EXPERTS, SIZES, big_model
from tests.torchrun import memory_cells
from tests.torchrun.live_group import LiveGroup

MIB = 2**20


def _save(path: Path, family: str, **settings: Any) -> str:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SIZES, **settings})
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {
        "tied": _save(root / "tied", "qwen2", tie_word_embeddings=True, vocab_size=65),  # 65 rows: uneven shards
        "untied": _save(root / "untied", "llama", tie_word_embeddings=False),
        "experts": _save(root / "experts", "qwen3_moe", **EXPERTS),
        "big": big_model(root / "big"),
    }


def _only_config(path: str, out: Path) -> str:
    out.mkdir()
    shutil.copy(Path(path) / "config.json", out)
    return str(out)


@pytest.mark.parametrize("first_rank_reads", [False, True])
@pytest.mark.parametrize("name", ["tied", "untied", "experts"])
def test_two_ranks_streamed_loading_equals_the_checkpoint(
    two_ranks: LiveGroup, model_dirs: dict[str, str], tmp_path: Path, name: str, first_rank_reads: bool
) -> None:
    path = model_dirs[name]
    # Where rank 0 reads for all, the others do not even have the files.
    other = _only_config(path, tmp_path / "config") if first_rank_reads else path
    answers = two_ranks.run(
        memory_cells.load, paths=(path, other), fsdp={"memory_efficient_load": first_rank_reads}, optimizer=None
    )
    expected = load_file(Path(path) / "model.safetensors")
    whole = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    logprobs = build_engine(path, optimizer=None).forward_batch(batch())
    for answer in answers:
        assert answer["weights"].keys() == expected.keys()
        for key, tensor in answer["weights"].items():
            assert torch.equal(tensor, expected[key]), key
        for key, tensor in whole.named_buffers():
            assert torch.equal(answer["buffers"][key], tensor), key
        assert answer["tied"] == (name == "tied")
        for ours, theirs in zip(answer["logprobs"], logprobs, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5)


def test_two_ranks_tensor_parallel_loading_equals_the_checkpoint(
    two_ranks: LiveGroup, model_dirs: dict[str, str]
) -> None:
    path = model_dirs["untied"]
    expected = load_file(Path(path) / "model.safetensors")
    for answer in two_ranks.run(memory_cells.load, paths=(path, path), backend="fsdp:d1t2", optimizer=None):
        assert answer["weights"].keys() == expected.keys()
        for key, tensor in answer["weights"].items():
            assert torch.equal(tensor, expected[key]), key


@pytest.mark.parametrize("first_rank_reads", [False, True])
def test_two_ranks_missing_tensor_is_raised_on_both(
    two_ranks: LiveGroup, model_dirs: dict[str, str], tmp_path: Path, first_rank_reads: bool
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(model_dirs["untied"], broken)
    tensors = load_file(broken / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    other = _only_config(str(broken), tmp_path / "config") if first_rank_reads else str(broken)
    messages = two_ranks.run(
        memory_cells.load_error, paths=(str(broken), other), fsdp={"memory_efficient_load": first_rank_reads}
    )
    for message in messages:
        assert message.startswith("CheckpointError")
        assert "model.norm.weight" in message


@pytest.mark.parametrize("first_rank_reads", [False, True])
def test_two_ranks_loading_grows_by_the_shard_and_one_tensor(
    two_ranks: LiveGroup, model_dirs: dict[str, str], first_rank_reads: bool
) -> None:
    settings = {"fsdp": {"memory_efficient_load": first_rank_reads}}
    answers = two_ranks.run(memory_cells.growth, small=model_dirs["untied"], path=model_dirs["big"], **settings)
    for answer in answers:
        assert answer["growth"] <= answer["shard"] + answer["largest"] + 64 * MIB
        assert answer["shard"] <= 0.51 * answer["whole"]


def test_two_ranks_per_layer_step_is_bit_equal_to_the_whole_step(
    two_ranks: LiveGroup, model_dirs: dict[str, str]
) -> None:
    whole = two_ranks.run(memory_cells.train_state, path=model_dirs["tied"])
    layered = two_ranks.run(memory_cells.train_state, path=model_dirs["tied"], fsdp={"per_layer_optim_step": True})
    for ours, theirs in zip(layered, whole, strict=True):
        assert ours["results"] == theirs["results"]
        assert all(torch.equal(a, b) for a, b in zip(ours["state"], theirs["state"], strict=True))


def test_two_ranks_adam_bf16_equals_one_process(two_ranks: LiveGroup, model_dirs: dict[str, str]) -> None:
    settings: dict[str, Any] = {"dtype": "bfloat16", "optimizer": {"type": "adam_bf16", "lr": 1e-2, "eps": 1e-3}}
    first, second = two_ranks.run(memory_cells.train_state, path=model_dirs["untied"], **settings)
    single = build_engine(model_dirs["untied"], **settings)
    start = {name: tensor.clone() for name, tensor in single.named_full_tensors()}
    for step in range(2):
        result = single.train_batch(batch(), loss_fn, weight_fn)
        assert first["results"][step]["grad_norm"] == pytest.approx(result["grad_norm"], rel=0.02)
    for name, tensor in single.named_full_tensors():
        assert first["weights"][name].dtype == torch.bfloat16
        assert torch.equal(first["weights"][name], second["weights"][name])
        torch.testing.assert_close(first["weights"][name], tensor, rtol=0.02, atol=4e-3)
    assert any(not torch.equal(first["weights"][name], tensor) for name, tensor in start.items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_ranks_offload_is_bit_equal_and_training_goes_on(
    two_ranks: LiveGroup, model_dirs: dict[str, str], tmp_path: Path, dtype: str
) -> None:
    settings = {"path": model_dirs["tied"], "out": str(tmp_path / "out"), "dtype": dtype}
    for answer in two_ranks.run(memory_cells.offload_roundtrip, **settings):
        assert answer["held"] == 0
        assert answer["still"]
        assert answer["equal"]
        assert answer["same"]
        assert answer["after"]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == getattr(torch, dtype)


def test_two_ranks_offload_really_releases_memory(two_ranks: LiveGroup, model_dirs: dict[str, str]) -> None:
    answers = two_ranks.run(memory_cells.offload_growth, small=model_dirs["untied"], path=model_dirs["big"])
    for loaded, out, back, state in answers:
        assert loaded >= 0.95 * state
        assert out <= 0.05 * state + 32 * MIB
        assert back == pytest.approx(state, rel=0.15)
