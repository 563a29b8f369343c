"""Where published datasets come from: a file, a directory, or the hub. Called by the builders that read them."""

from __future__ import annotations

from pathlib import Path

from areal.dataset.rows import DatasetRequest, RowDict, find_split_files, read_rows
from areal.utils.errors import DataError


def load_source(request: DatasetRequest, part: str | None = None, *, config: str | None = None) -> list[RowDict]:
    """The split's rows as published, from disk if ``request.path`` exists, else from the hub.

    Args:
        request: path and split.
        part: directory inside the path, or inside the hub's repository.
        config: the hub's name of a configuration.

    Raises:
        DataError: nothing is there, or it cannot be read.
    """
    root = Path(request.path)
    if root.exists():
        return _load_local(root / part if part else root, request.split)
    import datasets

    try:
        return list(datasets.load_dataset(request.path, name=config, data_dir=part, split=request.split))
    except Exception as exc:
        raise DataError(
            f"dataset {request.path!r}, split {request.split!r} is no local path, and the hub gave: {exc}"
        ) from exc


def _load_local(path: Path, split: str) -> list[RowDict]:
    files = find_split_files(path, split)
    if files:
        return [row for file in files for row in read_rows(file)]
    if (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
        from areal.dataset.disk import load_saved

        return list(load_saved(path, split))
    raise DataError(f"{path}: no file {split}.jsonl, .parquet or {split}-*.parquet in it, main/ or data/")
