"""What every loss of the PPO family starts from: masks, the policy's log ratio and advantages, by token or by sequence.

Called by ``ppo_loss``, ``sapo_loss`` and ``cispo_loss``. Packed 1-D ``[T]`` or padded 2-D ``[n, S]`` tensors come in,
flat ones ``[E]`` go out. Values at mask == 0 reach no result: they are selected away before any arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from areal.utils.functional.precision import at_least_float32
from areal.utils.functional.rejection import Rejection, apply_rejection
from areal.utils.functional.segments import flatten_padded, segment_mean

if TYPE_CHECKING:
    from areal.api.config.ppo import RejectionSamplingConfig

RATIO_LEVELS = ("token", "sequence")


@dataclass
class PolicyRatio:
    """Result of ``policy_ratio``; flat tensors ``[E]``.

    Attributes:
        mask: bool, positions that still train after rejection.
        log_ratio: current - proximal with gradient; at sequence level the sequence's mean; 0 off ``mask``.
        advantage: no gradient; at sequence level the sequence's mean; 0 off ``mask``.
        approx_kl: current - proximal of each token, no gradient; 0 off ``mask``.
        rejection: result of rejection sampling, None without it.
    """

    mask: Tensor
    log_ratio: Tensor
    advantage: Tensor
    approx_kl: Tensor
    rejection: Rejection | None

    def result(
        self, loss: Tensor, ratio: Tensor, shape: torch.Size, **extra: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """What a loss function returns: loss per token in the input's ``shape``, and the statistics that all losses
        share, without gradient; ``extra`` ones replace the zeros of a clip.
        """
        values = {
            "approx_kl": self.approx_kl,
            "clip_mask": torch.zeros_like(self.mask),
            "dual_clip_mask": torch.zeros_like(self.mask),
            "loss": loss.detach(),
            "importance_weight": torch.where(self.mask, ratio.detach(), 0.0),
            **{name: value.detach() for name, value in extra.items()},
        }
        if self.rejection is not None:
            values["behave_imp_weight"] = self.rejection.weight
            values["behave_approx_kl"] = self.rejection.approx_kl
            values["behave_mask"] = self.rejection.mask
        stats = {name: value.view(shape) for name, value in values.items()}
        if self.rejection is not None:
            stats["filtered_fraction"] = self.rejection.filtered_fraction
        return loss.view(shape), stats


def policy_ratio(  # noqa: PLR0913 - tensors of one formula
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    level: str = "token",
    rejection_sampling: RejectionSamplingConfig | None = None,
    cu_seqlens: Tensor | None = None,
) -> PolicyRatio:
    """Log ratio current / proximal and advantages on the tokens that train.

    Args:
        logprobs: current policy, float32 (float64 is kept), with gradient.
        proximal_logprobs: policy the ratio is taken against, same shape.
        old_logprobs: behaviour policy, same shape; read by rejection sampling only.
        advantages: same shape.
        loss_mask: same shape, non-zero on trained positions.
        level: ``token``, or ``sequence`` for the geometric mean of the ratio and the mean advantage of each sequence.
        rejection_sampling: bounds on proximal / behaviour.
        cu_seqlens: integer ``[n + 1]``, needed for packed input with anything at sequence level.

    Raises:
        ValueError: unknown level, shapes differ, or cu_seqlens missing.
    """
    for other in (proximal_logprobs, old_logprobs, advantages, loss_mask):
        if other.shape != logprobs.shape:
            raise ValueError(f"tensors of the loss differ in shape: {tuple(logprobs.shape)} and {tuple(other.shape)}")
    if level not in RATIO_LEVELS:
        raise ValueError(f"importance_sampling_level={level!r}; allowed: {', '.join(RATIO_LEVELS)}")
    rejects_sequences = rejection_sampling is not None and rejection_sampling.level == "sequence"
    by_sequence = level == "sequence"
    seq_ids, n = flatten_padded(loss_mask, cu_seqlens, need_sequences=by_sequence or rejects_sequences)
    mask = loss_mask.reshape(-1) != 0
    theta, prox = at_least_float32(logprobs.reshape(-1)), at_least_float32(proximal_logprobs.detach().reshape(-1))
    rejection = None
    if rejection_sampling is not None:
        rejection = apply_rejection(prox, old_logprobs.detach().reshape(-1), mask, rejection_sampling, seq_ids, n)
        mask = rejection.mask
    log_ratio = torch.where(mask, theta - prox, 0.0)
    advantage = torch.where(mask, at_least_float32(advantages.detach().reshape(-1)), 0.0)
    approx_kl = log_ratio.detach()
    if by_sequence and seq_ids is not None:
        log_ratio = torch.where(mask, segment_mean(log_ratio, mask, seq_ids, n)[seq_ids], 0.0)
        advantage = torch.where(mask, segment_mean(advantage, mask, seq_ids, n)[seq_ids], 0.0)
    return PolicyRatio(mask, log_ratio, advantage, approx_kl, rejection)
