"""Mesh and sharding of the FSDP engine: who holds what.

In: the strategy of a backend string such as ``fsdp:d2``. Out: ``ParallelGroups`` and a sharded model. Called by
``areal/engine/fsdp_engine.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from transformers import PreTrainedModel

from areal.engine.core.distributed import agreement_group, check_world_size, group_rank, join_world
from areal.engine.core.parallel_dims import ParallelGroups
from areal.engine.fsdp_utils.tensor_parallel import apply_tensor_parallel, check_tensor_parallel
from areal.engine.fsdp_utils.ulysses import check_heads, use_parallel_attention
from areal.utils.errors import ConfigError

if TYPE_CHECKING:
    from areal.api.alloc_mode import ParallelStrategy
    from areal.api.cli_args import FSDPEngineConfig


def check_strategy(strategy: ParallelStrategy) -> None:
    """Refuse layouts that this engine cannot run.

    Raises:
        ConfigError: pipeline parallelism, which FSDP never has; expert tensor sizes other than 1 and t.
    """
    if strategy.pipeline_parallel_size > 1:
        raise ConfigError(
            f"backend fsdp with p{strategy.pipeline_parallel_size}: FSDP has no pipeline parallelism; "
            "use archon or megatron"
        )
    if strategy.expert_tensor_parallel_size not in (1, strategy.tensor_parallel_size):
        raise ConfigError(
            f"backend fsdp with expert tensor size {strategy.expert_tensor_parallel_size}: it must be 1 or t "
            f"({strategy.tensor_parallel_size})"
        )


def check_model(model: PreTrainedModel, strategy: ParallelStrategy) -> None:
    """Refuse models that cannot be laid out as ``strategy`` says.

    Raises:
        ConfigError: heads, vocabulary or MLP do not divide, or experts are asked for and the model has none.
        UnsupportedFeatureError: the model's family or attention does not work with t or c.
    """
    sequence, tensor = strategy.context_parallel_size, strategy.tensor_parallel_size
    if strategy.expert_parallel_size > 1 and not _has_experts(model):
        raise ConfigError(
            f"backend fsdp with e{strategy.expert_parallel_size}: {type(model).__name__} has no experts; leave e out"
        )
    if tensor > 1:
        check_tensor_parallel(model.config, tensor)
    if sequence > 1 or tensor > 1:
        check_heads(model, sequence, tensor)


def build_mesh(strategy: ParallelStrategy, device: torch.device) -> DeviceMesh | None:
    """Start the process groups of ``strategy``; None for one rank, which needs no ``torch.distributed``.

    Returns: a mesh ``(dp, sp, tp)``; tensor-parallel ranks are neighbours. Experts add no ranks: their weights are
        sharded like all others.

    Raises:
        ConfigError: more ranks are asked for than there are processes.
    """
    size = strategy.world_size
    check_world_size(f"fsdp:{_layout(strategy)}", size)
    if size == 1:
        return None
    join_world(device)
    return _mesh_of(
        device, (strategy.data_parallel_size, strategy.context_parallel_size, strategy.tensor_parallel_size)
    )


# Engines of one layout share a mesh and its groups: DTensor remembers meshes for the life of a process, so groups that
# an engine took with it would be missed by the next one.
_meshes: dict[tuple[dist.ProcessGroup, str, tuple[int, ...]], DeviceMesh] = {}


def _mesh_of(device: torch.device, shape: tuple[int, ...]) -> DeviceMesh:
    world = dist.group.WORLD
    assert world is not None
    for key in [key for key in _meshes if key[0] is not world]:
        del _meshes[key]  # of a world that was left
    key = (world, device.type, shape)
    if key not in _meshes:
        _meshes[key] = init_device_mesh(device.type, shape, mesh_dim_names=("dp", "sp", "tp"))
    return _meshes[key]


def groups_of(mesh: DeviceMesh | None) -> ParallelGroups:
    """Process groups that core reads; every rank must call."""
    if mesh is None:
        return ParallelGroups()
    data, sequence, tensor = (_group(mesh, name) for name in ("dp", "sp", "tp"))
    model = _group(mesh["sp", "tp"]._flatten("sp_tp"), None) if sequence is not None or tensor is not None else None
    return ParallelGroups(
        data=data,
        loss=data,
        model=model,
        sequence=sequence,
        tensor=tensor,
        grad_norm=dist.group.WORLD,
        cpu=agreement_group(),
        is_head=group_rank(model) == 0,
        result_rank=dist.get_rank() if model is None else dist.get_global_rank(model, 0),
    )


def shard_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The ranks over which FSDP shards parameters: ``dp`` and ``sp`` as one dimension."""
    return mesh["dp", "sp"]._flatten("dp_sp")


def shard_model(
    model: PreTrainedModel,
    mesh: DeviceMesh,
    config: FSDPEngineConfig,
    *,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
) -> Callable[[], None]:
    """Shard ``model`` in place: decoder layers as units; embeddings (unless tied), final norm and head with the root.

    Tensor parallelism comes first; FSDP then shards what each tensor-parallel rank holds over ``dp`` and ``sp``.

    The root stays gathered between its forward and backward pass, because log-probs are computed from the head's weight
    outside the model.

    Returns: a function that shards the root again where no backward pass did (after scoring); without it a later reader
    would find gathered, possibly stale weights.
    """
    if mesh["sp"].size() > 1 or mesh["tp"].size() > 1:
        use_parallel_attention(model)
    if mesh["tp"].size() > 1:
        apply_tensor_parallel(model, mesh["tp"])
    mesh = shard_mesh(mesh)
    policies = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype),
        "offload_policy": CPUOffloadPolicy() if config.offload_params else OffloadPolicy(),
    }
    for layer in _units(model, config):
        fully_shard(layer, mesh=mesh, reshard_after_forward=True, **policies)
    if not model.config.tie_word_embeddings:
        fully_shard(model.get_input_embeddings(), mesh=mesh, reshard_after_forward=True, **policies)
    root = fully_shard(model, mesh=mesh, reshard_after_forward=False, **policies)
    register_fsdp_forward_method(model, "lm_hidden_states")
    return root.reshard


def _units(model: PreTrainedModel, config: FSDPEngineConfig) -> list[nn.Module]:
    wanted = config.wrap_policy.transformer_layer_cls_to_wrap if config.wrap_policy is not None else None
    names = set(wanted or model._no_split_modules or ())
    units = [m for m in model.modules() if type(m).__name__ in names]
    if wanted and len({type(m).__name__ for m in units}) != len(set(wanted)):
        have = sorted({type(m).__name__ for m in model.modules()})
        raise ConfigError(f"fsdp.wrap_policy.transformer_layer_cls_to_wrap={wanted}: the model has {', '.join(have)}")
    return units


def _group(mesh: DeviceMesh, name: str | None) -> dist.ProcessGroup | None:
    """Group of a dimension; None when this rank is alone in it."""
    group: dist.ProcessGroup = mesh.get_group(name)
    return group if dist.get_world_size(group) > 1 else None


def _layout(strategy: ParallelStrategy) -> str:
    sizes = {
        "d": strategy.data_parallel_size,
        "c": strategy.context_parallel_size,
        "t": strategy.tensor_parallel_size,
    }
    return "".join(f"{name}{size}" for name, size in sizes.items() if size > 1 or name == "d")


def _has_experts(model: PreTrainedModel) -> bool:
    config = model.config.get_text_config()
    return any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
