"""Rewards of sequences to advantages of tokens: penalties, shaping, placement and GAE, on packed 1-D tensors.

Called by the PPO actor. Shapes: T tokens, n sequences. ``mask [T]`` is *aligned*: entry t is about token t + 1, so the
last position of a sequence is never trained. Values at mask == 0 reach no result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from areal.utils.batch.pack import sequence_ids
from areal.utils.functional.kl import kl_estimate


def overlong_penalty(
    rewards: Tensor, response_lens: Tensor, *, max_new_tokens: int, overlong_tokens: int, factor: float
) -> Tensor:
    """Add the soft penalty for answers that enter the last ``overlong_tokens`` of the budget.

    ``r + min(0, -(L - (max_new_tokens - overlong_tokens)) / overlong_tokens * factor)``; there is no lower floor.

    Args:
        rewards: ``[n]`` float32, unitless.
        response_lens: ``[n]`` generated tokens L.
        max_new_tokens: budget of an answer (tokens).
        overlong_tokens: length of the punished tail (tokens), > 0.
        factor: penalty at the full budget.

    Returns: new ``[n]`` float32.
    Source: DAPO (arXiv 2503.14476) eq. 13, without its floor.
    """
    excess = response_lens - (max_new_tokens - overlong_tokens)
    return rewards + (-excess / overlong_tokens * factor).clamp(max=0)


def shape_rewards(rewards: Tensor, *, bias: float, scaling: float, clip: float) -> Tensor:
    """``clip((r + bias) * scaling, -clip, clip)``, ``[n]`` float32."""
    return ((rewards.float() + bias) * scaling).clamp(-clip, clip)


def trained_from_here(mask: Tensor, cu_seqlens: Tensor, seq_ids: Tensor | None = None) -> Tensor:
    """Number of trained positions of its sequence from each position on, itself included; int64 ``[T]``."""
    if mask.shape[0] == 0:
        return mask.long()
    seq_ids = sequence_ids(cu_seqlens, mask.shape[0]) if seq_ids is None else seq_ids
    mask = mask.long()
    running = mask.cumsum(0)
    last = cu_seqlens[1:].long() - 1
    return running[last][seq_ids] - running + mask


def token_kl_rewards(logprobs: Tensor, ref_logprobs: Tensor | None, mask: Tensor, kl_ctl: float, kind: str) -> Tensor:
    """``-kl_ctl * KL`` per token, 0 where ``mask`` is 0; without reference log-probs the reference is 0.

    Args:
        logprobs, ref_logprobs: ``[T]`` float32, aligned.
        mask: bool ``[T]``.
        kl_ctl: coefficient; 0 gives zeros.
        kind: estimator, see ``kl_estimate``.
    """
    if kl_ctl == 0:
        return torch.zeros_like(logprobs, dtype=torch.float32)
    zero = logprobs.new_zeros(())
    base = zero.expand_as(logprobs) if ref_logprobs is None else torch.where(mask, ref_logprobs, zero)
    return -kl_ctl * kl_estimate(torch.where(mask, logprobs, zero), base, kind)


def place_sequence_rewards(rewards: Tensor, mask: Tensor, remaining: Tensor, seq_ids: Tensor) -> Tensor:
    """Put each sequence's reward on its last trained position, zeros elsewhere; ``[T]``.

    For a sequence that ends with a generated token this is the position before the last. One that ends with tool or
    user text keeps its reward too: it goes to the last token the policy drew.

    Args:
        rewards: ``[n]`` float32.
        mask: bool ``[T]``, aligned.
        remaining: ``trained_from_here`` of the mask.
        seq_ids: ``[T]`` sequence of each token.
    """
    return torch.where(mask & (remaining == 1), rewards[seq_ids], 0.0)


def gae_packed(  # noqa: PLR0913 - tensors of one recurrence
    rewards: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    *,
    discount: float = 1.0,
    gae_lambda: float = 1.0,
    values: Tensor | None = None,
    truncated: Tensor | None = None,
    max_seqlen: int | None = None,
    seq_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over the trained positions of each sequence.

    Positions with mask 0 (prompt, tool output) neither discount nor contribute: the recurrence steps from one trained
    position to the next, ``A_k = r_k + discount * V_{k+1} - V_k + discount * gae_lambda * A_{k+1}``. A masked position
    reports the advantage of the next trained one. After the last trained position the value is 0, or that of the
    sequence's last token where ``truncated``.

    The recurrence runs for all sequences at once in log2(longest) steps.

    Args:
        rewards: ``[T]`` float32 per position; ignored at mask 0.
        mask: ``[T]`` 1 on trained positions, aligned.
        cu_seqlens: int32 ``[n + 1]``.
        discount: gamma in [0, 1].
        gae_lambda: lambda in [0, 1].
        values: ``[T]`` float32 of a critic, by index; None: 0.
        truncated: bool ``[n]``: bootstrap from the value of the last token. None: no sequence.
        max_seqlen: longest sequence; None reads it from ``cu_seqlens`` (one sync).
        seq_ids: ``[T]`` sequence of each token, if at hand.

    Returns: advantages and returns (advantages + values), ``[T]`` float32; returns carry no value at mask 0.
    Source: GAE (arXiv 1506.02438) eq. 16.
    """
    n, total = cu_seqlens.shape[0] - 1, rewards.shape[0]
    if total == 0:
        return rewards.clone(), rewards.clone()
    if max_seqlen is None:
        max_seqlen = int(cu_seqlens.diff().max())
    seq_ids = sequence_ids(cu_seqlens, total) if seq_ids is None else seq_ids
    last = cu_seqlens[1:].long() - 1
    mask = mask.bool().index_fill(0, last, False)
    # Column c >= 1 of a row holds the c-th trained position from the end, so that time runs to the left.
    cell = seq_ids * (max_seqlen + 1) + trained_from_here(mask, cu_seqlens, seq_ids)

    def to_grid(x: Tensor) -> Tensor:
        flat = x.new_zeros(n * (max_seqlen + 1), dtype=torch.float32)
        return flat.index_add_(0, cell, torch.where(mask, x.float(), 0.0)).view(n, -1)

    delta = to_grid(rewards)
    if values is not None:
        grid = to_grid(values)
        if truncated is not None:
            grid[:, 0] = torch.where(truncated.bool(), values[last].float(), 0.0)
        delta[:, 1:] += discount * grid[:, :-1] - grid[:, 1:]
    advantages = _discounted_cumsum(delta, discount * gae_lambda).reshape(-1)[cell]
    if values is None:
        return advantages, advantages
    return advantages, advantages + torch.where(mask, values.float(), 0.0)


def _discounted_cumsum(x: Tensor, factor: float) -> Tensor:
    """``y_c = x_c + factor * y_{c-1}`` along dim 1, by doubling the window that a step covers."""
    if factor == 1:
        return x.cumsum(1)
    step = 1
    while step < x.shape[1] and factor != 0:
        x = torch.cat([x[:, :step], x[:, step:] + factor * x[:, :-step]], dim=1)
        step, factor = step * 2, factor * factor
    return x
