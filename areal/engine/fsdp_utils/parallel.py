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
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from transformers import PreTrainedModel

from areal.engine.core.distributed import COLLECTIVE_TIMEOUT, join_world
from areal.engine.core.parallel_dims import ParallelGroups
from areal.utils import environ
from areal.utils.errors import ConfigError, UnsupportedFeatureError

if TYPE_CHECKING:
    from areal.api.alloc_mode import ParallelStrategy
    from areal.api.cli_args import FSDPEngineConfig


def check_strategy(strategy: ParallelStrategy) -> None:
    """Refuse layouts that this engine cannot run.

    Raises:
        ConfigError: pipeline parallelism, which FSDP never has.
        UnsupportedFeatureError: a dimension that comes later; the message names it.
    """
    if strategy.pipeline_parallel_size > 1:
        raise ConfigError(
            f"backend fsdp with p{strategy.pipeline_parallel_size}: FSDP has no pipeline parallelism; "
            "use archon or megatron"
        )
    later = {
        "tensor parallelism (t)": strategy.tensor_parallel_size,
        "sequence parallelism (c)": strategy.context_parallel_size,
        "expert parallelism (e)": strategy.expert_parallel_size,
    }
    for feature, size in later.items():
        if size > 1:
            raise UnsupportedFeatureError(
                f"backend fsdp with {feature} of {size}: not available in this version; use d only, such as fsdp:d2"
            )


def build_mesh(strategy: ParallelStrategy, device: torch.device) -> DeviceMesh | None:
    """Start the process groups of ``strategy``; None for one rank, which needs no ``torch.distributed``.

    Raises:
        ConfigError: more ranks are asked for than there are processes.
    """
    size = strategy.data_parallel_size
    world = dist.get_world_size() if dist.is_initialized() else environ.world_size()
    if size != world:
        hint = "; set scheduler.type=local, which starts them, or launch the script with torchrun" if size > 1 else ""
        raise ConfigError(f"backend fsdp:d{size} needs {size} processes, but this job has {world}{hint}")
    if size == 1:
        return None
    join_world(device)
    return init_device_mesh(device.type, (size,), mesh_dim_names=("dp",))


def groups_of(mesh: DeviceMesh | None) -> ParallelGroups:
    """Process groups that core reads."""
    if mesh is None:
        return ParallelGroups()
    data = mesh.get_group("dp")
    cpu = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
    return ParallelGroups(data=data, loss=data, grad_norm=data, cpu=cpu, is_head=True, result_rank=dist.get_rank())


def shard_model(
    model: PreTrainedModel,
    mesh: DeviceMesh,
    config: FSDPEngineConfig,
    *,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
) -> Callable[[], None]:
    """Shard ``model`` in place: decoder layers as units; embeddings (unless tied), final norm and head with the root.

    The root stays gathered between its forward and backward pass, because log-probs are computed from the head's weight
    outside the model.

    Returns: a function that shards the root again where no backward pass did (after scoring); without it a later reader
    would find gathered, possibly stale weights.
    """
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    for layer in _units(model, config):
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    if not model.config.tie_word_embeddings:
        fully_shard(model.get_input_embeddings(), mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    root = fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
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
