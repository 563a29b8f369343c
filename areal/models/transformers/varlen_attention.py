"""Variable-length causal attention for packed batches, registered with transformers under ``areal_varlen``.

In: query/key/value of one packed row ``[1, H, T, D]`` and ``cu_seq_lens_q`` ``[n+1]``, which transformers hands
through to the attention function. Out: ``[1, T, H, D]``. Exact: a token attends to itself and to earlier tokens of its
own sequence. Called by: Hugging Face models built by ``areal/engine/core/model.py`` on devices without a
variable-length kernel.

Sequences of similar length are gathered into right-padded blocks ``[n, L, H, D]`` and each block is one
scaled-dot-product call. Right padding under a causal mask is exact without a mask tensor: a real query never reaches a
later, padded key, and outputs of padded queries are dropped, so they receive and pass on zero gradient.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

VARLEN_ATTENTION = "areal_varlen"
# Padding, in query-key pairs, that a block may hold before it is split: one more block costs about as much.
SLACK_PAIRS = 2048
SLACK_SHARE = 0.05


class TreeOfSequences(Protocol):
    """Attention of a row that is a tree of sequences; see ``areal.models.tree``."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, window: int | None = None
    ) -> Tensor:
        """``[T, heads, D]`` each -> ``[T, H, D]``."""
        ...


@dataclass
class AttentionBlock:
    """Sequences computed together: ``count`` sequences padded to ``length`` tokens."""

    count: int
    length: int
    masks: dict[int, Tensor] = field(default_factory=dict)  # window -> bool [length, length]

    @property
    def slots(self) -> int:
        """Rows of the padded block."""
        return self.count * self.length

    def window_mask(self, window: int, device: torch.device) -> Tensor | None:
        """Mask of a sliding window, or None where the window covers the block."""
        if window >= self.length:
            return None
        if window not in self.masks:
            position = torch.arange(self.length, device=device)
            distance = position[:, None] - position[None, :]
            self.masks[window] = (distance >= 0) & (distance < window)
        return self.masks[window]


@dataclass
class AttentionPlan:
    """How one packed row is cut into blocks; made once per micro-batch and used by every layer.

    Attributes:
        blocks: padded blocks, in the order of their slots.
        gather: ``[slots]`` packed row of each slot; None when the packed row is one block as it stands.
        scatter: ``[T]`` slot of each packed row.
    """

    blocks: list[AttentionBlock]
    gather: Tensor | None = None
    scatter: Tensor | None = None


def plan_attention(cu_seqlens: Tensor, device: torch.device) -> AttentionPlan:
    """Group the sequences of a packed row into blocks of similar length.

    Args:
        cu_seqlens: ``[n+1]`` integer, ascending from 0; reading it is the only host sync of a micro-batch.
        device: device of the attention inputs.
    """
    bounds = cu_seqlens.detach().cpu().long()
    starts, lens = bounds[:-1], bounds.diff()
    starts, lens = starts[lens > 0], lens[lens > 0]
    order = torch.argsort(lens, descending=True, stable=True)
    starts, lens = starts[order], lens[order]
    sizes = lens.tolist()
    if not sizes or sizes[0] == sizes[-1]:
        return AttentionPlan([AttentionBlock(len(sizes), sizes[0])] if sizes else [])
    blocks, gathers = [], []
    scatter = torch.empty(int(bounds[-1]), dtype=torch.long)
    offset = 0
    for first, last in _cut(sizes):
        block = AttentionBlock(last - first, sizes[first])
        size = lens[first:last, None]
        column = torch.arange(block.length)[None, :]
        rows = starts[first:last, None] + torch.minimum(column, size - 1)  # padding repeats the last token: any will do
        real = column < size
        scatter[rows[real]] = offset + real.flatten().nonzero().squeeze(1)
        gathers.append(rows.flatten())
        blocks.append(block)
        offset += block.slots
    return AttentionPlan(blocks, torch.cat(gathers).to(device), scatter.to(device))


def varlen_attention_forward(  # noqa: PLR0913 - transformers' signature
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    tree_attention: TreeOfSequences | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function in transformers' signature; see the module docstring.

    Args:
        query: ``[B, H, T, D]``; B is 1 when ``cu_seq_lens_q`` is given. Key and value ``[B, KV, T, D]``.
        cu_seq_lens_q: ``[n+1]`` bounds of the sequences; None means that each of the B rows is one whole sequence.
        tree_attention: the row is a tree of sequences; the bounds say nothing.

    Raises:
        ValueError: a padding mask or a feature (soft cap, attention sinks; dropout of a tree) that this function does
            not compute.
    """
    _refuse(attention_mask, kwargs)
    if tree_attention is not None:
        if dropout:
            raise ValueError(f"{VARLEN_ATTENTION}: shared tokens cannot have dropout of their own; set it to 0")
        rows = (x.transpose(1, 2).squeeze(0) for x in (query, key, value))
        return tree_attention(*rows, scale=scaling, window=sliding_window)[None], None
    if cu_seq_lens_q is None:
        plan = AttentionPlan([AttentionBlock(query.shape[0], query.shape[2])])
    else:
        plan = _plan_of(cu_seq_lens_q, query.device)
    batch, _, tokens, _ = query.shape
    # [B, H, T, D] is a transposed view of the projection output, so these are views: one row per token.
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    options = _Options(scaling, dropout, sliding_window)
    if plan.gather is None:
        out = _attend(plan.blocks[0], q, k, v, options) if plan.blocks else torch.zeros_like(q)
    else:
        slots = [block.slots for block in plan.blocks]
        parts = zip(*(_ToSlots.apply(x, plan.gather, plan.scatter).split(slots) for x in (q, k, v)), strict=True)
        outputs = [_attend(block, *part, options) for block, part in zip(plan.blocks, parts, strict=True)]
        out = _ToRows.apply(torch.cat(outputs) if len(outputs) > 1 else outputs[0], plan.scatter)
    return out.view(batch, tokens, *out.shape[1:]), None


def register_varlen_attention() -> str:
    """Make ``attn_implementation="areal_varlen"`` known to transformers; returns that name. Idempotent."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(VARLEN_ATTENTION, varlen_attention_forward)
    return VARLEN_ATTENTION


@dataclass(frozen=True)
class _Options:
    scaling: float | None
    dropout: float
    window: int | None


class _ToSlots(torch.autograd.Function):
    """Packed rows to padded slots. Gradients of padding are exactly 0, so going back is a plain selection."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gather: Tensor, scatter: Tensor) -> Tensor:
        ctx.scatter = scatter
        return x.index_select(0, gather)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return grad.index_select(0, ctx.scatter), None, None


class _ToRows(torch.autograd.Function):
    """Padded slots to packed rows; padding gets gradient 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scatter: Tensor) -> Tensor:
        ctx.scatter, ctx.slots = scatter, x.shape[0]
        return x.index_select(0, scatter)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad.new_zeros(ctx.slots, *grad.shape[1:]).index_copy_(0, ctx.scatter, grad), None


def _attend(block: AttentionBlock, q: Tensor, k: Tensor, v: Tensor, options: _Options) -> Tensor:
    """Attention of one block: ``[slots, heads, D]`` in, ``[slots, H, D]`` out."""
    q, k, v = (x.view(block.count, block.length, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
    mask = block.window_mask(options.window, q.device) if options.window is not None else None
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=options.dropout,
        is_causal=mask is None,
        scale=options.scaling,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out.transpose(1, 2).flatten(0, 1)


def _cut(lens: list[int]) -> list[tuple[int, int]]:
    """Cut descending lengths into runs whose padding stays under the slack; returns ``(first, last)`` pairs."""
    runs: list[tuple[int, int]] = []
    first, real = 0, 0
    for i, length in enumerate(lens):
        pairs = (i - first + 1) * lens[first] ** 2
        real += length**2
        if pairs - real > max(SLACK_PAIRS, SLACK_SHARE * pairs):
            runs.append((first, i))
            first, real = i, length**2
    runs.append((first, len(lens)))
    return runs


def _refuse(attention_mask: Tensor | None, kwargs: dict[str, Any]) -> None:
    if attention_mask is not None:
        raise ValueError(
            f"{VARLEN_ATTENTION} takes packed rows with cu_seq_lens_q, not an attention_mask; drop the padding first "
            "or choose attn_impl=sdpa"
        )
    for name in ("softcap", "s_aux"):
        if kwargs.get(name) is not None:
            raise ValueError(f"{VARLEN_ATTENTION} does not compute {name}; choose attn_impl=eager for this model")


# The plan of the last cu_seqlens seen: all layers of a micro-batch (and their recomputation) share one tensor object.
_last_plan: tuple[weakref.ref[Tensor], torch.device, AttentionPlan] | None = None


def _plan_of(cu_seqlens: Tensor, device: torch.device) -> AttentionPlan:
    global _last_plan
    if _last_plan is not None and _last_plan[0]() is cu_seqlens and _last_plan[1] == device:
        return _last_plan[2]
    # Activation checkpointing that chooses by op watches the ops of a layer twice and wants the same ones, but the
    # second time a plan may be known, or no longer known: planning must not be seen.
    with _disable_current_modes():
        plan = plan_attention(cu_seqlens, device)
    _last_plan = (weakref.ref(cu_seqlens), device, plan)
    return plan
