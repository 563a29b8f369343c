"""Reads a Hugging Face directory into the shards of a model that exists already, in any layout.

In: a directory (or hub id) and a model whose parameters may be DTensors. Out: filled parameters and masters; every rank
reads only the part that it holds. Called by ``fsdp_utils/checkpoint.py``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from areal.engine.core.checkpoint import check_names, listed
from areal.engine.core.hf_checkpoint import HfDirectory
from areal.engine.fsdp_utils.loading import ModelNames, own_index
from areal.engine.fsdp_utils.weights import persistent_buffers
from areal.utils.errors import CheckpointError
from areal.utils.ranks import together

if TYPE_CHECKING:
    import torch.distributed as dist

    from areal.engine.core.optimizer import ParamShards

_NEVER_LOADED = r"rotary_emb\.inv_freq$"  # buffers of old checkpoints that models compute now


class _Source(Protocol):
    shapes: Mapping[str, tuple[int, ...]]

    def read(self, name: str, index: tuple[slice, ...]) -> Tensor: ...


def load_hf_weights(
    model: PreTrainedModel,
    shards: ParamShards | None,
    path: str | os.PathLike[str],
    group: dist.ProcessGroup | None,
) -> None:
    """Copy the weights of a Hugging Face directory into ``model`` and its float32 masters; every rank must call.

    Raises:
        CheckpointError: on every rank; the directory is of another architecture, lacks tensors, has tensors that the
            model lacks, or others of another shape. All are named, and nothing was loaded.
    """
    targets: dict[str, Tensor] = dict([*model.named_parameters(), *persistent_buffers(model)])
    wanted = {name: tuple(tensor.shape) for name, tensor in targets.items()}
    with together(f"{path} could not be loaded", CheckpointError, group, alone=group is None):
        source = _open(path, model, wanted)
        check_names(path, wanted, source.shapes)
        _check_unexpected(path, model, wanted, source.shapes)
    with together(f"{path} could not be loaded", CheckpointError, group, alone=group is None), torch.no_grad():
        for name, tensor in targets.items():
            master = shards.shards.get(name) if shards is not None else None
            local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor) if master is None else master
            if local.numel():
                local.detach().copy_(source.read(name, own_index(tensor)))
    if shards is not None:
        shards.write_back()


def _open(path: str | os.PathLike[str], model: PreTrainedModel, wanted: Mapping[str, Any]) -> _Source:
    """Read the files themselves where names agree, else what transformers makes of them."""
    if HfDirectory.has_weights(path):
        directory = HfDirectory(path)
        _check_architecture(path, directory.model_type, model)
        return ModelNames(directory, model)
    return _Converted(path, model)


class _Converted:
    """Weights that transformers itself must load: fused experts, older names, other file formats, hub ids."""

    def __init__(self, path: str | os.PathLike[str], model: PreTrainedModel) -> None:
        try:
            _check_architecture(path, AutoConfig.from_pretrained(path).model_type, model)
            # Float32 so that masters get every bit; mismatched shapes are reported by us, with all names.
            loaded, report = AutoModelForCausalLM.from_pretrained(
                path, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True
            )
        except (OSError, ValueError) as exc:
            raise CheckpointError(f"{path} cannot be loaded: {exc}") from exc
        missing = set(report["missing_keys"])
        self._tensors = {
            name: tensor.detach()
            for name, tensor in [*loaded.named_parameters(), *persistent_buffers(loaded)]
            if name not in missing
        }
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}
        for name, found, *_ in report["mismatched_keys"]:
            self.shapes[name] = tuple(found)

    def read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        return self._tensors[name][index]


def _check_architecture(path: str | os.PathLike[str], found: str | None, model: PreTrainedModel) -> None:
    ours = model.config.model_type
    if found is not None and found != ours:
        raise CheckpointError(
            f"{path} holds a model of type {found}, this engine trains {ours} ({type(model).__name__}); "
            "set path to the model that the checkpoint was made from"
        )


def _check_unexpected(
    path: str | os.PathLike[str], model: PreTrainedModel, wanted: Mapping[str, Any], found: Mapping[str, Any]
) -> None:
    ignored = [*(model._keys_to_ignore_on_load_unexpected or ()), _NEVER_LOADED]
    ignored += [re.escape(name) + "$" for name in _tied_names(model)]
    extra = [name for name in found if name not in wanted and not any(re.search(p, name) for p in ignored)]
    if extra:
        raise CheckpointError(f"{path}: the model has no place for {len(extra)} tensors: {listed(extra)}")


def _tied_names(model: PreTrainedModel) -> set[str]:
    """Names that share another parameter's storage; older checkpoints hold them too."""
    once = {name for name, _ in model.named_parameters()}
    return {name for name, _ in model.named_parameters(remove_duplicate=False)} - once
