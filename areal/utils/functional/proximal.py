"""Proximal policy of the decoupled objective, approximated from token versions instead of a forward pass.

Called inside the PPO actor's loss (``loglinear``) and for its error statistics (``metrics``). Any shape; aligned.
"""

from __future__ import annotations

import torch
from torch import Tensor

PROX_METHODS = ("loglinear", "linear", "rollout")


def version_alpha(versions: Tensor, current_version: int) -> Tensor:
    """How far the proximal policy lies from behaviour (0) to current (1), from the versions between them.

    ``clamp((v_theta - 1 - v) / (v_theta - v), 0, 1)``; 0 for prompt tokens (v < 0) and where v >= v_theta. float32.
    """
    lag = (current_version - versions).float()
    known = (versions >= 0) & (lag > 0)
    safe = torch.where(known, lag, 1.0)
    return torch.where(known, ((safe - 1) / safe).clamp(0, 1), 0.0)


def compute_prox_logp_approximations(
    old_logp: Tensor, logprobs: Tensor, versions: Tensor, current_version: int, method: str | None = None
) -> dict[str, Tensor]:
    """Approximate log pi_prox between behaviour and current policy.

    ``loglinear``: old + a (theta - old); ``linear``: log((1 - a) e^old + a e^theta + 1e-10); ``rollout``: old.

    Args:
        old_logp: behaviour log-probs, float32.
        logprobs: current log-probs; detached here.
        versions: version that drew each token; -1 on prompt.
        current_version: the trainer's version v_theta.
        method: one name, or None for all.

    Returns: method name -> float32 tensor of the same shape; where a is 0 the value is exactly ``old_logp``
        (``linear`` up to its 1e-10).
    Raises:
        ValueError: unknown method.
    """
    if method is not None and method not in PROX_METHODS:
        raise ValueError(f"prox approximation {method!r} is unknown; allowed: {', '.join(PROX_METHODS)}")
    theta, old = logprobs.detach().float(), old_logp.float()
    alpha = version_alpha(versions, current_version)
    result = {}
    if method in (None, "loglinear"):
        result["loglinear"] = torch.where(alpha > 0, old + alpha * (theta - old), old)
    if method in (None, "linear"):
        result["linear"] = ((1 - alpha) * old.exp() + alpha * theta.exp() + 1e-10).log()
    if method in (None, "rollout"):
        result["rollout"] = old
    return result
