"""On-policy distillation: terms that pull the policy to a teacher on tokens the policy drew itself.

Called by the PPO actor for each micro-batch; elementwise, so any shape. The mean over tokens is the loss aggregation's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from areal.utils.functional.precision import at_least_float32

DISTILL_ESTIMATORS = ("k1", "k2")


def distillation_token_losses(logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor, kind: str = "k1") -> Tensor:
    """The term that is added to the policy loss (joint distillation), with d = logprobs - teacher.

    - ``k1``: ``d``. Its value estimates KL(policy || teacher); its gradient is that of the log-prob alone and does not
      depend on the teacher.
    - ``k2``: ``d^2 / 2``. Its gradient ``d * grad logprobs`` is the gradient of that KL on tokens the policy drew.

    Args:
        logprobs: current policy, aligned, float32 (float64 is kept), with gradient.
        teacher_logprobs: of the same tokens, same shape, aligned.
        mask: bool, same shape.
        kind: ``k1`` or ``k2``.

    Returns: same shape, 0 off the mask.
    Raises:
        ValueError: unknown kind.
    Source: KDRL (arXiv 2506.02208) sec. 3.
    """
    if kind not in DISTILL_ESTIMATORS:
        raise ValueError(f"distill_estimator={kind!r} is unknown; allowed: {', '.join(DISTILL_ESTIMATORS)}")
    d = torch.where(mask, at_least_float32(logprobs) - at_least_float32(teacher_logprobs.detach()), 0.0)
    return d if kind == "k1" else d.square() / 2


def pure_distillation_token_losses(
    logprobs: Tensor, teacher_logprobs: Tensor, old_logprobs: Tensor, mask: Tensor
) -> Tensor:
    """Reverse KL as the only objective: ``-exp(logprobs - old) * (teacher - sg(logprobs))``.

    The log ratio of teacher and policy takes the place of an advantage; the importance weight corrects for tokens
    that another version drew.

    Args:
        logprobs: current policy, aligned, float32 (float64 is kept), with gradient.
        teacher_logprobs: of the same tokens, same shape, aligned.
        old_logprobs: behaviour policy, same shape.
        mask: bool, same shape.

    Returns: same shape, 0 off the mask.
    Source: MiniLLM (arXiv 2306.08543), single-step part; GKD (2306.13649) with reverse KL on own samples.
    """
    theta = torch.where(mask, at_least_float32(logprobs), 0.0)
    teacher, old = (torch.where(mask, x.detach().to(theta.dtype), 0.0) for x in (teacher_logprobs, old_logprobs))
    return -(theta - old).exp() * (teacher - theta.detach())
