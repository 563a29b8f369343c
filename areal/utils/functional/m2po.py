"""M2PO: drop the most off-policy tokens until the second moment of the log ratio is small. Called by the PPO actor."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


@torch.no_grad()
def m2po_mask(
    old_logprobs: Tensor,
    proximal_logprobs: Tensor,
    loss_mask: Tensor,
    threshold: float,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Tokens that stay in the loss: with s = (old - proximal)^2, the largest are dropped until the mean is bounded.

    As few tokens as possible are dropped, from the largest s down, so that the mean s of those left is strictly below
    ``threshold``; where no number of them reaches it, only the smallest s stays. Tokens of equal s are dropped or kept
    together, so that the result depends neither on the order of rows nor on how they lie on ranks.

    Args:
        old_logprobs: behaviour policy, any shape, float32.
        proximal_logprobs: same shape.
        loss_mask: same shape, non-zero on trained positions; values off it reach no result.
        threshold: bound of the mean squared log ratio, > 0.
        group: ranks whose tokens are judged together; all of them must call. None: these tokens alone.

    Returns: bool, same shape.
    Raises:
        ValueError: threshold is not positive, or shapes differ.
    Source: M2PO (arXiv 2510.01161).
    """
    if threshold <= 0:
        raise ValueError(f"m2_threshold={threshold} must be > 0")
    if old_logprobs.shape != loss_mask.shape or proximal_logprobs.shape != loss_mask.shape:
        raise ValueError(f"tensors differ in shape: {tuple(old_logprobs.shape)}, {tuple(loss_mask.shape)}")
    mask = loss_mask != 0
    own = torch.where(mask, (old_logprobs.double() - proximal_logprobs.double()).square(), -1.0)  # -1: not trained
    values = _of_all_ranks(own.reshape(-1), group)
    if values.numel() == 0:
        return mask
    ordered = values.sort(descending=True).values
    trained = ordered >= 0
    # Sum and number of the tokens from each place on, in the order from the largest down.
    tail = torch.where(trained, ordered, 0.0).flip(0).cumsum(0).flip(0)
    number = trained.flip(0).cumsum(0).flip(0)
    bounded = trained & (tail / number.clamp(min=1) < threshold)
    dropped = torch.where(bounded.any(), bounded.int().argmax(), (number[0] - 1).clamp(min=0))
    limit = torch.where(dropped > 0, ordered[(dropped - 1).clamp(min=0)], torch.inf)
    kept = trained & (ordered < limit)
    smallest = torch.where(trained, ordered, torch.inf).min()
    limit = torch.where(kept.any(), limit, torch.nextafter(smallest, smallest.new_tensor(torch.inf)))
    return mask & (own < limit)


def _of_all_ranks(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The values of every rank of ``group``, -1 where one has fewer than another; one host sync."""
    if group is None or dist.get_world_size(group) == 1:
        return values
    size = torch.tensor(values.numel(), device=values.device)
    dist.all_reduce(size, op=dist.ReduceOp.MAX, group=group)
    padded = values.new_full((int(size),), -1.0)
    padded[: values.numel()] = values
    parts = [torch.empty_like(padded) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, padded, group=group)
    return torch.cat(parts)
