"""Optimizers of the train engines: AdamW, Adam with bfloat16 state, SGD, layer by layer; steps that are not finite."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from areal.api.config.optimizer import OptimizerConfig
from areal.api.io_struct import SaveLoadMeta
from areal.engine.core.adam_bf16 import AdamBf16
from areal.engine.core.layer_step import LayerwiseAdamW, group_by_layer
from areal.engine.core.lr_schedule import LrSchedule
from areal.engine.core.optimizer import ClippedOptimizer, LowPrecisionShards, PlainShards, build_torch_optimizer
from areal.engine.fsdp_engine import FSDPEngine
from areal.utils.errors import ConfigError, EngineError
from tests.engine_fakes import ADAM, adamw, batch, build_engine, loss_fn, reference_step, weight_fn
from tests.fakes import tiny_model

SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    tiny_model("qwen2").save_pretrained(path)
    return str(path)


def _gradients(shape: tuple[int, ...], steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator) for _ in range(steps)]


def _reference_bf16_step(p: Tensor, grad: Tensor, state: dict[str, Any], settings: dict[str, Any]) -> Tensor:
    """The formula of the specification, operation by operation; only what is stored is rounded to bfloat16."""
    lr, eps, decay = settings["lr"], settings["eps"], settings["weight_decay"]
    beta1, beta2 = settings["betas"]
    state["t"] += 1
    m = beta1 * state["m"].float() + (1 - beta1) * grad
    v = beta2 * state["v"].float() + (1 - beta2) * grad * grad
    state["m"], state["v"] = m.bfloat16(), v.bfloat16()
    decayed = p.float() * (1 - lr * decay)
    step = lr / (1 - beta1 ** state["t"])
    comp = state["comp"].float() - step * m / (v.sqrt() / math.sqrt(1 - beta2 ** state["t"]) + eps)
    p_new = (decayed + comp).to(p.dtype)
    state["comp"] = (comp + decayed - p_new.float()).bfloat16()
    return p_new


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_adam_bf16_step_equals_the_formula(dtype: torch.dtype) -> None:
    leaf = torch.linspace(-2, 2, 50).to(dtype).requires_grad_()
    leaf.grad_dtype = torch.float32
    optimizer = AdamBf16([leaf], **SETTINGS)
    expected = leaf.detach().clone()
    zeros = torch.zeros(50, dtype=torch.bfloat16)
    state: dict[str, Any] = {"t": 0, "m": zeros, "v": zeros, "comp": zeros}

    for grad in _gradients((50,), 20):
        leaf.grad = grad.clone()
        optimizer.step()
        expected = _reference_bf16_step(expected, grad, state, SETTINGS)

    ours = optimizer.state[leaf]
    assert {k: v.dtype for k, v in ours.items() if k != "step"} == dict.fromkeys(
        ("exp_avg", "exp_avg_sq", "compensation"), torch.bfloat16
    )
    spacing = 2.0**-7 if dtype == torch.bfloat16 else 1e-5  # one rounding of 20 may fall the other way
    torch.testing.assert_close(leaf.detach(), expected, rtol=spacing, atol=1e-5)
    exact, theirs = leaf.float() + ours["compensation"].float(), expected.float() + state["comp"].float()
    torch.testing.assert_close(exact.detach(), theirs, rtol=1e-5, atol=1e-4)


def test_adam_bf16_close_to_adamw_in_float32() -> None:
    leaf = torch.linspace(-2, 2, 50).bfloat16().requires_grad_()
    leaf.grad_dtype = torch.float32
    exact = leaf.detach().float().requires_grad_()
    ours, theirs = AdamBf16([leaf], **SETTINGS), torch.optim.AdamW([exact], **SETTINGS)
    start = exact.detach().clone()
    for grad in _gradients((50,), 50):
        leaf.grad, exact.grad = grad.clone(), grad.clone()
        ours.step()
        theirs.step()
    moved = leaf.float() + ours.state[leaf]["compensation"].float() - start
    torch.testing.assert_close(moved.detach(), exact.detach() - start, rtol=0.02, atol=0.01)


@pytest.mark.parametrize("kind", ["adam_bf16", "adam"])
def test_bfloat16_training_at_lr_1e_6_moves_weights(model_dir: str, kind: str) -> None:
    # The spacing of bfloat16 at 0.2 is 1e-3: 1,000 plain steps of 1e-6 would each be rounded away.
    optimizer = {"type": kind, "lr": 1e-6, "weight_decay": 0.0, "gradient_clipping": 1.0}
    engine = build_engine(model_dir, dtype="bfloat16", optimizer=optimizer)
    start = {n: t.clone() for n, t in engine.named_full_tensors()}
    shard = dict(engine.module.named_parameters())["model.layers.0.mlp.up_proj.weight"]
    assert shard.dtype == torch.bfloat16
    engine.train_batch(batch(), loss_fn, weight_fn)
    step = engine.loop.optimizer
    gradients = {n: s.grad.clone() for n, s in step.shards.shards.items()}
    for _ in range(1500):
        for name, leaf in step.shards.shards.items():
            leaf.grad = gradients[name].clone()
        step.torch_optimizer.step()
    step.shards.write_back()
    moved = torch.cat([(t.float() - start[n].float()).flatten() for n, t in engine.named_full_tensors()])
    assert (moved != 0).float().mean() > 0.5
    assert moved.abs().mean().item() == pytest.approx(1.5e-3, rel=0.2)


def test_adam_bf16_weight_decay_below_the_spacing_is_not_lost() -> None:
    leaf = torch.ones(4, dtype=torch.bfloat16).requires_grad_()
    leaf.grad_dtype = torch.float32
    optimizer = AdamBf16([leaf], lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=1e-2)
    for _ in range(500):
        leaf.grad = torch.zeros(4)
        optimizer.step()
    assert leaf[0].item() == pytest.approx((1 - 1e-4) ** 500, abs=4e-3)


def test_low_precision_shards_gradients_add_up_in_float32() -> None:
    module = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    shards = LowPrecisionShards({n: (p, p) for n, p in module.named_parameters()})
    for scale in (1.0, 2.0**-10):  # in bfloat16 the second one would vanish
        (module(torch.ones(1, 1, dtype=torch.bfloat16)).sum() * scale).backward()
    (grad,) = shards.collect_gradients()
    assert (grad.dtype, grad.item()) == (torch.float32, 1 + 2.0**-10)
    shards.zero_grad()
    assert shards.collect_gradients() == []


@pytest.mark.parametrize(("kind", "dtype"), [("adam_bf16", "bfloat16"), ("adam_bf16", "float32"), ("sgd", "float32")])
def test_optimizer_dcp_resume_equals_uninterrupted_run(model_dir: str, kind: str, dtype: str, tmp_path: Path) -> None:
    settings = {"dtype": dtype, "optimizer": {"type": kind, "lr": 1e-2}}
    engine, meta = build_engine(model_dir, **settings), SaveLoadMeta(str(tmp_path / "recover"), "dcp", True)
    engine.train_batch(batch(), loss_fn, weight_fn)
    engine.save(meta)
    resumed = build_engine(model_dir, **settings)
    resumed.load(meta)
    for each in (engine, resumed):
        for seed in range(2):
            each.train_batch(batch(seed=seed), loss_fn, weight_fn)
    _assert_equal(engine, resumed)


def test_sgd_step_equals_torch(model_dir: str) -> None:
    engine = build_engine(
        model_dir, optimizer={"type": "sgd", "lr": 0.1, "weight_decay": 0.05, "gradient_clipping": 0.5}
    )
    reference = tiny_model("qwen2")
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, weight_decay=0.05)
    for _ in range(2):
        engine.train_batch(batch(), loss_fn, weight_fn)
        reference_step(reference, batch(), optimizer)
    for ours, theirs in zip(engine.module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_adamw_step_equals_torch(model_dir: str) -> None:
    engine, reference = build_engine(model_dir), tiny_model("qwen2")
    optimizer = adamw(reference)
    for _ in range(2):
        engine.train_batch(batch(), loss_fn, weight_fn)
        reference_step(reference, batch(), optimizer)
    for ours, theirs in zip(engine.module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


# --- layer by layer


def test_group_by_layer_keeps_blocks_together_in_order() -> None:
    names = (
        "model.embed.weight",
        "model.layers.0.a",
        "model.layers.0.mlp.1.b",
        "model.layers.1.a",
        "model.norm.weight",
    )
    leaves = {name: torch.zeros(1) for name in names}
    groups = group_by_layer(leaves)
    assert [[next(n for n in names if leaves[n] is leaf) for leaf in group] for group in groups] == [
        ["model.embed.weight"],
        ["model.layers.0.a", "model.layers.0.mlp.1.b"],
        ["model.layers.1.a"],
        ["model.norm.weight"],
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("prefetch", [0, 1, 7])
def test_per_layer_step_is_bit_equal_to_the_whole_step(model_dir: str, dtype: str, prefetch: int) -> None:
    layered = _layered_engine(model_dir, prefetch, dtype=dtype)
    whole = build_engine(model_dir, dtype=dtype)
    assert isinstance(layered.loop.optimizer.torch_optimizer, LayerwiseAdamW)
    for seed in range(3):
        results = [engine.train_batch(batch(seed=seed), loss_fn, weight_fn) for engine in (layered, whole)]
        assert results[0] == results[1]
    _assert_equal(layered, whole)
    for name in whole.loop.optimizer.shards.shards:
        for key, value in whole.loop.optimizer.state_tensors(name).items():
            assert torch.equal(layered.loop.optimizer.state_tensors(name)[key], value), (name, key)


def test_per_layer_step_dcp_resume_equals_uninterrupted_run(model_dir: str, tmp_path: Path) -> None:
    meta = SaveLoadMeta(str(tmp_path / "recover"), "dcp", True)
    engine = _layered_engine(model_dir, 1)
    engine.train_batch(batch(), loss_fn, weight_fn)
    engine.save(meta)
    resumed = _layered_engine(model_dir, 1)
    resumed.load(meta)
    for each in (engine, resumed):
        each.train_batch(batch(seed=4), loss_fn, weight_fn)
    _assert_equal(engine, resumed)


@pytest.mark.parametrize("kind", ["sgd", "adam_bf16"])
def test_per_layer_step_with_another_optimizer_is_a_config_error(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"per_layer_optim_step=true with optimizer.type={kind}"):
        build_torch_optimizer(OptimizerConfig(type=kind), {"w": torch.zeros(1)}, layers_ahead=1)


# --- steps without a finite norm


def _step(optimizer: ClippedOptimizer, module: nn.Module, gradient: float) -> dict[str, float]:
    module.weight.grad = torch.full_like(module.weight, gradient)
    return optimizer.step()


def test_non_finite_steps_are_counted_and_the_run_stops_after_some_in_a_row() -> None:
    module = nn.Linear(2, 1, bias=False)
    config = OptimizerConfig(lr=0.1, max_nonfinite_steps=3)
    optimizer = ClippedOptimizer(config, PlainShards(module), LrSchedule(config, None), None)
    nan = float("nan")
    results = [_step(optimizer, module, g) for g in (nan, nan, 1.0, nan, nan)]
    assert [r["nonfinite_steps"] for r in results] == [1, 2, 2, 3, 4]
    assert [r["update_successful"] for r in results] == [0, 0, 1, 0, 0]
    good = module.weight.detach().clone()
    with pytest.raises(EngineError, match=r"3 steps in a row.*optimizer\.max_nonfinite_steps"):
        _step(optimizer, module, float("inf"))
    assert torch.equal(module.weight, good)
    assert module.weight.grad is None


def test_max_nonfinite_steps_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_nonfinite_steps=0"):
        OptimizerConfig(max_nonfinite_steps=0)


def _layered_engine(path: str, prefetch: int, **settings: Any) -> FSDPEngine:
    from areal.api.config.fsdp import FSDPEngineConfig

    fsdp = FSDPEngineConfig(per_layer_optim_step=True, optim_step_prefetch_layers=prefetch)
    return build_engine(path, fsdp=fsdp, optimizer=ADAM, **settings)


def _assert_equal(first: FSDPEngine, second: FSDPEngine) -> None:
    for (name, ours), (_, theirs) in zip(first.named_full_tensors(), second.named_full_tensors(), strict=True):
        assert torch.equal(ours, theirs), name
