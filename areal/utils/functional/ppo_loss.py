"""The PPO family's actor loss (PPO, GRPO, GSPO, DAPO clip-higher, dual clip, decoupled objective).

Called by the PPO actor for each micro-batch, on packed 1-D tensors; padded 2-D tensors are accepted for the public API.
Values at mask == 0 reach no result: they are selected away before any arithmetic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from areal.utils.functional.rejection import apply_rejection
from areal.utils.functional.segments import flatten_padded, segment_mean

if TYPE_CHECKING:
    from areal.api.config.ppo import RejectionSamplingConfig


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
    """Clipped surrogate loss, averaged over the tokens of ``loss_mask``.

    With rho = exp(logprobs - proximal), per token ``max(-A rho, -A clip(rho))``, bounded by ``c_clip * |A|`` for A < 0
    (dual clip), times the importance weight exp(proximal - old) when ``rejection_sampling`` is set. The divisor is the
    token count of ``loss_mask`` *before* rejection: a dropped token counts in the divisor, and its gradient is 0.
    At sequence level rho is the geometric mean over the sequence and A its mean advantage; tokens share both.

    Args:
        logprobs: current policy, ``[T]`` packed or ``[n, S]`` padded, float32, with gradient.
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

    Returns: scalar loss, and per-token tensors without gradient (input shape): ``loss, importance_weight, approx_kl,
        clip_mask, dual_clip_mask``; with rejection also ``behave_imp_weight, behave_approx_kl, behave_mask`` and the
        scalar ``filtered_fraction``.

    Raises:
        ValueError: unknown level, shapes differ, c_clip <= 1, or cu_seqlens missing.

    Source: PPO (1707.06347) eq. 7; dual clip (1912.09729) eq. 5; DAPO (2503.14476) eq. 10; GSPO (2507.18071) eq. 5;
        decoupled objective AReaL (2505.24298) eq. 5.
    """
    _check(logprobs, proximal_logprobs, old_logprobs, advantages, loss_mask)
    if importance_sampling_level not in ("token", "sequence"):
        raise ValueError(f"importance_sampling_level={importance_sampling_level!r}; allowed: token, sequence")
    if c_clip is not None and c_clip <= 1:
        raise ValueError(f"c_clip={c_clip} must be > 1 (it bounds the loss at c_clip * |advantage|)")
    shape = loss_mask.shape
    by_sequence = importance_sampling_level == "sequence"
    rejects_sequences = rejection_sampling is not None and rejection_sampling.level == "sequence"
    seq_ids, n = flatten_padded(loss_mask, cu_seqlens, need_sequences=by_sequence or rejects_sequences)
    mask = loss_mask.reshape(-1) != 0
    divisor = mask.sum().clamp(min=1)
    theta, prox = logprobs.reshape(-1), proximal_logprobs.detach().reshape(-1)
    rejection = None
    if rejection_sampling is not None:
        rejection = apply_rejection(prox, old_logprobs.detach().reshape(-1), mask, rejection_sampling, seq_ids, n)
        mask = rejection.mask
    log_ratio = torch.where(mask, theta.float() - prox.float(), 0.0)
    advantage = torch.where(mask, advantages.detach().reshape(-1).float(), 0.0)
    stats = {"approx_kl": log_ratio.detach()}
    if by_sequence and seq_ids is not None:
        log_ratio = torch.where(mask, segment_mean(log_ratio, mask, seq_ids, n)[seq_ids], 0.0)
        advantage = torch.where(mask, segment_mean(advantage, mask, seq_ids, n)[seq_ids], 0.0)
    # advantage is 0 off the mask, hence so are loss and gradient there, while ratio is 1 and harmless.
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - eps_clip, 1 + (eps_clip if eps_clip_higher is None else eps_clip_higher))
    plain_loss, clipped_loss = -advantage * ratio, -advantage * clipped
    loss = torch.maximum(plain_loss, clipped_loss)
    stats["clip_mask"] = plain_loss.detach() < clipped_loss.detach()
    stats["dual_clip_mask"] = torch.zeros_like(mask)
    if c_clip is not None:
        # Bounding by c|A| only bites for A < 0: a positive advantage gives a loss below 0.
        bound = c_clip * advantage.abs()
        stats["dual_clip_mask"] = bound < loss.detach()
        loss = torch.minimum(loss, bound)
    if rejection is not None:
        loss = loss * rejection.weight
        stats["behave_imp_weight"] = rejection.weight
        stats["behave_approx_kl"] = rejection.approx_kl
        stats["behave_mask"] = rejection.mask
    stats["loss"] = loss.detach()
    stats["importance_weight"] = torch.where(mask, ratio.detach(), 0.0)
    shaped = {name: value.view(shape) for name, value in stats.items()}
    if rejection is not None:
        shaped["filtered_fraction"] = rejection.filtered_fraction
    return loss.sum() / divisor, shaped


def _check(logprobs: Tensor, *others: Tensor) -> None:
    for other in others:
        if other.shape != logprobs.shape:
            raise ValueError(f"tensors of the loss differ in shape: {tuple(logprobs.shape)} and {tuple(other.shape)}")
