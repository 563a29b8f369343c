"""Puts the parts of a Megatron engine together: stages, weights, optimizer, runner, checkpoints.

In: the engine's config, the model's shape and the process groups. Out: ``BuiltEngine``. Called by
``areal/engine/megatron_engine.py``, inside ``device.runs_on``; this module and what it imports need megatron-core.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from megatron.core import parallel_state
from torch import nn

from areal.engine.megatron_utils.checkpoint import MegatronCheckpoints
from areal.engine.megatron_utils.model import build_stages, transformer_config
from areal.engine.megatron_utils.optimizer import MegatronOptimizer, MegatronShards, wrap_stages
from areal.engine.megatron_utils.pipeline import MegatronRunner
from areal.engine.megatron_utils.weights import MegatronLayout, fill_parts, init_parts

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from areal.api.cli_args import TrainEngineConfig
    from areal.api.io_struct import FinetuneSpec
    from areal.engine.core.parallel_dims import ParallelGroups
    from areal.engine.megatron_utils.parallel import MegatronDims
    from areal.engine.megatron_utils.shape import ModelShape

__all__ = ["BuiltEngine", "build_checkpoints", "build_engine"]


@dataclass
class BuiltEngine:
    """The parts of one engine.

    Attributes:
        stages: of this rank, wrapped for training where there is an optimizer.
        layout: of their tensors.
        runner: runs them.
        optimizer, shards: None for an engine that only scores.
    """

    stages: list[nn.Module]
    layout: MegatronLayout
    runner: MegatronRunner
    optimizer: MegatronOptimizer | None = None
    shards: MegatronShards | None = None


def build_engine(  # noqa: PLR0913 - everything that an engine is made of
    config: TrainEngineConfig,
    model_config: PretrainedConfig,
    shape: ModelShape,
    dims: MegatronDims,
    groups: ParallelGroups,
    device: torch.device,
    ft_spec: FinetuneSpec | None,
) -> BuiltEngine:
    """Build the stages of this rank and fill them; every rank must call."""
    dtype = getattr(torch, config.dtype)
    transformer = transformer_config(config, shape, dims, dtype, device)
    stages = build_stages(transformer, shape, dims, device)
    wrapped: list[nn.Module] = list(stages)
    if config.optimizer is not None:
        ddp = wrap_stages(stages, config, groups)
        wrapped = list(ddp)
        if config.megatron.ddp.overlap_grad_reduce:
            syncs = [stage.no_sync for stage in ddp]
            transformer.no_sync_func = syncs if dims.vpp > 1 else syncs[0]
    layout = MegatronLayout(stages, shape, model_config, config.path, _ranks(dims), _first_expert(shape, dims))
    runner = MegatronRunner(wrapped, dims, groups, device, is_critic=shape.is_critic)
    built = BuiltEngine(wrapped, layout, runner)
    if config.optimizer is not None:
        built.optimizer = MegatronOptimizer(ddp, config, ft_spec, layout, groups, device)
        shards = built.optimizer.shards
        assert isinstance(shards, MegatronShards)
        built.shards = shards
    _load(built, config, groups)
    return built


def build_checkpoints(
    built: BuiltEngine, config: TrainEngineConfig, groups: ParallelGroups, device: torch.device
) -> MegatronCheckpoints:
    """What saves and loads ``built``."""
    dtype = getattr(torch, config.dtype)
    checkpoints = MegatronCheckpoints(built.layout, built.shards, built.optimizer, groups, dtype, device)
    checkpoints.restores_schedule = config.megatron.use_checkpoint_opt_param_scheduler
    return checkpoints


def _load(built: BuiltEngine, config: TrainEngineConfig, groups: ParallelGroups) -> None:
    runs = [] if built.shards is None else built.shards.separate_runs
    if config.init_from_scratch:
        missing = set(built.layout.names.shapes)
    else:
        missing = fill_parts(built.layout, runs, config.path, groups.cpu, strict=False)
    init_parts(built.layout, runs, groups.cpu, missing)


def _ranks(dims: MegatronDims) -> tuple[tuple[int, int], tuple[int, int]]:
    dense = parallel_state.get_tensor_model_parallel_rank(), dims.tp
    return dense, (parallel_state.get_expert_tensor_parallel_rank(), dims.etp)


def _first_expert(shape: ModelShape, dims: MegatronDims) -> int:
    if shape.moe is None:
        return 0
    return parallel_state.get_expert_model_parallel_rank() * (shape.moe.num_experts // dims.ep)
