"""Reduces recorded statistics: local partial results, at most three collectives, one copy to the host.

``stats_tracker`` hands over its series; every key becomes one row ``[sum, count, min, max]``, so that ranks may hold
different keys (a missing one contributes neutral elements) and averages are weighted by elements, not by ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch

from areal.utils.errors import DataError
from areal.utils.ranks import gather_json, group_device

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

COUNT_SUFFIX = "__count"


class ReduceType(Enum):
    """How the records of one key become numbers."""

    AVG_MIN_MAX = "avg_min_max"  # key/avg, key/min, key/max over the masked elements
    AVG = "avg"
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    SCALAR = "scalar"  # mean over calls, plus key__count


@dataclass
class Series:
    """Everything recorded under one key since its last reset."""

    reduce_type: ReduceType
    values: list[Any] = field(default_factory=list)  # tensors, or numbers for SCALAR
    masks: list[torch.Tensor] = field(default_factory=list)  # parallel to values; empty for SCALAR and denominators


# One row per key: [sum, count] are added over ranks, min and max have their own operation.
_NEUTRAL = (0.0, 0.0, math.inf, -math.inf)


def reduce_series(series: Mapping[str, Series], group: ProcessGroup | None) -> dict[str, float]:
    """Local partial results -> (collectives) -> one host copy -> numbers under their exported keys."""
    types = {key: s.reduce_type for key, s in series.items()}
    if group is not None:
        types = _union_of_keys(types, group)
    keys = sorted(types)
    if not keys:
        return {}
    rows = _local_partials(keys, series, group_device(group) if group is not None else None)
    if group is not None:
        rows = _all_reduce_rows(rows, group)
    result: dict[str, float] = {}
    for key, (total, count, low, high) in zip(keys, rows.tolist(), strict=True):
        _emit(result, key, types[key], (total, count, low, high))
    return result


def _local_partials(keys: list[str], series: Mapping[str, Series], device: torch.device | None) -> torch.Tensor:
    """``[n_keys, 4]`` float64: sum, count, min, max of each key; neutral elements for keys recorded elsewhere only."""
    masks: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}
    partials: list[list[torch.Tensor]] = []
    positions: list[int] = []
    table = torch.tensor([_NEUTRAL] * len(keys), dtype=torch.float64)
    for row, key in enumerate(keys):
        one = series.get(key)
        if one is None:
            continue
        if one.reduce_type is ReduceType.SCALAR:
            table[row, 0] = sum(sorted(float(v) for v in one.values))  # the order of recording depends on timing
            table[row, 1] = len(one.values)
        else:
            partials.append(_tensor_partials(one, masks))
            positions.append(row)
    if device is None:
        device = partials[0][0].device if partials else torch.device("cpu")
    table = table.to(device)
    if partials:
        table[positions] = torch.stack([torch.stack([x.to(device) for x in part]) for part in partials])
    return table


def _tensor_partials(
    series: Series, masks: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]]
) -> list[torch.Tensor]:
    """sum, count, min, max of one tensor series as 0-dim float64 tensors on its device; no host synchronisation."""
    flat = _cat(series.values)
    if flat.dtype == torch.bool:  # a denominator: the sum of its true values
        total = flat.sum().double()
        return [total, total, *(torch.full_like(total, x) for x in _NEUTRAL[2:])]
    group = tuple(id(mask) for mask in series.masks)
    if group not in masks:
        mask = _cat(series.masks, flat.device)
        masks[group] = (mask, mask.sum().double())
    mask, count = masks[group]
    total = torch.where(mask, flat, 0.0).sum(dtype=torch.float64)
    low = torch.where(mask, flat, math.inf).min().double()
    high = torch.where(mask, flat, -math.inf).max().double()
    return [total, count, low, high]


def _cat(tensors: list[torch.Tensor], device: torch.device | None = None) -> torch.Tensor:
    device = device or tensors[0].device
    flat = [t.reshape(-1).to(device) for t in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def _emit(result: dict[str, float], key: str, reduce_type: ReduceType, row: tuple[float, float, float, float]) -> None:
    """Add the exported keys of one series; averages and extremes of nothing are left out."""
    total, count, low, high = row
    if reduce_type is ReduceType.SUM:
        result[key] = total
    elif count == 0:
        return
    elif reduce_type is ReduceType.AVG_MIN_MAX:
        result.update({f"{key}/avg": total / count, f"{key}/min": low, f"{key}/max": high})
    elif reduce_type is ReduceType.SCALAR:
        result[key] = total / count
        result[f"{key}{COUNT_SUFFIX}"] = int(count)
    else:
        result[key] = {ReduceType.AVG: total / count, ReduceType.MIN: low, ReduceType.MAX: high}[reduce_type]


def _union_of_keys(types: Mapping[str, ReduceType], group: ProcessGroup) -> dict[str, ReduceType]:
    """Keys of all ranks with their reduce type; the names travel as JSON bytes, and ranks may hold different ones.

    Raises:
        ValueError: two ranks record one key with different reduce types (raised on every rank).
    """
    union: dict[str, ReduceType] = {}
    for of_rank in gather_json({key: value.value for key, value in types.items()}, group):
        for key, value in of_rank.items():
            if union.setdefault(key, ReduceType(value)) is not ReduceType(value):
                raise DataError(f"ranks record {key!r} with different reduce types: {union[key].name} and {value}")
    return union


def _all_reduce_rows(rows: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    added, low, high = rows[:, :2].contiguous(), rows[:, 2].contiguous(), rows[:, 3].contiguous()
    ops = torch.distributed.ReduceOp
    for part, op in ((added, ops.SUM), (low, ops.MIN), (high, ops.MAX)):
        torch.distributed.all_reduce(part, op=op, group=group)
    return torch.cat([added, low[:, None], high[:, None]], dim=1)
