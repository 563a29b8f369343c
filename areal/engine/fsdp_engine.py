"""The FSDP train engine: any Hugging Face causal LM, in one process or sharded over data-parallel ranks.

In: a ``TrainEngineConfig``; batches of trajectories. Out: optimizer steps, log-probs, checkpoints, full tensors to
publish. Called by the roles of ``areal/trainer`` and by user scripts. What every backend does is in
``areal/engine/core``.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from areal.engine.core.compiled_layers import check_compile, compile_layers
from areal.engine.core.distributed import leave_world
from areal.engine.core.engine_base import EngineBase
from areal.engine.core.engine_checkpoints import EngineCheckpoints
from areal.engine.core.loop import TrainLoop
from areal.engine.core.lora import base_fingerprint, refuse_adapter
from areal.engine.core.lr_schedule import LrSchedule
from areal.engine.core.model import build_causal_lm
from areal.engine.core.optimizer import ClippedOptimizer, model_dtype
from areal.engine.core.parallel_dims import ParallelGroups
from areal.engine.core.rebuild import rebuilding
from areal.engine.core.runner import SequentialRunner
from areal.engine.core.shared_prefix import check_tree_training
from areal.engine.fsdp_utils.checkpoint import HfLayout
from areal.engine.fsdp_utils.grad import shard_copies
from areal.engine.fsdp_utils.loading import find_weights, load_streamed
from areal.engine.fsdp_utils.lora import add_lora, lora_layouts
from areal.engine.fsdp_utils.optimizer import build_shards
from areal.engine.fsdp_utils.parallel import build_mesh, check_model, check_strategy, groups_of, shard_model
from areal.utils import logging
from areal.utils.errors import ConfigError, UnsupportedFeatureError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

    from areal.api.alloc_mode import ParallelStrategy
    from areal.api.cli_args import TrainEngineConfig
    from areal.api.io_struct import FinetuneSpec
    from areal.engine.core.lora import LoraSpec

logger = logging.getLogger("FSDPEngine")


class FSDPEngine(EngineBase):
    """Owns one model: steps it, scores with it, saves and publishes it.

    Life: ``create_process_group()``, ``initialize()``, any number of calls, ``destroy()``.
    """

    def __init__(self, config: TrainEngineConfig) -> None:
        super().__init__(config)
        self._strategy: ParallelStrategy | None = None
        self._mesh: DeviceMesh | None = None

    @classmethod
    def from_pretrained(cls, model: str, **settings: Any) -> FSDPEngine:
        """Shortcut: build and initialize an engine from a model path and ``TrainEngineConfig`` settings.

        Args:
            model: Hugging Face directory or hub id.
            settings: fields of ``TrainEngineConfig``; also ``dp_size``, ``tp_size`` (default 1), ``learning_rate``
                (makes an AdamW optimizer) and ``ft_spec``.
        """
        from areal.api.config.optimizer import OptimizerConfig
        from areal.api.config.train import TrainEngineConfig

        dp_size, tp_size = settings.pop("dp_size", 1), settings.pop("tp_size", 1)
        learning_rate, ft_spec = settings.pop("learning_rate", None), settings.pop("ft_spec", None)
        settings.setdefault("experiment_name", "default")
        settings.setdefault("trial_name", "default")
        settings.setdefault("backend", f"fsdp:d{dp_size}" + (f"t{tp_size}" if tp_size > 1 else ""))
        if learning_rate is not None:
            settings["optimizer"] = OptimizerConfig(lr=learning_rate)
        engine = cls(TrainEngineConfig(path=model, **settings))
        engine.create_process_group()
        engine.initialize(None, ft_spec)
        return engine

    def create_process_group(self, parallel_strategy: ParallelStrategy | None = None) -> None:
        """Join the groups of ``parallel_strategy`` (None: that of ``config.backend``); one rank starts nothing.

        Raises:
            ConfigError: the layout does not fit the processes of this job.
        """
        strategy = self._strategy_or_own(parallel_strategy)
        check_strategy(strategy)
        check_tree_training(self.config, tensor=strategy.tensor_parallel_size, sequence=strategy.context_parallel_size)
        self._mesh = build_mesh(strategy, self._device)
        self.groups = groups_of(self._mesh)
        self._strategy = strategy

    def initialize(self, addr: str | None = None, ft_spec: FinetuneSpec | None = None, **kwargs: Any) -> None:
        """Load or make the model, shard it, build optimizer and schedule.

        Args:
            addr: must be None; a train engine listens nowhere.
            ft_spec: length of the run, for the learning-rate schedule.
            kwargs: must be empty; unknown arguments are refused.
        """
        self._check_start(addr, kwargs)
        if self._strategy is None:
            self.create_process_group()
        _check_features(self.config, self._device, sharded=self._mesh is not None)
        refuse_adapter(self.config.path)
        if self.config.fsdp.enable_compile:
            check_compile(self._device, self.groups, key="fsdp.enable_compile")
        dtype = getattr(torch, self.config.dtype)
        weights = find_weights(self.config, self.groups.cpu)
        lm = build_causal_lm(self.config, model_dtype(self.config), self._device, empty=weights is not None)
        assert self._strategy is not None
        lora = add_lora(lm.module, self.config, self._strategy) if self.config.use_lora else None
        check_model(lm.module, self._strategy)
        self.module, lm.groups = lm.module, self.groups
        # The compiler chooses itself what compiled layers keep; of other sharding units than layers, weights that a
        # product needs again may be gone when its result is asked for.
        fsdp = self.config.fsdp
        rebuilds = lora is not None and not fsdp.enable_compile and fsdp.wrap_policy is None
        runner = SequentialRunner(lm, keeping=rebuilding if rebuilds else nullcontext)
        if self._mesh is not None:
            reduce_dtype = getattr(torch, self.config.grad_reduce_dtype)
            reshard = shard_model(lm.module, self._mesh, self.config.fsdp, param_dtype=dtype, reduce_dtype=reduce_dtype)
            runner.release = reshard
        if weights is not None:
            first = self.config.fsdp.memory_efficient_load
            where = torch.device("cpu") if self.config.fsdp.offload_params else self._device
            load_streamed(lm.module, weights, where, self.groups.cpu, first_rank_reads=first)
        if self.config.fsdp.enable_compile:
            compile_layers(lm.module, key="fsdp.enable_compile")
        optimizer = None
        if self.config.optimizer is not None:
            self._shards = build_shards(lm.module, dtype, sharded=self._mesh is not None)
            schedule = LrSchedule(self.config.optimizer, ft_spec)
            layers_ahead = fsdp.optim_step_prefetch_layers if fsdp.per_layer_optim_step else None
            optimizer = ClippedOptimizer(
                self.config.optimizer, self._shards, schedule, self.groups.grad_norm, layers_ahead
            )
            optimizer.copies = shard_copies(lm.module)
        self._loop = TrainLoop(self.config, runner, self.groups, self._device, optimizer)
        self._checkpoints = self._build_checkpoints(lm.module, lora, optimizer)
        self._started()

    def _build_checkpoints(
        self, model: PreTrainedModel, lora: LoraSpec | None, optimizer: ClippedOptimizer | None
    ) -> EngineCheckpoints:
        dtype = getattr(torch, self.config.dtype)
        if lora is None:
            return EngineCheckpoints(HfLayout(model), self._shards, optimizer, self.groups, dtype)
        layout, merged = lora_layouts(model, lora)
        identity = lora.identity(base_fingerprint([model]))
        return EngineCheckpoints(layout, self._shards, optimizer, self.groups, dtype, whole=merged, identity=identity)

    def destroy(self) -> None:
        """Free the model; the last engine of the process leaves the groups. Safe to call twice."""
        self._release()
        if self._mesh is not None and dist.is_initialized():
            leave_world()
        self._mesh, self._strategy, self.groups = None, None, ParallelGroups()


def _check_features(config: TrainEngineConfig, device: torch.device, *, sharded: bool) -> None:
    """Refuse what this device, layout or version cannot do."""
    if config.fsdp.shard_vision_across_sp:
        raise UnsupportedFeatureError(
            "fsdp.shard_vision_across_sp=true is not available in this version; set it to false"
        )
    if config.fsdp.offload_params and (device.type == "cpu" or not sharded):
        why = "torch's CPU offload does not run on a CPU" if device.type == "cpu" else "one rank shards nothing"
        raise ConfigError(f"fsdp.offload_params=true: {why}; set it to false")
