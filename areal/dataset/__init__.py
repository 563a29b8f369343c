"""Datasets by name: one table from name to builder, and ``get_custom_dataset``, which picks from it.

A name alone, or followed by ``/…``, selects its builder (``arithmetic``, ``reasoning_gym/chain_sum``); the builders
that read files are also found by a name anywhere in ``path`` (``openai/gsm8k``, ``/data/gsm8k/train.jsonl``), the
rightmost wins. Otherwise ``path`` may be a plain JSONL, JSON or parquet file, a directory with one such file per split,
or a directory written by ``save_to_disk``. Register your own builder with ``DATASETS.register("my_data",
"pkg.module.build")``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal.dataset.rows import FILE_SUFFIXES, DatasetRequest, RowDataset, find_split_files
from areal.utils import logging
from areal.utils.errors import ArealError, DataError, UnsupportedFeatureError
from areal.utils.registry import Registry

if TYPE_CHECKING:
    from areal.api.cli_args import _DatasetConfig

__all__ = ["DATASETS", "DatasetRequest", "RowDataset", "get_custom_dataset"]

logger = logging.getLogger("Dataset")

Builder = Callable[[DatasetRequest], Any]
DATASETS: Registry[Builder] = Registry(
    "dataset",
    {
        "gsm8k": "areal.dataset.gsm8k.build_gsm8k",
        "hh-rlhf": "areal.dataset.hhrlhf.build_hhrlhf",
        "reasoning_gym": "areal.dataset.reasoning_gym.build_reasoning_gym",
        "arithmetic": "areal.dataset.arithmetic.build_arithmetic",
    },
)
# Builders that make their rows up: a file that merely has such a name in its path is not theirs.
PROCEDURAL = frozenset({"arithmetic", "reasoning_gym"})
# Names of the 1.x surface that this build does not load.
LATER_DATASETS = ("clevr_count_70k", "geometry3k", "virl39k", "torl_data")


def get_custom_dataset(
    split: str | None = None,
    dataset_config: _DatasetConfig | None = None,
    tokenizer: Any = None,
    processor: Any = None,
    **kwargs: Any,
) -> Any:
    """Load a dataset by its path and type.

    Args:
        split: ``train``, ``test``, …; None takes the config's, else ``train``.
        dataset_config: dataset section; gives path, type, max_length and dataset_kwargs.
        tokenizer: needed for all types but ``rl``, and for ``max_length``.
        processor: reserved for image datasets.
        kwargs: without a config: ``path``, ``type`` (default ``rl``), ``max_length``, ``dataset_kwargs``; any other is
            added to ``dataset_kwargs``.

    Returns:
        A sequence of dict rows. RL: ``messages`` and columns for the reward; SFT: ``input_ids`` and ``loss_mask``;
        preference pairs: ``chosen_ids`` and ``rejected_ids``, for DPO with loss masks.

    Raises:
        UnsupportedFeatureError: a dataset that this build does not offer.
        DataError: (a ValueError) nothing is known by that path, or it cannot be loaded.
    """
    request = _request(split, dataset_config, tokenizer, processor, kwargs)
    builder = _find_builder(request)
    try:
        dataset = builder(request)
    except ArealError:
        raise
    except Exception as exc:
        raise DataError(f"dataset {request.path!r} ({request.type}, {request.split}) failed to load: {exc}") from exc
    logger.info(f"{request.path} ({request.type}, {request.split}): {len(dataset)} rows")
    return dataset


def _request(
    split: str | None, config: _DatasetConfig | None, tokenizer: Any, processor: Any, kwargs: dict[str, Any]
) -> DatasetRequest:
    kwargs = dict(kwargs)
    if config is None:
        logger.warning("get_custom_dataset without dataset_config: using its keyword arguments")
    path = kwargs.pop("path", getattr(config, "path", None))
    if not path:
        raise DataError(f"a dataset needs a path: a file, a directory, a hub name, or one of {_supported()}")
    options = {**getattr(config, "dataset_kwargs", {}), **kwargs.pop("dataset_kwargs", {})}
    request_type = kwargs.pop("type", getattr(config, "type", "rl"))
    max_length = kwargs.pop("max_length", getattr(config, "max_length", None))
    return DatasetRequest(
        path=str(path),
        type=str(request_type),
        split=split or getattr(config, "split", None) or "train",
        max_length=max_length,
        tokenizer=tokenizer,
        processor=processor,
        options={**options, **kwargs},
    )


def _find_builder(request: DatasetRequest) -> Builder:
    path = request.path.lower()
    exists = Path(request.path).exists()
    for name in DATASETS:
        if (path == name or path.startswith(f"{name}/")) and not (exists and name in PROCEDURAL):
            return DATASETS.get(name)
    found = [name for name in DATASETS if name.lower() in path and name not in PROCEDURAL]
    if found:
        return DATASETS.get(max(found, key=lambda name: path.rfind(name.lower())))
    for name in LATER_DATASETS:
        if name in path:
            raise UnsupportedFeatureError(
                f"dataset {name!r} (path {request.path!r}) is not available in this version; supported: {_supported()}"
            )
    local = Path(request.path)
    if (local.is_file() and local.name.endswith(FILE_SUFFIXES)) or (
        local.is_dir() and find_split_files(local, request.split)
    ):
        from areal.dataset.jsonl import build_jsonl

        return build_jsonl
    if (local / "dataset_info.json").is_file() or (local / "dataset_dict.json").is_file():
        from areal.dataset.disk import build_saved

        return build_saved
    raise DataError(f"unknown dataset {request.path!r}: supported are {_supported()}")


def _supported() -> str:
    return f"{', '.join(DATASETS)}, a .jsonl/.json/.parquet file, or a directory written by save_to_disk"
