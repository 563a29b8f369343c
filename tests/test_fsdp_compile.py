"""``fsdp.enable_compile`` changes speed only: results equal those of plain execution, and graphs stay few."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from areal.api.config.fsdp import FSDPEngineConfig
from areal.engine.core.compiled_layers import check_compile
from areal.engine.core.parallel_dims import ParallelGroups
from areal.engine.fsdp_engine import FSDPEngine
from areal.utils.errors import ConfigError
from tests.engine_fakes import batch, build_engine, loss_fn, weight_fn
from tests.fakes import tiny_model
from tests.moe_fakes import tiny_moe

TOLERANCE = {"rtol": 0.0, "atol": 1e-5}


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def _pair(path: str, **settings: Any) -> tuple[FSDPEngine, FSDPEngine]:
    """A plain engine and a compiled one."""
    return build_engine(path, **settings), build_engine(path, fsdp=FSDPEngineConfig(enable_compile=True), **settings)


def _assert_equal_steps(plain: FSDPEngine, compiled: FSDPEngine, steps: int = 2) -> None:
    data = batch()
    for _ in range(steps):
        losses = [e.eval_batch(data, loss_fn, weight_fn) for e in (plain, compiled)]
        results = [e.train_batch(data, loss_fn, weight_fn) for e in (plain, compiled)]
        torch.testing.assert_close(losses[1], losses[0], **TOLERANCE)
        assert results[1]["grad_norm"] == pytest.approx(results[0]["grad_norm"], rel=1e-5)
    for (name, ours), theirs in zip(compiled.module.named_parameters(), plain.module.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, **TOLERANCE, msg=lambda text, name=name: f"{name}: {text}")
    for ours, theirs in zip(compiled.forward_batch(data), plain.forward_batch(data), strict=True):
        torch.testing.assert_close(ours, theirs, **TOLERANCE)


@pytest.mark.slow  # about 15 s of C++ compilation
@pytest.mark.parametrize(
    ("arch", "settings"),
    [
        ("qwen2", {}),
        ("qwen3", {"attn_impl": "sdpa", "gradient_checkpointing": True}),
        ("llama", {"mb_spec": {"n_mbs": 3}}),
        ("qwen3_moe", {}),
    ],
)
def test_compiled_engine_equals_plain_engine(arch: str, settings: dict[str, Any], tmp_path: Path) -> None:
    (tiny_moe() if arch == "qwen3_moe" else tiny_model(arch)).save_pretrained(tmp_path)
    plain, compiled = _pair(str(tmp_path), **settings)
    _assert_equal_steps(plain, compiled)
    assert [n for n, _ in compiled.module.named_parameters()] == [n for n, _ in plain.module.named_parameters()]


@pytest.mark.slow  # about 15 s of C++ compilation
def test_compiled_engine_graphs_do_not_grow_with_lengths_and_layers(tmp_path: Path) -> None:
    tiny_model("qwen2", num_hidden_layers=4).save_pretrained(tmp_path)
    engine = build_engine(str(tmp_path), fsdp=FSDPEngineConfig(enable_compile=True))
    stats = torch._dynamo.utils.counters["stats"]
    for lengths in ((5, 9), (7,)):
        engine.train_batch(batch(lengths), loss_fn, weight_fn)
        engine.forward_batch(batch(lengths))
    graphs = stats["unique_graphs"]
    assert graphs <= 12  # parts between attentions, with and without gradients, of one and of several sequences
    for n in range(3, 40, 4):
        engine.train_batch(batch((n + 2, n, 5)), loss_fn, weight_fn)
        engine.forward_batch(batch((n,)))
    assert stats["unique_graphs"] == graphs


def test_compile_without_compiler_is_refused_with_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model("qwen2").save_pretrained(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ConfigError, match=r"fsdp\.enable_compile=true needs a C\+\+ compiler.*g\+\+"):
        build_engine(str(tmp_path), fsdp=FSDPEngineConfig(enable_compile=True))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match="CXX=no-such-compiler"):
        check_compile(torch.device("cpu"), ParallelGroups(), key="fsdp.enable_compile")
