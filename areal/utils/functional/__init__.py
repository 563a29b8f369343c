"""Formulas of the algorithms: pure functions of tensors, packed 1-D first.

Called by roles (``trainer``) and engines; nothing here knows a config beyond the few fields it reads.
"""

from areal.utils.functional.advantages import (
    gae_packed,
    overlong_penalty,
    place_sequence_rewards,
    shape_rewards,
    token_kl_rewards,
    trained_from_here,
)
from areal.utils.functional.kl import KL_ESTIMATORS, kl_estimate
from areal.utils.functional.logprobs import gather_logprobs, gather_logprobs_entropy
from areal.utils.functional.normalization import normalize
from areal.utils.functional.ppo_loss import ppo_actor_loss_fn
from areal.utils.functional.proximal import PROX_METHODS, compute_prox_logp_approximations, version_alpha
from areal.utils.functional.rejection import Rejection, apply_rejection
from areal.utils.functional.sft_loss import perplexity, sft_loss

__all__ = [
    "KL_ESTIMATORS",
    "PROX_METHODS",
    "Rejection",
    "apply_rejection",
    "compute_prox_logp_approximations",
    "gae_packed",
    "gather_logprobs",
    "gather_logprobs_entropy",
    "kl_estimate",
    "normalize",
    "overlong_penalty",
    "perplexity",
    "place_sequence_rewards",
    "ppo_actor_loss_fn",
    "sft_loss",
    "shape_rewards",
    "token_kl_rewards",
    "trained_from_here",
    "version_alpha",
]
