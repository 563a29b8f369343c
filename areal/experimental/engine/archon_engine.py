"""The Archon train engine: plain PyTorch models under data, tensor, context, expert and pipeline parallelism.

In: a ``TrainEngineConfig`` with a backend such as ``archon:d2p2t2``; batches of trajectories. Out: optimizer steps,
log-probs (values, with ``is_critic``), checkpoints, full tensors to publish. To follow one micro-batch, read
``engine/core/loop.py``, ``archon_runner.py`` and ``models/archon/base.py``. Called by the roles of ``areal/trainer``
and by user scripts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoConfig

import areal.experimental.models.archon  # noqa: F401 - registers the model families
from areal.engine.core.compiled_layers import check_compile
from areal.engine.core.determinism import use_deterministic_algorithms
from areal.engine.core.distributed import agreement_group, check_world_size, group_rank, join_world, leave_world
from areal.engine.core.engine_base import EngineBase
from areal.engine.core.engine_checkpoints import EngineCheckpoints
from areal.engine.core.hf_load import load_streamed
from areal.engine.core.loop import TrainLoop
from areal.engine.core.lora import base_fingerprint, refuse_adapter
from areal.engine.core.lr_schedule import LrSchedule
from areal.engine.core.optimizer import ClippedOptimizer, model_dtype
from areal.engine.core.parallel_dims import ParallelGroups
from areal.engine.core.shared_prefix import check_tree_training, tree_attention
from areal.engine.fsdp_utils.grad import shard_copies
from areal.engine.fsdp_utils.optimizer import build_shards
from areal.experimental.engine.archon_checkpoint import ArchonLayout
from areal.experimental.engine.archon_config import TrainingOptions, prepare_training_config
from areal.experimental.engine.archon_dims import ArchonParallelDims
from areal.experimental.engine.archon_init import init_weights
from areal.experimental.engine.archon_runner import (
    ForwardBackwardRunner,
    PipelineLoss,
    PipelineRows,
    Stage,
    create_runner,
    own_hidden,
)
from areal.experimental.engine.archon_tied import COPIES, TiedShards, group_of_copies
from areal.experimental.engine.archon_weight_sync import (
    WeightSyncState,
    full_tensors,
    init_weight_update_group,
    update_weights_from_disk,
    update_weights_from_distributed,
)
from areal.experimental.models.archon.lora import add_lora, check_lora, lora_layouts
from areal.experimental.models.archon.model_spec import ModelSpec, get_model_spec
from areal.experimental.models.archon.parallelize import FsdpOptions, check_parallelism, parallelize_model
from areal.experimental.models.archon.pipeline_split import (
    SCHEDULES,
    count_stages,
    keep_modules,
    split_modules,
    stages_of_rank,
)
from areal.utils import logging
from areal.utils.errors import EngineError

if TYPE_CHECKING:
    from areal.api.alloc_mode import ParallelStrategy
    from areal.api.cli_args import TrainEngineConfig
    from areal.api.io_struct import FinetuneSpec, WeightUpdateMeta
    from areal.engine.core.inputs import ModelInput
    from areal.engine.core.runner import ProcessOutput
    from areal.experimental.models.archon.base import ArchonModel, ModelArgs

logger = logging.getLogger("ArchonEngine")


class ModelParts(nn.Module):
    """The parts of a model that one pipeline rank holds, seen as one: parameters keep the names of the whole model."""

    def __init__(self, parts: list[ArchonModel]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """See ``nn.Module``; names of different parts never clash."""
        for part in self.parts:
            yield from part.named_parameters(*args, **kwargs)


class ArchonLm:
    """A whole model as core sees it: packed row in, hidden states out, plus the weight of its head."""

    def __init__(self, model: ArchonModel, groups: ParallelGroups) -> None:
        self.module, self.groups = model, groups

    @property
    def head_weight(self) -> Tensor:
        """See ``ArchonModel``."""
        return self.module.head_weight

    def hidden_states(self, model_input: ModelInput) -> tuple[Tensor, Tensor | None]:
        """Last hidden states, and where each real token finds its own; None: they are one to one with the tokens.

        Returns: ``[T, dim]`` of the real tokens; of the rows of a tree, and the ``[T]`` rows in it; under context
            parallelism ``[T_padded / c, dim]``, of this rank's slice of the padded row.
        """
        padded, attention = model_input.padded, tree_attention(model_input)
        rows = PipelineRows.stack([model_input], 1).slice(self.groups.sequence)
        hidden = self.module(rows.ids, rows.positions, padded.cu_seqlens, padded.max_seqlen, attention)
        own = own_hidden(hidden[0], model_input, self.groups, whole_head=self.module.args.is_critic)
        return own, None if attention is None else attention.tree.source


class ArchonEngine(EngineBase):
    """Owns one model, or the stages of it that this pipeline rank holds: steps it, scores with it, saves and publishes.

    Life: ``create_process_group()``, ``initialize()``, any number of calls, ``destroy()``.

    Raises:
        UnknownNameError: Archon has no model of this type (a ``ValueError``).
    """

    def __init__(self, config: TrainEngineConfig) -> None:
        super().__init__(config)
        self.options: TrainingOptions | None = None

        # Model
        refuse_adapter(config.path)
        self.model_config = AutoConfig.from_pretrained(config.path)
        self.spec: ModelSpec = get_model_spec(self.model_config.model_type)
        self.args: ModelArgs | None = None
        self.parts: list[ArchonModel] = []

        # Distributed
        self.dims: ArchonParallelDims | None = None
        self._joined = False

        # Pipeline
        self.stage_numbers: tuple[int, ...] = ()
        self.stage_modules: list[list[str]] = []  # of every stage, as names
        self.stages: list[Stage] = []

        # Rollout
        self.weight_sync_state = WeightSyncState(pp_rank=0)

        # Runtime state
        self.runner: ForwardBackwardRunner | None = None
        self._layout: ArchonLayout | None = None

    def create_process_group(self, parallel_strategy: ParallelStrategy | None = None) -> None:
        """Join the groups of ``parallel_strategy`` (None: that of ``config.backend``); one rank starts nothing.

        Raises:
            ConfigError: the layout fits neither the processes of this job nor the model, or its sizes do not fit
                together.
        """
        self.dims = ArchonParallelDims.from_strategy(self._strategy_or_own(parallel_strategy), self._device.type)
        self._check_layout()
        if self.config.archon.use_deterministic_algorithms:
            use_deterministic_algorithms()  # before NCCL and cuBLAS start, which read their settings then
        if self.dims.world_size > 1:
            join_world(self._device)
            self._joined = True
            self.groups = self._setup_parallelism()
        self.weight_sync_state = WeightSyncState(group_rank(self.groups.pp))

    def initialize(self, addr: str | None = None, ft_spec: FinetuneSpec | None = None, **kwargs: Any) -> None:
        """Build the model on the meta device, cut and shard it, load its weights, build optimizer and schedule.

        Args:
            addr: must be None; a train engine listens nowhere.
            ft_spec: length of the run, for the learning-rate schedule.
            kwargs: must be empty; unknown arguments are refused.
        """
        self._check_start(addr, kwargs)
        if self.dims is None:
            self.create_process_group()
        assert self.dims is not None
        assert self.args is not None
        config = self.config
        self.options = prepare_training_config(config, self.args, self._device, dims=self.dims)
        if self.options.compile is not None:
            check_compile(self._device, self.groups, key="archon.enable_compile")
        with torch.device("meta"):
            whole = self.spec.model_class(self.args).to(model_dtype(config))
        adapter = self.spec.state_dict_adapter_class(self.args, _directory(config.path))
        lora = add_lora(whole, config, adapter) if config.use_lora else None
        self._apply_pipeline_parallelism(whole)
        release = self._apply_parallelism()
        self.module = self.parts[0] if len(self.parts) == 1 else ModelParts(self.parts)
        self._layout = ArchonLayout(self.parts, adapter, self.model_config, config.path)
        self._load_weights()
        self._create_runner(release)
        optimizer = self._create_optimizer(ft_spec)
        assert self.runner is not None
        self._loop = TrainLoop(config, self.runner, self.groups, self._device, optimizer)
        dtype = getattr(torch, config.dtype)
        if lora is None:
            self._checkpoints = EngineCheckpoints(self._layout, self._shards, optimizer, self.groups, dtype)
        else:
            trained, merged = lora_layouts(self._layout, config.path, lora)
            identity = lora.identity(base_fingerprint(self.parts))
            self._checkpoints = EngineCheckpoints(
                trained, self._shards, optimizer, self.groups, dtype, whole=merged, identity=identity
            )
        self._started()

    # -- parallelism ---------------------------------------------------------------------------------------------------

    def _check_layout(self) -> None:
        """Refuse what this job or model cannot run, before anything is started."""
        dims, archon = self._dims(), self.config.archon
        if self.config.enable_tree_training:
            self.config.pad_to_maximum = True
        check_tree_training(self.config, tensor=dims.tp, sequence=dims.cp, pipeline=dims.pp)
        check_world_size(self.config.backend, dims.world_size)
        attn_type = "varlen" if archon.attn_type == "tree" else archon.attn_type
        self.args = self.spec.model_args_class.from_hf_config(
            self.model_config, is_critic=self.config.is_critic, attn_type=attn_type
        )
        if self.args.moe is not None and archon.moe_router_dtype is None:
            self.args = replace(self.args, moe=replace(self.args.moe, router_dtype=None))
        check_parallelism(self.args, dims)
        check_lora(self.config, dims, has_experts=self.args.moe is not None)
        if dims.pp_enabled:
            self.stage_modules = self._split_modules()

    def _split_modules(self) -> list[list[str]]:
        """Module names of every stage of the pipeline."""
        assert self.args is not None
        archon, layers = self.config.archon, self.args.n_layers
        first, last = archon.pp_first_stage_less_layers, archon.pp_last_stage_less_layers
        count = count_stages(archon.pp_schedule, self._dims().pp, layers, archon.pp_layers_per_stage, first, last)
        critic = self.config.is_critic
        return split_modules(count, layers, first_less=first, last_less=last, is_critic=critic)

    def _setup_parallelism(self) -> ParallelGroups:
        """Process groups that core reads; every rank must call."""
        dims = self._dims()
        model = dims.get_group("pp_cp_tp")
        assert model is not None

        def own(name: str) -> dist.ProcessGroup | None:
            group = dims.get_group(name)
            return group if group is not None and dist.get_world_size(group) > 1 else None

        v_shape = dims.pp_enabled and SCHEDULES[self.config.archon.pp_schedule].v_shape
        last_stage = 0 if v_shape else dims.pp - 1
        return ParallelGroups(
            data=own("dp"),
            loss=own("dp_cp"),
            model=own("pp_cp_tp"),
            sequence=own("cp"),
            tensor=own("tp"),
            pp=own("pp"),
            grad_norm=dist.group.WORLD,
            cpu=agreement_group(),
            is_head=group_rank(model) == 0,
            result_rank=dist.get_global_rank(model, last_stage * dims.cp * dims.tp),
        )

    def _apply_pipeline_parallelism(self, whole: ArchonModel) -> None:
        """Keep what this rank holds of ``whole``."""
        dims = self._dims()
        if not dims.pp_enabled:
            self.parts = [whole]
        else:
            modules = self.stage_modules
            rank = group_rank(self.groups.pp)
            self.stage_numbers = stages_of_rank(self.config.archon.pp_schedule, dims.pp, len(modules), rank)
            cut = self.spec.pipelining_fn or keep_modules
            self.parts = [cut(whole, modules[number]) for number in self.stage_numbers]
        for part in self.parts:
            part.head_outside = True

    def _apply_parallelism(self) -> Callable[[], None]:
        """Everything but the pipeline, for each part; returns what frees gathered weights."""
        config, options = self.config, self.options
        assert options is not None
        fsdp = FsdpOptions(
            getattr(torch, config.dtype),
            getattr(torch, config.grad_reduce_dtype),
            config.archon.reshard_after_forward_policy,
            config.archon.offload_params,
        )
        parallelize = self.spec.parallelize_fn or parallelize_model
        parts = [parallelize(part, self._dims(), fsdp, options.ac, options.compile) for part in self.parts]

        def release() -> None:
            for reshard in parts:
                if reshard is not None:
                    reshard()

        return release

    def _create_runner(self, release: Callable[[], None]) -> None:
        if not self._dims().pp_enabled:
            self.runner = create_runner(ArchonLm(self.parts[0], self.groups), release)
            return
        assert self.groups.pp is not None
        dtype = getattr(torch, self.config.dtype)
        self.stages = [
            Stage(part, number, len(self.stage_modules), self._device, self.groups.pp, dtype)
            for part, number in zip(self.parts, self.stage_numbers, strict=True)
        ]
        self.runner = create_runner(
            None,
            release,
            stages=self.stages,
            schedule=self.config.archon.pp_schedule,
            groups=self.groups,
            prepare_inputs=self._prepare_pipelined_mb_inputs,
            create_loss_fn=self._create_pipelined_loss_fn,
        )

    def _prepare_pipelined_mb_inputs(self, items: Sequence[ModelInput], multiple: int) -> PipelineRows:
        """Micro-batches as a multiple of ``multiple`` rows of one length, and of them what this rank computes."""
        return PipelineRows.stack(items, multiple).slice(self.groups.sequence)

    def _create_pipelined_loss_fn(self, items: Sequence[ModelInput], process: ProcessOutput) -> PipelineLoss:
        """The loss of the last stage. ``index`` says which micro-batch the hidden states are of."""
        last = next((stage for stage in self.stages if stage.is_last), None)

        def loss_of(hidden: Tensor, index: Tensor) -> Tensor:
            number = int(index)
            if last is None or number >= len(items):  # a row that only fills the schedule up
                return hidden.sum() * 0
            loss = process(last.output(hidden[0], items[number], self.groups), items[number])
            return hidden.sum() * 0 if loss is None else loss

        return loss_of

    # -- weights and optimizer -----------------------------------------------------------------------------------------

    def _load_weights(self) -> None:
        assert self._layout is not None
        where = torch.device("cpu") if self.config.archon.offload_params else self._device
        if self.config.init_from_scratch:
            self._layout.materialize(where)
            init_weights(self._layout, self.groups.cpu)
        else:
            load_streamed(self._layout, self.config.path, where, self.groups.cpu)
        if where != self._device:
            for part in self.parts:
                part.init_buffers(self._device)  # FSDP brings parameters to the device, not buffers

    def _create_optimizer(self, ft_spec: FinetuneSpec | None) -> ClippedOptimizer | None:
        config, dims = self.config, self._dims()
        if config.optimizer is None:
            return None
        assert self._layout is not None
        assert self.args is not None
        sharded = dims.fsdp_enabled or dims.tp_enabled
        self._shards = build_shards(self._layout, getattr(torch, config.dtype), sharded=sharded)
        copies = shard_copies(self._layout)
        if dims.pp_enabled and self.args.tied:
            v_shape = SCHEDULES[config.archon.pp_schedule].v_shape
            self._shards = TiedShards(self._shards, group_of_copies(self.groups, v_shape))
            copies |= {name: COPIES[name] * copies.get(name, 1) for name in COPIES}
        optimizer = ClippedOptimizer(
            config.optimizer, self._shards, LrSchedule(config.optimizer, ft_spec), self.groups.grad_norm
        )
        optimizer.copies = copies
        return optimizer

    def named_full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See :class:`WeightsFacade`. In a pipeline the first rank gets all tensors, the others their own stages'."""
        with self.resident():
            yield from full_tensors(self.published_layout, getattr(torch, self.config.dtype), self.groups.pp)

    def connect_engine(self, engine: Any, meta: WeightUpdateMeta) -> None:
        """See :class:`RolloutFacade`; for ``xccl`` the servers join the group of weight updates now."""
        super().connect_engine(engine, meta)
        if meta.type == "xccl":
            init_weight_update_group(self.weight_sync_state, meta, self)

    def update_weights(self, meta: WeightUpdateMeta) -> None:
        """See :class:`RolloutFacade`."""
        if self._connected_weights is None:
            super().update_weights(meta)
        elif meta.type == "disk":
            update_weights_from_disk(meta, self)
        else:
            update_weights_from_distributed(self.weight_sync_state, meta, self)

    def destroy(self) -> None:
        """Free the model; the last engine of the process leaves the groups. Safe to call twice."""
        self._release()
        self.parts, self.stages, self.runner, self._layout = [], [], None, None
        self.weight_sync_state = WeightSyncState(pp_rank=0)
        if self._joined and dist.is_initialized():
            leave_world()
        self._joined, self.dims, self.groups = False, None, ParallelGroups()

    def _dims(self) -> ArchonParallelDims:
        if self.dims is None:
            raise EngineError("ArchonEngine has no process group; call create_process_group()")
        return self.dims


def _directory(path: str) -> str | None:
    """``path`` where it is a directory; a hub id names no files here."""
    return path if os.path.isdir(path) else None
