"""Attention of prefix trees, in blocks and by flex attention, against one dense mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from areal.models.tree import TreeAttention, build_prefix_tree
from areal.models.tree import tree_attention as module
from areal.utils.errors import ConfigError
from tests.tree_rows import branches, packed

CASES = {
    "branches": branches(seed=1, roots=3),
    "one": [[3, 4, 5, 6]],
    "nothing in common": [[3, 4, 5], [4, 5], [5, 3]],
    "prefixes of each other": [[3], [3, 4], [3, 4, 5, 6], [3, 4]],
    "long and short": [[7] * 90 + [1, 2, 3], [7] * 90 + [2], [7] * 40 + [3] * 30, [8]],
}


def tensors(rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Four query heads for two key-value heads of 16."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(rows, heads, 16, generator=generator, dtype=dtype) for heads in (4, 2, 2))
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def dense(tree: Any, q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int | None) -> Tensor:
    """Every row against every row, the mask made by following parents."""
    seen = torch.eye(q.shape[0], dtype=torch.bool)
    for row in range(tree.n_rows):
        other, steps = row, 1
        while (other := int(tree.parent[other])) >= 0 and (window is None or steps < window):
            seen[row, other], steps = True, steps + 1
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True)[0].transpose(0, 1)


@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize(("padding", "scale", "window"), [(0, None, None), (5, 0.3, None), (3, None, 4)])
def test_tree_attention_blocks_equal_a_dense_mask_in_float64(
    name: str, padding: int, scale: float | None, window: int | None
) -> None:
    batch = packed(CASES[name])
    tree = build_prefix_tree(batch.tokens["input_ids"], batch.lens)
    q, k, v = tensors(tree.n_rows + padding, torch.float64)
    weight = torch.randn(tree.n_rows, 4, 16, dtype=torch.float64)

    out = TreeAttention(tree, tree.n_rows + padding)(q, k, v, scale=scale, window=window)[: tree.n_rows]
    gradients = torch.autograd.grad((out * weight).sum(), (q, k, v))

    expected = dense(tree, q, k, v, scale, window)[: tree.n_rows]
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    for ours, theirs in zip(gradients, torch.autograd.grad((expected * weight).sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_tree_attention_flex_forward_equals_a_dense_mask(window: int | None) -> None:
    batch = packed(CASES["branches"])
    tree = build_prefix_tree(batch.tokens["input_ids"], batch.lens)
    with torch.no_grad():
        q, k, v = (x.detach() for x in tensors(tree.n_rows + 7, torch.float32))

        out = TreeAttention(tree, tree.n_rows + 7, use_flex=True)(q, k, v, window=window)

        torch.testing.assert_close(out, dense(tree, q, k, v, None, window), rtol=0, atol=1e-6)


def test_tree_attention_queries_meet_no_key_of_another_branch() -> None:
    """8 answers of 64 on a prompt of 192: the prompt once, and each answer against its own path."""
    prompt = list(range(2, 194))
    batch = packed([prompt + [200 + i] * 64 for i in range(8)])
    tree = build_prefix_tree(batch.tokens["input_ids"], batch.lens)

    blocks = TreeAttention(tree, tree.n_rows).plan.blocks

    assert [(block.count, block.queries, block.keys) for block in blocks] == [(8, 64, 256), (1, 192, 192)]


@pytest.mark.parametrize("size", ["0", "100", "-128", "x"])
def test_flex_block_size_that_kernels_cannot_take_is_refused(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(module.BLOCK_SIZE_ENV, size)
    with pytest.raises(ConfigError, match=module.BLOCK_SIZE_ENV):
        module.flex_block_size()


def test_flex_block_size_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert module.flex_block_size() == 128
    monkeypatch.setenv(module.BLOCK_SIZE_ENV, "256")
    assert module.flex_block_size() == 256
