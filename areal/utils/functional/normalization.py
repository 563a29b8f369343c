"""Standardise rewards or advantages over the batch or over groups of equal id; called by the PPO actor."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from areal.utils.functional.segments import segment_sum

if TYPE_CHECKING:
    from areal.api.config.ppo import NormConfig


Total = Callable[..., list[Tensor]]


def normalize(
    x: Tensor,
    mask: Tensor | None,
    group_id: Tensor | None,
    config: NormConfig,
    reduce_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Centre and scale ``x``; groups are equal ids, of any size and in any order.

    ``(x - mean) / (std + eps)``; without ``std_level`` the centred value. The deviation is taken around the chosen mean
    (also a leave-one-out one; 0 without ``mean_level``). With a group level, a group of one element gets 0, never its
    raw value: the lone survivor of a group has no baseline. Only where every group has one element *and*
    ``config.group_size`` is 1 (groups of one by design) is it left as it is.

    Args:
        x: ``[E]`` sequences, or tokens; any shape.
        mask: same shape, 1 on elements that count; None: all.
        group_id: int64, same shape; needed with a group level, and None otherwise allowed.
        config: mean_level, mean_leave1out, std_level, std_unbiased, eps, group_size.
        reduce_group: batch statistics are summed over these ranks, every one of which must call. Group statistics never
            communicate: a group lies whole on one rank.

    Returns: float32, same shape, 0 where the mask is 0. Computed in float64.
    Raises:
        ValueError: a group level without ``group_id``.
    Source: DeepSeekMath (arXiv 2402.03300) sec. 4.1; leave-one-out RLOO (arXiv 2402.14740) eq. 7.
    """
    shape = x.shape
    weight = torch.ones_like(x, dtype=torch.float64) if mask is None else (mask != 0).to(torch.float64)
    weight, values = weight.reshape(-1), x.reshape(-1).to(torch.float64)
    values = torch.where(weight > 0, values, 0.0)
    levels = (config.mean_level, config.std_level)
    index, n_groups = None, 1
    if "group" in levels:
        if group_id is None:
            raise ValueError("normalisation with a group level needs group_id for every element")
        uniques, index = torch.unique(group_id.reshape(-1), return_inverse=True)
        n_groups = uniques.shape[0]

    def total(level: str | None, *terms: Tensor) -> list[Tensor]:
        """Per element: the sum of each term over its set."""
        if level == "group" and index is not None:
            return [segment_sum(t, index, n_groups)[index] for t in terms]
        sums = torch.stack([t.sum() for t in terms])
        if reduce_group is not None and dist.get_world_size(reduce_group) > 1:
            dist.all_reduce(sums, group=reduce_group)
        return list(sums)

    mean = _mean(values, weight, config, total)
    centred = torch.where(weight > 0, values - mean, 0.0)
    result = centred if config.std_level is None else centred / (_std(centred, weight, config, total) + config.eps)
    if index is not None:
        count = segment_sum(weight, index, n_groups)[index]
        by_design = (config.group_size == 1) & (count.max() <= 1)
        result = torch.where((count <= 1) & ~by_design, 0.0, result)
    return result.reshape(shape).float()


def _mean(values: Tensor, weight: Tensor, config: NormConfig, total: Total) -> Tensor:
    if config.mean_level is None:
        return values.new_zeros(())
    summed, count = total(config.mean_level, values, weight)
    plain = summed / count.clamp(min=1)
    if not config.mean_leave1out:
        return plain
    others = torch.where(weight > 0, (summed - values) / (count - 1).clamp(min=1), plain)
    return torch.where(count <= 1, 0.0, others)


def _std(centred: Tensor, weight: Tensor, config: NormConfig, total: Total) -> Tensor:
    squares, count = total(config.std_level, centred.square(), weight)
    divisor = count - 1 if config.std_unbiased else count
    return torch.where(divisor <= 0, 1.0, (squares / divisor.clamp(min=1)).sqrt())
