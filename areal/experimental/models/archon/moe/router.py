"""Which experts each token visits, and how much each of them counts.

In: tokens ``[T, dim]``. Out: scores and expert ids ``[T, top_k]``. Called by ``moe/layer.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

__all__ = ["Gate", "Router", "Routing", "choose_experts"]


@dataclass(frozen=True)
class Routing:
    """How experts are chosen.

    Attributes:
        top_k: experts that each token visits.
        score: turns a token's logits into scores between 0 and 1.
        norm: scores of the chosen experts are scaled to sum 1.
        scale: scores are multiplied by it, last.
        num_groups: the experts form so many groups of neighbours; 1: one group.
        num_limited_groups: a token chooses within its best so many groups; a group is as good as its best two experts.
    """

    top_k: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    norm: bool = False
    scale: float = 1.0
    num_groups: int = 1
    num_limited_groups: int = 1


def choose_experts(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The ``top_k`` best experts of each token.

    Args:
        logits: ``[T, E]``, any float dtype.
        routing: how to choose.
        bias: float32 ``[E]``, added to the scores for the choice only, so it evens out loads without changing outputs.

    Returns: scores, float32 ``[T, top_k]``, differentiable; expert ids, int64 ``[T, top_k]``, in no fixed order.
    """
    wide = logits.float()
    scores = wide.softmax(-1) if routing.score == "softmax" else wide.sigmoid()
    merit = scores.detach() if bias is None else scores.detach() + bias
    if routing.num_limited_groups < routing.num_groups:
        merit = _best_groups_only(merit, routing)
    experts = merit.topk(routing.top_k, dim=-1).indices
    chosen = scores.gather(-1, experts)
    if routing.norm:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
    return chosen * routing.scale, experts


class Router(nn.Module):
    """A linear gate and the choice that follows it.

    Args:
        dim: width of the tokens.
        num_experts: E.
        routing: how to choose.
        gate_dtype: see :class:`Gate`.
    """

    def __init__(self, dim: int, num_experts: int, routing: Routing, gate_dtype: torch.dtype | None) -> None:
        super().__init__()
        self.routing = routing
        self.gate = Gate(dim, num_experts, gate_dtype)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """``[T, dim]`` to what :func:`choose_experts` returns."""
        return choose_experts(self.gate(tokens), self.routing)


class Gate(nn.Linear):
    """Logits of the experts. The matrix product runs in ``compute_dtype``; None: in the dtype of its inputs."""

    def __init__(self, dim: int, num_experts: int, compute_dtype: torch.dtype | None) -> None:
        super().__init__(dim, num_experts, bias=False)
        self.compute_dtype = compute_dtype

    def forward(self, tokens: Tensor) -> Tensor:
        """``[T, dim]`` to ``[T, E]`` in ``compute_dtype``."""
        weight: Tensor = self.weight
        if isinstance(weight, DTensor):  # whole on every tensor-parallel rank, which has a part of the gradient only
            weight = weight.to_local(grad_placements=[Partial()] * weight.device_mesh.ndim)
        if self.compute_dtype is None or self.compute_dtype == tokens.dtype == weight.dtype:
            return F.linear(tokens, weight)
        logits: Tensor = _LinearInDtype.apply(tokens, weight, self.compute_dtype)  # type: ignore[no-untyped-call]
        return logits


def _best_groups_only(merit: Tensor, routing: Routing) -> Tensor:
    """``merit`` with minus infinity at the experts of all but the best groups."""
    groups = merit.view(len(merit), routing.num_groups, -1)
    value = groups.topk(min(2, groups.shape[-1]), dim=-1).values.sum(-1)
    best = value.topk(routing.num_limited_groups, dim=-1).indices
    left_out = torch.ones_like(value, dtype=torch.bool).scatter(-1, best, False)
    return groups.masked_fill(left_out[..., None], -torch.inf).view_as(merit)


class _LinearInDtype(torch.autograd.Function):
    """``tokens @ weight.T`` in ``dtype``; keeps the inputs as they came for the backward pass, not wider copies."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(tokens, weight)
        ctx.dtype = dtype
        return F.linear(tokens.to(dtype), weight.to(dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        tokens, weight = ctx.saved_tensors
        grad_tokens = grad @ weight.to(ctx.dtype)
        grad_weight = grad.T @ tokens.to(ctx.dtype)
        return grad_tokens.to(tokens.dtype), grad_weight.to(weight.dtype), None
