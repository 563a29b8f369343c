"""megatron's optimizer as core sees it: leaves with their places in the model, gradients, clipping, schedule.

In: stages wrapped in megatron's DDP, and an ``OptimizerConfig``. Out: ``MegatronOptimizer``, which the engine loop
steps. With the distributed optimizer a leaf is the range of a flattened parameter that this data-parallel rank steps.
Called by the Megatron engine, inside ``device.runs_on``.

megatron's own scheduler sets learning rate and weight decay of every parameter group before every step: a group's
factors act through it alone. All weights decay, norms and biases too, as in the other engines; megatron would leave
those out, and the same run would give other weights with another backend.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, Float16OptimizerWithFloat16Params
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from areal.engine.core.lr_schedule import LrSchedule
from areal.engine.core.optimizer import ClippedOptimizer
from areal.engine.megatron_utils.device import optimizer_context, runs_on
from areal.engine.megatron_utils.weights import Run

if TYPE_CHECKING:
    import areal.api.cli_args as cli_args
    from areal.api.io_struct import FinetuneSpec
    from areal.engine.core.parallel_dims import ParallelGroups
    from areal.engine.megatron_utils.model import StageModel
    from areal.engine.megatron_utils.weights import MegatronLayout

__all__ = ["MegatronOptimizer", "MegatronSchedule", "MegatronShards", "wrap_stages"]


def wrap_stages(
    stages: list[StageModel], config: cli_args.TrainEngineConfig, groups: ParallelGroups
) -> list[DistributedDataParallel]:
    """The stages with buffers for their gradients, and for their weights under the distributed optimizer."""
    ddp = config.megatron.ddp
    assert config.optimizer is not None
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=ddp.grad_reduce_in_fp32,
        overlap_grad_reduce=ddp.overlap_grad_reduce,
        overlap_param_gather=ddp.overlap_param_gather,
        align_param_gather=ddp.align_param_gather,
        use_distributed_optimizer=uses_distributed_optimizer(config, groups),
        check_for_nan_in_grad=False,  # core looks at the norm, and skips the step; megatron would end the process
        bucket_size=ddp.bucket_size,
        average_in_collective=ddp.average_in_collective,
        fp8_param_gather=ddp.fp8_param_gather,
    )
    return [
        DistributedDataParallel(stage.config, settings, stage, disable_bucketing=index > 0)
        for index, stage in enumerate(stages)
    ]


def uses_distributed_optimizer(config: cli_args.TrainEngineConfig, groups: ParallelGroups) -> bool:
    """Whether ranks share the optimizer's work out: megatron can with Adam only, and one rank would only copy."""
    assert config.optimizer is not None
    shared = config.megatron.ddp.use_distributed_optimizer and groups.loss is not None
    return shared and config.optimizer.type != "sgd"


class MegatronSchedule(LrSchedule):
    """megatron's scheduler with the learning rates that every engine has; see ``LrSchedule``."""

    _scheduler: OptimizerParamScheduler | None = None

    def __init__(
        self, config: cli_args.OptimizerConfig, ft_spec: FinetuneSpec | None, optimizer: ChainedOptimizer
    ) -> None:
        super().__init__(config, ft_spec)
        lowest = _lowest_rate(config)
        total = max(1, self.total, self.warmup + 1)
        self._scheduler = OptimizerParamScheduler(
            optimizer,
            init_lr=lowest,
            max_lr=config.lr,
            min_lr=lowest,
            lr_warmup_steps=self.warmup,
            lr_decay_steps=total,
            lr_decay_style=config.lr_scheduler_type,
            start_wd=config.weight_decay,
            end_wd=config.weight_decay,
            wd_incr_steps=total,
            wd_incr_style="constant",
        )

    @property
    def lr(self) -> float:
        """Learning rate of the current global step."""
        assert self._scheduler is not None
        rate: float = self._scheduler.get_lr({})
        return rate

    @property
    def steps_done(self) -> int:
        """Global steps done so far."""
        return 0 if self._scheduler is None else int(self._scheduler.num_steps)

    @steps_done.setter
    def steps_done(self, steps: int) -> None:
        if self._scheduler is not None:
            self._scheduler.num_steps = steps
            self._scheduler.step(0)

    def step(self) -> None:
        """Go on to the next global step."""
        assert self._scheduler is not None
        self._scheduler.step(1)

    def apply(self) -> None:
        """Set learning rate and weight decay of every parameter group to those of this step."""
        assert self._scheduler is not None
        self._scheduler.step(0)


class MegatronShards:
    """The ``ParamShards`` of a rank.

    Attributes:
        shards: float32 leaves by own name; empty on ranks without a part of the parameter.
        runs: which elements they are.
    """

    def __init__(
        self, stages: list[DistributedDataParallel], optimizer: ChainedOptimizer, layout: MegatronLayout
    ) -> None:
        self._stages, self._optimizer = stages, optimizer
        parts = {id(part.parameter): part for part in layout.parts}
        found = {}
        for parameter, leaf, start in _leaves(optimizer):
            if not leaf.is_leaf:
                leaf.retain_grad()  # a view of its parameter; torch warns of gradients of such, which megatron sets
            part = parts[id(parameter)]
            found[part.name] = Run(part, leaf, start, start + leaf.numel())
        self.runs = [found[part.name] for part in layout.parts if part.name in found]
        self.shards: dict[str, Tensor] = {run.part.name: run.leaf for run in self.runs}

    @property
    def separate_runs(self) -> list[Run]:
        """Those whose leaves have memory of their own."""
        return [r for r in self.runs if r.leaf.untyped_storage().data_ptr() != _storage(r.part.parameter)]

    def collect_gradients(self) -> list[Tensor]:
        """See ``ParamShards``; reduces the gradients of all ranks, so every rank must call."""
        for group in self._bucket_groups():
            # The first step reduces here of its own; a later one did so in its run, unless several runs made it up.
            if not group.is_first_batch and group.grad_reduce_handle is None:
                group.start_grad_sync()
        finalize_model_grads(self._stages)
        self._optimizer.prepare_grads()
        return [leaf.grad for leaf in self.shards.values() if leaf.grad is not None and leaf.grad.numel()]

    def _bucket_groups(self) -> Iterator[Any]:
        """Those that reduce while the backward pass runs."""
        for stage in self._stages:
            if stage.ddp_config.overlap_grad_reduce:
                yield from (*stage.bucket_groups, *stage.expert_parallel_bucket_groups)

    def write_back(self) -> None:
        """See ``ParamShards``; gathers what other ranks stepped, so every rank must call."""
        for inner in self._optimizer.chained_optimizers:
            if not inner.is_stub_optimizer and hasattr(inner, "_copy_main_params_to_model_params"):
                inner._copy_main_params_to_model_params()
        for stage in self._stages:
            if stage.ddp_config.use_distributed_optimizer:
                stage.start_param_sync(force_sync=True)

    def zero_grad(self) -> None:
        """See ``ParamShards``."""
        for stage in self._stages:
            stage.zero_grad_buffer()
        self._optimizer.zero_grad()


class MegatronOptimizer(ClippedOptimizer):
    """megatron's optimizer under core's rules: a step whose gradient norm is not finite is skipped and counted.

    Args:
        stages: of this rank.
        config: of the engine; it trains.
        ft_spec: length of the run.
        layout: of the stages.
        groups: of this rank.
        device: of the stages.
    """

    def __init__(  # noqa: PLR0913 - the parts of an engine
        self,
        stages: list[DistributedDataParallel],
        config: cli_args.TrainEngineConfig,
        ft_spec: FinetuneSpec | None,
        layout: MegatronLayout,
        groups: ParallelGroups,
        device: torch.device,
    ) -> None:
        assert config.optimizer is not None
        self.device = device
        with optimizer_context(device):
            self.megatron = get_megatron_optimizer(
                _settings(config, groups), stages, config_overrides={}, use_gloo_process_groups=False
            )
        for group in self.megatron.param_groups:
            if "fused" in group:  # torch's, where neither Transformer Engine nor Apex is installed
                group["fused"], group["foreach"] = True, False
        self._states = _States(self.megatron)
        self._steps: dict[str, Tensor] = {}
        shards = MegatronShards(stages, self.megatron, layout)
        schedule = MegatronSchedule(config.optimizer, ft_spec, self.megatron)
        super().__init__(config.optimizer, shards, schedule, groups.grad_norm)

    def zero_grad(self) -> None:
        """See ``ClippedOptimizer``."""
        with runs_on(self.device):
            super().zero_grad()

    def step(self, inspect: Any = None) -> dict[str, float]:
        """See ``ClippedOptimizer``; every rank must call."""
        with runs_on(self.device):
            return super().step(inspect)

    def state_tensors(self, name: str) -> dict[str, Tensor]:
        """See ``ClippedOptimizer``; empty where this rank has no part of the parameter."""
        if name not in self.shards.shards:
            return {}
        leaf = self.shards.shards[name]
        group = self._states.group(leaf)
        if "fused" in group or self.config.type == "sgd":
            return super().state_tensors(name)
        # Transformer Engine's and Apex's Adam count steps for a group of parameters.
        state = self._states.state[leaf]
        moments = {key: state.setdefault(key, torch.zeros_like(leaf)) for key in ("exp_avg", "exp_avg_sq")}
        steps = self._steps.setdefault(name, torch.zeros(()))
        steps.fill_(group.get("step", 0))
        return {"step": steps, **moments}

    def take_over_steps(self) -> None:
        """Count on from the steps that were loaded into ``state_tensors``."""
        for name, steps in self._steps.items():
            self._states.group(self.shards.shards[name])["step"] = int(steps)

    def _build(self, layers_ahead: int | None) -> Any:
        return self._states

    def _norm(self, grads: list[Tensor]) -> float:
        return float(self.megatron.get_grad_norm())

    def _update(self, lr: float) -> None:
        assert isinstance(self.schedule, MegatronSchedule)
        self.schedule.apply()
        self.megatron.step_with_ready_grads()


class _States:
    """The state of all of megatron's inner optimizers, by leaf, as that of one optimizer of torch."""

    def __init__(self, optimizer: ChainedOptimizer) -> None:
        self._inner = [one.optimizer for one in optimizer.chained_optimizers if one.optimizer is not None]
        self._groups = {id(leaf): group for group in self.param_groups for leaf in group["params"]}
        self.state = _MergedState(self._inner)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for inner in self._inner for group in inner.param_groups]

    def group(self, leaf: Tensor) -> dict[str, Any]:
        """The parameter group that holds ``leaf``."""
        return self._groups[id(leaf)]


class _MergedState:
    def __init__(self, inner: list[torch.optim.Optimizer]) -> None:
        self._inner = inner
        leaves = ((leaf, one) for one in inner for group in one.param_groups for leaf in group["params"])
        self._owners = {id(leaf): one for leaf, one in leaves}

    def __getitem__(self, leaf: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self._owners[id(leaf)].state[leaf]
        return state

    def values(self) -> Iterator[dict[str, Tensor]]:
        for one in self._inner:
            yield from one.state.values()

    def clear(self) -> None:
        for one in self._inner:
            one.state.clear()


def _lowest_rate(config: cli_args.OptimizerConfig) -> float:
    """Where the schedule starts and ends."""
    return config.lr * config.min_lr_ratio if config.lr_scheduler_type == "cosine" else 0.0


def _settings(config: cli_args.TrainEngineConfig, groups: ParallelGroups) -> OptimizerConfig:
    optimizer, megatron = config.optimizer, config.megatron
    assert optimizer is not None
    return OptimizerConfig(
        optimizer="sgd" if optimizer.type == "sgd" else "adam",
        lr=optimizer.lr,
        min_lr=_lowest_rate(optimizer),  # every group keeps it, and the scheduler obeys the group
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.beta1,
        adam_beta2=optimizer.beta2,
        adam_eps=optimizer.eps,
        sgd_momentum=0.0,
        bf16=config.dtype == "bfloat16",
        params_dtype=getattr(torch, config.dtype),
        clip_grad=optimizer.gradient_clipping,
        use_distributed_optimizer=uses_distributed_optimizer(config, groups),
        overlap_param_gather=megatron.ddp.overlap_param_gather,
    )


def _leaves(optimizer: ChainedOptimizer) -> Iterator[tuple[Tensor, Tensor, int]]:
    """``(model's parameter, leaf, first element of it)`` of everything that this rank steps."""
    for inner in optimizer.chained_optimizers:
        if inner.is_stub_optimizer:
            continue
        if isinstance(inner, DistributedOptimizer):
            pairs = _pairs(inner.model_fp32_groups, inner.shard_fp32_groups)
            pairs += _pairs(inner.model_float16_groups, inner.shard_fp32_from_float16_groups)
            for parameter, leaf in pairs:
                yield parameter, leaf, inner._get_model_param_range_map(parameter)["param"].start
            continue
        if isinstance(inner, Float16OptimizerWithFloat16Params):
            pairs = _pairs(inner.float16_groups, inner.fp32_from_float16_groups)
            pairs += _pairs(inner.fp32_from_fp32_groups, inner.fp32_from_fp32_groups)
        else:
            groups = [group["params"] for group in inner.optimizer.param_groups]
            pairs = _pairs(groups, groups)
        for parameter, leaf in pairs:
            yield parameter, leaf, 0


def _pairs(groups: list[list[Tensor]], leaves: list[list[Tensor]]) -> list[tuple[Tensor, Tensor]]:
    grouped = (zip(own, theirs, strict=True) for own, theirs in zip(groups, leaves, strict=True))
    return [pair for group in grouped for pair in group]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
