"""Everything that a CPU cannot show, on one or two CUDA devices: ``pytest -m gpu tests/gpu_smoke.py``, in minutes.

The right value is the same as everywhere: plain transformers in float32 on the CPU. Skips with the reason where there
is no device.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from areal.api.config.fsdp import FSDPEngineConfig
from areal.api.config.inference import NativeConfig
from areal.api.config.megatron import FP8EngineConfig
from areal.api.config.train import FailureCaptureConfig
from areal.api.io_struct import SaveLoadMeta
from areal.engine.core.device_stats import DeviceRuntimeInfo
from areal.engine.core.replay import replay_step
from areal.engine.core.weight_sync import InProcessPublisher
from areal.engine.fsdp_engine import FSDPEngine
from areal.engine.native.engine import NativeEngine
from areal.utils.errors import UnsupportedFeatureError
from tests.engine_fakes import adamw, batch, build_engine, loss_fn, reference_logprobs, reference_step, weight_fn
from tests.fakes import tiny_model
from tests.moe_fakes import save_tiny_moe
from tests.native_helpers import assert_greedy_match, assert_logprobs_match, generate, random_prompts, request
from tests.test_engine_shared_prefix import TREES
from tests.test_engine_shared_prefix import build as build_tree_engine
from tests.test_engine_shared_prefix import step as tree_step
from tests.torchrun.feature_cells import compiled_steps
from tests.torchrun.live_group import LiveGroup
from tests.tree_rows import branches, packed

N_DEVICES = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(N_DEVICES == 0, reason="needs a CUDA device; torch.cuda.is_available() is false"),
    pytest.mark.timeout(300),
]
HAS_FLASH = importlib.util.find_spec("flash_attn") is not None
FLOAT32_REL = 1e-4  # another device sums in another order


@pytest.fixture(scope="module", autouse=True)
def exact_float32() -> None:
    """No TF32: it rounds to ten bits."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny Qwen2 with heads of 32, which every attention kernel takes."""
    path = tmp_path_factory.mktemp("gpu") / "qwen2"
    tiny_model("qwen2", hidden_size=128, intermediate_size=256, initializer_range=0.1).save_pretrained(path)
    return str(path)


def _reference(path: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")


def _assert_two_steps_match_the_cpu(engine: FSDPEngine, path: str) -> None:
    data, reference = batch(), _reference(path)
    optimizer = adamw(reference)
    for _ in range(2):
        loss = engine.eval_batch(data, loss_fn, weight_fn)
        result = engine.train_batch(data, loss_fn, weight_fn)
        expected_loss, expected_norm = reference_step(reference, data, optimizer)
        assert loss.item() == pytest.approx(expected_loss, rel=FLOAT32_REL)
        assert result["grad_norm"] == pytest.approx(expected_norm, rel=FLOAT32_REL)
    for (name, ours), theirs in zip(engine.module.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: name + text)
    for trajectory, result in zip(data, engine.forward_batch(data), strict=True):
        with torch.no_grad():
            expected, _ = reference_logprobs(reference, trajectory)
        torch.testing.assert_close(result[0, : len(expected)].cpu(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("settings", [{}, {"attn_impl": "sdpa"}, {"attn_impl": "eager"}, {"mb_spec": {"n_mbs": 3}}])
def test_engine_in_float32_equals_plain_transformers_on_the_cpu(model_dir: str, settings: dict[str, Any]) -> None:
    engine = build_engine(model_dir, **settings)
    assert engine.device.type == "cuda"
    _assert_two_steps_match_the_cpu(engine, model_dir)
    engine.destroy()


@pytest.mark.parametrize("backend", ["fsdp:d1", "archon:d1"])
def test_tree_training_by_flex_attention_equals_every_token_computed(backend: str, model_dir: str) -> None:
    rows = packed(branches())

    shared = tree_step(build_tree_engine(model_dir, backend, **TREES), rows)
    plain = tree_step(build_tree_engine(model_dir, backend, limit=None), rows)

    assert shared[0]["tree_token_ratio"] < 0.9
    torch.testing.assert_close(shared[2], plain[2], rtol=1e-4, atol=1e-4)
    assert shared[3] == pytest.approx(plain[3], rel=FLOAT32_REL, abs=1e-4)
    assert shared[0]["grad_norm"] == pytest.approx(plain[0]["grad_norm"], rel=1e-3)
    for name, expected in plain[1].items():
        torch.testing.assert_close(shared[1][name], expected, rtol=1e-4, atol=1e-4)


def test_moe_engine_in_float32_equals_plain_transformers_on_the_cpu(tmp_path: Path) -> None:
    path = save_tiny_moe(tmp_path / "moe")
    engine = build_engine(path)
    _assert_two_steps_match_the_cpu(engine, path)
    engine.destroy()


def test_compiled_engine_equals_plain_transformers_on_the_cpu(model_dir: str) -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs the package triton")
    engine = build_engine(model_dir, fsdp=FSDPEngineConfig(enable_compile=True))
    _assert_two_steps_match_the_cpu(engine, model_dir)
    engine.destroy()


def _assert_bfloat16_is_close(engine: FSDPEngine, path: str) -> None:
    """Log-probs within bfloat16's rounding, and small updates reach the float32 master weights."""
    data, reference = batch(), _reference(path)
    for trajectory, result in zip(data, engine.forward_batch(data), strict=True):
        with torch.no_grad():
            expected, _ = reference_logprobs(reference, trajectory)
        torch.testing.assert_close(result[0, : len(expected)].cpu().float(), expected, rtol=0.05, atol=0.1)
    before = {name: tensor.clone() for name, tensor in engine.named_full_tensors()}
    for _ in range(40):
        assert engine.train_batch(data, loss_fn, weight_fn)["update_successful"] == 1.0
    changed = [name for name, tensor in engine.named_full_tensors() if not torch.equal(tensor, before[name])]
    assert len(changed) > len(before) // 2


def test_engine_in_bfloat16_is_close_and_small_updates_arrive(model_dir: str) -> None:
    settings = {"lr": 1e-5, "weight_decay": 0.0}
    engine = build_engine(model_dir, dtype="bfloat16", attn_impl="sdpa", optimizer=settings)
    _assert_bfloat16_is_close(engine, model_dir)
    engine.destroy()


@pytest.mark.skipif(not HAS_FLASH, reason="the package flash-attn is not installed")
def test_engine_with_flash_attention_keeps_packed_sequences_apart(model_dir: str) -> None:
    settings = {"lr": 1e-5, "weight_decay": 0.0}
    engine = build_engine(model_dir, dtype="bfloat16", attn_impl="flash_attention_2", optimizer=settings)
    _assert_bfloat16_is_close(engine, model_dir)
    engine.destroy()


@pytest.mark.skipif(N_DEVICES < 2, reason=f"needs two CUDA devices, there are {N_DEVICES}")
@pytest.mark.parametrize("backend", ["fsdp:d2", "fsdp:c2", "fsdp:t2"])
def test_two_ranks_over_nccl_equal_plain_transformers_on_the_cpu(model_dir: str, backend: str) -> None:
    group = LiveGroup(2)
    try:
        answers = group.run(compiled_steps, path=model_dir, backend=backend, enable_compile=False)
    finally:
        group.close()
    reference = _reference(model_dir)
    optimizer = adamw(reference)
    for step in range(2):
        loss, norm = reference_step(reference, batch(), optimizer)
        for answer in answers:
            assert answer["losses"][step] == pytest.approx(loss, rel=FLOAT32_REL)
            assert answer["norms"][step] == pytest.approx(norm, rel=FLOAT32_REL)
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(answers[0]["weights"][name].cpu(), parameter, rtol=1e-4, atol=1e-4)


def test_recover_point_continues_as_if_nothing_happened(model_dir: str, tmp_path: Path) -> None:
    engine, data = build_engine(model_dir), batch()
    engine.train_batch(data, loss_fn, weight_fn)
    engine.save(SaveLoadMeta(str(tmp_path / "point"), "dcp", True))
    drawn = torch.rand(3, device="cuda")
    expected = engine.train_batch(data, loss_fn, weight_fn)["grad_norm"]
    other = build_engine(model_dir)
    other.load(SaveLoadMeta(str(tmp_path / "point"), "dcp", True))
    assert torch.equal(torch.rand(3, device="cuda"), drawn)
    assert other.train_batch(data, loss_fn, weight_fn)["grad_norm"] == pytest.approx(expected, rel=1e-6)
    engine.save(SaveLoadMeta(str(tmp_path / "hf"), "hf", False))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "hf").dtype == torch.float32
    engine.destroy()
    other.destroy()


def test_failing_step_is_captured_and_replays(model_dir: str, tmp_path: Path) -> None:
    capture = FailureCaptureConfig(directory=str(tmp_path / "failures"))
    engine = build_engine(model_dir, failure_capture=capture)
    with torch.no_grad():
        engine.module.model.norm.weight[0] = math.nan
    assert engine.train_batch(batch(), loss_fn, weight_fn)["update_successful"] == 0.0
    engine.destroy()
    report = replay_step(tmp_path / "failures" / "step_0")
    assert report.reproduced, report.lines()


def test_native_engine_decodes_what_the_cpu_says() -> None:
    model = tiny_model("qwen2")
    prompts = random_prompts((10, 17, 4))
    engine = NativeEngine(NativeConfig(), model)
    assert engine.device.type == "cuda"
    engine.start()
    try:
        greedy = generate(engine, [request(p, greedy=True, max_new_tokens=24) for p in prompts])
        sampled = generate(engine, [request(p, seed=i, max_new_tokens=24) for i, p in enumerate(prompts)])
    finally:
        engine.stop()
    for response in greedy:
        assert_greedy_match(model, response)
    for response in sampled:
        assert_logprobs_match(model, response)


def test_native_engine_takes_published_weights(model_dir: str) -> None:
    engine = build_engine(model_dir)
    engine.train_batch(batch(), loss_fn, weight_fn)
    sampler = NativeEngine(NativeConfig(), model_dir)
    sampler.start()
    try:
        records = InProcessPublisher(engine.named_full_tensors, sampler).publish(1)
        assert len(records) == len(list(engine.module.named_parameters()))
    finally:
        sampler.stop()
        engine.destroy()


def test_offload_frees_the_device_and_onload_brings_back_every_bit(model_dir: str) -> None:
    engine, data = build_engine(model_dir), batch()
    engine.train_batch(data, loss_fn, weight_fn)
    before = {name: tensor.clone().cpu() for name, tensor in engine.named_full_tensors()}
    held = torch.cuda.memory_allocated()
    try:
        engine.offload()
    except UnsupportedFeatureError as exc:
        engine.destroy()
        pytest.skip(str(exc))
    weights_bytes = sum(tensor.numel() * tensor.element_size() for tensor in before.values())
    assert torch.cuda.memory_allocated() <= held - 2 * weights_bytes  # weights and Adam's two moments, at least two
    engine.onload()
    for name, tensor in engine.named_full_tensors():
        assert torch.equal(tensor.cpu(), before[name]), name
    assert engine.train_batch(data, loss_fn, weight_fn)["update_successful"] == 1.0
    engine.destroy()


def test_device_stats_tell_the_memory_of_the_device(model_dir: str) -> None:
    engine = build_engine(model_dir)
    stats = engine.get_device_stats()
    assert isinstance(stats, DeviceRuntimeInfo)
    total = torch.cuda.get_device_properties(0).total_memory / 1024**3
    assert 0 < stats.mem_allocated <= stats.mem_reserved <= stats.mem_total
    assert stats.mem_total == pytest.approx(total, rel=0.05)
    engine.destroy()


def _megatron(path: str, **settings: Any) -> Any:
    """An initialised Megatron engine of one device; skips where megatron-core is missing."""
    pytest.importorskip("megatron.core", reason="megatron-core is not installed; pip install 'areal[megatron]'")
    from tests.torchrun.megatron_cells import megatron_engine

    engine = megatron_engine(path, "megatron:d1", **settings)
    engine.create_process_group()
    engine.initialize(None, None)
    return engine.train()


@pytest.mark.parametrize("experts", [False, True])
def test_megatron_engine_in_float32_equals_plain_transformers_on_the_cpu(
    model_dir: str, tmp_path: Path, experts: bool
) -> None:
    path = save_tiny_moe(tmp_path / "moe") if experts else model_dir
    engine, data, reference = _megatron(path), batch(), _reference(path)
    assert "areal.engine.megatron_utils.cpu_compat" not in sys.modules
    optimizer = adamw(reference)
    for _ in range(2):
        loss = engine.eval_batch(data, loss_fn, weight_fn)
        result = engine.train_batch(data, loss_fn, weight_fn)
        expected_loss, expected_norm = reference_step(reference, data, optimizer)
        assert loss.item() == pytest.approx(expected_loss, rel=FLOAT32_REL)
        assert result["grad_norm"] == pytest.approx(expected_norm, rel=FLOAT32_REL)
    engine.destroy()


def test_megatron_engine_in_bfloat16_is_close_and_small_updates_arrive(model_dir: str) -> None:
    engine = _megatron(model_dir, dtype="bfloat16", optimizer={"lr": 1e-5, "weight_decay": 0.0})
    _assert_bfloat16_is_close(engine, model_dir)
    engine.destroy()


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise"])
def test_megatron_engine_in_fp8_trains_near_bfloat16(model_dir: str, recipe: str) -> None:
    if importlib.util.find_spec("transformer_engine") is None or torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs Transformer Engine and a Hopper GPU")
    losses = {}
    for name, section in (("bfloat16", {}), ("fp8", {"fp8_config": FP8EngineConfig(recipe=recipe)})):
        engine = _megatron(model_dir, dtype="bfloat16", optimizer={"lr": 1e-3}, megatron=section)
        losses[name] = []
        for _ in range(10):
            losses[name].append(engine.eval_batch(batch(), loss_fn, weight_fn).item())
            assert engine.train_batch(batch(), loss_fn, weight_fn)["update_successful"] == 1.0
        engine.destroy()
    assert losses["fp8"] == pytest.approx(losses["bfloat16"], rel=0.1)
    assert losses["fp8"][-1] < losses["fp8"][0]
