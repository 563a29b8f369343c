"""The actor's order of reward shaping and advantages, on one packed batch.

In: a packed batch of finished trajectories (with ``prox_logp``, ``ref_logp``, ``values`` where configured). Out: the
same batch with aligned masks and log-probs, token rewards and advantages. Called by ``PPOActor.compute_advantages``.
"Aligned": entry t of a sequence describes the prediction of token t + 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from areal.trainer.ppo import ADVANTAGE_FNS, resolve
from areal.trainer.ppo.losses import LossContractError
from areal.utils.batch import PackedBatch, roll_packed
from areal.utils.errors import ArealError, DataError
from areal.utils.functional import (
    gae_packed,
    normalize,
    overlong_penalty,
    place_sequence_rewards,
    shape_rewards,
    token_kl_rewards,
    trained_from_here,
)
from areal.utils.functional.segments import segment_sum

if TYPE_CHECKING:
    import torch.distributed as dist

    from areal.api.config.ppo import PPOActorConfig


class NonFiniteInputError(ArealError, RuntimeError):
    """A reward, or a log-prob or value of a trained token, is NaN or infinite."""


@dataclass(frozen=True)
class AdvantageInput:
    """One step's sequences as an advantage function sees them: T packed tokens, n sequences.

    Attributes:
        token_rewards: float32 ``[T]``, KL reward of each trained token plus the sequence's reward on its last one.
        rewards: float32 ``[n]``, shaped and normalised reward of each sequence.
        mask: bool ``[T]``, aligned: entry t is about token t + 1.
        cu_seqlens: int32 ``[n + 1]``.
        seq_ids: int64 ``[T]``, sequence of each token.
        max_seqlen: longest sequence (tokens).
        values: float32 ``[T]`` of the critic, by index; None without one.
        truncated: bool ``[n]``; None where the workflow does not say.
        group_id: int64 ``[n]``, equal for the answers to one prompt; None where it is not known.
        reduce_group: data-parallel ranks; all of them call the function together.
        config: the actor's settings.
    """

    token_rewards: Tensor
    rewards: Tensor
    mask: Tensor
    cu_seqlens: Tensor
    seq_ids: Tensor
    max_seqlen: int
    values: Tensor | None
    truncated: Tensor | None
    group_id: Tensor | None
    reduce_group: dist.ProcessGroup | None
    config: PPOActorConfig


@dataclass(frozen=True)
class AdvantageOutput:
    """What an advantage function returns; float32 ``[T]``, values off the mask are ignored.

    Attributes:
        advantages: weight of each trained token in the policy loss, before ``adv_norm``.
        returns: target of the critic.
    """

    advantages: Tensor
    returns: Tensor


def gae_advantages(x: AdvantageInput) -> AdvantageOutput:
    """Generalised advantage estimation, see ``gae_packed``; without a critic the discounted rewards to come."""
    advantages, returns = gae_packed(
        x.token_rewards,
        x.mask,
        x.cu_seqlens,
        discount=x.config.discount,
        gae_lambda=x.config.gae_lambda,
        values=x.values,
        truncated=x.truncated,
        max_seqlen=x.max_seqlen,
        seq_ids=x.seq_ids,
    )
    return AdvantageOutput(advantages, returns)


def compute_advantages(
    batch: PackedBatch, config: PPOActorConfig, reduce_group: dist.ProcessGroup | None = None
) -> PackedBatch:
    """Rewards to advantages, in this order: overlong penalty, bias/scale/clip, reward normalisation, alignment of mask
    and log-probs, overlong filter, KL reward, placement of the sequence reward, GAE (or ``actor.advantage_fn``),
    advantage normalisation.

    Args:
        batch: one step's sequences; not modified.
        config: the actor's.
        reduce_group: data-parallel ranks over which batch-level normalisation is taken; all of them must call.

    Returns: a new batch. Tokens: ``loss_mask`` (float32, aligned), ``logprobs`` (aligned behaviour log-probs, 0 off the
        mask), ``prox_logp`` where there is one, ``aligned_versions``, ``advantages``, ``returns``, ``kl_rewards``,
        ``tot_rewards``. Sequences: ``response_len``, generated tokens, also of those that the filter
        drops. ``rewards`` stay as they came.

    Raises:
        DataError: a needed field is absent, or advantages were computed before.
        NonFiniteInputError: a reward, or a trained token's log-prob or value, is not finite.
    """
    _check_fields(batch, config)
    seq_ids = batch.seq_ids
    scores = _sequence_scores(batch, config, seq_ids, reduce_group)
    mask = roll_packed(batch.tokens["loss_mask"] != 0, batch.cu_seqlens, fill=False)
    response_len = segment_sum(mask.float(), seq_ids, batch.n_sequences)
    truncated = batch.sequences.get("truncated")
    if config.overlong_filter:
        mask = mask & ~_known(truncated).bool()[seq_ids]
    tokens = _aligned_logprobs(batch, config, mask)
    old = tokens["logprobs"]
    read = [batch.tokens[key] for key in ("teacher_logp", "ref_logp", "values") if key in batch.tokens]
    check_finite(scores, *tokens.values(), *(torch.where(mask, value, 0.0) for value in read))
    remaining = trained_from_here(mask, batch.cu_seqlens, seq_ids)
    if config.mask_no_eos_with_zero and truncated is not None:
        scores = torch.where(truncated.bool(), 0.0, scores)
    kl_rewards = token_kl_rewards(old, batch.tokens.get("ref_logp"), mask, config.kl_ctl, config.kl_estimator)
    token_rewards = kl_rewards + place_sequence_rewards(scores, mask, remaining, seq_ids)
    result = _run(
        AdvantageInput(
            token_rewards=token_rewards,
            rewards=scores,
            mask=mask,
            cu_seqlens=batch.cu_seqlens,
            seq_ids=seq_ids,
            max_seqlen=batch.max_seqlen,
            values=batch.tokens.get("values"),
            truncated=truncated,
            group_id=batch.sequences.get("group_id"),
            reduce_group=reduce_group,
            config=config,
        )
    )
    advantages = result.advantages
    if config.adv_norm is not None:
        group_id = batch.sequences.get("group_id")
        token_group = None if group_id is None else group_id[seq_ids]
        advantages = normalize(advantages, mask, token_group, config.adv_norm, reduce_group)
    if "versions" in batch.tokens:
        tokens["aligned_versions"] = roll_packed(batch.tokens["versions"], batch.cu_seqlens, fill=-1)
    return batch.with_tokens(
        **tokens,
        loss_mask=mask.float(),
        advantages=advantages,
        returns=result.returns,
        kl_rewards=kl_rewards,
        tot_rewards=token_rewards,
    ).with_sequences(response_len=response_len)


def _run(x: AdvantageInput) -> AdvantageOutput:
    """Call the configured function and check what it returns.

    Raises:
        LossContractError: no ``AdvantageOutput``, or a tensor that is not ``[T]``.
        NonFiniteInputError: an advantage or return of a trained token is not finite.
    """
    name = x.config.advantage_fn
    function = resolve("actor.advantage_fn", name, ADVANTAGE_FNS)
    result = function(x)
    if name in ADVANTAGE_FNS:
        assert isinstance(result, AdvantageOutput)
        return result
    if not isinstance(result, AdvantageOutput):
        raise LossContractError(
            f"actor.advantage_fn={name} returned a {type(result).__name__}; it must return an AdvantageOutput"
        )
    for key, value in (("advantages", result.advantages), ("returns", result.returns)):
        if value.shape != x.mask.shape:
            raise LossContractError(
                f"actor.advantage_fn={name}: {key} has shape {tuple(value.shape)}; expected {tuple(x.mask.shape)}"
            )
        if not bool(torch.where(x.mask, value, 0.0).isfinite().all()):
            raise NonFiniteInputError(f"actor.advantage_fn={name}: {key} of a trained token is NaN or infinite")
    return result


def _known(truncated: Tensor | None) -> Tensor:
    if truncated is None:
        raise DataError(
            "actor.overlong_filter=true needs 'truncated' in every trajectory: return it from the workflow, or set the "
            "filter to false"
        )
    return truncated


def _sequence_scores(
    batch: PackedBatch, config: PPOActorConfig, seq_ids: Tensor, reduce_group: dist.ProcessGroup | None
) -> Tensor:
    """Shaped and normalised reward of each sequence, ``[n]`` float32."""
    rewards = batch.sequences["rewards"].float()
    if config.overlong_reward_penalty:
        assert config.overlong_tokens is not None
        assert config.overlong_penalty_factor is not None
        generated = segment_sum((batch.tokens["loss_mask"] != 0).float(), seq_ids, batch.n_sequences)
        rewards = overlong_penalty(
            rewards,
            generated,
            max_new_tokens=config.max_new_tokens,
            overlong_tokens=config.overlong_tokens,
            factor=config.overlong_penalty_factor,
        )
    rewards = shape_rewards(rewards, bias=config.reward_bias, scaling=config.reward_scaling, clip=config.reward_clip)
    if config.reward_norm is not None:
        rewards = normalize(rewards, None, batch.sequences.get("group_id"), config.reward_norm, reduce_group)
    return rewards


def _aligned_logprobs(batch: PackedBatch, config: PPOActorConfig, mask: Tensor) -> dict[str, Tensor]:
    """Behaviour log-probs, and the proximal ones where the loss needs them; 0 off the mask."""
    prox = batch.tokens.get("prox_logp")
    if not config.use_decoupled_loss and config.recompute_logprob:
        assert prox is not None
        old = torch.where(mask, prox, 0.0)
        return {"logprobs": old, "prox_logp": old}
    old = torch.where(mask, roll_packed(batch.tokens["logprobs"], batch.cu_seqlens), 0.0)
    if not config.use_decoupled_loss:
        return {"logprobs": old, "prox_logp": old}
    return {"logprobs": old} if prox is None else {"logprobs": old, "prox_logp": torch.where(mask, prox, 0.0)}


def _check_fields(batch: PackedBatch, config: PPOActorConfig) -> None:
    if "advantages" in batch.tokens:
        raise DataError("compute_advantages was called on its own result; masks and log-probs would be shifted twice")
    for key, fields in (("loss_mask", batch.tokens), ("logprobs", batch.tokens), ("rewards", batch.sequences)):
        if key not in fields:
            raise DataError(f"compute_advantages needs {key!r} in every trajectory")
    if config.should_compute_prox_logp() and "prox_logp" not in batch.tokens:
        raise DataError(
            "prox_logp is missing: call compute_logp before compute_advantages and store its result as 'prox_logp', "
            "or set actor.prox_logp_method=loglinear (decoupled loss) or actor.recompute_logprob=false"
        )
    if config.use_decoupled_loss and config.prox_logp_method != "recompute" and "versions" not in batch.tokens:
        raise DataError(f"actor.prox_logp_method={config.prox_logp_method} needs 'versions' in every trajectory")


def check_finite(*tensors: Tensor) -> None:
    """Refuse NaN and infinity; one host sync.

    Raises:
        NonFiniteInputError: a tensor has one.
    """
    finite = torch.stack([t.isfinite().all() for t in tensors]).all()
    if not bool(finite):
        raise NonFiniteInputError(
            "a reward, or a log-prob or value of a trained token, is NaN or infinite: check the reward function, the "
            "sampler's log-probs (a sample that has such ones should have been dropped), and the weights of ref and "
            "critic"
        )
