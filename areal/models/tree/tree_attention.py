"""Attention of a prefix tree: a row sees itself and the rows before it on the way from the root.

In: query ``[R, H, D]``, key and value ``[R, KV, D]`` of the R >= U rows of a ``PrefixTree``, padding behind them.
Out: ``[R, H, D]``. Made once per micro-batch, called by every layer: through ``areal_varlen`` in Hugging Face models,
through ``PackedAttention`` in Archon models.

On CUDA: flex attention with a block mask, which skips blocks of 128 x 128 rows that share no path. Elsewhere: each
chain of the tree is computed against the path that leads to it; chains of similar size are gathered into padded blocks
``[n, Q, H, D]`` x ``[n, K, KV, D]``, and each block is one scaled-dot-product call. So no query meets a key of another
sequence, and no mask of all rows by all rows exists.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from areal.models.transformers.varlen_attention import SLACK_PAIRS, SLACK_SHARE
from areal.models.tree.prefix_tree import PrefixTree
from areal.utils import environ
from areal.utils.errors import ConfigError

BLOCK_SIZE_ENV = "AREAL_FLEX_ATTENTION_BLOCK_SIZE"
FLEX_MIN_HEAD_DIM = 16  # of its GPU kernels


class TreeAttention:
    """The attention of one tree; a callable.

    Attributes:
        tree: on the device of the rows.
        n_rows: rows R that the model computes; those behind the tree's are padding, and their results mean nothing.
        calls: how often it was called.
    """

    def __init__(self, tree: PrefixTree, n_rows: int, *, use_flex: bool | None = None) -> None:
        """Args: ``use_flex`` chooses the kernel; None: flex attention on CUDA."""
        self.tree, self.n_rows, self.calls = tree, n_rows, 0
        self.use_flex = tree.source.is_cuda if use_flex is None else use_flex
        if not self.use_flex:
            _ = self.plan  # before the first layer: activation checkpointing may count the ops of a layer
        else:
            self._block_mask(None)

    @torch.compiler.disable  # it plans in Python, and flex attention is a graph of its own
    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, window: int | None = None
    ) -> Tensor:
        """Attention of all rows.

        Args:
            q: ``[R, H, D]``; k and v ``[R, KV, D]`` with H a multiple of KV.
            scale: of the products; None: ``D ** -0.5``.
            window: a row sees at most so many rows, itself included; None: all before it.
        """
        self.calls += 1
        if self.use_flex and not (q.is_cuda and q.shape[-1] < FLEX_MIN_HEAD_DIM):
            return self._flex(q, k, v, scale, window)
        plan = self.plan
        queries = _ToSlots.apply(q, plan.queries).split([block.count * block.queries for block in plan.blocks])
        keys, values = (_ToSlots.apply(x, plan.keys).split([b.count * b.keys for b in plan.blocks]) for x in (k, v))
        parts = zip(plan.blocks, queries, keys, values, strict=True)
        outputs = [_attend(*part, scale=scale, window=window) for part in parts]
        out = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
        rows: Tensor = _ToRows.apply(out, plan.queries, self.n_rows)
        return rows

    @cached_property
    def plan(self) -> TreePlan:
        """How the chains are cut into blocks."""
        return plan_tree_attention(self.tree, self.n_rows)

    def _flex(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int | None) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        attend = _compiled_flex() if q.is_cuda else _plain_flex()
        out: Tensor = attend(
            q, k, v, block_mask=self._block_mask(window), scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out[0].transpose(0, 1)

    def _block_mask(self, window: int | None) -> Any:
        if window not in self._block_masks:
            self._block_masks[window] = _make_block_mask(self.tree, self.n_rows, window)
        return self._block_masks[window]

    @cached_property
    def _block_masks(self) -> dict[int | None, Any]:
        return {}


@dataclass
class Slots:
    """Rows of the tree as padded slots.

    Attributes:
        rows: int64 ``[S]``, row of each slot; padding has one too.
        first: int64 ``[U]``, a slot of each row.
        again: int64 ``[A]``, all other slots that are no padding, sorted by row.
        targets: int64 ``[B]``, the rows that have such slots; counts: int64 ``[B]``, how many of them.
    """

    rows: Tensor
    first: Tensor
    again: Tensor
    targets: Tensor
    counts: Tensor


@dataclass
class TreeBlock:
    """Chains computed together: ``count`` chains padded to ``queries`` rows, on paths padded to ``keys`` rows.

    Attributes:
        starts: int64 ``[count, 1, 1, 1]``, or ``[1, 1]`` where all are equal: rows before each chain; None: all are 0.
    """

    count: int
    queries: int
    keys: int
    starts: Tensor | None

    def mask(self, window: int | None, device: torch.device) -> Tensor | None:
        """True where a query (row) sees a key (column); None: the causal one of a square."""
        if self.starts is None and (window is None or window >= self.keys):
            return None
        query = torch.arange(self.queries, device=device)[:, None]
        distance = query - torch.arange(self.keys, device=device) + (0 if self.starts is None else self.starts)
        seen = distance >= 0
        return seen if window is None else seen & (distance < window)


@dataclass
class TreePlan:
    """Blocks in the order of their slots, and the slots of queries and of keys."""

    blocks: list[TreeBlock]
    queries: Slots
    keys: Slots


def plan_tree_attention(tree: PrefixTree, n_rows: int) -> TreePlan:
    """Group the chains of a tree into blocks of similar size; made on the host.

    Args:
        tree: on any device; the plan is on the same.
        n_rows: rows of the model, at least the tree's.
    """
    device, host = tree.source.device, tree.to("cpu")
    keep, depth, source, bounds = (x.numpy() for x in (host.keep, host.depth, host.source, host.chains))
    first, size = bounds[:-1], np.diff(bounds)
    start = depth[first]
    path = keep[first] - start  # the first sequence of a chain, where its path can be read from ``source``
    order = np.lexsort((-size, -(start + size)))
    blocks, queries, keys = [], [], []
    for i, j in _cut(size[order], (start + size)[order]):
        chosen = order[i:j]
        n_queries, n_keys = int(size[chosen].max()), int((start + size)[chosen].max())
        blocks.append(TreeBlock(j - i, n_queries, n_keys, _starts(start[chosen], device)))
        queries.append(_padded(first[chosen], size[chosen], n_queries))
        slots, real = _padded(path[chosen], (start + size)[chosen], n_keys)
        keys.append((source[slots], real))
    return TreePlan(blocks, _slots(queries, tree.n_rows, device), _slots(keys, tree.n_rows, device))


class _ToSlots(torch.autograd.Function):
    """Rows to padded slots. Backward adds up the slots of a row segment by segment: ``index_add`` walks a CPU tensor
    row by row. Gradients of padding are exactly 0, as no real query sees it and no result is read from it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: Slots) -> Tensor:
        ctx.slots, ctx.n_rows = slots, x.shape[0]
        return x.index_select(0, slots.rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        slots: Slots = ctx.slots
        total = grad.new_zeros(ctx.n_rows, *grad.shape[1:])
        torch.index_select(grad, 0, slots.first, out=total[: slots.first.shape[0]])
        if slots.again.shape[0]:
            again = grad.index_select(0, slots.again).flatten(1)
            added = torch.segment_reduce(again, "sum", lengths=slots.counts, axis=0).view(-1, *grad.shape[1:])
            total.index_copy_(0, slots.targets, added + total.index_select(0, slots.targets))
        return total, None


class _ToRows(torch.autograd.Function):
    """Padded slots of queries to rows; padding rows are 0, and padding slots get gradient 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: Slots, n_rows: int) -> Tensor:
        ctx.slots, ctx.n_slots = slots, x.shape[0]
        out = x.new_zeros(n_rows, *x.shape[1:])
        torch.index_select(x, 0, slots.first, out=out[: slots.first.shape[0]])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        first = ctx.slots.first
        return grad.new_zeros(ctx.n_slots, *grad.shape[1:]).index_copy_(0, first, grad[: first.shape[0]]), None, None


def _attend(block: TreeBlock, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, window: int | None) -> Tensor:
    """``[slots, heads, D]`` in, ``[slots, H, D]`` out."""
    q, k, v = (x.view(block.count, -1, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
    mask = block.mask(window, q.device)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.transpose(1, 2).flatten(0, 1)


def _cut(queries: Any, keys: Any) -> list[tuple[int, int]]:
    """Cut chains, sorted by falling length of their paths, into runs whose padding stays under the slack."""
    runs: list[tuple[int, int]] = []
    first, real, widest = 0, 0, 0
    for i, (n_queries, n_keys) in enumerate(zip(queries.tolist(), keys.tolist(), strict=True)):
        real, widest = real + n_queries * n_keys, max(widest, n_queries)
        pairs = (i - first + 1) * widest * int(keys[first])
        if pairs - real > max(SLACK_PAIRS, SLACK_SHARE * pairs):
            runs.append((first, i))
            first, real, widest = i, n_queries * n_keys, n_queries
    runs.append((first, len(queries)))
    return runs


def _padded(begin: Any, size: Any, width: int) -> tuple[Any, Any]:
    """Rows ``[n, width]`` from ``begin`` on, the last one repeated behind ``size`` of them; and which are real."""
    column = np.arange(width)[None]
    return begin[:, None] + np.minimum(column, size[:, None] - 1), column < size[:, None]


def _starts(start: Any, device: torch.device) -> Tensor | None:
    if (start == start[0]).all():
        return torch.tensor([[int(start[0])]], device=device) if start[0] else None
    return torch.from_numpy(start).view(-1, 1, 1, 1).to(device)


def _slots(blocks: list[tuple[Any, Any]], n_rows: int, device: torch.device) -> Slots:
    rows = np.concatenate([slots.ravel() for slots, _ in blocks])
    real = np.flatnonzero(np.concatenate([mask.ravel() for _, mask in blocks]))
    ordered = real[np.argsort(rows[real], kind="stable")]
    counts = np.bincount(rows[real], minlength=n_rows)
    first = np.cumsum(counts) - counts
    again = np.delete(ordered, first)
    targets = np.flatnonzero(counts > 1)
    arrays = (rows, ordered[first], again, targets, counts[targets] - 1)
    return Slots(*(torch.from_numpy(array).to(device) for array in arrays))


def _make_block_mask(tree: PrefixTree, n_rows: int, window: int | None) -> Any:
    """Block mask ``[R, R]``; a row of padding sees itself."""
    from torch.nn.attention.flex_attention import create_block_mask

    device = tree.source.device
    padding = torch.arange(tree.n_rows, n_rows, device=device)
    enter, leave = torch.cat([tree.enter, padding]), torch.cat([tree.leave, padding + 1])
    depth = torch.cat([tree.depth, torch.zeros_like(padding)])

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        on_path = (enter[key] <= enter[query]) & (enter[query] < leave[key])
        return on_path if window is None else on_path & (depth[query] - depth[key] < window)

    size = flex_block_size()
    compiled = device.type == "cuda"  # else it would hold the mask of all rows by all rows
    return create_block_mask(sees, None, None, n_rows, n_rows, device=device, BLOCK_SIZE=size, _compile=compiled)


def flex_block_size() -> int:
    """Rows of a block of flex attention's mask, from the environment; ConfigError: no positive multiple of 128."""
    size = environ.get_int_env(BLOCK_SIZE_ENV, 128)
    if size < 1 or size % 128:
        raise ConfigError(f"{BLOCK_SIZE_ENV}={size} must be a positive multiple of 128")
    return size


def _plain_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention


@cache
def _compiled_flex() -> Callable[..., Any]:
    return torch.compile(_plain_flex(), dynamic=False)
