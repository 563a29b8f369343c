"""Direct preference optimisation on pairs of sequences; called by the DPO learner.

Sequences alternate: chosen, rejected, chosen, rejected. A pair of which one side has no completion token counts
nowhere. Sums are taken in float64: they are differences of long sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from areal.utils.batch.pack import sequence_ids
from areal.utils.functional.rw_loss import valid_pairs
from areal.utils.functional.segments import segment_sum

DPO_LOSSES = ("sigmoid", "ipo")


@dataclass
class PreferencePairs:
    """Result of ``dpo_loss``; m pairs.

    Attributes:
        loss: float64 scalar with gradient, mean over the valid pairs; 0 with zero gradient when there is none.
        pair_loss: ``[m]`` loss of each pair, no gradient; 0 where not valid.
        chosen, rejected: ``[m]`` implicit rewards ``beta * (policy - reference)`` of the summed log-probs (under every
            loss type), no gradient; 0 where not valid.
        valid: bool ``[m]``, both sides have a completion token.
    """

    loss: Tensor
    pair_loss: Tensor
    chosen: Tensor
    rejected: Tensor
    valid: Tensor


def completion_logprobs(logprobs: Tensor, loss_mask: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of the log-probs of each sequence's completion, and its tokens; ``[n]`` float64 both.

    Args:
        logprobs: ``[T]`` aligned: entry t is of token t + 1. Values off the completion reach no result.
        loss_mask: ``[T]`` non-zero on completion tokens, by token: it is shifted left inside each sequence here. A
            first token of a sequence therefore never counts: nothing predicts it.
        cu_seqlens: integer ``[n + 1]``.
    """
    n, total = cu_seqlens.shape[0] - 1, logprobs.shape[0]
    seq_ids = sequence_ids(cu_seqlens, total)
    aligned = torch.zeros(total, dtype=torch.bool, device=logprobs.device)
    aligned[:-1] = (loss_mask[1:] != 0) & (seq_ids[1:] == seq_ids[:-1])
    sums = segment_sum(torch.where(aligned, logprobs, 0.0).double(), seq_ids, n)
    return sums, segment_sum(aligned.double(), seq_ids, n)


def dpo_loss(  # noqa: PLR0913 - tensors of one formula
    policy: Tensor,
    reference: Tensor | None,
    lens: Tensor,
    beta: float = 0.1,
    loss_type: str = "sigmoid",
    label_smoothing: float = 0.0,
) -> PreferencePairs:
    """Preference loss of summed log-probs, mean over valid pairs.

    With p, r the policy's and the reference's sums and c, j chosen and rejected:

    - sigmoid: ``z = (p_c - p_j) - (r_c - r_j)``; ``-(1 - s) log sigmoid(beta z) - s log sigmoid(-beta z)`` with s the
      label smoothing, the probability that a pair's labels are swapped.
    - ipo: ``z = (p_c - r_c) / len_c - (p_j - r_j) / len_j``; ``(z - 1 / (2 beta))^2``.

    Args:
        policy: ``[2m]`` float64 with gradient, from ``completion_logprobs``.
        reference: ``[2m]`` of the reference model; None: reference-free, that is, 0.
        lens: ``[2m]`` completion tokens.
        beta: inverse strength of the pull to the reference, > 0.
        loss_type: ``sigmoid`` or ``ipo``.
        label_smoothing: s in [0, 0.5); sigmoid only.

    Raises:
        ValueError: unknown ``loss_type``, a number out of range, shapes differ, an odd number of sequences.

    Source: DPO (arXiv 2305.18290) eq. 7; IPO (2310.12036) eq. 17, per token; label smoothing: Mitchell, A note on DPO
        with noisy preferences (2023).
    """
    if loss_type not in DPO_LOSSES:
        raise ValueError(f"loss_type={loss_type!r} is unknown; allowed: {', '.join(DPO_LOSSES)}")
    if beta <= 0:
        raise ValueError(f"beta={beta} must be > 0")
    if not 0 <= label_smoothing < 0.5 or (label_smoothing and loss_type != "sigmoid"):
        raise ValueError(f"label_smoothing={label_smoothing} must lie in [0, 0.5), and be 0 unless loss_type=sigmoid")
    if policy.shape != lens.shape or (reference is not None and reference.shape != policy.shape):
        raise ValueError("policy sums, reference sums and lengths of the pairs differ in number")
    valid = valid_pairs(lens)
    gain = policy if reference is None else policy - reference.detach()
    gain = torch.where(valid[:, None], gain.view(-1, 2), 0.0)
    if loss_type == "sigmoid":
        z = beta * (gain[:, 0] - gain[:, 1])
        pair_loss = -(1 - label_smoothing) * F.logsigmoid(z) - label_smoothing * F.logsigmoid(-z)
    else:
        per_token = gain / lens.view(-1, 2).clamp(min=1)
        pair_loss = (per_token[:, 0] - per_token[:, 1] - 1 / (2 * beta)).square()
    pair_loss = torch.where(valid, pair_loss, 0.0)
    loss = pair_loss.sum() / valid.sum().clamp(min=1)
    rewards = beta * gain.detach()
    return PreferencePairs(loss, pair_loss.detach(), rewards[:, 0], rewards[:, 1], valid)
