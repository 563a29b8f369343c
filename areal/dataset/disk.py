"""Datasets written by ``datasets.Dataset.save_to_disk``: returned as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from areal.dataset.rows import DatasetRequest, take_options
from areal.utils.errors import DataError


def build_saved(request: DatasetRequest) -> Any:
    """The saved dataset at ``request.path``; ``max_length`` drops rows whose ``input_ids`` are longer."""
    take_options(request, {})
    dataset = load_saved(Path(request.path), request.split)
    if request.max_length is None:
        return dataset
    if "input_ids" not in dataset.column_names:
        raise DataError(
            f"{request.path}: max_length={request.max_length} needs a column input_ids; it has "
            f"{', '.join(dataset.column_names)}. Filter the rows before saving, or leave max_length out"
        )
    limit = request.max_length
    return dataset.filter(lambda row: len(row["input_ids"]) <= limit)


def load_saved(path: Path, split: str | None) -> Any:
    """A ``datasets.Dataset``; of a saved dict, the entry ``split`` (its first without a split).

    Raises:
        DataError: the dict has no such split (the message lists them), or the directory cannot be read.
    """
    import datasets

    try:
        loaded = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as exc:
        raise DataError(f"{path}: not a directory written by save_to_disk ({exc})") from exc
    if not isinstance(loaded, datasets.DatasetDict):
        return loaded
    name = split if split is not None else next(iter(loaded))
    if name not in loaded:
        raise DataError(f"{path}: no split {name!r}; it has {', '.join(map(str, loaded))}")
    return loaded[name]
