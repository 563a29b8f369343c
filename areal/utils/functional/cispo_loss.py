"""CISPO: the importance weight is clipped, not the update. Called by the PPO actor for each micro-batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from areal.utils.functional.policy_ratio import policy_ratio
from areal.utils.functional.precision import at_least_float32

if TYPE_CHECKING:
    from areal.api.config.ppo import RejectionSamplingConfig


def cispo_token_losses(  # noqa: PLR0913 - tensors of one formula
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    eps_clip: float,
    loss_mask: Tensor,
    eps_clip_higher: float | None = None,
    rejection_sampling: RejectionSamplingConfig | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """REINFORCE with a clipped importance weight: ``-clip(rho, 1 - eps_clip, 1 + eps_clip_higher) * A * logprobs``.

    rho = exp(logprobs - proximal) has no gradient, so every token keeps one, also beyond the clip. ``eps_clip=1``
    leaves the weight without a lower bound, as the paper does.

    Args:
        logprobs: current policy, ``[T]`` packed or ``[n, S]`` padded, float32 (float64 is kept), with gradient.
        proximal_logprobs: policy the ratio is taken against, same shape.
        old_logprobs: behaviour policy, same shape; read by rejection sampling only.
        advantages: same shape.
        eps_clip: bound below 1 (and above it, without ``eps_clip_higher``).
        loss_mask: same shape, non-zero on trained positions.
        eps_clip_higher: bound above 1.
        rejection_sampling: as in ``ppo_token_losses``; the loss is multiplied by proximal / behaviour.
        cu_seqlens: integer ``[n + 1]``, needed for packed input with rejection at sequence level.

    Returns: as ``ppo_token_losses``; ``clip_mask`` is where the weight was clipped.

    Raises:
        ValueError: shapes differ, or cu_seqlens missing.

    Source: MiniMax-M1 (arXiv 2506.13585) eq. 4 and 5.
    """
    terms = policy_ratio(
        logprobs, proximal_logprobs, old_logprobs, advantages, loss_mask, "token", rejection_sampling, cu_seqlens
    )
    ratio = terms.log_ratio.detach().exp()
    weight = ratio.clamp(1 - eps_clip, 1 + (eps_clip if eps_clip_higher is None else eps_clip_higher))
    theta = torch.where(terms.mask, at_least_float32(logprobs.reshape(-1)), 0.0)
    loss = -weight * terms.advantage * theta
    if terms.rejection is not None:
        loss = loss * terms.rejection.weight
    return terms.result(loss, ratio, loss_mask.shape, clip_mask=weight != ratio)
