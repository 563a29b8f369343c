"""Datasets and batching; read by ``areal.dataset`` and ``areal.utils.dataloader``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from areal.api.config.fields import MISSING, ConfigSection, opt
from areal.api.config.scheduling import SchedulingSpec


@dataclass
class _DatasetConfig(ConfigSection):
    """One dataset and how it is batched."""

    path: str = opt(MISSING, "Dataset path or name; it also selects the loader.")
    type: Literal["sft", "rl", "rw", "dpo"] = opt(MISSING, "What the records are for.")
    split: str = opt("train", "Which split of the dataset is read.")
    batch_size: int = opt(1, "Records per step, over all data-parallel ranks.", unit="records", ge=1)
    shuffle: bool = opt(True, "New order each epoch, from seed and epoch.")
    num_workers: int = opt(0, "Threads that read records ahead; 0 = none.", unit="threads", ge=0)
    drop_last: bool = opt(True, "Leave out the last batch of an epoch when it is not full.")
    max_length: int | None = opt(None, "Records with longer prompts are dropped.", unit="tokens", ge=1)
    pin_memory: bool = opt(False, "Not read (kept for 1.x files).")
    num_dataset_workers: int = opt(1, "Processes that load the dataset for all ranks.", unit="processes", ge=1)
    dataset_kwargs: dict[str, Any] = opt(help="Passed on to the dataset loader.", factory=dict)
    scheduling_spec: SchedulingSpec | None = opt(
        help="Non-null in single-controller mode = load data in remote workers; null = in process.",
        factory=lambda: SchedulingSpec(cpu=1, gpu=0, mem=10, cmd="python3 -m areal.infra.rpc.guard"),
    )
    setup_timeout: float = opt(120.0, "Limit of loading in such processes.", unit="s", gt=0)


@dataclass
class TrainDatasetConfig(_DatasetConfig):
    """The training data."""


@dataclass
class ValidDatasetConfig(_DatasetConfig):
    """The evaluation data."""

    split: str = opt("test", "Which split of the dataset is read.")
    shuffle: bool = opt(False, "New order each epoch, from seed and epoch.")
    drop_last: bool = opt(False, "Leave out the last batch when it is not full.")
