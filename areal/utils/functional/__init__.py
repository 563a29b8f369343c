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
from areal.utils.functional.cispo_loss import cispo_token_losses
from areal.utils.functional.critic_loss import CRITIC_LOSSES, critic_loss, explained_variance
from areal.utils.functional.distillation import (
    DISTILL_ESTIMATORS,
    distillation_token_losses,
    pure_distillation_token_losses,
)
from areal.utils.functional.dpo_loss import DPO_LOSSES, PreferencePairs, completion_logprobs, dpo_loss
from areal.utils.functional.kl import KL_ESTIMATORS, kl_estimate
from areal.utils.functional.logprobs import gather_logprobs, gather_logprobs_entropy
from areal.utils.functional.loss_agg import LOSS_AGGREGATIONS, aggregate, denominator
from areal.utils.functional.m2po import m2po_mask
from areal.utils.functional.normalization import normalize
from areal.utils.functional.ppo_loss import ppo_actor_loss_fn, ppo_token_losses
from areal.utils.functional.proximal import PROX_METHODS, compute_prox_logp_approximations, version_alpha
from areal.utils.functional.rejection import Rejection, apply_rejection
from areal.utils.functional.rw_loss import RewardPairs, rw_loss, valid_pairs
from areal.utils.functional.sapo_loss import sapo_token_losses
from areal.utils.functional.sft_loss import perplexity, sft_loss

__all__ = [
    "CRITIC_LOSSES",
    "DISTILL_ESTIMATORS",
    "DPO_LOSSES",
    "KL_ESTIMATORS",
    "LOSS_AGGREGATIONS",
    "PROX_METHODS",
    "PreferencePairs",
    "Rejection",
    "RewardPairs",
    "aggregate",
    "apply_rejection",
    "cispo_token_losses",
    "completion_logprobs",
    "compute_prox_logp_approximations",
    "critic_loss",
    "denominator",
    "distillation_token_losses",
    "dpo_loss",
    "explained_variance",
    "gae_packed",
    "gather_logprobs",
    "gather_logprobs_entropy",
    "kl_estimate",
    "m2po_mask",
    "normalize",
    "overlong_penalty",
    "perplexity",
    "place_sequence_rewards",
    "ppo_actor_loss_fn",
    "ppo_token_losses",
    "pure_distillation_token_losses",
    "rw_loss",
    "sapo_token_losses",
    "sft_loss",
    "shape_rewards",
    "token_kl_rewards",
    "trained_from_here",
    "valid_pairs",
    "version_alpha",
]
