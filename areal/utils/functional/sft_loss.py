"""Supervised fine-tuning loss and perplexity on packed tensors; called by the LM learner."""

from __future__ import annotations

import torch
from torch import Tensor

from areal.utils.functional.segments import segment_mean, segment_sum


def sft_loss(logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """Mean negative log-likelihood over the mask: ``-sum_M logp / (|M| + 1e-5)``.

    Args:
        logprobs: ``[T]`` float32 with gradient, aligned.
        loss_mask: ``[T]``, already rolled left by one inside each sequence.

    Returns: scalar; 0 with zero gradient when nothing is masked in.
    """
    mask = loss_mask != 0
    return -torch.where(mask, logprobs, 0.0).sum() / (mask.sum() + 1e-5)


def perplexity(logprobs: Tensor, loss_mask: Tensor, seq_ids: Tensor, n_sequences: int) -> tuple[Tensor, Tensor]:
    """Perplexity exp(-mean logp) per sequence, and which sequences have a trained token; both ``[n]``."""
    mask = loss_mask != 0
    mean = segment_mean(logprobs.detach().float(), mask, seq_ids, n_sequences)
    defined = segment_sum(mask.float(), seq_ids, n_sequences) > 0
    return torch.where(defined, (-mean).exp(), 0.0), defined
