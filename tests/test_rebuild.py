"""What ``rebuilding`` keeps for backward, and that gradients are the same without the rest."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from areal.engine.core import rebuild
from areal.engine.core.rebuild import rebuilding
from areal.engine.fsdp_engine import FSDPEngine
from tests.engine_fakes import batch, build_engine, loss_fn, weight_fn
from tests.fakes import tiny_model

ROWS, WIDTH, INNER = 6, 4, 10


def gated_layer(x: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """A scaled norm and gated activations, ``[1, ROWS, WIDTH]`` to the same, like a model's."""
    normed = norm * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
    return F.linear(F.silu(F.linear(normed, gate)) * F.linear(normed, up), down)


def arguments(*, norm_trained: bool = False) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(1, ROWS, WIDTH), (WIDTH,), (INNER, WIDTH), (INNER, WIDTH), (WIDTH, INNER)]
    tensors = [torch.randn(shape).requires_grad_() for shape in shapes]
    return [tensor.requires_grad_(index != 1 or norm_trained) for index, tensor in enumerate(tensors)]


def gradients_of(
    function: Callable[..., Tensor], tensors: list[Tensor], context: AbstractContextManager[Any]
) -> tuple[Tensor, ...]:
    with context:
        result = function(*tensors)
    return result, *torch.autograd.grad(result.pow(3).sum(), [t for t in tensors if t.requires_grad])


def kept_shapes(packed: list[Any]) -> list[tuple[int, ...]]:
    return [tuple(item.shape) for item in packed if isinstance(item, Tensor)]


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the graph gets in place of every tensor that it asks for."""
    seen: list[Any] = []
    pack = rebuilding._pack

    def spy(self: rebuilding, saved: Tensor) -> Any:
        seen.append(pack(self, saved))
        return seen[-1]

    monkeypatch.setattr(rebuilding, "_pack", spy)
    return seen


def test_rebuilding_graph_without_a_backward_pass_is_freed() -> None:
    x = torch.randn(ROWS, WIDTH).requires_grad_()
    with rebuilding():
        kept = torch.exp(x * 2.0)  # whose node keeps its own result
        result = kept * F.silu(x)
    alive = weakref.ref(kept)
    del kept, result
    gc.collect()
    assert alive() is None


def test_rebuilding_product_in_place_of_a_lower_dtype_has_the_same_gradients() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return F.linear(F.silu(x.bfloat16()).mul_(y), y.bfloat16())

    torch.manual_seed(0)
    tensors = [torch.randn(4, 4).requires_grad_() for _ in range(2)]
    plain, rebuilt = (gradients_of(function, tensors, context) for context in (nullcontext(), rebuilding()))
    for ours, reference in zip(rebuilt, plain, strict=True):
        assert torch.equal(ours, reference)


@pytest.mark.parametrize("norm_trained", [False, True])
def test_rebuilding_gated_layer_has_the_same_gradients(norm_trained: bool) -> None:
    plain = gradients_of(gated_layer, arguments(norm_trained=norm_trained), nullcontext())
    rebuilt = gradients_of(gated_layer, arguments(norm_trained=norm_trained), rebuilding())
    for ours, reference in zip(rebuilt, plain, strict=True):
        assert torch.equal(ours, reference)


def test_rebuilding_gated_layer_keeps_gate_and_up_alone(packed: list[Any]) -> None:
    gradients_of(gated_layer, arguments(), rebuilding())
    inner = [shape for shape in kept_shapes(packed) if shape[-2:] == (ROWS, INNER)]
    assert inner == [(1, ROWS, INNER)] * 2  # silu(gate) and its product with up are not there


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: (2.0 * x * 3.0).exp() * y,
        lambda x, y: F.linear(F.silu(x)[:, 1:], y[:, 1:]),  # a part of what was made
        lambda x, y: F.linear(F.silu(x).t(), y.t()),  # in another order
        lambda x, y: F.linear((x * y).view(2, -1), (y * y.detach()).view(2, -1)),
        lambda x, y: F.linear(F.silu(x).mul_(y), y),
        lambda x, y: F.silu(x * y) * F.silu(x) * torch.sigmoid(x * y),
    ],
    ids=["numbers", "part", "transposed", "views", "in_place", "nested"],
)
def test_rebuilding_of_views_numbers_and_nested_products_changes_no_gradient(
    function: Callable[[Tensor, Tensor], Tensor],
) -> None:
    def tensors() -> list[Tensor]:
        torch.manual_seed(0)
        return [torch.randn(4, 4).requires_grad_() for _ in range(2)]

    plain = gradients_of(function, tensors(), nullcontext())
    rebuilt = gradients_of(function, tensors(), rebuilding())
    for ours, reference in zip(rebuilt, plain, strict=True):
        assert torch.equal(ours, reference)


def test_rebuilding_returns_memory_each_time_so_many_bytes_were_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    returned: list[torch.device] = []
    monkeypatch.setattr(rebuild, "return_memory", returned.append)
    monkeypatch.setattr(rebuild, "RETURN_BYTES", 2 * ROWS * INNER * 4)
    x = torch.randn(ROWS, INNER).requires_grad_()
    with rebuilding():
        for _ in range(5):
            F.silu(x) * x
    assert returned == [torch.device("cpu")] * 2


def train_step(tmp_path: Any, **settings: Any) -> FSDPEngine:
    tiny_model("llama").save_pretrained(tmp_path)
    engine: FSDPEngine = build_engine(str(tmp_path), **settings)
    engine.train_batch(batch(), loss_fn, weight_fn)
    return engine


def test_fsdp_engine_with_adapters_keeps_no_activation_of_gates(packed: list[Any], tmp_path: Any) -> None:
    engine = train_step(tmp_path, use_lora=True, lora_rank=4, lora_alpha=8)
    assert engine.module is not None
    config = engine.module.config
    tokens = sum(int(row["attention_mask"].sum()) for row in batch())
    inner = [shape for shape in kept_shapes(packed) if shape[-2:] == (tokens, config.intermediate_size)]
    assert len(inner) == 2 * config.num_hidden_layers  # gate and up of each


def test_fsdp_engine_without_adapters_keeps_what_it_kept(packed: list[Any], tmp_path: Any) -> None:
    train_step(tmp_path)
    assert not packed
