"""How the losses of tokens become the loss of an optimizer step: the one place that knows the denominators.

``aggregate`` gives the loss of one micro-batch, divided by that micro-batch's ``denominator``; the engine loop weighs
each micro-batch with its denominator over the sum of all of them (see ``areal.engine.core.loop``). Hence the loss of a
step is the sum over all its tokens divided by the denominator of all its rows, for every cut into micro-batches and
ranks; sequences are never cut.

| name                      | numerator                                | denominator                                |
|---------------------------|------------------------------------------|--------------------------------------------|
| `token-mean`              | sum of token losses                      | trained tokens                             |
| `seq-mean-token-mean`     | sum over sequences of their token mean   | sequences with a trained token             |
| `seq-mean-token-sum-norm` | sum of token losses / constant           | sequences, also those without trained token|
"""

from __future__ import annotations

import torch
from torch import Tensor

from areal.utils.functional.segments import flatten_padded, segment_mean, segment_sum

LOSS_AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def aggregate(
    losses: Tensor, loss_mask: Tensor, kind: str = "token-mean", constant: float = 1.0, cu_seqlens: Tensor | None = None
) -> Tensor:
    """Loss of one micro-batch.

    Args:
        losses: per token, ``[T]`` packed or ``[n, S]`` padded, with gradient; values off the mask reach no result.
        loss_mask: same shape, non-zero on the tokens that count.
        kind: one of ``LOSS_AGGREGATIONS``.
        constant: divides the sum of a sequence under ``seq-mean-token-sum-norm`` (tokens), > 0.
        cu_seqlens: integer ``[n + 1]``; needed for packed input, except by ``token-mean``.

    Returns: scalar; 0 with zero gradient when nothing is masked in.
    Raises:
        ValueError: unknown kind, constant <= 0, shapes differ, or cu_seqlens missing.
    Source: token mean: DAPO (arXiv 2503.14476) eq. 8; sequence mean: DeepSeekMath (2402.03300) eq. 3; fixed
        denominator: Dr.GRPO (2503.20783) sec. 3.2.
    """
    if losses.shape != loss_mask.shape:
        raise ValueError(f"losses and mask differ in shape: {tuple(losses.shape)} and {tuple(loss_mask.shape)}")
    if constant <= 0:
        raise ValueError(f"loss_agg_constant={constant} must be > 0")
    count = denominator(loss_mask, kind, cu_seqlens).clamp(min=1)
    mask = loss_mask.reshape(-1) != 0
    flat = torch.where(mask, losses.reshape(-1), 0.0)
    if kind == "token-mean":
        return flat.sum() / count
    if kind == "seq-mean-token-sum-norm":
        return flat.sum() / (constant * count)
    seq_ids, n = flatten_padded(loss_mask, cu_seqlens, need_sequences=True)
    assert seq_ids is not None
    return segment_mean(flat, mask, seq_ids, n).sum() / count


def denominator(loss_mask: Tensor, kind: str = "token-mean", cu_seqlens: Tensor | None = None) -> Tensor:
    """Weight of a micro-batch among the others of a step: an integer scalar, no host sync.

    Args, Raises: as ``aggregate``.
    """
    if kind not in LOSS_AGGREGATIONS:
        raise ValueError(f"loss_agg={kind!r} is unknown; allowed: {', '.join(LOSS_AGGREGATIONS)}")
    mask = loss_mask != 0
    if kind == "token-mean":
        return mask.sum()
    seq_ids, n = flatten_padded(mask, cu_seqlens, need_sequences=True)
    if kind == "seq-mean-token-sum-norm":
        return torch.tensor(n, device=mask.device)
    assert seq_ids is not None
    return (segment_sum(mask.reshape(-1).long(), seq_ids, n) > 0).sum()
