"""SAPO: a smooth gate on the ratio instead of a clip. Called by the PPO actor for each micro-batch."""

from __future__ import annotations

import torch
from torch import Tensor

from areal.utils.functional.policy_ratio import policy_ratio

# exp of it is finite, and both gates are flat there to the last bit of float32: the bound changes no result.
_MAX_LOG_RATIO = 20.0


def sapo_token_losses(  # noqa: PLR0913 - tensors of one formula
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    importance_sampling_level: str = "token",
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Soft adaptive policy loss of each token: ``-A * G(rho)`` with ``G(rho) = 4 / tau * sigmoid(tau * (rho - 1))``.

    rho = exp(logprobs - old); tau is ``tau_pos`` where A > 0 and ``tau_neg`` elsewhere. The gradient's weight
    ``4 p (1 - p)``, p the sigmoid, is 1 at rho = 1 and fades on both sides. No clip and no importance weight.

    Args:
        logprobs: current policy, ``[T]`` packed or ``[n, S]`` padded, float32 (float64 is kept), with gradient.
        old_logprobs: policy that drew the tokens (or its recomputation), same shape.
        advantages: same shape.
        loss_mask: same shape, non-zero on trained positions.
        tau_pos, tau_neg: temperatures, > 0; a larger one fades faster.
        importance_sampling_level: ``token`` or ``sequence``, as in ``ppo_token_losses``.
        cu_seqlens: integer ``[n + 1]``, needed for packed input at sequence level.

    Returns: loss per token with gradient (input shape), 0 off the mask; and per-token tensors without gradient: those
        of ``ppo_token_losses`` (no clips) and ``sapo_soft_gate, sapo_scaled_gate_pos, sapo_scaled_gate_neg``.

    Raises:
        ValueError: a temperature is not positive, unknown level, shapes differ, cu_seqlens missing.

    Source: Soft Adaptive Policy Optimization (arXiv 2511.20347).
    """
    if tau_pos <= 0 or tau_neg <= 0:
        raise ValueError(f"sapo_tau_pos={tau_pos} and sapo_tau_neg={tau_neg} must be > 0")
    terms = policy_ratio(
        logprobs, old_logprobs, old_logprobs, advantages, loss_mask, importance_sampling_level, None, cu_seqlens
    )
    ratio = terms.log_ratio.clamp(max=_MAX_LOG_RATIO).exp()
    positive, negative = (4 / tau * torch.sigmoid(tau * (ratio - 1)) for tau in (tau_pos, tau_neg))
    gate = torch.where(terms.advantage > 0, positive, negative)
    loss = -terms.advantage * gate
    gates = {"sapo_soft_gate": gate, "sapo_scaled_gate_pos": positive, "sapo_scaled_gate_neg": negative}
    return terms.result(loss, ratio, loss_mask.shape, **gates)
