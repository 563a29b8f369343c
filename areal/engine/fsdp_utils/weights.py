"""Full tensors of an FSDP model under their checkpoint names."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from areal.engine.core.hf_names import CheckpointNames


def named_full_tensors(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """``(checkpoint name, full tensor of dtype)`` in model order; tied weights once, under their first name.

    Every rank must iterate: each step gathers one tensor. The tensors may alias the model's; copy what must outlive a
    step.
    """
    names = CheckpointNames(model)
    for name, tensor in _gathered(model, dtype):
        yield from names.split(name, tensor)


def full_tensor(value: Tensor) -> Tensor:
    """The whole of a parameter (or of a tensor laid out like one); every rank must call.

    FSDP's part is undone before the tensor-parallel one: the reverse of how it was made.
    """
    if not isinstance(value, DTensor):
        return value
    mesh, placements = value.device_mesh, value.placements
    if mesh.ndim == 1:
        return value.full_tensor()
    assert mesh.mesh_dim_names is not None
    sharded, tensor_parallel = (mesh[name] for name in mesh.mesh_dim_names)
    outer = placements[1]
    shape = list(value.shape)
    if isinstance(outer, Shard):
        shape[outer.dim] //= tensor_parallel.size()
    part = value.to_local()
    if sharded.size() > 1:
        size, stride = torch.Size(shape), torch.empty(shape, device="meta").stride()
        part = DTensor.from_local(part, sharded, [Shard(0)], run_check=False, shape=size, stride=stride).full_tensor()
    return DTensor.from_local(part, tensor_parallel, [outer], run_check=False).full_tensor()


def _gathered(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    # Detached tensors instead of no_grad: a generator must not hold a global mode while it is suspended.
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        yield name, full_tensor(value).to(dtype)
    for name, buffer in persistent_buffers(model):
        yield name, buffer.detach()


def persistent_buffers(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """``(name, buffer)`` of the buffers that belong into a checkpoint."""
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer
