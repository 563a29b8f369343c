"""KL divergence estimators per token; called by reward shaping and rejection sampling."""

from __future__ import annotations

from torch import Tensor

KL_ESTIMATORS = ("k1", "k2", "k3")
KL_CLAMP = 10.0  # nats; bound of one token's estimate in reward shaping


def kl_estimate(logprobs: Tensor, base_logprobs: Tensor, kind: str = "k1", clamp: bool = True) -> Tensor:
    """Per-token estimate of KL(p || base) from samples of p.

    Args:
        logprobs: log p of the sampled tokens, any shape; computed in float32.
        base_logprobs: log base of the same tokens, same shape.
        kind: ``k1`` d, ``k2`` d^2/2, ``k3`` exp(-d) - 1 + d, with d = logprobs - base_logprobs.
        clamp: bound the result to [-10, 10] nats.

    Raises:
        ValueError: unknown ``kind``.

    Source: J. Schulman, Approximating KL divergence (2020).
    """
    d = logprobs.float() - base_logprobs.float()
    if kind == "k1":
        kl = d
    elif kind == "k2":
        kl = d.square() / 2
    elif kind == "k3":
        kl = (-d).exp() - 1 + d
    else:
        raise ValueError(f"kl_estimator={kind!r} is unknown; allowed: {', '.join(KL_ESTIMATORS)}")
    return kl.clamp(-KL_CLAMP, KL_CLAMP) if clamp else kl
