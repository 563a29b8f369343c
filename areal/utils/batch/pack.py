"""The packed batch: right-padded trajectories in, 1-D tokens with ``cu_seqlens`` out, and back.

Called once per step by the roles and by the train engines for raw input. No loop over tokens or sequences; the only
host sync of ``pack`` is the one that reads the lengths.
Shapes: T tokens of the batch, n sequences, S padded width.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from areal.utils.errors import DataError


@dataclass
class PackedBatch:
    """n sequences laid end to end.

    Attributes:
        tokens: per token ``[T, ...]``: input_ids, position_ids, loss_mask, logprobs, ...
        sequences: per sequence ``[n, ...]``: rewards, group_id, row_id, truncated, ...
        cu_seqlens: int32 ``[n + 1]``, start of each sequence and the end, on the device of the tokens.
        lens: tokens of each sequence as Python numbers, so that no caller needs a sync.
        lists: one Python object per sequence (``multi_modal_input``).
        scalars: everything else; every micro-batch gets a copy.
    """

    tokens: dict[str, Tensor]
    sequences: dict[str, Tensor]
    cu_seqlens: Tensor
    lens: list[int]
    lists: dict[str, list[Any]] = field(default_factory=dict)
    scalars: dict[str, Any] = field(default_factory=dict)
    _seq_ids: Tensor | None = field(default=None, repr=False, compare=False)

    @property
    def n_sequences(self) -> int:
        return len(self.lens)

    @property
    def n_tokens(self) -> int:
        return sum(self.lens)

    @property
    def max_seqlen(self) -> int:
        return max(self.lens, default=0)

    @property
    def device(self) -> torch.device:
        return self.cu_seqlens.device

    @property
    def seq_ids(self) -> Tensor:
        """Sequence of each token, int64 ``[T]``; computed once."""
        if self._seq_ids is None:
            self._seq_ids = sequence_ids(self.cu_seqlens, self.n_tokens)
        return self._seq_ids

    def to(self, device: torch.device | str, non_blocking: bool = True) -> PackedBatch:
        """Return the batch with its tensors on ``device`` (itself if they are there already)."""
        device = torch.device(device)
        if device.type == self.device.type and device.index in (None, self.device.index):
            return self
        return replace(
            self,
            tokens={k: v.to(device, non_blocking=non_blocking) for k, v in self.tokens.items()},
            sequences={k: v.to(device, non_blocking=non_blocking) for k, v in self.sequences.items()},
            cu_seqlens=self.cu_seqlens.to(device, non_blocking=non_blocking),
            _seq_ids=None,
        )

    def as_loss_input(self) -> dict[str, Any]:
        """Flat dict for loss functions: all fields, ``cu_seqlens``, ``max_seqlen`` (int) and ``lens`` (list of int)."""
        return {
            **self.scalars,
            **self.lists,
            **self.sequences,
            **self.tokens,
            "cu_seqlens": self.cu_seqlens,
            "max_seqlen": self.max_seqlen,
            "lens": self.lens,
        }

    def with_tokens(self, **tokens: Tensor) -> PackedBatch:
        """Shallow copy with token fields added or replaced."""
        return replace(self, tokens={**self.tokens, **tokens})

    def with_sequences(self, **sequences: Tensor) -> PackedBatch:
        """Shallow copy with sequence fields added or replaced."""
        return replace(self, sequences={**self.sequences, **sequences})

    def with_scalars(self, **scalars: Any) -> PackedBatch:
        """Shallow copy with values added or replaced that every micro-batch gets."""
        return replace(self, scalars={**self.scalars, **scalars})

    def without(self, *keys: str) -> PackedBatch:
        """Shallow copy without these fields, wherever they are; absent ones are ignored."""

        def keep(fields: dict[str, Any]) -> dict[str, Any]:
            return {k: v for k, v in fields.items() if k not in keys}

        return replace(
            self,
            tokens=keep(self.tokens),
            sequences=keep(self.sequences),
            lists=keep(self.lists),
            scalars=keep(self.scalars),
        )

    def select(self, rows: Sequence[int]) -> PackedBatch:
        """Return the given sequences, in the given order, with all their fields."""
        if list(rows) == list(range(self.n_sequences)):
            return self
        index = torch.tensor(rows, dtype=torch.long, device=self.device)
        lens = [self.lens[r] for r in rows]
        cu_seqlens = _cumulative(lens, self.device)
        shift = self.cu_seqlens[:-1].long()[index] - cu_seqlens[:-1]
        total = sum(lens)
        source = torch.arange(total, device=self.device) + shift[sequence_ids(cu_seqlens, total)]
        return PackedBatch(
            tokens={k: v.index_select(0, source) for k, v in self.tokens.items()},
            sequences={k: v.index_select(0, index) for k, v in self.sequences.items()},
            cu_seqlens=cu_seqlens,
            lens=lens,
            lists={k: [v[r] for r in rows] for k, v in self.lists.items()},
            scalars=dict(self.scalars),
        )

    def slice(self, start: int, stop: int) -> PackedBatch:
        """Return sequences ``start:stop`` as views of this batch."""
        offset = sum(self.lens[:start])
        total = sum(self.lens[start:stop])
        return PackedBatch(
            tokens={k: v.narrow(0, offset, total) for k, v in self.tokens.items()},
            sequences={k: v[start:stop] for k, v in self.sequences.items()},
            cu_seqlens=self.cu_seqlens[start : stop + 1] - offset,
            lens=self.lens[start:stop],
            lists={k: v[start:stop] for k, v in self.lists.items()},
            scalars=dict(self.scalars),
        )


def pack(trajectories: Sequence[dict[str, Any]] | dict[str, Any] | PackedBatch) -> PackedBatch:
    """Pack trajectories (or one padded dict), dropping what ``attention_mask`` marks as padding.

    A tensor is per token when its first two dimensions are those of ``input_ids``, per sequence when its first one is
    n; a list of n objects is per sequence; everything else is a scalar, taken from the first trajectory.
    ``position_ids`` are added when absent.

    Args:
        trajectories: dicts with ``input_ids [n, S]`` and ``attention_mask [n, S]``; n and S may differ between them.

    Raises:
        DataError: no trajectory, a required key is absent, or the keys of two trajectories differ.
    """
    if isinstance(trajectories, PackedBatch):
        return trajectories
    parts = [trajectories] if isinstance(trajectories, dict) else list(trajectories)
    _check_parts(parts)
    masks = [p["attention_mask"] for p in parts]
    flat_mask = masks[0].reshape(-1) if len(masks) == 1 else torch.cat([m.reshape(-1) for m in masks])
    source = flat_mask.nonzero().squeeze(1)
    lens = _row_lengths(flat_mask, masks)
    cu_seqlens = _cumulative(lens, flat_mask.device)
    batch = PackedBatch({}, {}, cu_seqlens, lens)
    whole = source.numel() == flat_mask.numel()
    for key, value in parts[0].items():
        if key == "attention_mask":
            continue
        values = [p[key] for p in parts]
        kind = _kind(value, masks[0])
        if kind == "token":
            flat = torch.cat([v.reshape(-1, *v.shape[2:]) for v in values])
            batch.tokens[key] = flat if whole else flat.index_select(0, source)
        elif kind == "sequence":
            batch.sequences[key] = torch.cat(values)
        elif kind == "list":
            batch.lists[key] = list(itertools.chain.from_iterable(values))
        else:
            batch.scalars[key] = value
    if "position_ids" not in batch.tokens:
        starts = cu_seqlens[:-1].long()[batch.seq_ids]
        batch.tokens["position_ids"] = torch.arange(source.numel(), device=source.device) - starts
    return batch


def unpack_tokens(x: Tensor, lens: Sequence[int]) -> list[Tensor]:
    """Cut ``[T, ...]`` into one view per sequence."""
    return list(torch.split(x, list(lens)))


def pad_packed(x: Tensor, lens: Sequence[int], width: int | None = None, value: float = 0) -> Tensor:
    """Lay ``[T, ...]`` out as right-padded ``[n, S, ...]``; ``width`` is S (None: the longest sequence)."""
    width = max(lens, default=0) if width is None else width
    if all(n == width for n in lens):
        return x.reshape(len(lens), width, *x.shape[1:])
    cu_seqlens = _cumulative(lens, x.device)
    rows = sequence_ids(cu_seqlens, x.shape[0])
    starts = torch.arange(len(lens), device=x.device) * width - cu_seqlens[:-1]
    out = x.new_full((len(lens) * width, *x.shape[1:]), value)
    out.index_copy_(0, torch.arange(x.shape[0], device=x.device) + starts[rows], x)
    return out.view(len(lens), width, *x.shape[1:])


def roll_packed(x: Tensor, cu_seqlens: Tensor, shift: int = -1, fill: float = 0) -> Tensor:
    """Roll ``[T, ...]`` inside each sequence; what would come from another sequence is ``fill``.

    ``shift=-1`` moves the entry of token t+1 to t, so a token's mask lands on the position that predicts it.
    """
    if shift == 0 or x.shape[0] == 0:
        return x.clone()
    cu = cu_seqlens.long()
    seq = sequence_ids(cu_seqlens, x.shape[0])
    source = torch.arange(x.shape[0], device=x.device) - shift
    inside = (source >= cu[seq]) & (source < cu[seq + 1])
    rolled = torch.roll(x, shift, dims=0)
    return torch.where(inside.view(-1, *[1] * (x.dim() - 1)), rolled, torch.full_like(rolled, fill))


def pad_to_multiple(batch: PackedBatch, quantum: int, pad_to: int | None = None) -> tuple[PackedBatch, int]:
    """Append one fake sequence so that the token count is a multiple of ``quantum``, or exactly ``pad_to``.

    The result is for the forward pass only: fields of the fake sequence are zeros and its positions restart at 0.

    Returns: the batch (the same object when no padding is due) and the number of tokens added.

    Raises:
        DataError: the batch is longer than ``pad_to``.
    """
    total = batch.n_tokens
    target = -(-total // quantum) * quantum if pad_to is None else pad_to
    if target < total:
        raise DataError(f"batch of {total} tokens cannot be padded to {target}; raise max_tokens_per_mb")
    if target == total:
        return batch, 0
    extra = target - total

    def grow(x: Tensor, rows: int) -> Tensor:
        return torch.cat([x, x.new_zeros(rows, *x.shape[1:])])

    tokens = {k: grow(v, extra) for k, v in batch.tokens.items()}
    if "position_ids" in tokens:
        positions = torch.arange(extra, device=batch.device)
        tokens["position_ids"][total:] = positions.view(-1, *[1] * (tokens["position_ids"].dim() - 1))
    return (
        PackedBatch(
            tokens=tokens,
            sequences={k: grow(v, 1) for k, v in batch.sequences.items()},
            cu_seqlens=_cumulative([*batch.lens, extra], batch.device),
            lens=[*batch.lens, extra],
            lists=batch.lists,
            scalars=batch.scalars,
        ),
        extra,
    )


def align_sequences(batch: PackedBatch, align: int) -> PackedBatch:
    """Pad each sequence with zeros to a multiple of ``align`` tokens; its positions go on through the padding."""
    lens = [-(-n // align) * align for n in batch.lens]
    if lens == batch.lens:
        return batch
    cu_seqlens = _cumulative(lens, batch.device)
    target = torch.arange(batch.n_tokens, device=batch.device)
    target += (cu_seqlens[:-1] - batch.cu_seqlens[:-1]).long()[batch.seq_ids]
    total = sum(lens)
    tokens = {k: v.new_zeros(total, *v.shape[1:]).index_copy_(0, target, v) for k, v in batch.tokens.items()}
    if "position_ids" in tokens:
        starts = cu_seqlens[:-1].long()[sequence_ids(cu_seqlens, total)]
        tokens["position_ids"] = torch.arange(total, device=batch.device) - starts
    return PackedBatch(tokens, batch.sequences, cu_seqlens, lens, batch.lists, batch.scalars)


def sequence_ids(cu_seqlens: Tensor, n_tokens: int) -> Tensor:
    """Sequence of each of ``n_tokens`` tokens, int64 ``[T]``; no host sync."""
    n = cu_seqlens.shape[0] - 1
    rows = torch.arange(n, device=cu_seqlens.device)
    return torch.repeat_interleave(rows, cu_seqlens.diff().long(), output_size=n_tokens)


def _cumulative(lens: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32, device=device)


def _row_lengths(flat_mask: Tensor, masks: list[Tensor]) -> list[int]:
    """Real tokens of every row of every mask, with one transfer to the host."""
    widths = [m.shape[1] for m in masks for _ in range(m.shape[0])]
    ends = torch.tensor(list(itertools.accumulate(widths)), device=flat_mask.device)
    running = torch.cat([flat_mask.new_zeros(1, dtype=torch.long), flat_mask.bool().cumsum(0)])
    counts: list[int] = running[ends].tolist()
    return [stop - start for start, stop in itertools.pairwise([0, *counts])]


def _kind(value: Any, mask: Tensor) -> str:
    if isinstance(value, Tensor):
        if value.dim() >= 2 and value.shape[:2] == mask.shape:
            return "token"
        return "sequence" if value.dim() >= 1 and value.shape[0] == mask.shape[0] else "scalar"
    return "list" if isinstance(value, list) and len(value) == mask.shape[0] else "scalar"


def _check_parts(parts: list[dict[str, Any]]) -> None:
    if not parts:
        raise DataError("cannot pack an empty list of trajectories; the rollout or the data split returned no rows")
    keys = parts[0].keys()
    for key in ("input_ids", "attention_mask"):
        if key not in keys:
            raise DataError(f"trajectory lacks {key!r}; its keys are {sorted(keys)}")
    for i, part in enumerate(parts):
        if part.keys() != keys:
            differing = sorted(part.keys() ^ keys)
            raise DataError(f"trajectories 0 and {i} differ in keys {differing}; all must have the same")
