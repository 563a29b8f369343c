"""Beginnings that several sequences of a micro-batch share run through the model once: where, and how batches are cut.

In: packed batches. Out: micro-batches cut by the size of their trees, the rows that the model takes, and the tree that
its attention needs (``areal/models/tree``). There are two ways to it: ``enable_tree_training`` cuts by trees, on every
device and layout without c and p; without it, answers to one prompt that happen to be in one micro-batch share it where
our own attention runs on a CPU. Called by ``inputs.py``, ``loop.py`` and the models of the engines.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from areal.models.tree import PrefixTree, TreeAttention, allocate_trees, build_prefix_tree, shared_tokens
from areal.utils import logging
from areal.utils.batch import MicroBatch, PackedBatch, split_micro_batches
from areal.utils.errors import ConfigError, DataError, UnsupportedFeatureError

if TYPE_CHECKING:
    from areal.api.cli_args import MicroBatchSpec, TrainEngineConfig
    from areal.engine.core.inputs import ModelInput

logger = logging.getLogger("SharedPrefix")

MIN_SAVED_SHARE = 0.1  # of the tokens; below, copying to and fro costs more than it saves
ROW_QUANTUM = 128  # rows of a block of flex attention


def check_tree_training(config: TrainEngineConfig, *, tensor: int = 1, sequence: int = 1, pipeline: int = 1) -> None:
    """Refuse what ``enable_tree_training`` does not work with, before a model is loaded.

    Args:
        config: of the engine; nothing is checked where it does not ask for trees.
        tensor, sequence, pipeline: sizes t, c and p of the layout.

    Raises:
        ConfigError: ``pad_to_maximum`` or ``max_tokens_per_mb`` is not what trees need.
        UnsupportedFeatureError: a critic, or a layout with c or p.
    """
    if not config.enable_tree_training:
        return
    if config.is_critic:
        raise UnsupportedFeatureError("enable_tree_training=true works for language models only, not with is_critic")
    for letter, size in (("c", sequence), ("p", pipeline)):
        if size > 1:
            raise UnsupportedFeatureError(
                f"backend {config.backend}: enable_tree_training=true does not work with {letter}{size}; "
                f"use d and t only"
            )
    limit, multiple = config.mb_spec.max_tokens_per_mb, math.lcm(ROW_QUANTUM, tensor)
    if limit is None or limit < 1 or limit % multiple:
        raise ConfigError(
            f"mb_spec.max_tokens_per_mb={limit}: enable_tree_training=true needs a positive multiple of {multiple}, "
            "the most distinct tokens of a tree"
        )
    if not config.pad_to_maximum:
        raise ConfigError("pad_to_maximum=false: enable_tree_training=true needs trees of one size; set it to true")


def split_by_trees(batch: PackedBatch, spec: MicroBatchSpec) -> list[MicroBatch]:
    """Micro-batches whose trees have at most ``spec.max_tokens_per_mb`` rows, first fit in the order of the batch.

    ``n_mbs`` and ``n_mbs_divisor`` have no effect. Where trees would not pay, the batch is split as without them.

    Raises:
        DataError: a sequence is longer than the limit, or its positions do not count from 0.
        UnsupportedFeatureError: rows have images.
        PackingError: trees do not pay, and the batch cannot be split as ``spec`` asks.
    """
    if "multi_modal_input" in batch.lists:
        raise UnsupportedFeatureError(
            "enable_tree_training=true: rows with multi_modal_input look alike and are not; set it to false"
        )
    if not _counts_from_zero(batch):
        raise DataError("enable_tree_training=true needs position_ids that count from 0 in each sequence; drop them")
    ids, lens = batch.tokens["input_ids"], batch.lens
    if shared_tokens(ids, lens) < MIN_SAVED_SHARE * batch.n_tokens:
        _say_once(f"sequences share less than {MIN_SAVED_SHARE:.0%} of a batch's tokens: trained without trees")
        return split_micro_batches(batch, spec)
    assert spec.max_tokens_per_mb is not None
    groups = allocate_trees(ids, lens, spec.max_tokens_per_mb, spec.granularity)
    return [MicroBatch(batch.select(rows), rows) for rows in groups]


def find_shared_prefixes(batch: PackedBatch, limit: int | None = None) -> PrefixTree | None:
    """The tree of ``batch``; None where it would not pay, unless the tokens are more than ``limit``."""
    if batch.n_sequences < 2:
        return None
    tree = build_prefix_tree(batch.tokens["input_ids"], batch.lens)
    pays = tree.n_rows <= (1 - MIN_SAVED_SHARE) * batch.n_tokens
    needed = limit is not None and batch.n_tokens > limit
    return tree.to(batch.device) if pays or needed else None


def tree_rows(batch: PackedBatch, tree: PrefixTree, n_rows: int) -> PackedBatch:
    """What the model sees of ``batch``: the rows of its tree and padding behind them, ``n_rows`` in all, as one row."""
    ids = F.pad(batch.tokens["input_ids"].index_select(0, tree.keep), (0, n_rows - tree.n_rows))
    positions = F.pad(tree.depth, (0, n_rows - tree.n_rows))
    bounds = torch.tensor([0, n_rows], dtype=torch.int32, device=ids.device)
    return PackedBatch({"input_ids": ids, "position_ids": positions}, {}, bounds, [n_rows])


def share_automatically(model_input: ModelInput) -> ModelInput:
    """The micro-batch with a tree, if its rows come in groups (of one prompt) and it pays; else as it is."""
    batch = model_input.batch
    if model_input.tree is not None or model_input.padded is not batch or "group_id" not in batch.sequences:
        return model_input
    if batch.n_sequences < 2 or "multi_modal_input" in batch.lists or not _counts_from_zero(batch):
        return model_input
    tree = find_shared_prefixes(batch)
    if tree is None:
        return model_input
    return replace(model_input, tree=tree, padded=tree_rows(batch, tree, tree.n_rows))


def tree_attention(model_input: ModelInput) -> TreeAttention | None:
    """What the layers compute attention with; None where the micro-batch has no tree."""
    tree = model_input.tree
    return None if tree is None else TreeAttention(tree, model_input.padded.n_tokens)


def distinct_predictions(source: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Of positions that predict the same token after the same tokens, one each.

    Args:
        source: int64 ``[T]``, row of each token in a tree.
        rows: int64 ``[N]``, ascending, positions whose next token is of the same sequence.

    Returns: int64 ``[M]``, some of ``rows``; and int64 ``[T]``, for each position the one that stands for it.
    """
    following = source.index_select(0, rows + 1)
    distinct, group = following.unique(return_inverse=True)
    last = torch.full_like(distinct, source.shape[0])
    chosen = last.scatter_reduce(0, group, rows, "amin")
    place = torch.arange(source.shape[0], device=source.device)
    return chosen.sort().values, place.index_copy(0, rows, chosen.index_select(0, group))


def tree_token_ratio(inputs: list[ModelInput]) -> float:
    """Tokens that the model computes, padding apart, over tokens of the sequences; 1: nothing is shared."""
    real = [item for item in inputs if not item.filler]
    computed = sum(item.batch.n_tokens if item.tree is None else item.tree.n_rows for item in real)
    return computed / max(1, sum(item.batch.n_tokens for item in real))


def _counts_from_zero(batch: PackedBatch) -> bool:
    place = torch.arange(batch.n_tokens, device=batch.device) - batch.cu_seqlens[:-1].long()[batch.seq_ids]
    return torch.equal(batch.tokens["position_ids"], place)


_said: set[str] = set()


def _say_once(message: str) -> None:
    if message not in _said:
        _said.add(message)
        logger.info(message)
