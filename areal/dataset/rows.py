"""What the dataset builders share: the request they get, the list of rows they return, files, length limits.

A builder is ``build(request: DatasetRequest) -> dataset``; a dataset is anything with ``len`` and integer indexing
whose rows are dicts (:class:`RowDataset`, ``datasets.Dataset``, or a user's own class).
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

from areal.utils import logging
from areal.utils.errors import DataError

logger = logging.getLogger("Dataset")

RowDict = dict[str, Any]
# Names that a workflow passes to the reward function itself.
RESERVED_COLUMNS = frozenset({"prompt", "completions", "prompt_ids", "completion_ids"})
FILE_SUFFIXES = (".jsonl", ".json", ".parquet", ".jsonl.gz")


@dataclass(frozen=True)
class DatasetRequest:
    """One call of ``get_custom_dataset``, resolved.

    ``type`` is ``sft``, ``rl``, ``rw`` or ``dpo``; ``max_length`` counts tokens, longer samples are dropped, never cut;
    ``options`` are the settings of ``dataset_kwargs``.
    """

    path: str
    type: str
    split: str
    max_length: int | None = None
    tokenizer: Any = None
    processor: Any = None
    options: dict[str, Any] = field(default_factory=dict)


class RowDataset(Sequence[RowDict]):
    """An immutable list of rows with a name and a fingerprint.

    Args:
        rows: dicts that all have the columns of the first.
        name: for messages, such as ``"gsm8k/train"``.
    """

    def __init__(self, rows: Iterable[RowDict], name: str = "rows") -> None:
        self._rows = list(rows)
        self.name = name

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> RowDict: ...
    @overload
    def __getitem__(self, index: slice) -> RowDataset: ...
    def __getitem__(self, index: int | slice) -> RowDict | RowDataset:
        if isinstance(index, slice):
            return RowDataset(self._rows[index], self.name)
        return self._rows[index]

    def __repr__(self) -> str:
        return f"RowDataset({self.name!r}, {len(self)} rows, columns={self.column_names})"

    @property
    def column_names(self) -> list[str]:
        """Columns of the first row; empty without rows."""
        return list(self._rows[0]) if self._rows else []

    @property
    def fingerprint(self) -> str:
        """16 hex digits of a hash over all rows: equal contents, equal fingerprint."""
        digest = hashlib.sha256()
        for row in self._rows:
            digest.update(json.dumps(row, sort_keys=True, default=str).encode())
        return digest.hexdigest()[:16]


def read_rows(path: Path) -> list[RowDict]:
    """Rows of a ``.jsonl``, ``.jsonl.gz``, ``.json`` (a list of objects) or ``.parquet`` file.

    Raises:
        DataError: the file is not of that form; the message names the line.
    """
    if path.suffix == ".parquet":
        import pyarrow.parquet

        rows: list[RowDict] = pyarrow.parquet.read_table(path).to_pylist()
        return rows
    if path.suffix == ".json":
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, list) or not all(isinstance(row, dict) for row in content):
            raise DataError(f"{path}: expected a JSON list of objects")
        return content
    rows = []
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                rows.append(_parse_line(path, number, line))
    return rows


def _parse_line(path: Path, number: int, line: str) -> RowDict:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as exc:
        raise DataError(f"{path}:{number}: not valid JSON ({exc})") from exc
    if not isinstance(row, dict):
        raise DataError(f"{path}:{number}: expected a JSON object, got {type(row).__name__}")
    return row


def find_split_files(path: Path, split: str) -> list[Path]:
    """Files of one split: the file itself, or ``split.jsonl`` / ``split*.parquet`` in a directory or its main/ or
    data/."""
    if path.is_file():
        return [path]
    for directory in (path, path / "main", path / "data"):
        for suffix in FILE_SUFFIXES:
            exact = directory / f"{split}{suffix}"
            if exact.is_file():
                return [exact]
        shards = sorted(directory.glob(f"{split}-*.parquet"))
        if shards:
            return shards
    return []


def require_columns(rows: Sequence[RowDict], columns: Sequence[str], where: str) -> None:
    """Raise :class:`DataError` naming the first row that lacks one of ``columns``."""
    for index, row in enumerate(rows):
        missing = [c for c in columns if c not in row]
        if missing:
            raise DataError(
                f"{where}: row {index} lacks column {', '.join(missing)}; it has {', '.join(map(str, row))}"
            )


def require_tokenizer(request: DatasetRequest, why: str) -> Any:
    """The request's tokenizer, or a :class:`DataError` saying what needs it."""
    if request.tokenizer is None:
        raise DataError(f"dataset {request.path!r}: {why} needs a tokenizer; pass tokenizer=")
    return request.tokenizer


def require_type(request: DatasetRequest, types: Sequence[str] = ("sft", "rl")) -> None:
    """Raise :class:`DataError` unless the request's type is one of ``types``."""
    if request.type not in types:
        raise DataError(f"dataset {request.path!r}: type={request.type!r} is not offered; it has {', '.join(types)}")


def take_options(request: DatasetRequest, defaults: dict[str, Any]) -> dict[str, Any]:
    """``defaults`` updated by ``dataset_kwargs``; an unknown key is a :class:`DataError` listing the known ones."""
    unknown = sorted(set(request.options) - set(defaults))
    if unknown:
        known = ", ".join(sorted(defaults)) or "none"
        raise DataError(f"dataset {request.path!r}: unknown dataset_kwargs {', '.join(unknown)}; known: {known}")
    return {**defaults, **request.options}


def limit_length(rows: list[RowDict], request: DatasetRequest, length: Callable[[RowDict], int]) -> list[RowDict]:
    """Drop the rows whose ``length`` in tokens is above ``max_length``; says how many."""
    if request.max_length is None:
        return rows
    kept = [row for row in rows if length(row) <= request.max_length]
    if len(kept) < len(rows):
        dropped = len(rows) - len(kept)
        logger.info(
            f"{request.path} ({request.split}): dropped {dropped} of {len(rows)} rows above {request.max_length} tokens"
        )
    if rows and not kept:
        raise DataError(
            f"dataset {request.path!r}: all {len(rows)} rows are longer than max_length={request.max_length} tokens"
        )
    return kept


def finish_rl(rows: list[RowDict], request: DatasetRequest) -> RowDataset:
    """RL rows under the length limit, which counts the tokens of the messages' text without the chat template."""
    if request.max_length is not None:
        tokenizer = require_tokenizer(request, "max_length")
        texts = ["".join(m["content"] for m in row["messages"] if isinstance(m["content"], str)) for row in rows]
        lengths = dict(zip(map(id, rows), map(len, encode_all(tokenizer, texts)), strict=True))
        rows = limit_length(rows, request, lambda row: lengths[id(row)])
    return RowDataset(rows, f"{request.path}/{request.split}")


def finish_sft(rows: list[RowDict], request: DatasetRequest) -> RowDataset:
    """Supervised rows ``{input_ids, loss_mask}`` under the length limit."""
    return RowDataset(limit_length(rows, request, lambda row: len(row["input_ids"])), f"{request.path}/{request.split}")


def encode_all(tokenizer: Any, texts: list[str], *, add_special_tokens: bool = True) -> list[list[int]]:
    """Token ids of many texts in one call."""
    if not texts:
        return []
    encoded: list[list[int]] = tokenizer(
        texts, add_special_tokens=add_special_tokens, return_attention_mask=False, padding=False, truncation=False
    )["input_ids"]
    return encoded


def prompt_and_target(prompt_ids: list[int], target_ids: list[int]) -> RowDict:
    """A supervised row: loss 0 on the prompt, 1 on the target."""
    return {
        "input_ids": [*prompt_ids, *target_ids],
        "loss_mask": [0] * len(prompt_ids) + [1] * len(target_ids),
    }
