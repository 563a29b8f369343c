"""Compiled layers of Archon models change speed and memory only; graphs stay few."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from areal.experimental.models.archon.activation_checkpoint import AcOptions, apply_activation_checkpointing
from areal.experimental.models.archon.base import ArchonModel
from areal.experimental.models.archon.compile import CompileOptions, compile_model
from tests.archon_fakes import archon_model, hf_model, packed_row

TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
FULL, BY_OP, EVERY_2 = AcOptions("full"), AcOptions("selective"), AcOptions("selective", every=2)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def build(family: str, attn_type: str, ac: AcOptions | None = None, **overrides: Any) -> ArchonModel:
    model = archon_model(hf_model(family, **overrides), attn_type=attn_type).train()
    if ac is not None:
        apply_activation_checkpointing(model, ac)
    return model


def step(model: ArchonModel, lengths: tuple[int, ...] = (5, 1, 19, 9)) -> tuple[list[Tensor], int]:
    """Loss and gradients, and bytes saved for the backward pass."""
    saved = [0]

    def pack(tensor: Tensor) -> Tensor:
        saved[0] += tensor.numel() * tensor.element_size()
        return tensor

    model.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(*packed_row(lengths)).log_softmax(-1)[..., 3].mean()
    loss.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    return [loss.detach(), *gradients], saved[0]


def assert_equal_steps(plain: ArchonModel, compiled: ArchonModel) -> None:
    for lengths in ((5, 1, 19, 9), (3, 7, 11)):
        for actual, expected in zip(step(compiled, lengths)[0], step(plain, lengths)[0], strict=True):
            torch.testing.assert_close(actual, expected, **TOLERANCE)


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def breaks() -> list[str]:
    return list(torch._dynamo.utils.counters["graph_break"])


@pytest.mark.slow  # C++ compilation
@pytest.mark.parametrize("ac", [None, FULL, BY_OP], ids=["none", "full", "op"])
def test_dense_layers_are_one_graph_that_equals_plain_ones(ac):
    plain, compiled = build("llama", "sdpa"), build("llama", "sdpa", ac, num_hidden_layers=2)
    compile_model(compiled)

    assert_equal_steps(plain, compiled)

    assert breaks() == []
    assert graphs() <= 2  # a length may turn out special to attention
    before = graphs()
    for n in (8, 12, 31):
        step(compiled, (n, 5, n + 4))
    assert graphs() == before


@pytest.mark.slow  # C++ compilation
@pytest.mark.parametrize(
    ("family", "attn_type", "ac"),
    [
        ("qwen3", "varlen", None),
        ("qwen3", "varlen", BY_OP),
        ("qwen3_moe", "sdpa", EVERY_2),
        ("qwen3_moe", "sdpa", BY_OP),
    ],
)
def test_layers_in_several_graphs_equal_plain_ones(family, attn_type, ac):
    plain, compiled = build(family, attn_type), build(family, attn_type, ac)
    compile_model(compiled)

    assert_equal_steps(plain, compiled)

    assert 1 <= graphs() <= 16


@pytest.mark.slow  # C++ compilation
def test_memory_budget_saves_less_and_changes_nothing():
    plain, half = build("llama", "sdpa"), build("llama", "sdpa")
    compile_model(plain)
    compile_model(half, CompileOptions(memory_budget=0.2))

    (expected, plain_bytes), (found, bytes_) = step(plain), step(half)

    for actual, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, wanted, **TOLERANCE)
    assert bytes_ < 0.8 * plain_bytes


def test_names_of_compiled_models_are_those_of_plain_ones():
    plain, compiled = build("qwen3_moe", "varlen"), build("qwen3_moe", "varlen")

    compile_model(compiled)

    assert [name for name, _ in compiled.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert compiled.state_dict().keys() == plain.state_dict().keys()
