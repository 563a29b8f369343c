"""Plain files: any ``.jsonl``, ``.json`` or ``.parquet`` file, or a directory with one such file per split.

RL rows need ``messages`` (or ``prompt``, a string that becomes one user message); all other columns go to the reward
function as keyword arguments. Supervised rows are ``input_ids`` + ``loss_mask``, or ``prompt`` + ``completion``, or
``messages`` (and ``tools``), where the loss is on every turn of the assistant. Preference pairs (``rw``, ``dpo``) are
``chosen`` + ``rejected``; see ``areal.dataset.preference``.
"""

from __future__ import annotations

import keyword
from pathlib import Path

from areal.dataset.chat import conversation_row
from areal.dataset.preference import PAIR_TYPES, pair_dataset
from areal.dataset.rows import (
    RESERVED_COLUMNS,
    DatasetRequest,
    RowDataset,
    RowDict,
    encode_all,
    find_split_files,
    finish_rl,
    finish_sft,
    prompt_and_target,
    read_rows,
    require_columns,
    require_tokenizer,
    require_type,
    take_options,
)
from areal.utils.errors import DataError


def build_jsonl(request: DatasetRequest) -> RowDataset:
    """Rows of a file, or of the split's file in a directory."""
    take_options(request, {})
    files = find_split_files(Path(request.path), request.split)
    if not files:
        raise DataError(f"{request.path}: no file {request.split}.jsonl, .json or .parquet")
    return rows_to_dataset([row for file in files for row in read_rows(file)], request)


def rows_to_dataset(rows: list[RowDict], request: DatasetRequest) -> RowDataset:
    """Check and convert rows for ``request.type``."""
    require_type(request, ("sft", "rl", *PAIR_TYPES))
    if request.type in PAIR_TYPES:
        return pair_dataset(rows, request)
    if request.type == "sft":
        return finish_sft(_sft_rows(rows, request), request)
    return finish_rl([_rl_row(i, row, request.path) for i, row in enumerate(rows)], request)


def _rl_row(index: int, row: RowDict, path: str) -> RowDict:
    row = dict(row)
    if "messages" not in row:
        if not isinstance(row.get("prompt"), str):
            raise DataError(
                f"{path}: row {index} needs a column messages or a string column prompt; it has {', '.join(row)}"
            )
        row["messages"] = [{"role": "user", "content": row.pop("prompt")}]
    messages = row["messages"]
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and {"role", "content"} <= set(m) for m in messages
    ):
        raise DataError(f"{path}: row {index}: messages must be a list of objects with role and content")
    for name in row:
        if not name.isidentifier() or keyword.iskeyword(name) or name in RESERVED_COLUMNS:
            raise DataError(
                f"{path}: row {index}: column {name!r} cannot be a keyword argument of the reward function; rename it "
                f"(reserved: {', '.join(sorted(RESERVED_COLUMNS))})"
            )
    return row


def _sft_rows(rows: list[RowDict], request: DatasetRequest) -> list[RowDict]:
    if not rows or "input_ids" in rows[0]:
        require_columns(rows, ("input_ids", "loss_mask"), request.path)
        for index, row in enumerate(rows):
            if len(row["input_ids"]) != len(row["loss_mask"]):
                raise DataError(f"{request.path}: row {index}: input_ids and loss_mask differ in length")
        return [{"input_ids": row["input_ids"], "loss_mask": row["loss_mask"]} for row in rows]
    tokenizer = require_tokenizer(request, "type=sft")
    if "messages" in rows[0]:
        require_columns(rows, ("messages",), request.path)
        return [
            conversation_row(tokenizer, row["messages"], f"{request.path}: row {i}", row.get("tools"))
            for i, row in enumerate(rows)
        ]
    require_columns(rows, ("prompt", "completion"), request.path)
    prompts = encode_all(tokenizer, [row["prompt"] for row in rows])
    targets = encode_all(tokenizer, [row["completion"] for row in rows], add_special_tokens=False)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return [prompt_and_target(p, [*t, *end]) for p, t in zip(prompts, targets, strict=True)]
