"""From what callers pass to what models take: pack, split into micro-batches, pad, move to the device.

In: a padded dict, a list of trajectories or a ``PackedBatch``. Out: ``EngineBatch`` with one ``ModelInput`` per
micro-batch, and the way back to the caller's form. Called by ``engine/core/loop.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from areal.engine.core.distributed import padding_quantum
from areal.utils.batch import MicroBatch, PackedBatch, pack, pad_packed, pad_to_multiple, scatter_rows, split_like
from areal.utils.batch.split import split_micro_batches
from areal.utils.seqpack import PackingError

if TYPE_CHECKING:
    from areal.api.cli_args import MicroBatchSpec
    from areal.engine.core.parallel_dims import ParallelGroups

Trajectories = list[dict[str, Any]] | dict[str, Any] | PackedBatch


@dataclass
class ModelInput:
    """One micro-batch on the device.

    Attributes:
        micro_batch: the real tokens, for the loss.
        padded: what the model sees; the same batch, or with one fake sequence of padding at its end.
        filler: this rank had no rows left; the micro-batch only keeps collectives in step and has no loss.
    """

    micro_batch: MicroBatch
    padded: PackedBatch
    filler: bool = False

    @property
    def batch(self) -> PackedBatch:
        """The real tokens."""
        return self.micro_batch.batch

    def next_tokens(self) -> Tensor:
        """Token that each position predicts, int64 ``[T]``; 0 at the last position of a sequence."""
        ids = self.batch.tokens["input_ids"]
        labels = torch.zeros(ids.shape[0], dtype=torch.int64, device=ids.device)
        labels[:-1] = ids[1:]
        labels[self._last_positions()] = 0
        return labels

    def predicting_rows(self, mask_key: str | None) -> Tensor:
        """Positions that predict a token of their own sequence (and have a non-zero mask), int64 ``[N]``."""
        ids = self.batch.tokens["input_ids"]
        if mask_key is None:
            chosen = torch.ones(ids.shape[0], dtype=torch.bool, device=ids.device)
        else:
            chosen = self.batch.tokens[mask_key] != 0
        chosen[self._last_positions()] = False
        return chosen.nonzero().squeeze(1)

    def _last_positions(self) -> Tensor:
        return self.batch.cu_seqlens[1:].long() - 1


@dataclass
class EngineBatch:
    """A caller's input, cut into micro-batches."""

    source: Trajectories
    packed: PackedBatch
    inputs: list[ModelInput]

    def restore(self, parts: list[Tensor], aggregate: Callable[[list[Tensor]], Tensor] | None = None) -> Any:
        """Per-token results of the micro-batches in the caller's form.

        Returns: list of ``[n_i, S_i]`` for a list, ``[n, S]`` for a padded dict, ``[T]`` for a packed batch.
        """
        real = [(p, i) for p, i in zip(parts, self.inputs, strict=True) if not i.filler]
        if not real:
            return []
        flat = scatter_rows([p for p, _ in real], [i.micro_batch for _, i in real])
        if isinstance(self.source, PackedBatch):
            return flat
        if isinstance(self.source, dict):
            return pad_packed(flat, self.packed.lens, self.source["attention_mask"].shape[1])
        return split_like(flat, self.packed.lens, self.source)


def prepare_batch(
    source: Trajectories,
    spec: MicroBatchSpec,
    groups: ParallelGroups,
    device: torch.device,
    *,
    pad_to_maximum: bool = False,
) -> EngineBatch:
    """Pack ``source`` and cut it into as many micro-batches as every other rank; every rank must call.

    A rank without rows gets filler micro-batches.

    Raises:
        PackingError: the rows cannot be split as ``spec`` asks; see ``areal.utils.batch.allocate_rows``.
    """
    packed = None if _is_empty(source) else pack(source).to(device)
    if groups.cpu is None:
        if packed is None:
            raise ValueError("cannot run an empty batch: the caller passed no trajectories")
        parts = split_micro_batches(packed, spec)
        agreed = len(parts)
    else:
        parts, agreed = _split_in_step(packed, spec, groups.cpu)
    n_real = len(parts)
    filler = MicroBatch(_filler(device), [])
    parts = parts + [filler] * (agreed - n_real)
    limit = spec.max_tokens_per_mb if pad_to_maximum else None
    inputs = [
        ModelInput(part, _pad(part.batch, device, limit), filler=index >= n_real) for index, part in enumerate(parts)
    ]
    return EngineBatch(source, packed if packed is not None else filler.batch, inputs)


def as_model_input(item: Any, device: torch.device) -> ModelInput:
    """Wrap one micro-batch of a 1.x caller: a ``ModelInput``, ``MicroBatch``, ``PackedBatch`` or padded dict."""
    if isinstance(item, ModelInput):
        return item
    batch = item.batch if isinstance(item, MicroBatch) else item
    packed = pack(batch).to(device)
    indices = item.indices if isinstance(item, MicroBatch) else list(range(packed.n_sequences))
    return ModelInput(MicroBatch(packed, indices), _pad(packed, device, None))


def _split_in_step(
    packed: PackedBatch | None, spec: MicroBatchSpec, group: dist.ProcessGroup
) -> tuple[list[MicroBatch], int]:
    """Micro-batches of this rank (at most as many as it has rows for) and the number every rank must run."""
    own = _try_split(packed, spec)
    agreed = _agree_max(own, group)
    if packed is not None and agreed > len(_raise_if_failed(own)):
        n_mbs = min(agreed, packed.n_sequences // spec.granularity)
        own = _try_split(packed, replace(spec, n_mbs=n_mbs))
    # A second split can need even more than it was asked for (divisor, unlucky packing): agree on what is really there.
    agreed = _agree_max(own, group)
    return _raise_if_failed(own), agreed


def _try_split(packed: PackedBatch | None, spec: MicroBatchSpec) -> list[MicroBatch] | PackingError:
    """Split, or return the error: every rank must reach the collective before one of them raises."""
    if packed is None:
        return []
    try:
        return split_micro_batches(packed, spec)
    except PackingError as exc:
        return exc


def _raise_if_failed(split: list[MicroBatch] | PackingError) -> list[MicroBatch]:
    if isinstance(split, PackingError):
        raise split
    return split


def _agree_max(split: list[MicroBatch] | PackingError, group: dist.ProcessGroup) -> int:
    """Largest count over the ranks; raises on every rank when one could not split. One collective."""
    failed = isinstance(split, PackingError)
    pair = torch.tensor([0 if failed else len(_raise_if_failed(split)), int(failed)])
    dist.all_reduce(pair, op=dist.ReduceOp.MAX, group=group)
    agreed, any_failed = pair.tolist()
    _raise_if_failed(split)
    if any_failed:
        raise PackingError("another rank could not split its rows into micro-batches; see its error")
    return int(agreed)


def _pad(batch: PackedBatch, device: torch.device, pad_to: int | None) -> PackedBatch:
    quantum = padding_quantum(device)
    if quantum == 1 and pad_to is None:
        return batch
    model_side = PackedBatch(
        tokens={key: batch.tokens[key] for key in ("input_ids", "position_ids")},
        sequences={},
        cu_seqlens=batch.cu_seqlens,
        lens=batch.lens,
    )
    return pad_to_multiple(model_side, quantum, pad_to)[0]


def _filler(device: torch.device) -> PackedBatch:
    """One sequence of one token."""
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    bounds = torch.tensor([0, 1], dtype=torch.int32, device=device)
    return PackedBatch({"input_ids": zero, "position_ids": zero}, {}, bounds, [1])


def _is_empty(source: Trajectories) -> bool:
    if isinstance(source, PackedBatch):
        return source.n_sequences == 0
    if isinstance(source, dict):
        return source["input_ids"].shape[0] == 0
    return len(source) == 0
