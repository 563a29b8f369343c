"""What an FSDP recover point holds, and how a Hugging Face directory is read back into shards."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from areal.engine.core.optimizer import ClippedOptimizer, ParamShards
from areal.utils.errors import CheckpointError


def recover_tensors(
    model: PreTrainedModel, shards: ParamShards | None, optimizer: ClippedOptimizer | None
) -> dict[str, Tensor]:
    """Flat ``{key: tensor}`` of weights (float32 masters) and optimizer state; loading writes into these tensors.

    Keys: ``model.<parameter>``, ``optim.<parameter>.<state>``. Sharded tensors are DTensors, so a recover point can be
    read by another number of ranks.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        shard = shards.shards.get(name) if shards is not None else None
        local = shard if shard is not None else parameter
        tensors[f"model.{name}"] = _like(parameter, local.detach())
        if optimizer is not None and shard is not None:
            for key, value in optimizer.state_tensors(name).items():
                tensors[f"optim.{name}.{key}"] = value if value.dim() == 0 else _like(parameter, value)
    return tensors


def local_optimizer_state(shards: ParamShards, optimizer: ClippedOptimizer) -> dict[str, Tensor]:
    """This rank's optimizer state as plain tensors; writing into them changes the optimizer."""
    return {f"{name}.{key}": value for name in shards.shards for key, value in optimizer.state_tensors(name).items()}


def load_hf_weights(model: PreTrainedModel, shards: ParamShards | None, path: str | os.PathLike[str]) -> None:
    """Copy the weights of a Hugging Face directory into ``model`` (and its float32 masters).

    Raises:
        CheckpointError: the directory holds another architecture.
    """
    dtype = torch.float32 if shards is not None else next(model.parameters()).dtype
    source = dict(AutoModelForCausalLM.from_pretrained(path, dtype=dtype).named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = source.get(name)
            if value is None or value.shape != parameter.shape:
                found = None if value is None else tuple(value.shape)
                raise CheckpointError(f"{path}: {name} has shape {found}, the model needs {tuple(parameter.shape)}")
            if isinstance(parameter, DTensor):
                full = value.detach().to(parameter.device)
                parameter.copy_(distribute_tensor(full, parameter.device_mesh, parameter.placements))
            else:
                target: Any = parameter if shards is None else shards.shards.get(name, parameter)
                target.detach().copy_(value)
    if shards is not None:
        shards.write_back()


def _like(parameter: Tensor, local: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor) or isinstance(local, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
