"""Bradley-Terry loss of a reward model on pairs of sequences; called by the reward-model learner.

Sequences alternate: chosen, rejected, chosen, rejected. A pair with an empty side counts nowhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from areal.utils.functional.precision import at_least_float32


@dataclass
class RewardPairs:
    """Result of ``rw_loss``; m pairs.

    Attributes:
        loss: scalar with gradient, mean over the valid pairs; 0 with zero gradient when there is none.
        pair_loss: ``[m]`` loss of each pair, no gradient; 0 where not valid.
        chosen, rejected: ``[m]`` scores, no gradient; 0 where not valid.
        valid: bool ``[m]``, both sides have a token.
    """

    loss: Tensor
    pair_loss: Tensor
    chosen: Tensor
    rejected: Tensor
    valid: Tensor


def valid_pairs(counts: Tensor) -> Tensor:
    """Which pairs have something on both sides; bool ``[m]``.

    Args:
        counts: ``[2m]`` tokens of each sequence (or of its completion), chosen and rejected in turn.

    Raises:
        ValueError: an odd number of sequences.
    """
    if counts.shape[0] % 2:
        raise ValueError(
            f"{counts.shape[0]} sequences are not pairs of chosen and rejected; keep pairs together with "
            "mb_spec.granularity=2"
        )
    return (counts.view(-1, 2) > 0).all(1)


def rw_loss(values: Tensor, cu_seqlens: Tensor) -> RewardPairs:
    """``-log sigmoid(s_chosen - s_rejected)``, where s is the value at a sequence's last token; mean over valid pairs.

    Args:
        values: ``[T]`` of a value head, float32 (float64 is kept), with gradient.
        cu_seqlens: integer ``[2m + 1]``.

    Raises:
        ValueError: an odd number of sequences.

    Source: Bradley and Terry (1952); InstructGPT (arXiv 2203.02155) eq. 1 for one pair per prompt.
    """
    valid = valid_pairs(cu_seqlens.diff())
    last = (cu_seqlens[1:].long() - 1).clamp(min=0)
    padded = F.pad(at_least_float32(values), (0, 1))  # so that an empty batch can be indexed
    scores = torch.where(valid[:, None], padded[last].view(-1, 2), 0.0)
    chosen, rejected = scores.unbind(1)
    pair_loss = torch.where(valid, -F.logsigmoid(chosen - rejected), 0.0)
    loss = pair_loss.sum() / valid.sum().clamp(min=1)
    return RewardPairs(loss, pair_loss.detach(), chosen.detach(), rejected.detach(), valid)
