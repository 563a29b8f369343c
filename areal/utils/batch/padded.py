"""Right-padded trajectories: collate, concatenate, split, trim. The list <-> padded dict side of the public 1.x API.

Called by workflows, collators and user code through ``areal.utils.data``; the packed side is ``batch/pack``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from areal.utils.errors import DataError


@dataclass
class TrajBatchMeta:
    """How a concatenated batch came from trajectories.

    Attributes:
        n_trajs: number of trajectories.
        traj_group_sizes: sequences of each.
        traj_seqlens: padded width of each.
    """

    n_trajs: int
    traj_group_sizes: list[int]
    traj_seqlens: list[int]


def concat_padded_tensors(tensor_dicts: Sequence[dict[str, Any]], pad_value: float = 0.0) -> dict[str, Any]:
    """Right-pad tensors to the widest and concatenate rows; lists are joined, other values come from the first dict.

    ``attention_mask`` is padded with 0, everything else with ``pad_value``.

    Raises:
        DataError: the dicts differ in keys.
    """
    if not tensor_dicts:
        return {}
    keys = tensor_dicts[0].keys()
    for other in tensor_dicts[1:]:
        if other.keys() != keys:
            raise DataError(f"cannot concatenate dicts with different keys: {sorted(keys ^ other.keys())} differ")
    result: dict[str, Any] = {}
    for key in keys:
        values = [d[key] for d in tensor_dicts]
        if isinstance(values[0], Tensor) and values[0].dim() >= 1:
            result[key] = _concat(values, 0.0 if key == "attention_mask" else pad_value)
        elif isinstance(values[0], list):
            result[key] = [item for value in values for item in value]
        else:
            result[key] = values[0]
    return result


def _concat(values: list[Tensor], pad_value: float) -> Tensor:
    if values[0].dim() >= 2:
        width = max(v.shape[1] for v in values)
        values = [_widen(v, width, pad_value) for v in values]
    return torch.cat(values)


def _widen(x: Tensor, width: int, pad_value: float) -> Tensor:
    missing = width - x.shape[1]
    return pad(x, (0, 0) * (x.dim() - 2) + (0, missing), value=pad_value) if missing else x


def concat_batch(trajectories: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], TrajBatchMeta]:
    """Concatenate trajectories and say how to undo it."""
    shapes = [t["attention_mask"].shape for t in trajectories]
    meta = TrajBatchMeta(len(trajectories), [s[0] for s in shapes], [s[1] for s in shapes])
    return concat_padded_tensors(trajectories), meta


def split_batch(result: Any, meta: TrajBatchMeta) -> list[Any]:
    """Undo ``concat_batch`` on a result of the same rows: a tensor or a dict of tensors."""
    return split_and_unpad_tensor(result, meta.n_trajs, meta.traj_group_sizes, meta.traj_seqlens)


def batched_call(
    fn: Callable[[dict[str, Any]], Any], trajectories: Sequence[dict[str, Any]], unpack: bool = True
) -> Any:
    """Call ``fn`` once on the concatenated batch; with ``unpack`` return one result per trajectory."""
    batch, meta = concat_batch(trajectories)
    result = fn(batch)
    return split_batch(result, meta) if unpack else result


def split_and_unpad_tensor(
    result: Any, n_trajs: int, traj_group_sizes: int | list[int] = 1, traj_seqlens: list[int] | None = None
) -> list[Any]:
    """Slice rows by trajectory and trim dimension 1 to each trajectory's width.

    In a dict, widths default to those of ``attention_mask``; a tensor with another number of rows, and any other value,
    is copied to every part.
    """
    sizes = [traj_group_sizes] * n_trajs if isinstance(traj_group_sizes, int) else list(traj_group_sizes)
    if isinstance(result, dict) and traj_seqlens is None and "attention_mask" in result:
        masks = torch.split(result["attention_mask"], sizes)
        traj_seqlens = [int(m.sum(-1).max()) for m in masks]

    def parts(value: Any) -> list[Any]:
        if not isinstance(value, Tensor) or value.dim() == 0 or value.shape[0] != sum(sizes):
            return [copy.deepcopy(value) for _ in sizes]
        rows = torch.split(value, sizes)
        if traj_seqlens is None or value.dim() < 2:
            return list(rows)
        return [row[:, :width] for row, width in zip(rows, traj_seqlens, strict=True)]

    if not isinstance(result, dict):
        return parts(result)
    columns = {key: parts(value) for key, value in result.items()}
    return [{key: column[i] for key, column in columns.items()} for i in range(len(sizes))]


def pad_sequences_to_tensors(sequence_list: Sequence[dict[str, Any]], pad_value: float = 0.0) -> dict[str, Any]:
    """Turn dicts of token lists into padded tensors ``[n, S]`` and a bool ``attention_mask`` from their lengths.

    The mask comes from lengths, never from token values: the pad id may be a real token or the end of text.
    Numbers become ``[n]``, everything else a list.
    """
    if not sequence_list:
        return {}
    result: dict[str, Any] = {}
    lens: list[int] = []
    for key, first in sequence_list[0].items():
        values = [s[key] for s in sequence_list]
        if isinstance(first, (list, tuple, Tensor)) and len(torch.as_tensor(first).shape) == 1:
            rows = [torch.as_tensor(v) for v in values]
            lens = lens or [r.shape[0] for r in rows]
            result[key] = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad_value)
        elif isinstance(first, (bool, int, float)):
            result[key] = torch.tensor(values)
        else:
            result[key] = values
    width = max(lens, default=0)
    result["attention_mask"] = torch.arange(width)[None] < torch.tensor(lens)[:, None]
    return result


def collate_samples_to_list(samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Turn each sample's lists into ``[1, S]`` tensors with a bool ``attention_mask``; the collator of SFT loaders."""
    result = []
    for sample in samples:
        row: dict[str, Any] = {}
        for key, value in sample.items():
            if key.startswith("multi_modal"):
                row[key] = [value]
            elif isinstance(value, (list, tuple, Tensor)):
                row[key] = torch.as_tensor(value).unsqueeze(0)
            else:
                row[key] = torch.tensor([value]) if isinstance(value, (bool, int, float)) else [value]
        row.setdefault("attention_mask", torch.ones(row["input_ids"].shape, dtype=torch.bool))
        result.append(row)
    return result


def get_batch_size(data: dict[str, Any]) -> int:
    """Number of sequences of a padded or packed dict; 0 if it holds none."""
    if "attention_mask" in data:
        return int(data["attention_mask"].shape[0])
    if "cu_seqlens" in data:
        return int(data["cu_seqlens"].shape[0]) - 1
    if "multi_modal_input" in data:
        return len(data["multi_modal_input"])
    return next((int(v.shape[0]) for v in data.values() if isinstance(v, Tensor) and v.dim()), 0)


def make_dummy_eval_item(template: dict[str, Any]) -> dict[str, Any]:
    """Row of one masked token with the template's keys, for a rank that has nothing to evaluate."""
    return {key: v.new_zeros(1, 1) if isinstance(v, Tensor) else v for key, v in template.items()}
