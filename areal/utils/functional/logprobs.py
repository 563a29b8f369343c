"""Log-probability of labels and entropy from logits, in row chunks so that float32 copies stay small.

Called by the train engines (per chunk of hidden states) and by tests. The scaled distribution is softmax(logits / T).
"""

from __future__ import annotations

import torch
from torch import Tensor

ROWS_PER_CHUNK = 1024  # rows of logits cast to float32 at a time


def gather_logprobs(
    logits: Tensor, labels: Tensor, temperature: float = 1.0, rows_per_chunk: int = ROWS_PER_CHUNK
) -> Tensor:
    """log_softmax(logits / temperature)[label], float32.

    Args:
        logits: ``[..., V]``, any float dtype.
        labels: ``[...]`` int64, ids below V.
        temperature: > 0; the sampling temperature.
        rows_per_chunk: rows converted to float32 at a time.

    Returns: ``[...]`` float32, differentiable in ``logits``.
    """
    rows, flat_labels = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    parts = [
        _scaled(chunk, temperature).log_softmax(-1).gather(-1, label.unsqueeze(-1)).squeeze(-1)
        for chunk, label in zip(
            torch.split(rows, rows_per_chunk), torch.split(flat_labels, rows_per_chunk), strict=True
        )
    ]
    return _join(parts, labels)


def gather_logprobs_entropy(
    logits: Tensor, labels: Tensor, temperature: float = 1.0, rows_per_chunk: int = ROWS_PER_CHUNK
) -> tuple[Tensor, Tensor]:
    """Log-probs as ``gather_logprobs`` and the entropy -sum p log p of the same scaled distribution, nats.

    Args, shapes: as ``gather_logprobs``.
    Returns: log-probs (differentiable) and entropy (a statistic without gradient), both ``[...]`` float32.
    """
    rows, flat_labels = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    logprobs, entropies = [], []
    for chunk, label in zip(torch.split(rows, rows_per_chunk), torch.split(flat_labels, rows_per_chunk), strict=True):
        log_p = _scaled(chunk, temperature).log_softmax(-1)
        logprobs.append(log_p.gather(-1, label.unsqueeze(-1)).squeeze(-1))
        with torch.no_grad():
            entropies.append(_entropy(log_p.detach()))
    return _join(logprobs, labels), _join(entropies, labels)


def _entropy(log_p: Tensor) -> Tensor:
    # A forbidden token has log p = -inf and p = 0; 0 * -inf would be NaN, its share of the entropy is 0.
    return -(log_p.exp() * log_p.clamp(min=torch.finfo(log_p.dtype).min)).sum(-1)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    logits = logits.float()
    return logits if temperature == 1.0 else logits / temperature


def _join(parts: list[Tensor], like: Tensor) -> Tensor:
    flat = parts[0] if len(parts) == 1 else torch.cat(parts)
    return flat.reshape(like.shape)
