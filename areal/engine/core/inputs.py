"""From what callers pass to what models take: pack, split into micro-batches, pad, move to the device.

In: a padded dict, a list of trajectories or a ``PackedBatch``. Out: ``EngineBatch`` with one ``ModelInput`` per
micro-batch, and the way back to the caller's form. Called by ``engine/core/loop.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from areal.engine.core.distributed import group_rank, group_size, padding_quantum
from areal.engine.core.shared_prefix import find_shared_prefixes, split_by_trees, tree_rows
from areal.utils.batch import MicroBatch, PackedBatch, pack, pad_packed, pad_to_multiple, scatter_rows, split_like
from areal.utils.batch.split import split_micro_batches
from areal.utils.errors import ArealError, DataError
from areal.utils.seqpack import PackingError

if TYPE_CHECKING:
    from areal.api.cli_args import MicroBatchSpec
    from areal.engine.core.parallel_dims import ParallelGroups
    from areal.models.tree import PrefixTree

Trajectories = list[dict[str, Any]] | dict[str, Any] | PackedBatch
Split = Callable[[PackedBatch, "MicroBatchSpec"], list[MicroBatch]]


@dataclass
class ModelInput:
    """One micro-batch on the device.

    Attributes:
        micro_batch: the real tokens, for the loss.
        padded: what the model sees, on all ranks of the model group together; the same batch, or with one fake
            sequence of padding at its end; or the rows of the tree.
        filler: this rank had no rows left; the micro-batch only keeps collectives in step and has no loss.
        tree: how the tokens are made from the rows that the model sees; None: they are one to one.
    """

    micro_batch: MicroBatch
    padded: PackedBatch
    filler: bool = False
    tree: PrefixTree | None = None

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
    trees: bool = False,
) -> EngineBatch:
    """Pack ``source`` and cut it into as many micro-batches as every other rank; every rank must call.

    A rank without rows gets filler micro-batches. Ranks of one model group hold the same rows. With ``trees`` the cut
    goes by distinct tokens, and the model sees each of them once; see ``shared_prefix``.

    Raises:
        PackingError: the rows of some rank cannot be split as ``spec`` asks; see ``areal.utils.batch.allocate_rows``.
        DataError: ranks of one model group hold different rows; a sequence is longer than a tree may be.
    """
    split = split_by_trees if trees else split_micro_batches
    packed = None if _is_empty(source) else pack(source).to(device)
    if groups.cpu is None:
        if packed is None:
            raise ValueError("cannot run an empty batch: the caller passed no trajectories")
        parts = split(packed, spec)
        agreed = len(parts)
    else:
        parts, agreed = _split_in_step(packed, spec, split, groups, device)
    n_real = len(parts)
    filler = MicroBatch(_filler(device), [])
    parts = parts + [filler] * (agreed - n_real)
    limit = spec.max_tokens_per_mb if pad_to_maximum else None
    inputs = []
    for index, part in enumerate(parts):
        tree = find_shared_prefixes(part.batch, limit) if trees else None
        if tree is not None:
            # One size is for compiled kernels; on a CPU it would only be more to compute.
            rows = _padded_length(tree.n_rows, device, groups, limit if device.type == "cuda" else None)
            inputs.append(ModelInput(part, tree_rows(part.batch, tree, rows), tree=tree))
        else:
            inputs.append(ModelInput(part, _pad(part.batch, device, groups, limit), filler=index >= n_real))
    return EngineBatch(source, packed if packed is not None else filler.batch, inputs)


def as_model_input(item: Any, device: torch.device, groups: ParallelGroups) -> ModelInput:
    """Wrap one micro-batch of a 1.x caller: a ``ModelInput``, ``MicroBatch``, ``PackedBatch`` or padded dict."""
    if isinstance(item, ModelInput):
        return item
    batch = item.batch if isinstance(item, MicroBatch) else item
    packed = pack(batch).to(device)
    indices = item.indices if isinstance(item, MicroBatch) else list(range(packed.n_sequences))
    return ModelInput(MicroBatch(packed, indices), _pad(packed, device, groups, None))


def own_slice(labels: Tensor, rows: Tensor, width: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Labels ``[width]`` and selected rows of this rank's slice of a row; labels of its padding are 0."""
    start = group_rank(group) * width
    own = labels.new_zeros(width)
    part = labels[start : start + width]
    own[: part.shape[0]] = part
    return own, rows[(rows >= start) & (rows < start + width)] - start


def _split_in_step(
    packed: PackedBatch | None, spec: MicroBatchSpec, split: Split, groups: ParallelGroups, device: torch.device
) -> tuple[list[MicroBatch], int]:
    """Micro-batches of this rank (at most as many as it has rows for) and the number every rank must run.

    A rank with too few rows for ``n_mbs`` or ``n_mbs_divisor`` makes as many as it can, if another rank has enough.
    """
    assert groups.cpu is not None
    limit = packed.n_sequences // spec.granularity if packed is not None else 0
    strict = _differing_rows(packed, groups, device) or _try_split(packed, spec, split)
    own = strict
    if isinstance(strict, PackingError):
        own = _try_split(packed, _at_most(spec, spec.n_mbs, limit), split)
    wanted = _agree(own, strict, groups.cpu)
    if limit and wanted > len(own := _raise_if_failed(own)):
        own = _try_split(packed, _at_most(spec, wanted, limit), split)
    # A second split can need even more than it was asked for (unlucky packing): agree on what is really there.
    agreed = _agree(own, own, groups.cpu)
    divisor = spec.n_mbs_divisor or 1
    return _raise_if_failed(own), -(-agreed // divisor) * divisor


def _at_most(spec: MicroBatchSpec, wanted: int | None, limit: int) -> MicroBatchSpec:
    return replace(spec, n_mbs=max(1, min(wanted or 1, limit)), n_mbs_divisor=1)


def _differing_rows(packed: PackedBatch | None, groups: ParallelGroups, device: torch.device) -> DataError | None:
    """The error of ranks that should hold the same rows and do not; their collectives would not match."""
    if groups.model is None:
        return None
    content = [0, 0, 0]
    if packed is not None:
        ids = packed.tokens["input_ids"].long()
        place = torch.arange(1, ids.shape[0] + 1, device=ids.device)
        content = [packed.n_sequences, packed.n_tokens, int((ids * place).sum())]
    extremes = torch.tensor([content, [-x for x in content]], device=device)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=groups.model)
    largest, smallest = extremes.tolist()
    if largest == [-x for x in smallest]:
        return None
    return DataError(
        f"this rank holds {content[0]} sequences of {content[1]} tokens, another rank of its model group other rows; "
        "ranks that differ only in t, c or p must be given the same rows in the same order"
    )


def _try_split(packed: PackedBatch | None, spec: MicroBatchSpec, split: Split) -> list[MicroBatch] | ArealError:
    """Split, or return the error: every rank must reach the collective before one of them raises."""
    if packed is None:
        return []
    try:
        return split(packed, spec)
    except ArealError as exc:
        return exc


def _raise_if_failed(split: list[MicroBatch] | ArealError) -> list[MicroBatch]:
    if isinstance(split, ArealError):
        raise split
    return split


def _agree(
    split: list[MicroBatch] | ArealError, strict: list[MicroBatch] | ArealError, group: dist.ProcessGroup
) -> int:
    """Largest count over the ranks; one collective. Raises on every rank when one could not split its rows at all, or
    none with rows could split them as strictly as asked."""
    failed = isinstance(split, ArealError)
    short = isinstance(strict, ArealError)
    rank = dist.get_rank(group)
    state = torch.tensor(
        [
            0 if failed else len(_raise_if_failed(split)),
            rank + 1 if failed else 0,
            rank + 1 if short else 0,
            0 if short else len(_raise_if_failed(strict)),
        ]
    )
    dist.all_reduce(state, op=dist.ReduceOp.MAX, group=group)
    agreed, failed_rank, short_rank, strictly = state.tolist()
    if failed_rank or (short_rank and not strictly):
        _raise_if_failed(split)
        _raise_if_failed(strict)
        raise PackingError(
            f"another rank (rank {(failed_rank or short_rank) - 1}) could not split its rows into micro-batches; see "
            "its error. A single sequence above max_tokens_per_mb is the usual reason"
        )
    return int(agreed)


def _pad(batch: PackedBatch, device: torch.device, groups: ParallelGroups, pad_to: int | None) -> PackedBatch:
    """The model's side: padded to what kernels want, and so that every rank of a model group gets an equal share."""
    length = _padded_length(batch.n_tokens, device, groups, pad_to)
    if length == batch.n_tokens:
        return batch
    model_side = PackedBatch(
        tokens={key: batch.tokens[key] for key in ("input_ids", "position_ids")},
        sequences={},
        cu_seqlens=batch.cu_seqlens,
        lens=batch.lens,
    )
    return pad_to_multiple(model_side, 1, length)[0]


def _padded_length(n_tokens: int, device: torch.device, groups: ParallelGroups, pad_to: int | None) -> int:
    shares = group_size(groups.sequence) * group_size(groups.tensor)
    quantum = math.lcm(padding_quantum(device), shares) if pad_to is None else shares
    return -(-(n_tokens if pad_to is None else pad_to) // quantum) * quantum


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
