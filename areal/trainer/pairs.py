"""Preference pairs on their way to a learner: one table ``[2, S]`` per pair, chosen first.

In: records of a dataset. Out: tables, then one ``PackedBatch`` whose sequences alternate chosen, rejected. A pair is
one table, so it never splits between ranks; and one block of two rows, so it never splits between micro-batches. Called
by the DPO and reward-model trainers, learners and workers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from areal.utils.batch import PackedBatch, pack
from areal.utils.errors import DataError

SIDES = ("chosen", "rejected")
PairRows = list[dict[str, Any]] | dict[str, Any] | PackedBatch


def collate_pairs(samples: list[dict[str, Any]], *, with_mask: bool) -> list[dict[str, Any]]:
    """Records -> one table per pair; a rank without records gets :func:`empty_pair`.

    Args:
        samples: ``chosen_ids`` and ``rejected_ids`` (lists of int); ``chosen_loss_mask`` and ``rejected_loss_mask`` too
            where ``with_mask``. A side may be empty: such a pair counts nowhere.
        with_mask: whether the tables get a ``loss_mask``.

    Returns: dicts of ``input_ids`` int64, ``attention_mask`` bool and ``loss_mask`` int64, all ``[2, S]``.

    Raises:
        DataError: a column is missing, a mask has another length than its tokens, or both sides are empty.
    """
    return [_table(i, sample, with_mask) for i, sample in enumerate(samples)] or [empty_pair()]


def empty_pair() -> dict[str, Any]:
    """A table that counts nowhere, one token long, for a rank that must join the collectives of a step."""
    zeros = torch.zeros(2, 1, dtype=torch.int64)
    return {"input_ids": zeros, "attention_mask": torch.tensor([[True], [False]]), "loss_mask": zeros.clone()}


def _table(index: int, sample: dict[str, Any], with_mask: bool) -> dict[str, Any]:
    columns = {"input_ids": "ids", "loss_mask": "loss_mask"} if with_mask else {"input_ids": "ids"}
    missing = [f"{side}_{name}" for side in SIDES for name in columns.values() if f"{side}_{name}" not in sample]
    if missing:
        raise DataError(f"pair {index} of the batch lacks {', '.join(missing)}; it has {', '.join(map(str, sample))}")
    sizes = [len(sample[f"{side}_ids"]) for side in SIDES]
    if not any(sizes):
        raise DataError(f"pair {index} of the batch has no token on either side; leave such rows out of the dataset")
    table: dict[str, Any] = {}
    for key, name in columns.items():
        table[key] = torch.zeros(2, max(sizes), dtype=torch.int64)
        for row, (side, size) in enumerate(zip(SIDES, sizes, strict=True)):
            values = torch.as_tensor(sample[f"{side}_{name}"], dtype=torch.int64)
            if values.shape[0] != size:
                raise DataError(
                    f"pair {index} of the batch: {side}_{name} has {values.shape[0]} entries, {side}_ids {size}"
                )
            table[key][row, :size] = values
    table["attention_mask"] = torch.arange(max(sizes))[None] < torch.tensor(sizes)[:, None]
    return table


def pack_pairs(data: PairRows) -> PackedBatch:
    """One packed batch of pairs.

    Args:
        data: tables ``[2, S]`` of one pair each, or ``[1, S]`` with chosen and rejected in turn, or already packed.

    Raises:
        DataError: an odd number of sequences.
    """
    batch = pack(data)
    if batch.n_sequences % 2:
        raise DataError(
            f"{batch.n_sequences} sequences are not pairs: pass chosen and rejected in turn, or a table [2, S] per pair"
        )
    return batch


def keep_pairs_together(engine: Any) -> None:
    """Have the engine cut batches into micro-batches between pairs only, whatever its config says."""
    engine.config.mb_spec = replace(engine.config.mb_spec, granularity=2)
