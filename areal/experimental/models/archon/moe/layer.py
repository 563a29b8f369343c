"""A mixture of experts in place of a feed-forward block.

In: hidden states ``[1, L, dim]``. Out: the same shape. Built by ``base.Block`` for the layers that have experts.

::

    tokens [T, dim] -> router: scores, experts [T, k] -> sort the T * k visits by expert -> rows [T * k, dim]
           -> experts -> back into token order [T, k, dim] -> sum weighted by the scores -> [T, dim]
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from areal.experimental.models.archon.activation_checkpoint import is_recomputing
from areal.experimental.models.archon.base import ModelArgs
from areal.experimental.models.archon.moe.experts import Experts
from areal.experimental.models.archon.moe.router import Router, Routing

__all__ = ["MoE", "combine", "sort_by_expert"]


class MoE(nn.Module):
    """Router and experts of one layer; there is no auxiliary loss.

    Attributes:
        tokens_per_expert: int64 ``[E]`` buffer, visits of each expert since it was last set to zero. A forward pass
            that activation checkpointing repeats counts once.
        exchange: set where experts are spread over ranks: called in their place, it brings rows to them and back.
    """

    tokens_per_expert: Tensor
    exchange: Callable[[Tensor, Tensor], Tensor] | None = None

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        moe = args.moe
        if moe is None:
            raise ValueError("ModelArgs.moe=None: a mixture of experts needs its sizes")
        routing = Routing(top_k=moe.top_k, norm=moe.norm_topk_prob)
        self.num_experts = moe.num_experts
        self.router = Router(args.dim, moe.num_experts, routing, moe.router_dtype)
        self.experts = Experts(moe.num_experts, args.dim, moe.hidden_dim)
        self.register_buffer("tokens_per_expert", torch.zeros(moe.num_experts, dtype=torch.int64), persistent=False)

    def init_buffers(self, device: torch.device | str) -> None:
        """Zero the counts, on ``device``."""
        self.tokens_per_expert = torch.zeros(self.num_experts, dtype=torch.int64, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """``[1, L, dim]`` to ``[1, L, dim]``, in the same dtype."""
        tokens = x.flatten(0, 1)
        scores, experts = self.router(tokens)
        order, counts = sort_by_expert(experts, self.num_experts)
        if not is_recomputing():
            self.tokens_per_expert += counts
        rows = tokens[order // experts.shape[1]]
        run = self.experts if self.exchange is None else self.exchange
        return combine(run(rows, counts), order, scores).view_as(x)


def sort_by_expert(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Order in which visits are computed: by expert, then by token. No host sync.

    Args:
        experts: int64 ``[T, k]``, experts of each token.
        num_experts: E.

    Returns: int64 ``[T * k]``, indices into the flattened ``experts``; int64 ``[E]``, visits of each expert.
    """
    ids, order = experts.flatten().sort(stable=True)
    ends = torch.searchsorted(ids, torch.arange(num_experts, device=ids.device), right=True)
    return order, ends.diff(prepend=ends.new_zeros(1))


def combine(outputs: Tensor, order: Tensor, scores: Tensor) -> Tensor:
    """Each token's outputs, weighted by its scores and summed in float32.

    Args:
        outputs: ``[T * k, dim]`` in the order of :func:`sort_by_expert`.
        order: that order, int64 ``[T * k]``.
        scores: float32 ``[T, k]``.

    Returns: ``[T, dim]`` in the dtype of ``outputs``.
    """
    by_token = torch.empty_like(outputs).index_copy(0, order, outputs).view(*scores.shape, -1)
    return torch.einsum("tk,tkd->td", scores, by_token.float()).to(outputs.dtype)
