"""Bound the importance ratio between proximal and behaviour policy: drop or clamp what is out of bounds.

Called by the PPO loss. Works on flat tensors ``[E]``; all results are without gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from areal.utils.functional.kl import kl_estimate
from areal.utils.functional.segments import segment_max, segment_mean, segment_sum

if TYPE_CHECKING:
    from areal.api.config.ppo import RejectionSamplingConfig


@dataclass
class Rejection:
    """Result of ``apply_rejection``.

    Attributes:
        mask: bool ``[E]``, elements that still train.
        weight: float32 ``[E]``, importance weight prox / behaviour; 0 where ``mask`` is False.
        approx_kl: float32 ``[E]``, log ratio prox - behaviour; 0 where ``mask`` is False.
        filtered_fraction: scalar, share of valid elements dropped (mask) or whose weight changed (clamp).
    """

    mask: Tensor
    weight: Tensor
    approx_kl: Tensor
    filtered_fraction: Tensor


@torch.no_grad()
def apply_rejection(  # noqa: PLR0913 - tensors of one formula
    proximal_logprobs: Tensor,
    old_logprobs: Tensor,
    mask: Tensor,
    config: RejectionSamplingConfig,
    seq_ids: Tensor | None = None,
    n_sequences: int = 0,
) -> Rejection:
    """Weight each token by exp(prox - old) and enforce the bounds of ``config``, both inclusive.

    Token level judges each element. Sequence level judges the sequence: the ratio metric aggregates log ratios (mean:
    geometric mean, sum: product, max: largest), KL metrics aggregate the estimates; under the ratio metric every token
    then carries the sequence's geometric mean as its weight, whatever ``agg`` is.

    Args:
        proximal_logprobs, old_logprobs: float32 ``[E]``.
        mask: bool ``[E]``.
        config: level, action, metric, agg, upper, lower.
        seq_ids: int64 ``[E]``, needed at sequence level.
        n_sequences: number of sequences.

    Source: AReaL (arXiv 2505.24298) decoupled objective; bounds as in truncated importance sampling.
    """
    raw = torch.where(mask, proximal_logprobs.float() - old_logprobs.float(), 0.0)
    log_ratio = torch.where(raw.isfinite(), raw, 0.0)
    weight = log_ratio.exp()
    is_ratio = config.metric == "ratio"
    metric = log_ratio if is_ratio else kl_estimate(raw, torch.zeros_like(raw), config.metric[3:], clamp=False)
    if config.level == "sequence":
        if seq_ids is None:
            raise ValueError("rejection_sampling.level=sequence on packed tensors needs cu_seqlens")
        metric = _aggregate(metric, mask, seq_ids, n_sequences, config.agg)[seq_ids]
        if is_ratio:
            weight = segment_mean(log_ratio, mask, seq_ids, n_sequences).exp()[seq_ids]
    if is_ratio:
        metric = metric.exp()
    inside = metric <= config.upper
    if config.lower is not None:
        inside &= metric >= config.lower
    if config.action == "mask":
        kept = mask & inside
        changed = mask & ~inside
    else:
        kept = mask
        clamped = torch.where(inside, weight, weight.clamp(config.lower or 0.0, config.upper))
        changed, weight = mask & (clamped != weight), clamped
    fraction = changed.sum() / mask.sum().clamp(min=1)
    return Rejection(kept, torch.where(kept, weight, 0.0), torch.where(kept, log_ratio, 0.0), fraction)


def _aggregate(x: Tensor, mask: Tensor, seq_ids: Tensor, n: int, agg: str) -> Tensor:
    if agg == "mean":
        return segment_mean(x, mask, seq_ids, n)
    if agg == "sum":
        return segment_sum(torch.where(mask, x, 0.0), seq_ids, n)
    return segment_max(x, mask, seq_ids, n)
