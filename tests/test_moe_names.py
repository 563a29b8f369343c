"""Qwen3-MoE: fused in memory, split under checkpoint names in exports and published weights."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from areal.api.io_struct import SaveLoadMeta
from areal.engine.core.hf_names import CheckpointNames
from areal.engine.core.weight_sync import InProcessPublisher, ParamRecord
from tests.engine_fakes import adamw, batch, build_engine, loss_fn, reference_logprobs, reference_step, weight_fn
from tests.fakes import tiny_model
from tests.moe_fakes import save_tiny_moe


@pytest.fixture(scope="module")
def moe_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_moe(tmp_path_factory.mktemp("moe"))


class CopyingReceiver:
    """Keeps copies of what is published."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}

    def stage_weights(self, pairs: Iterable[tuple[str, Tensor]], version: int) -> list[ParamRecord]:
        self.weights = {name: tensor.clone() for name, tensor in pairs}
        return [ParamRecord.of(name, tensor) for name, tensor in self.weights.items()]

    def commit_weights(self, version: int) -> None: ...

    def discard_weights(self) -> None: ...


def _reference(path: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")


def test_checkpoint_names_of_a_dense_model_are_its_own() -> None:
    model = tiny_model("qwen2")
    names = CheckpointNames(model)
    assert not names.differ
    weight = model.model.norm.weight
    assert names.split("model.norm.weight", weight) == [("model.norm.weight", weight)]


def test_named_full_tensors_equal_transformers_own_export_bit_for_bit(moe_dir: str, tmp_path: Path) -> None:
    engine = build_engine(moe_dir)
    engine.train_batch(batch(), loss_fn, weight_fn)
    engine.module.save_pretrained(tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    ours = dict(engine.named_full_tensors())
    assert ours.keys() == expected.keys()
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in ours
    for name, tensor in expected.items():
        assert torch.equal(ours[name], tensor), name


@pytest.mark.parametrize("settings", [{}, {"init_from_scratch": True}])
def test_save_and_load_go_through_checkpoint_names(moe_dir: str, tmp_path: Path, settings: dict[str, Any]) -> None:
    engine = build_engine(moe_dir, **settings)
    engine.train_batch(batch(), loss_fn, weight_fn)
    engine.save(SaveLoadMeta(str(tmp_path / "out"), "hf", False))
    saved = load_file(tmp_path / "out" / "model.safetensors")
    ours = dict(engine.named_full_tensors())
    assert saved.keys() == ours.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in ours.items())
    loaded = _reference(str(tmp_path / "out"))
    for (name, value), parameter in zip(engine.module.named_parameters(), loaded.parameters(), strict=True):
        assert torch.equal(value, parameter), name
    other = build_engine(moe_dir)
    other.load(SaveLoadMeta(str(tmp_path / "out"), "hf", False))
    for (name, value), parameter in zip(other.module.named_parameters(), loaded.parameters(), strict=True):
        assert torch.equal(value, parameter), name


def test_publisher_sends_checkpoint_names_that_a_plain_model_loads(moe_dir: str, tmp_path: Path) -> None:
    engine, receiver = build_engine(moe_dir, dtype="bfloat16"), CopyingReceiver()
    engine.train_batch(batch(), loss_fn, weight_fn)
    InProcessPublisher(engine.named_full_tensors, receiver).publish(1)
    engine.module.config.save_pretrained(tmp_path)
    save_file({k: v.contiguous() for k, v in receiver.weights.items()}, tmp_path / "model.safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for (name, value), parameter in zip(engine.module.named_parameters(), loaded.parameters(), strict=True):
        assert torch.equal(value, parameter), name


@pytest.mark.parametrize("n_mbs", [1, 3])
def test_train_batch_equals_plain_transformers(moe_dir: str, n_mbs: int) -> None:
    data, engine, reference = batch(), build_engine(moe_dir, mb_spec={"n_mbs": n_mbs}), _reference(moe_dir)
    optimizer = adamw(reference)
    for _ in range(2):
        loss = engine.eval_batch(data, loss_fn, weight_fn)
        result = engine.train_batch(data, loss_fn, weight_fn)
        expected_loss, expected_norm = reference_step(reference, data, optimizer)
        assert loss.item() == pytest.approx(expected_loss, rel=1e-5)
        assert result["grad_norm"] == pytest.approx(expected_norm, rel=1e-5)
    for (name, ours), theirs in zip(engine.module.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
    for trajectory, result in zip(data, engine.forward_batch(data), strict=True):
        with torch.no_grad():
            expected, _ = reference_logprobs(reference, trajectory)
        torch.testing.assert_close(result[0, : len(expected)], expected, rtol=1e-5, atol=1e-5)
