"""Archon checkpoints of ranks that hold different parts of a model; each function is called on every rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import AutoConfig

from areal.api.config.optimizer import OptimizerConfig
from areal.api.io_struct import SaveLoadMeta
from areal.engine.core import hf_checkpoint
from areal.engine.core.distributed import agreement_group
from areal.engine.core.engine_checkpoints import EngineCheckpoints
from areal.engine.core.hf_load import load_streamed
from areal.engine.core.lr_schedule import LrSchedule
from areal.engine.core.model_layout import named_full_tensors
from areal.engine.core.optimizer import ClippedOptimizer
from areal.engine.core.parallel_dims import ParallelGroups
from areal.engine.fsdp_utils.optimizer import build_shards
from areal.experimental.engine.archon_checkpoint import ArchonLayout
from areal.experimental.engine.archon_dims import ArchonParallelDims
from areal.experimental.models.archon.base import ArchonModel
from areal.experimental.models.archon.model_spec import get_model_spec
from areal.experimental.models.archon.pipeline_split import keep_modules, split_modules, stages_of_rank
from areal.utils.errors import CheckpointError

CPU = torch.device("cpu")
LAYOUTS = {
    "d2": {"dp_shard": 2},
    "p2": {"dp_shard": 1, "pp": 2},
    "v2": {"dp_shard": 1, "pp": 2},  # rank 0 has the first and the last stage
    "e2": {"dp_shard": 2, "ep": 2},
    "d2p2": {"dp_shard": 2, "pp": 2},
    "d4e2": {"dp_shard": 4, "ep": 2},
}


def build(path: str, layout: str) -> EngineCheckpoints:
    """The loaded model of a directory with an optimizer, in one of ``LAYOUTS``."""
    dims = ArchonParallelDims(world_size=dist.get_world_size(), device_type="cpu", **LAYOUTS[layout])
    config = AutoConfig.from_pretrained(path)
    spec = get_model_spec(config.model_type)
    args = spec.model_args_class.from_hf_config(config)
    with torch.device("meta"):
        whole = spec.model_class(args)
    parts = _parts_of_rank(whole, dims, "ZBVZeroBubble" if layout == "v2" else "1F1B")
    for part in parts:
        _shard(part, dims)
    model = ArchonLayout(parts, spec.state_dict_adapter_class(args), config, path)
    cpu = agreement_group()
    load_streamed(model, path, CPU, cpu)
    groups = ParallelGroups(cpu=cpu, pp=dims.get_group("pp") if dims.pp_enabled else None)
    optimizer = OptimizerConfig(lr=1e-2)
    shards = build_shards(model, torch.float32, sharded=dims.fsdp_enabled)
    stepper = ClippedOptimizer(optimizer, shards, LrSchedule(optimizer, None), None)
    return EngineCheckpoints(model, shards, stepper, groups, torch.float32)


def _parts_of_rank(whole: ArchonModel, dims: ArchonParallelDims, schedule: str) -> list[ArchonModel]:
    if not dims.pp_enabled:
        return [whole]
    count = 4 if schedule == "ZBVZeroBubble" else 2
    modules = split_modules(count, whole.args.n_layers)
    rank = dist.get_rank(dims.get_group("pp"))
    return [keep_modules(whole, modules[number]) for number in stages_of_rank(schedule, 2, count, rank)]


def _shard(part: ArchonModel, dims: ArchonParallelDims) -> None:
    """Experts over ``ep``, then everything with FSDP, as the engine does."""
    for layer in part.layers.values() if dims.ep_enabled else ():
        experts = None if layer.moe is None else layer.moe.experts
        for name, weight in [] if experts is None else list(experts.named_parameters()):
            sharded = distribute_tensor(weight, dims.get_mesh("ep"), [Shard(0)], src_data_rank=None)
            experts.register_parameter(name, torch.nn.Parameter(sharded))
        if experts is not None:
            fully_shard(experts, mesh=dims.get_mesh("dp_shard_mod_ep"))
    if dims.fsdp_enabled:
        for layer in part.layers.values():
            fully_shard(layer, mesh=dims.get_mesh("dp_shard_cp"))
        fully_shard(part, mesh=dims.get_mesh("dp_shard_cp"))


def step(engine: EngineCheckpoints) -> None:
    """Add to every weight something that depends on its place in the whole tensor only."""
    for name, parameter in engine.layout.named_parameters():
        generator = torch.Generator().manual_seed(len(engine.layout.copies.get(name, name)))
        change = torch.randn(parameter.shape, generator=generator)
        engine.shards.shards[name].data.add_(_part(change, parameter))


def _part(whole: Tensor, parameter: Tensor) -> Tensor:
    from areal.engine.core.tensor_parts import own_index

    return whole[own_index(parameter)]


def weights(engine: EngineCheckpoints) -> dict[str, Tensor]:
    """Full tensors under their checkpoint names: those of this rank's stages."""
    return {name: tensor.clone() for name, tensor in named_full_tensors(engine.layout, torch.float32)}


def saved(path: str, layout: str, out: str, many_files: bool = False) -> dict[str, Any]:
    """Load, change and save in every way; returns the weights before and after the change."""
    limits = hf_checkpoint.MAX_FILE_BYTES, hf_checkpoint.SHARDED_FROM_BYTES
    engine = build(path, layout)
    answer = {"loaded": weights(engine)}
    step(engine)
    answer["changed"] = weights(engine)
    try:
        if many_files:
            hf_checkpoint.MAX_FILE_BYTES, hf_checkpoint.SHARDED_FROM_BYTES = 20_000, 1
        engine.save(SaveLoadMeta(f"{out}/hf", "hf", True), 3)
        engine.stage(SaveLoadMeta(f"{out}/staged", "hf", False), 3)()
        engine.save(SaveLoadMeta(f"{out}/dcp", "dcp", True), 3)
    finally:
        hf_checkpoint.MAX_FILE_BYTES, hf_checkpoint.SHARDED_FROM_BYTES = limits
        engine.close()
    return answer


def loaded(path: str, layout: str, out: str, kind: str) -> dict[str, Tensor]:
    """The weights of a checkpoint that another layout wrote."""
    engine = build(path, layout)
    engine.load(SaveLoadMeta(f"{out}/{kind}", kind, kind == "dcp"), 0)
    return weights(engine)


def refused(path: str, layout: str) -> str:
    """What every rank says of a directory that cannot be loaded."""
    try:
        build(path, layout)
    except CheckpointError as exc:
        return str(exc)
    return ""
