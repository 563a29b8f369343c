"""A policy loss and advantages of one's own, chosen in ``own_loss.yaml`` by their import paths.

``python examples/math/gsm8k_rl.py --config examples/math/own_loss.yaml``
"""

import torch

from areal.trainer.ppo.advantages import AdvantageInput, AdvantageOutput
from areal.trainer.ppo.losses import LossInput, LossOutput


def clipped_reinforce(x: LossInput) -> LossOutput:
    """REINFORCE whose importance weight never exceeds ``1 + eps_clip``."""
    weight = (x.logprobs - x.old_logprobs).detach().exp().clamp(max=1 + x.config.eps_clip)
    return LossOutput(-weight * x.advantages * x.logprobs, {"weight": weight})


def shorter_is_better(x: AdvantageInput) -> AdvantageOutput:
    """The sequence's reward on every token, shared out: a long answer gets less for each of its tokens."""
    trained = torch.zeros_like(x.rewards).index_add_(0, x.seq_ids, x.mask.float())
    advantages = (x.rewards / trained.clamp(min=1))[x.seq_ids]
    return AdvantageOutput(advantages, advantages)
