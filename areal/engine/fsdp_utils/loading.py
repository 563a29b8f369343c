"""Weights of a transformers model that was made empty: where they are, and how they get into its shards.

In: a sharded model on the meta device and a directory of safetensors files. Out: the same model with this rank's shards
in memory. Called by ``areal/engine/fsdp_engine.py``; the loading itself is in ``core/hf_load``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from areal.engine.core import hf_load
from areal.engine.core.hf_load import weights_directory
from areal.engine.core.model_layout import TensorSource
from areal.engine.fsdp_utils.checkpoint import HfLayout
from areal.engine.fsdp_utils.model_names import ModelNames, conversions_of
from areal.utils.errors import ConfigError
from areal.utils.ranks import gather_json

if TYPE_CHECKING:
    from areal.api.cli_args import TrainEngineConfig

__all__ = ["find_weights", "load_streamed", "weights_directory"]


def find_weights(config: TrainEngineConfig, group: dist.ProcessGroup | None) -> Path | None:
    """Where :func:`load_streamed` can read ``config.path``; None where transformers must make the model.

    With ``fsdp.memory_efficient_load`` rank 0 decides, and only it needs the weights; every rank must call then.

    Raises:
        ConfigError: ``fsdp.memory_efficient_load`` with weights that cannot be streamed.
    """
    if config.init_from_scratch:
        return None
    own = weights_directory(config.path)
    if not config.fsdp.memory_efficient_load:
        return own
    if not (own is not None if group is None else gather_json(own is not None, group)[0]):
        raise ConfigError(
            f"fsdp.memory_efficient_load=true: {config.path} has no plain safetensors weights; "
            "set it to false or convert the checkpoint"
        )
    return own or Path(config.path)


def load_streamed(
    model: PreTrainedModel,
    path: str | os.PathLike[str],
    device: torch.device,
    group: dist.ProcessGroup | None,
    *,
    first_rank_reads: bool = False,
) -> None:
    """Give an empty, possibly sharded model its memory and weights; every rank of ``group`` must call.

    Arguments and errors as in ``core/hf_load``. Exports undo the conversions that loading needed.
    """
    source = hf_load.load_streamed(
        HfLayout(model, check_type=False), path, device, group, first_rank_reads=first_rank_reads
    )
    _remember_conversions(model, source, group)


def _remember_conversions(model: PreTrainedModel, source: TensorSource | None, group: dist.ProcessGroup | None) -> None:
    """Exports undo the conversions that loading needed; every rank must know them."""
    mapping = conversions_of(model)
    names = source if isinstance(source, ModelNames) else None
    if names is not None:
        model._weight_conversions = names.conversions
    if group is None:
        return
    used = gather_json(None if names is None else [str(entry) for entry in names.conversions], group)[0]
    if names is None:
        model._weight_conversions = [entry for entry in mapping if str(entry) in used]
