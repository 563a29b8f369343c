"""GSM8K grade-school word problems: from the hub (``openai/gsm8k``), a directory, or one JSONL or parquet file.

Columns in: ``question`` and ``answer`` (worked solution ending in ``#### N``). Out: ``messages`` and ``answer`` for RL,
``input_ids`` and ``loss_mask`` for supervised training.
"""

from __future__ import annotations

from areal.dataset.rows import (
    DatasetRequest,
    RowDataset,
    RowDict,
    encode_all,
    finish_rl,
    finish_sft,
    require_columns,
    require_tokenizer,
    require_type,
    take_options,
)
from areal.dataset.sources import load_source

BOXED_INSTRUCTION = "Give your final answer inside \\boxed{}."


def build_gsm8k(request: DatasetRequest) -> RowDataset:
    """Rows of one split.

    Raises:
        DataError: the type is neither ``sft`` nor ``rl``, the data cannot be found, or it lacks a column.
    """
    require_type(request)
    take_options(request, {})
    source = load_source(request, config="main")
    if source and "question" not in source[0]:
        # A file prepared for training that merely has "gsm8k" in its path.
        from areal.dataset.jsonl import rows_to_dataset

        return rows_to_dataset(source, request)
    require_columns(source, ("question", "answer"), request.path)
    return _rl_rows(source, request) if request.type == "rl" else _sft_rows(source, request)


def _rl_rows(source: list[RowDict], request: DatasetRequest) -> RowDataset:
    rows = [
        {
            "messages": [{"role": "user", "content": f"{row['question']}\n{BOXED_INSTRUCTION}"}],
            "answer": row["answer"],
        }
        for row in source
    ]
    return finish_rl(rows, request)


def _sft_rows(source: list[RowDict], request: DatasetRequest) -> RowDataset:
    tokenizer = require_tokenizer(request, "type=sft")
    eos = tokenizer.eos_token or ""
    questions = encode_all(tokenizer, [row["question"] for row in source])
    whole = encode_all(tokenizer, [row["question"] + row["answer"] + eos for row in source])
    rows = [
        {"input_ids": ids, "loss_mask": [0] * len(question) + [1] * (len(ids) - len(question))}
        for question, ids in zip(questions, whole, strict=True)
    ]
    return finish_sft(rows, request)
