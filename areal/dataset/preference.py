"""Preference pairs as rows for DPO and reward models: what is preferred, ``chosen``, and what is not, ``rejected``.

In: rows in one of three forms. Out: ``chosen_ids`` and ``rejected_ids``, and for DPO ``chosen_loss_mask`` and
``rejected_loss_mask``, which are 1 after the longest common prefix of both sides, the prompt.

====================================  ==========================================================================
columns                               tokens of a side
====================================  ==========================================================================
``chosen``, ``rejected``: strings     the text, then the end token; after ``prompt``, if there is that column
``chosen``, ``rejected``: messages    the chat template over them, up to the token that ends the last turn; after the
                                      messages of ``prompt``, if there is that column
``chosen_ids``, ``rejected_ids``      as they are
====================================  ==========================================================================
"""

from __future__ import annotations

from typing import Any

from areal.dataset.chat import check_messages
from areal.dataset.rows import (
    DatasetRequest,
    RowDataset,
    RowDict,
    encode_all,
    limit_length,
    require_columns,
    require_tokenizer,
)
from areal.utils import logging
from areal.utils.errors import DataError
from areal.utils.hf_utils import apply_chat_template, end_of_turn

logger = logging.getLogger("Dataset")

SIDES = ("chosen", "rejected")
PAIR_TYPES = ("rw", "dpo")


def pair_dataset(source: list[RowDict], request: DatasetRequest) -> RowDataset:
    """Rows of token ids; pairs longer than ``max_length`` on either side are dropped, and so are pairs that say
    nothing: an empty side (for DPO: without a token of its own), or two equal sides.

    Raises:
        DataError: a column is missing or of another form, or no pair is left.
    """
    pairs = [_with_masks(row) if request.type == "dpo" else row for row in _token_rows(source, request)]
    kept = [
        row
        for row in pairs
        if row["chosen_ids"] != row["rejected_ids"] and all(_says_something(row, side) for side in SIDES)
    ]
    if len(kept) < len(pairs):
        logger.warning(
            f"{request.path} ({request.split}): left out {len(pairs) - len(kept)} of {len(pairs)} pairs with equal "
            "sides, or with an empty one"
        )
    if pairs and not kept:
        raise DataError(f"dataset {request.path!r}: no pair of {len(pairs)} has two sides that differ")
    kept = limit_length(kept, request, lambda row: max(len(row["chosen_ids"]), len(row["rejected_ids"])))
    return RowDataset(kept, f"{request.path}/{request.split}")


def common_prefix(one: list[int], other: list[int]) -> int:
    """Number of tokens at the beginning that both lists share."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))


def _says_something(row: RowDict, side: str) -> bool:
    """Whether a side has a token, or for DPO a predicted one of its own: nothing predicts the first token of a row."""
    mask = row.get(f"{side}_loss_mask")
    return bool(row[f"{side}_ids"]) if mask is None else any(mask[1:])


def _with_masks(row: RowDict) -> RowDict:
    if "chosen_loss_mask" in row:
        return row
    shared = common_prefix(row["chosen_ids"], row["rejected_ids"])
    masks = {f"{side}_loss_mask": [0] * shared + [1] * (len(row[f"{side}_ids"]) - shared) for side in SIDES}
    return {**row, **masks}


def _token_rows(source: list[RowDict], request: DatasetRequest) -> list[RowDict]:
    if source and "chosen_ids" in source[0]:
        return _given_tokens(source, request)
    require_columns(source, SIDES, request.path)
    tokenizer = require_tokenizer(request, f"type={request.type}")
    if source and isinstance(source[0]["chosen"], str):
        return _from_texts(source, request, tokenizer)
    return [_from_messages(row, f"{request.path}: row {i}", tokenizer) for i, row in enumerate(source)]


def _given_tokens(source: list[RowDict], request: DatasetRequest) -> list[RowDict]:
    masked = request.type == "dpo" and "chosen_loss_mask" in source[0]
    columns = [f"{side}_ids" for side in SIDES] + ([f"{side}_loss_mask" for side in SIDES] if masked else [])
    require_columns(source, columns, request.path)
    for index, row in enumerate(source):
        for side in SIDES:
            if masked and len(row[f"{side}_ids"]) != len(row[f"{side}_loss_mask"]):
                raise DataError(f"{request.path}: row {index}: {side}_ids and {side}_loss_mask differ in length")
    return [{name: row[name] for name in columns} for row in source]


def _from_texts(source: list[RowDict], request: DatasetRequest, tokenizer: Any) -> list[RowDict]:
    end = tokenizer.eos_token or ""
    for index, row in enumerate(source):
        for name in (*SIDES, "prompt"):
            if not isinstance(row.get(name, ""), str):
                kind = type(row[name]).__name__
                raise DataError(f"{request.path}: row {index}: {name} is a {kind}; it must be a string as in row 0")
    ids = {side: encode_all(tokenizer, [row.get("prompt", "") + row[side] + end for row in source]) for side in SIDES}
    return [
        {"chosen_ids": chosen, "rejected_ids": rejected}
        for chosen, rejected in zip(ids["chosen"], ids["rejected"], strict=True)
    ]


def _from_messages(row: RowDict, where: str, tokenizer: Any) -> RowDict:
    prompt = row.get("prompt") or []
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    result = {}
    for side in SIDES:
        check_messages(row[side], f"{where}: {side}")
        ids = apply_chat_template(tokenizer, [*prompt, *row[side]])
        result[f"{side}_ids"] = ids[: end_of_turn(tokenizer, ids)]
    return result
