"""Micro-batches as public 1.x dicts: adapters over ``PackedBatch``.

For user code that drives an engine by hand (``split_padded_tensor_dict_into_mb_list``, ``forward_backward_batch``); our
own engines use ``batch/split`` directly.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from areal.utils.batch.pack import PackedBatch, align_sequences, pack, pad_to_multiple, unpack_tokens
from areal.utils.batch.split import allocate_rows
from areal.utils.errors import DataError

if TYPE_CHECKING:
    from areal.api.config.train import MicroBatchSpec


@dataclass
class MicroBatchItem:
    """One micro-batch as the loss sees it and as the model sees it."""

    orig_mb: dict[str, Any]
    padded_mb: dict[str, Any]
    padding_length: int
    old_cu_seqlens: Tensor
    padded_to_length: int


@dataclass
class MicroBatchList:
    """Micro-batches of one padded dict; iterate after ``pad_mb_list``.

    ``forward_indices`` lists the input's rows in micro-batch order, ``backward_indices`` undoes it; ``group_lens`` are
    tokens per micro-batch.
    """

    data: dict[str, Any]
    mb_spec: MicroBatchSpec
    mbs: list[dict[str, Any]]
    group_lens: list[int]
    forward_indices: list[int]
    backward_indices: list[int]
    padded_mbs: list[dict[str, Any]] | None = None
    padding_lengths: list[int] = field(default_factory=list)
    padded_to_lengths: list[int] = field(default_factory=list)
    align_to_lengths: list[int] = field(default_factory=list)
    old_cu_seqlens_list: list[Tensor] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.mbs)

    def __iter__(self) -> Iterator[MicroBatchItem]:
        if self.padded_mbs is None:
            raise DataError("MicroBatchList is not padded yet; call pad_mb_list first")
        for row in zip(
            self.mbs,
            self.padded_mbs,
            self.padding_lengths,
            self.old_cu_seqlens_list,
            self.padded_to_lengths,
            strict=True,
        ):
            yield MicroBatchItem(*row)


def split_padded_tensor_dict_into_mb_list(
    data: dict[str, Any], mb_spec: MicroBatchSpec, group: dist.ProcessGroup | None = None
) -> MicroBatchList:
    """Split a padded dict by rows into padded dicts; per-sequence fields go with their rows.

    Under torch.distributed every rank of ``group`` (None: the world) must call; all get the same count.
    """
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    lens: list[int] = data["attention_mask"].sum(-1).tolist()
    groups = allocate_rows(lens, mb_spec, group)
    forward = list(itertools.chain.from_iterable(groups))
    backward = [0] * len(forward)
    for place, row in enumerate(forward):
        backward[row] = place
    return MicroBatchList(
        data=data,
        mb_spec=mb_spec,
        mbs=[_take_rows(data, rows, lens) for rows in groups],
        group_lens=[sum(lens[r] for r in rows) for rows in groups],
        forward_indices=forward,
        backward_indices=backward,
    )


def _take_rows(data: dict[str, Any], rows: list[int], lens: list[int]) -> dict[str, Any]:
    n, width = data["attention_mask"].shape[:2]
    longest = max(lens[r] for r in rows)
    taken: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Tensor) and value.dim() >= 1 and value.shape[0] == n:
            part = value[rows]
            taken[key] = part[:, :longest] if value.dim() >= 2 and value.shape[1] == width else part
        elif isinstance(value, list) and len(value) == n:
            taken[key] = [value[r] for r in rows]
        else:
            taken[key] = value
    return taken


def amend_position_ids(data: dict[str, Any]) -> dict[str, Any]:
    """Add ``position_ids`` 0..S-1 per row, unless present."""
    if "position_ids" in data:
        return data
    n, width = data["attention_mask"].shape[:2]
    positions = torch.arange(width, device=data["attention_mask"].device).expand(n, width)
    return {**data, "position_ids": positions}


def pack_tensor_dict(data: dict[str, Any]) -> dict[str, Any]:
    """Padded dict to packed dict: ``attention_mask`` becomes ``cu_seqlens`` (int32) and ``max_seqlen`` (int)."""
    batch = pack(data)
    packed = batch.as_loss_input()
    del packed["lens"]
    if "position_ids" not in data:
        del packed["position_ids"]
    return packed


def unpack_sequence(x: Tensor, cu_seqlens: Tensor | None = None, lens: list[int] | None = None) -> list[Tensor]:
    """Cut ``[T, ...]`` into sequences, from either ``cu_seqlens`` or ``lens``."""
    if lens is None:
        if cu_seqlens is None:
            raise DataError("unpack_sequence needs cu_seqlens or lens")
        lens = cu_seqlens.diff().tolist()
    return unpack_tokens(x, lens)


def pad_packed_tensor_dict(
    data: dict[str, Any], pad_to_length: int, pad_value: float = 0.0, seq_align_to: int | None = None
) -> tuple[dict[str, Any], int, Tensor, int]:
    """Pad a packed dict to ``pad_to_length`` tokens by one fake sequence.

    With ``seq_align_to`` each sequence is first padded to a multiple of it, and the total is rounded up to a common
    multiple of it and ``pad_to_length``.

    Returns: padded dict, tokens in the fake sequence, ``cu_seqlens`` after alignment, tokens after alignment.
    """
    cu_seqlens = data["cu_seqlens"]
    lens: list[int] = cu_seqlens.diff().tolist()
    total = sum(lens)
    tokens = {k: v for k, v in data.items() if isinstance(v, Tensor) and v.dim() and v.shape[0] == total}
    tokens.pop("cu_seqlens", None)
    batch = PackedBatch(tokens, {}, cu_seqlens, lens)
    target = pad_to_length
    if seq_align_to is not None:
        batch = align_sequences(batch, seq_align_to)
        step = math.lcm(seq_align_to, pad_to_length)
        target = -(-batch.n_tokens // step) * step
    padded, extra = pad_to_multiple(batch, 1, target)
    if pad_value and extra:
        for key, value in padded.tokens.items():
            if key != "position_ids":
                value[batch.n_tokens :] = pad_value
    bounds = {"cu_seqlens": padded.cu_seqlens, "max_seqlen": padded.max_seqlen}
    return {**data, **padded.tokens, **bounds}, extra, batch.cu_seqlens, batch.n_tokens


def pad_mb_list(
    mb_list: MicroBatchList,
    pad_value: float = 0.0,
    pad_to_maximum: bool = False,
    batch_align_to: int = 1,
    seq_align_to: int | None = None,
) -> MicroBatchList:
    """Pack and pad every micro-batch; ``batch_align_to`` is the padding quantum of the device (1 on a CPU).

    With ``pad_to_maximum`` the total is ``mb_spec.max_tokens_per_mb`` where that is set.
    """
    mb_list.padded_mbs = []
    for field_list in (mb_list.padding_lengths, mb_list.padded_to_lengths, mb_list.align_to_lengths):
        field_list.clear()
    mb_list.old_cu_seqlens_list = []
    for i, mb in enumerate(mb_list.mbs):
        packed = mb if "cu_seqlens" in mb else pack_tensor_dict(amend_position_ids(mb))
        mb_list.mbs[i] = packed
        total = int(packed["cu_seqlens"][-1])
        limit = mb_list.mb_spec.max_tokens_per_mb
        rounded = -(-total // batch_align_to) * batch_align_to
        target = limit if pad_to_maximum and limit is not None else rounded
        if seq_align_to is not None:
            target = batch_align_to
        padded, extra, _, aligned_total = pad_packed_tensor_dict(packed, target, pad_value, seq_align_to)
        mb_list.padded_mbs.append(padded)
        mb_list.padding_lengths.append(extra)
        mb_list.padded_to_lengths.append(aligned_total + extra)
        mb_list.align_to_lengths.append(aligned_total)
        mb_list.old_cu_seqlens_list.append(packed["cu_seqlens"])
    return mb_list


def unsqueeze_mb_list(mb_list: MicroBatchList) -> MicroBatchList:
    """Add a batch dimension of 1 to the token tensors of the padded micro-batches."""
    for mb, total in zip(mb_list.padded_mbs or [], mb_list.padded_to_lengths, strict=True):
        for key, value in mb.items():
            if isinstance(value, Tensor) and value.dim() and value.shape[0] == total and key != "cu_seqlens":
                mb[key] = value.unsqueeze(0)
    return mb_list


def unpad_logits(logits: Tensor, padding_length: int) -> Tensor:
    """Drop the padding at the end of ``[T, V]``."""
    return logits[: logits.shape[0] - padding_length] if padding_length else logits
