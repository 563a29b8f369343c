"""Parallelism of Archon models, applied from outside: the modules do not know of it.

In: a model (or the part that a pipeline stage keeps) on the meta device, and ``ArchonParallelDims``. Out: the same
modules, with sharded parameters. Called by the Archon engine.

The order matters: tensor parallelism replaces parameters, expert parallelism takes experts and routers that it left,
context parallelism wraps attention, activation checkpointing wraps whole layers, compilation traces what is then there,
and FSDP shards what each rank holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import _disable_current_modes

from areal.experimental.models.archon.activation_checkpoint import AcOptions, apply_activation_checkpointing
from areal.experimental.models.archon.compile import CompileOptions, compile_model
from areal.experimental.models.archon.context_parallel import apply_context_parallel, check_context_parallel
from areal.experimental.models.archon.expert_parallel import (
    apply_expert_parallel,
    check_expert_parallel,
    expert_layers,
)
from areal.experimental.models.archon.tensor_parallel import apply_tensor_parallel, check_tensor_parallel

if TYPE_CHECKING:
    from areal.experimental.engine.archon_dims import ArchonParallelDims
    from areal.experimental.models.archon.base import ArchonModel, ModelArgs

__all__ = ["FsdpOptions", "check_parallelism", "parallelize_model"]


@dataclass(frozen=True)
class FsdpOptions:
    """How FSDP2 holds parameters.

    Attributes:
        param_dtype: of computation.
        reduce_dtype: of gradient reduction.
        reshard: when layers give back what they gathered for the forward pass: ``always`` after it; ``never`` before
            the backward pass is through; ``default``: as ``always``, but as ``never`` in a pipeline, where the same
            layers run again for the next micro-batch.
        offload: keep shards in host memory.
    """

    param_dtype: torch.dtype
    reduce_dtype: torch.dtype
    reshard: Literal["default", "always", "never"] = "default"
    offload: bool = False


def check_parallelism(args: ModelArgs, dims: ArchonParallelDims) -> None:
    """Refuse models that cannot be laid out as ``dims`` says. Raises ConfigError: names sizes and rule."""
    check_tensor_parallel(args, dims.tp)
    check_context_parallel(args, dims.cp, dims.tp)
    check_expert_parallel(args, dims)


def parallelize_model(
    model: ArchonModel,
    dims: ArchonParallelDims,
    fsdp: FsdpOptions,
    ac: AcOptions | None = None,
    compiled: CompileOptions | None = None,
) -> Callable[[], None] | None:
    """Apply everything but the pipeline, in place; every rank must call.

    Args:
        ac: which activations are computed again in the backward pass; None: none.
        compiled: how layers are compiled; None: not at all.

    Returns: a function that shards again what no backward pass did; None where nothing is sharded.
    """
    if dims.tp_enabled:
        apply_tensor_parallel(model, _mesh(dims, "tp"))
    if dims.ep_enabled or dims.tp_enabled:
        apply_expert_parallel(model, dims)
    if dims.cp_enabled:
        apply_context_parallel(model, _mesh(dims, "cp").get_group())
    if ac is not None:
        apply_activation_checkpointing(model, ac)
    if compiled is not None:
        compile_model(model, compiled)
    if dims.fsdp_enabled or dims.tp_enabled:  # tensor parallelism alone needs FSDP's handling of partial gradients
        return _shard_model(model, dims, fsdp)
    return None


def _shard_model(model: ArchonModel, dims: ArchonParallelDims, options: FsdpOptions) -> Callable[[], None]:
    """Shard ``model`` over ``dp_shard_cp``: layers as units, an untied embedding, and the rest with the root.

    The root stays gathered between its forward and backward pass, because log-probs are computed from the head's weight
    outside the model.
    """
    mesh = _mesh(dims, "dp_shard_cp")
    reshard = options.reshard == "always" or (options.reshard == "default" and not dims.pp_enabled)
    policies: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=options.param_dtype, reduce_dtype=options.reduce_dtype),
        "offload_policy": CPUOffloadPolicy() if options.offload else OffloadPolicy(),
    }
    if dims.ep_enabled:
        for moe in expert_layers(model):
            _shard_experts(moe.experts, dims, {**policies, "reshard_after_forward": reshard})
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard, **policies)
    if model.tok_embeddings is not None and not model.args.tied:
        fully_shard(model.tok_embeddings, mesh=mesh, reshard_after_forward=reshard, **policies)
    fully_shard(model, mesh=mesh, reshard_after_forward=False, **policies)

    def release() -> None:
        for module in model.modules():  # each of them shards its own parameters only
            if isinstance(module, FSDPModule):
                module.reshard()

    return release


def _shard_experts(experts: nn.Module, dims: ArchonParallelDims, policies: dict[str, Any]) -> None:
    """Shard experts over the ranks that hold the same ones; their gradients are averaged as all others are."""
    mesh = _mesh(dims, "dp_shard_mod_ep")

    def placement(parameter: nn.Parameter) -> Shard:
        """Cut whole experts where they divide, else inside them, in a dimension that is whole."""
        if parameter.shape[0] % (dims.ep * mesh.size()) == 0:
            return Shard(0)
        assert isinstance(parameter, DTensor)
        cut = {place.dim for place in parameter.placements if isinstance(place, Shard)}
        return Shard(2 if 1 in cut else 1)

    sharded = fully_shard(experts, mesh=mesh, shard_placement_fn=placement, **policies)
    sharded.set_gradient_divide_factor(float(dims.fsdp_gradient_divide_factor))
    # Only NCCL can divide while it reduces. Among one, torch 2.13 divides by itself already, and would twice.
    sharded.set_force_sum_reduction_for_comms(mesh.size() > 1)
    for hooks in (experts._forward_pre_hooks, experts._forward_hooks):
        for key, hook in hooks.items():
            hooks[key] = _unseen(hook)


def _unseen(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook of FSDP inside a checkpointed layer: a choice by op must not see what it runs, which is less the second
    time, when the weights are there.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return hook(*args, **kwargs)

    return run


def _mesh(dims: ArchonParallelDims, name: str) -> Any:
    mesh = dims.get_mesh(name)
    assert mesh is not None, f"{dims} has no mesh {name}"
    return mesh
