"""Causal attention inside each sequence of a packed row.

In: queries ``[1, L, H, D]``, keys and values ``[1, L, KV, D]``, the bounds of the sequences. Out: ``[1, L, H, D]``.
Called by ``base.Attention``; context parallelism wraps the module from outside. A row that is a tree of sequences
(``areal/models/tree``) brings its own attention.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from areal.models.transformers.varlen_attention import varlen_attention_forward

if TYPE_CHECKING:
    from areal.models.tree import TreeAttention

AttentionType = Literal["sdpa", "varlen"]


class PackedAttention(nn.Module):
    """A token attends to itself and to earlier tokens of its own sequence.

    Args:
        attn_type: ``sdpa``: one call with a dense mask ``[L, L]``, for short rows and as the reference. ``varlen``: no
            mask; the flash kernel for half precision on CUDA, else one call per block of similar sequences.
    """

    def __init__(self, attn_type: AttentionType) -> None:
        super().__init__()
        self.attn_type = attn_type

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        tree_attn_meta: TreeAttention | None = None,
    ) -> Tensor:
        """Attention of one packed row.

        Args:
            q: ``[1, L, H, D]``; k and v ``[1, L, KV, D]`` with H a multiple of KV.
            cu_seqlens: int32 ``[K + 1]``, from 0 to L; a repeated value is an empty sequence.
            max_seqlen: tokens of the longest sequence.
            tree_attn_meta: the row is this tree, and its bounds say nothing.
        """
        if tree_attn_meta is not None:
            return tree_attn_meta(q.squeeze(0), k.squeeze(0), v.squeeze(0)).unsqueeze(0)
        if self.attn_type == "sdpa":
            return _dense(q, k, v, cu_seqlens)
        if q.is_cuda and q.dtype in (torch.float16, torch.bfloat16):
            return _flash(q, k, v, cu_seqlens, max_seqlen)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return varlen_attention_forward(self, q, k, v, None, cu_seq_lens_q=cu_seqlens)[0]


def packed_causal_mask(cu_seqlens: Tensor, length: int) -> Tensor:
    """Bool ``[length, length]``: True where the query (row) may attend to the key (column)."""
    position = torch.arange(length, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens, position.to(cu_seqlens.dtype), right=True)
    same_sequence = sequence[:, None] == sequence[None, :]
    return same_sequence & (position[:, None] >= position[None, :])


def _dense(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
    mask = packed_causal_mask(cu_seqlens, q.shape[1])
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)


def _flash(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # registers CUDA kernels

    out = varlen_attn(
        q.squeeze(0),
        k.squeeze(0),
        v.squeeze(0),
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        window_size=(-1, 0),  # causal
        enable_gqa=q.shape[2] != k.shape[2],
    )
    assert isinstance(out, Tensor)
    return out.unsqueeze(0)
