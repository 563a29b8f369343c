"""The PPO family's actor loss (PPO, GRPO, GSPO, DAPO clip-higher, dual clip, decoupled objective).

Called by the PPO actor for each micro-batch, on packed 1-D tensors; padded 2-D tensors are accepted for the public API.
Values at mask == 0 reach no result: they are selected away before any arithmetic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from areal.utils.functional.loss_agg import aggregate
from areal.utils.functional.policy_ratio import policy_ratio

if TYPE_CHECKING:
    from areal.api.config.ppo import RejectionSamplingConfig


def ppo_token_losses(  # noqa: PLR0913 - public signature
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    eps_clip: float,
    loss_mask: Tensor,
    eps_clip_higher: float | None = None,
    c_clip: float | None = None,
    importance_sampling_level: str = "token",
    rejection_sampling: RejectionSamplingConfig | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate loss of each token.

    With rho = exp(logprobs - proximal), per token ``max(-A rho, -A clip(rho))``, bounded by ``c_clip * |A|`` for A < 0
    (dual clip), times the importance weight exp(proximal - old) when ``rejection_sampling`` is set; a token that
    rejection drops has loss 0. At sequence level rho is the geometric mean over the sequence and A its mean advantage;
    tokens share both.

    Args:
        logprobs: current policy, ``[T]`` packed or ``[n, S]`` padded, float32 (float64 is kept), with gradient.
        proximal_logprobs: policy the ratio is taken against, same shape.
        old_logprobs: behaviour policy, same shape.
        advantages: same shape.
        eps_clip: clip below 1 (and above it, without ``eps_clip_higher``).
        loss_mask: same shape, non-zero on trained positions.
        eps_clip_higher: clip above 1.
        c_clip: dual clip constant, > 1.
        importance_sampling_level: ``token`` or ``sequence``.
        rejection_sampling: bounds on the importance weight; None: the weight is 1.
        cu_seqlens: int32 ``[n + 1]``, needed for packed input with anything at sequence level.

    Returns: loss per token with gradient (input shape), 0 off the mask; and per-token tensors without gradient (input
        shape): ``loss, importance_weight, approx_kl, clip_mask, dual_clip_mask``; with rejection also
        ``behave_imp_weight, behave_approx_kl, behave_mask`` and the scalar ``filtered_fraction``.

    Raises:
        ValueError: unknown level, shapes differ, c_clip <= 1, or cu_seqlens missing.

    Source: PPO (1707.06347) eq. 7; dual clip (1912.09729) eq. 5; DAPO (2503.14476) eq. 10; GSPO (2507.18071) eq. 5;
        decoupled objective AReaL (2505.24298) eq. 5.
    """
    if c_clip is not None and c_clip <= 1:
        raise ValueError(f"c_clip={c_clip} must be > 1 (it bounds the loss at c_clip * |advantage|)")
    terms = policy_ratio(
        logprobs,
        proximal_logprobs,
        old_logprobs,
        advantages,
        loss_mask,
        importance_sampling_level,
        rejection_sampling,
        cu_seqlens,
    )
    # advantage is 0 off the mask, hence so are loss and gradient there, while ratio is 1 and harmless.
    ratio, advantage = terms.log_ratio.exp(), terms.advantage
    clipped = ratio.clamp(1 - eps_clip, 1 + (eps_clip if eps_clip_higher is None else eps_clip_higher))
    plain_loss, clipped_loss = -advantage * ratio, -advantage * clipped
    loss = torch.maximum(plain_loss, clipped_loss)
    masks = {"clip_mask": plain_loss < clipped_loss}
    if c_clip is not None:
        # Bounding by c|A| only bites for A < 0: a positive advantage gives a loss below 0.
        bound = c_clip * advantage.abs()
        masks["dual_clip_mask"] = bound < loss
        loss = torch.minimum(loss, bound)
    if terms.rejection is not None:
        loss = loss * terms.rejection.weight
    return terms.result(loss, ratio, loss_mask.shape, **masks)


def ppo_actor_loss_fn(  # noqa: PLR0913 - public signature
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    eps_clip: float,
    loss_mask: Tensor,
    eps_clip_higher: float | None = None,
    c_clip: float | None = None,
    importance_sampling_level: str = "token",
    rejection_sampling: RejectionSamplingConfig | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean of ``ppo_token_losses`` over the tokens of ``loss_mask``; same arguments, errors and statistics.

    The divisor is the token count of ``loss_mask`` *before* rejection: a dropped token counts in it, and its gradient
    is 0.
    """
    losses, stats = ppo_token_losses(
        logprobs,
        proximal_logprobs,
        old_logprobs,
        advantages,
        eps_clip,
        loss_mask,
        eps_clip_higher,
        c_clip,
        importance_sampling_level,
        rejection_sampling,
        cu_seqlens,
    )
    return aggregate(losses, loss_mask), stats
