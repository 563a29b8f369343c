"""Parallel layout of the Megatron engine: which sizes fit together and fit the model, and megatron's process groups.

In: the strategy of a backend string such as ``megatron:d2t2p2`` and ``megatron.virtual_pipeline_parallel_size``. Out:
megatron's global ``parallel_state``, and ``ParallelGroups`` for core. Called by the Megatron engine, inside
``device.runs_on``.

Ranks are ordered tp, cp, ep, dp, pp, the first one fastest. megatron-core keeps its groups in global variables, so the
engines of a process share one layout; layouts that were used before come back without making their groups again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from areal.engine.core.distributed import COLLECTIVE_TIMEOUT, agreement_group, check_world_size, join_world, leave_world
from areal.engine.core.parallel_dims import ParallelGroups
from areal.engine.megatron_utils.shape import ModelShape, split_layers
from areal.utils import environ
from areal.utils.errors import ConfigError
from areal.utils.ranks import gather_json

if TYPE_CHECKING:
    from areal.api.alloc_mode import ParallelStrategy
    from areal.api.cli_args import TrainEngineConfig

__all__ = ["MegatronDims", "check_model", "join_groups", "leave_groups"]


@dataclass(frozen=True)
class MegatronDims:
    """Sizes of every parallel dimension, checked against each other.

    Attributes:
        dp: ranks with different rows.
        cp: ranks that each hold a part of every sequence.
        tp: ranks that each hold a shard of every projection; between the layers each has a share of the tokens.
        pp: pipeline ranks.
        ep: ranks that each hold different experts.
        etp: ranks that each hold a shard of every expert.
        vpp: stages of each pipeline rank.

    Raises:
        ConfigError: sizes that do not fit together; the message names them and the rule.
    """

    dp: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    vpp: int = 1

    def __post_init__(self) -> None:
        ranks = self.world_size
        experts = self.ep * self.etp * self.pp
        if (self.ep > 1 or self.etp > 1) and ranks % experts:
            raise ConfigError(
                f"backend megatron: ep={self.ep}, etp={self.etp}, pp={self.pp}: ep * etp * pp={experts} must divide "
                f"the {ranks} ranks"
            )
        if self.ep == 1 and self.etp not in (1, self.tp):
            # megatron-core then adds up gradients of experts over the ranks that share all other weights.
            raise ConfigError(
                f"backend megatron: etp={self.etp} with e1 must be tp={self.tp}: experts that are not spread are cut "
                "as all other weights; leave t of ffn out, or give ffn an e"
            )
        if self.vpp > 1 and self.pp == 1:
            raise ConfigError(
                f"megatron.virtual_pipeline_parallel_size={self.vpp} must be 1 without pipeline ranks; the backend has "
                "p1"
            )

    @classmethod
    def from_strategy(cls, strategy: ParallelStrategy, virtual: int) -> MegatronDims:
        """Sizes of a backend string and of ``megatron.virtual_pipeline_parallel_size``.

        Experts for which the string asks nothing are cut like all other weights.
        """
        ep, tp = strategy.expert_parallel_size, strategy.tensor_parallel_size
        etp = strategy.expert_tensor_parallel_size
        if ep == etp == 1:
            etp = tp
        return cls(
            dp=strategy.data_parallel_size,
            cp=strategy.context_parallel_size,
            tp=tp,
            pp=strategy.pipeline_parallel_size,
            ep=ep,
            etp=etp,
            vpp=virtual,
        )

    @property
    def world_size(self) -> int:
        """All ranks; experts add none."""
        return self.dp * self.cp * self.tp * self.pp

    @property
    def stages(self) -> int:
        """Stages of the pipeline."""
        return self.pp * self.vpp


def check_model(shape: ModelShape, dims: MegatronDims, config: TrainEngineConfig) -> None:
    """Refuse models that cannot be laid out as ``dims`` says, and settings that do not fit the layout.

    Raises:
        ConfigError: names sizes and rule.
    """
    tp = dims.tp
    divided = [
        ("num_attention_heads", shape.n_heads, "t", tp),
        ("num_key_value_heads", shape.n_kv_heads, "t", tp),
        ("intermediate_size", shape.ffn_dim if shape.has_dense_layers else tp, "t", tp),
        ("vocab_size", shape.vocab_size, "t", tp),
    ]
    if shape.moe is not None:
        divided.append(("num_experts", shape.moe.num_experts, "e", dims.ep))
        divided.append(("moe_intermediate_size", shape.moe.ffn_dim, "the expert tensor size", dims.etp))
    elif dims.ep > 1:
        raise ConfigError(f"backend megatron with e{dims.ep}: {shape.model_type} has no experts; leave e out")
    for name, size, letter, ranks in divided:
        if size % ranks:
            raise ConfigError(f"backend megatron: {name}={size} must be a multiple of {letter} ({ranks})")
    if shape.n_layers < dims.stages:
        raise ConfigError(
            f"backend megatron: num_hidden_layers={shape.n_layers} must be at least p * "
            f"megatron.virtual_pipeline_parallel_size={dims.stages}, as every stage needs a layer"
        )
    _check_units(shape, dims, config)
    dispatcher = config.megatron.moe_token_dispatcher_type
    if shape.moe is None or dispatcher == "alltoall":
        return
    if dims.ep > 1:
        raise ConfigError(
            f"megatron.moe_token_dispatcher_type={dispatcher} with e{dims.ep}: ranks that share experts have different "
            "tokens, whose number differs; use alltoall"
        )
    if dims.pp > 1 and dims.vpp == 1:
        raise ConfigError(
            f"megatron.moe_token_dispatcher_type={dispatcher} with p{dims.pp}: micro-batches differ in length, which "
            "pipelines support with alltoall only"
        )


def _check_units(shape: ModelShape, dims: MegatronDims, config: TrainEngineConfig) -> None:
    """Layers that are recomputed together must fill every stage: megatron takes a next one of each."""
    megatron = config.megatron
    kind, size = (megatron.recompute_granularity, megatron.recompute_method), megatron.recompute_num_layers
    if not config.gradient_checkpointing or kind != ("full", "uniform") or size is None:
        return
    counts = split_layers(shape, dims)
    if any(count % size for count in counts):
        raise ConfigError(
            f"megatron.recompute_num_layers={size} must divide the layers of every stage, which are {counts}; use 1, "
            "or recompute_method=block"
        )


@dataclass
class _Shared:
    """What the Megatron engines of this process have in common."""

    users: int = 0
    dims: MegatronDims | None = None
    world: dist.ProcessGroup | None = None
    started_alone: bool = False


_shared = _Shared()
_made: dict[tuple[dist.ProcessGroup, MegatronDims], tuple[dict[str, Any], ParallelGroups]] = {}


def join_groups(dims: MegatronDims, device: torch.device, backend: str) -> ParallelGroups:
    """Start or share the process groups of ``dims``; every rank must call, and :func:`leave_groups` once for it.

    Args:
        backend: of the config, for messages.

    Raises:
        ConfigError: the job has another number of processes, or another Megatron engine of this process has another
            layout.
    """
    check_world_size(backend, dims.world_size)
    if _shared.users and _shared.dims != dims:
        raise ConfigError(
            f"backend {backend} ({dims}): another Megatron engine of this process has {_shared.dims}; all of them must "
            "have one layout, with the same megatron.virtual_pipeline_parallel_size"
        )
    _join_world(device)
    _shared.users += 1
    _shared.dims = dims
    try:
        return _groups_of(dims)
    except BaseException:
        leave_groups()
        raise


def leave_groups() -> None:
    """Undo one :func:`join_groups`."""
    from megatron.core import parallel_state

    _shared.users -= 1
    if _shared.users == 0:
        _shared.dims = None
        _write_state(parallel_state, dict.fromkeys(_read_state(parallel_state)))
    leave_world()
    if _shared.users == 0 and _shared.started_alone and dist.is_initialized():
        _made.clear()
        dist.destroy_process_group()
        _shared.started_alone = False


def _join_world(device: torch.device) -> None:
    """Join the default group; a job of one process gets one too, as megatron-core does not work without."""
    if not dist.is_initialized() and environ.world_size() == 1:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        if device.type == "cuda":
            torch.cuda.set_device(device)
        store = dist.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=COLLECTIVE_TIMEOUT)
        _shared.started_alone = True
    join_world(device)


def _groups_of(dims: MegatronDims) -> ParallelGroups:
    from megatron.core import parallel_state

    world = dist.group.WORLD
    assert world is not None
    for key in [key for key in _made if key[0] is not world]:
        del _made[key]  # of a world that was left
    if (world, dims) in _made:
        state, groups = _made[world, dims]
        _write_state(parallel_state, state)
        return groups
    _write_state(parallel_state, dict.fromkeys(_read_state(parallel_state)))
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=dims.tp,
        pipeline_model_parallel_size=dims.pp,
        virtual_pipeline_model_parallel_size=dims.vpp if dims.vpp > 1 else None,
        context_parallel_size=dims.cp,
        expert_model_parallel_size=dims.ep,
        expert_tensor_parallel_size=dims.etp,
        distributed_timeout_minutes=int(COLLECTIVE_TIMEOUT.total_seconds() // 60),
        create_gloo_process_groups=False,
    )
    groups = _parallel_groups(parallel_state)
    _made[world, dims] = _read_state(parallel_state), groups
    return groups


def _read_state(module: Any) -> dict[str, Any]:
    """megatron's global variables, which hold all of its groups."""
    return {name: value for name, value in vars(module).items() if name[:1] == "_" and name.isupper()}


def _write_state(module: Any, state: dict[str, Any]) -> None:
    for name, value in state.items():
        setattr(module, name, value)


def _parallel_groups(state: Any) -> ParallelGroups:
    def own(group: dist.ProcessGroup) -> dist.ProcessGroup | None:
        return group if dist.get_world_size(group) > 1 else None

    world = agreement_group()
    data_rank = dist.get_rank(state.get_data_parallel_group())
    model: dist.ProcessGroup | None = None
    members: list[int] = []
    ranks_of_rows = gather_json(data_rank, world)
    for rows in sorted(set(ranks_of_rows)):
        ranks = [rank for rank, found in enumerate(ranks_of_rows) if found == rows]
        group = dist.new_group(ranks, timeout=COLLECTIVE_TIMEOUT)
        if rows == data_rank:
            model, members = group, ranks
    assert model is not None
    per_stage = len(members) // dist.get_world_size(state.get_pipeline_model_parallel_group())
    return ParallelGroups(
        data=own(state.get_data_parallel_group()),
        loss=own(state.get_data_parallel_group(with_context_parallel=True)),
        model=own(model),
        sequence=own(state.get_context_parallel_group()),
        tensor=own(state.get_tensor_model_parallel_group()),
        pp=own(state.get_pipeline_model_parallel_group()),
        grad_norm=dist.group.WORLD,
        cpu=world,
        is_head=dist.get_rank() == members[0],
        result_rank=members[-per_stage],
    )
