"""The FSDP train engine: any Hugging Face causal LM, in one process or sharded over data-parallel ranks.

In: a ``TrainEngineConfig``; batches of trajectories. Out: optimizer steps, log-probs, checkpoints, full tensors to
publish. Called by the roles of ``areal/trainer`` and by user scripts. What every backend does is in
``areal/engine/core``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from areal.api.engine_api import TrainEngine
from areal.engine.core.checkpoint import export_hf, load_dcp, load_optimizer_file, save_dcp
from areal.engine.core.distributed import current_device, leave_world
from areal.engine.core.facade import ComputeFacade, RolloutFacade, ServiceFacade, TopologyFacade
from areal.engine.core.loop import TrainLoop
from areal.engine.core.lr_schedule import LrSchedule
from areal.engine.core.model import build_causal_lm
from areal.engine.core.optimizer import ClippedOptimizer, ParamShards
from areal.engine.core.parallel_dims import ParallelGroups
from areal.engine.core.runner import SequentialRunner
from areal.engine.fsdp_utils.checkpoint import load_hf_weights, local_optimizer_state, recover_tensors
from areal.engine.fsdp_utils.optimizer import build_shards
from areal.engine.fsdp_utils.parallel import build_mesh, check_strategy, groups_of, shard_model
from areal.engine.fsdp_utils.weights import named_full_tensors
from areal.utils import logging
from areal.utils.errors import ConfigError, EngineError, UnsupportedFeatureError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

    from areal.api.alloc_mode import ParallelStrategy
    from areal.api.cli_args import TrainEngineConfig
    from areal.api.io_struct import FinetuneSpec, SaveLoadMeta

logger = logging.getLogger("FSDPEngine")


class FSDPEngine(TopologyFacade, ComputeFacade, RolloutFacade, ServiceFacade, TrainEngine):
    """Owns one model: steps it, scores with it, saves and publishes it.

    Life: ``create_process_group()``, ``initialize()``, any number of calls, ``destroy()``.
    """

    def __init__(self, config: TrainEngineConfig) -> None:
        self.config = config
        self.groups = ParallelGroups()
        self.module: PreTrainedModel | None = None
        self._device = current_device()
        self._mesh: DeviceMesh | None = None
        self._shards: ParamShards | None = None
        self._loop: TrainLoop | None = None
        self._grouped = False
        self._version = 0

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

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def initialized(self) -> bool:
        return self._loop is not None

    def create_process_group(self, parallel_strategy: ParallelStrategy | None = None) -> None:
        """Join the groups of ``parallel_strategy`` (None: that of ``config.backend``); one rank starts nothing.

        Raises:
            ConfigError: the layout does not fit the processes of this job.
            UnsupportedFeatureError: the layout needs a feature that comes later.
        """
        if parallel_strategy is None:
            from areal.api.alloc_mode import ModelAllocation

            parallel_strategy = ModelAllocation.from_str(self.config.backend).parallel
        check_strategy(parallel_strategy)
        self._mesh = build_mesh(parallel_strategy, self._device)
        self.groups = groups_of(self._mesh)
        self._grouped = True

    def initialize(self, addr: str | None = None, ft_spec: FinetuneSpec | None = None, **kwargs: Any) -> None:
        """Load or make the model, shard it, build optimizer and schedule.

        Args:
            addr: must be None; a train engine listens nowhere.
            ft_spec: length of the run, for the learning-rate schedule.
            kwargs: must be empty; unknown arguments are refused.
        """
        if addr is not None or kwargs:
            raise ConfigError(f"FSDPEngine.initialize takes ft_spec only, got addr={addr!r} {sorted(kwargs)}")
        if not self._grouped:
            self.create_process_group()
        _refuse_later_features(self.config)
        dtype = getattr(torch, self.config.dtype)
        trains = self.config.optimizer is not None
        # Master weights are float32 whatever the compute dtype; an engine that only scores loads the compute dtype.
        lm = build_causal_lm(self.config, torch.float32 if trains else dtype, self._device)
        self.module = lm.module
        runner = SequentialRunner(lm)
        if self._mesh is not None:
            reduce_dtype = getattr(torch, self.config.grad_reduce_dtype)
            reshard = shard_model(lm.module, self._mesh, self.config.fsdp, param_dtype=dtype, reduce_dtype=reduce_dtype)
            runner = SequentialRunner(lm, release=reshard)
        optimizer = None
        if self.config.optimizer is not None:
            self._shards = build_shards(lm.module, dtype, sharded=self._mesh is not None)
            schedule = LrSchedule(self.config.optimizer, ft_spec)
            optimizer = ClippedOptimizer(self.config.optimizer, self._shards, schedule, self.groups.grad_norm)
        self._loop = TrainLoop(self.config, runner, self.groups, self._device, optimizer)

    def named_full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """``(checkpoint name, full tensor)`` in ``config.dtype``, tied weights once; every rank must iterate.

        Tensors may alias the engine's own: a receiver copies them.
        """
        return named_full_tensors(self._model(), getattr(torch, self.config.dtype))

    def save(self, meta: SaveLoadMeta) -> None:
        """Write ``meta.path`` as ``hf`` (to exchange) or ``dcp`` (to resume), whole or not at all; every rank calls."""
        if meta.weight_format == "hf":
            export_hf(
                meta.path,
                self._model(),
                self.named_full_tensors(),
                getattr(torch, self.config.dtype),
                self.groups.cpu,
                extras=(meta.tokenizer, meta.processor),
                optimizer_state=self._optimizer_state() if meta.with_optim else None,
            )
        elif meta.weight_format == "dcp":
            state: dict[str, Any] = {"version": self._version}
            if self._shards is not None:
                state["lr_steps"] = self.loop.optimizer.schedule.steps_done
            save_dcp(meta.path, self._recover_tensors(meta.with_optim), state, self.groups.cpu)
        else:
            raise _unknown_format(meta)

    def load(self, meta: SaveLoadMeta) -> None:
        """Read what :meth:`save` wrote; every rank must call. ``dcp`` restores schedule, RNG and version too."""
        if meta.weight_format == "hf":
            load_hf_weights(self._model(), self._shards, meta.path)
            if meta.with_optim:
                load_optimizer_file(meta.path, self._optimizer_state(), self.groups.cpu)
        elif meta.weight_format == "dcp":
            state = load_dcp(meta.path, self._recover_tensors(meta.with_optim), self.groups.cpu)
            self._version = state["version"]
            if self._shards is not None:
                self._shards.write_back()
                self.loop.optimizer.schedule.steps_done = state.get("lr_steps", 0)
        else:
            raise _unknown_format(meta)

    def set_version(self, version: int) -> None:
        self._version = version

    def get_version(self) -> int:
        return self._version

    def destroy(self) -> None:
        """Free the model and leave the process groups that this engine made; safe to call twice."""
        self._loop = None
        self._shards = None
        self.module = None
        if self._mesh is not None and dist.is_initialized():
            dist.destroy_process_group(self.groups.cpu)
            leave_world()
        self._mesh, self._grouped = None, False
        self.groups = ParallelGroups()

    def _model(self) -> PreTrainedModel:
        if self.module is None:
            raise EngineError("FSDPEngine is not initialized; call create_process_group() and initialize()")
        return self.module

    def _optimizer_state(self) -> dict[str, Tensor]:
        optimizer = self.loop.optimizer
        assert self._shards is not None
        return local_optimizer_state(self._shards, optimizer)

    def _recover_tensors(self, with_optim: bool) -> dict[str, Tensor]:
        optimizer = self.loop.optimizer if with_optim and self._shards is not None else None
        return recover_tensors(self._model(), self._shards, optimizer)


def _unknown_format(meta: SaveLoadMeta) -> ConfigError:
    return ConfigError(f"weight_format={meta.weight_format!r} is not valid; allowed: hf, dcp")


def _refuse_later_features(config: TrainEngineConfig) -> None:
    for name in ("offload_params", "memory_efficient_load", "per_layer_optim_step", "shard_vision_across_sp"):
        if getattr(config.fsdp, name):
            raise UnsupportedFeatureError(f"fsdp.{name}=true is not available in this version; set it to false")
