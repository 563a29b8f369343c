"""The policy losses that ``actor.loss_fn`` can name, and the types that one of your own takes and returns.

A loss function gives the loss of every token; the mean over tokens or sequences is taken afterwards, once for all of
them, as ``actor.loss_agg`` says (``areal.utils.functional.loss_agg``). Called by ``ActorLoss`` for each micro-batch.

    def my_loss(x: LossInput) -> LossOutput:
        ratio = (x.logprobs - x.old_logprobs).exp()
        return LossOutput(-ratio * x.advantages, {"my_ratio": ratio.detach()})
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from areal.utils.errors import ArealError
from areal.utils.functional import cispo_token_losses, denominator, ppo_token_losses, sapo_token_losses

if TYPE_CHECKING:
    from areal.api.config.ppo import PPOActorConfig


class LossContractError(ArealError, TypeError):
    """A function named by ``actor.loss_fn`` or ``actor.advantage_fn`` returned something else than it should."""


@dataclass(frozen=True)
class LossInput:
    """One micro-batch as a loss function sees it; packed tensors ``[T]``, 0 where ``mask`` is False.

    Attributes:
        logprobs: float32 with gradient, of the current policy for the token that each position predicts.
        proximal_logprobs: float32, of the policy the ratio is taken against.
        old_logprobs: float32, of the policy that drew the tokens; equal to the proximal ones without decoupled loss.
        advantages: float32.
        entropy: float32, of the current policy in nats; no gradient.
        mask: bool, positions that train.
        cu_seqlens: int32 ``[n + 1]``.
        config: the actor's settings.
        fields: every field of the micro-batch, as it came (``returns``, ``ref_logp``, a workflow's own ones, …).
    """

    logprobs: Tensor
    proximal_logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    entropy: Tensor
    mask: Tensor
    cu_seqlens: Tensor
    config: PPOActorConfig
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class LossOutput:
    """What a loss function returns.

    Attributes:
        losses: ``[T]`` with gradient, loss of each token; positions off the mask are ignored.
        stats: ``[T]`` without gradient, by the name they get under ``ppo_actor/update/`` (mean over trained tokens).
            ``clip_mask``, ``dual_clip_mask``, ``importance_weight``, ``approx_kl``, ``behave_mask`` and their like
            replace the usual ones.
    """

    losses: Tensor
    stats: dict[str, Tensor] = field(default_factory=dict)


LossFn = Callable[[LossInput], LossOutput]


def ppo_loss(x: LossInput) -> LossOutput:
    """PPO, GRPO, DAPO, GSPO and the decoupled objective: see ``ppo_token_losses``."""
    c = x.config
    losses, stats = ppo_token_losses(
        logprobs=x.logprobs,
        proximal_logprobs=x.proximal_logprobs,
        old_logprobs=x.old_logprobs,
        advantages=x.advantages,
        eps_clip=c.eps_clip,
        loss_mask=x.mask,
        eps_clip_higher=c.eps_clip_higher,
        c_clip=c.c_clip,
        importance_sampling_level=c.importance_sampling_level,
        rejection_sampling=c.rejection_sampling,
        cu_seqlens=x.cu_seqlens,
    )
    return LossOutput(losses, stats)


def sapo_loss(x: LossInput) -> LossOutput:
    """SAPO: see ``sapo_token_losses``."""
    c = x.config
    losses, stats = sapo_token_losses(
        logprobs=x.logprobs,
        old_logprobs=x.old_logprobs,
        advantages=x.advantages,
        loss_mask=x.mask,
        tau_pos=c.sapo_tau_pos,
        tau_neg=c.sapo_tau_neg,
        importance_sampling_level=c.importance_sampling_level,
        cu_seqlens=x.cu_seqlens,
    )
    return LossOutput(losses, stats)


def cispo_loss(x: LossInput) -> LossOutput:
    """CISPO: see ``cispo_token_losses``."""
    c = x.config
    losses, stats = cispo_token_losses(
        logprobs=x.logprobs,
        proximal_logprobs=x.proximal_logprobs,
        old_logprobs=x.old_logprobs,
        advantages=x.advantages,
        eps_clip=c.eps_clip,
        loss_mask=x.mask,
        eps_clip_higher=c.eps_clip_higher,
        rejection_sampling=c.rejection_sampling,
        cu_seqlens=x.cu_seqlens,
    )
    return LossOutput(losses, stats)


def run_loss(loss_fn: LossFn, x: LossInput) -> LossOutput:
    """Call ``loss_fn`` and complete its statistics.

    Raises:
        LossContractError: the result is no ``LossOutput``, or one of its tensors is not ``[T]``.
    """
    output = loss_fn(x)
    name = f"actor.loss_fn={x.config.objective()}"
    if not isinstance(output, LossOutput):
        raise LossContractError(f"{name} returned a {type(output).__name__}; it must return a LossOutput")
    for key, value in {"losses": output.losses, **output.stats}.items():
        if value.shape != x.mask.shape and key != "filtered_fraction":
            raise LossContractError(
                f"{name}: {key} has shape {tuple(value.shape)}; expected {tuple(x.mask.shape)}, one value per token"
            )
    log_ratio = (x.logprobs - x.proximal_logprobs).detach()
    nothing = torch.zeros_like(x.mask)
    usual = {
        "approx_kl": log_ratio,
        "importance_weight": torch.where(x.mask, log_ratio.exp(), 0.0),
        "clip_mask": nothing,
        "dual_clip_mask": nothing,
        "loss": torch.where(x.mask, output.losses.detach(), 0.0),
    }
    return LossOutput(output.losses, {**usual, **output.stats})


def loss_tokens(packed_input: dict[str, Any]) -> Tensor:
    """Weight of a micro-batch under ``token-mean``: its trained tokens."""
    return denominator(packed_input["loss_mask"])


def loss_sequences(packed_input: dict[str, Any]) -> Tensor:
    """Weight of a micro-batch under ``seq-mean-token-mean``: its sequences with a trained token."""
    return denominator(packed_input["loss_mask"], "seq-mean-token-mean", packed_input["cu_seqlens"])


def all_sequences(packed_input: dict[str, Any]) -> Tensor:
    """Weight of a micro-batch under ``seq-mean-token-sum-norm``: its sequences."""
    return denominator(packed_input["loss_mask"], "seq-mean-token-sum-norm", packed_input["cu_seqlens"])


# The engine weighs micro-batches by these; a captured step names them by import path, hence one function each.
LOSS_WEIGHTS: dict[str, Callable[[dict[str, Any]], Tensor]] = {
    "token-mean": loss_tokens,
    "seq-mean-token-mean": loss_sequences,
    "seq-mean-token-sum-norm": all_sequences,
}
