"""Anthropic's helpful and harmless preferences: from the hub (``Anthropic/hh-rlhf``), a directory, or one file.

Columns in: ``chosen`` and ``rejected``, whole conversations as text that differ in what follows their longest common
prefix. Out: token ids for ``type: rw``, with loss masks for ``type: dpo``; see ``areal.dataset.preference``.
``dataset_kwargs.subset``: one of the published parts, such as ``helpful-base``; default: all of them.
"""

from __future__ import annotations

from pathlib import Path

from areal.dataset.preference import PAIR_TYPES, pair_dataset
from areal.dataset.rows import DatasetRequest, RowDataset, require_type, take_options
from areal.dataset.sources import load_source


def build_hhrlhf(request: DatasetRequest) -> RowDataset:
    """Pairs of one split.

    Raises:
        DataError: the type is neither ``rw`` nor ``dpo``, the data cannot be found, or it lacks a column.
    """
    require_type(request, PAIR_TYPES)
    subset = take_options(request, {"subset": None})["subset"]
    path = Path(request.path)
    if subset is None and path.is_dir():
        parts = sorted(part for part in path.iterdir() if part.is_dir() and any(part.glob(f"{request.split}.jsonl*")))
        if parts:  # the layout of the published directory
            rows = [row for part in parts for row in load_source(request, part.name)]
            return pair_dataset(rows, request)
    return pair_dataset(load_source(request, subset), request)
