"""The Megatron train engine: megatron-core's GPT model under data, tensor, context, expert and pipeline parallelism.

In: a ``TrainEngineConfig`` with a backend such as ``megatron:d2t2p2``; batches of trajectories. Out: optimizer steps,
log-probs (values, with ``is_critic``), checkpoints, full tensors to publish. To follow one micro-batch, read
``engine/core/loop.py``, then ``megatron_utils/pipeline.py``. Called by the roles of ``areal/trainer`` and by user
scripts. megatron-core is an optional package: nothing of it is imported before an engine is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig

from areal.engine.core.determinism import use_deterministic_algorithms
from areal.engine.core.distributed import group_rank
from areal.engine.core.engine_base import EngineBase
from areal.engine.core.loop import TrainLoop
from areal.engine.core.parallel_dims import ParallelGroups
from areal.engine.megatron_utils.device import check_installed, runs_on
from areal.engine.megatron_utils.options import check_options
from areal.engine.megatron_utils.parallel import MegatronDims, check_model, join_groups, leave_groups
from areal.engine.megatron_utils.shape import ModelShape
from areal.utils import logging

if TYPE_CHECKING:
    from areal.api.alloc_mode import ParallelStrategy
    from areal.api.cli_args import TrainEngineConfig
    from areal.api.io_struct import FinetuneSpec
    from areal.engine.megatron_utils.weights import MegatronLayout

logger = logging.getLogger("MegatronEngine")


class MegatronEngine(EngineBase):
    """Owns the stages of one model that this rank holds: steps it, scores with it, saves and publishes it.

    Life: ``create_process_group()``, ``initialize()``, any number of calls, ``destroy()``.

    Raises:
        UnsupportedFeatureError: megatron-core is not installed, or the model's type or one of its settings is not
            supported (a ``ValueError``).
    """

    def __init__(self, config: TrainEngineConfig) -> None:
        check_installed()
        super().__init__(config)
        self.model_config = AutoConfig.from_pretrained(config.path)
        self.shape = ModelShape.from_hf_config(
            self.model_config, is_critic=config.is_critic, disable_dropout=config.disable_dropout
        )
        self.dims: MegatronDims | None = None
        self.stages: list[Any] = []  # modules, wrapped for training
        self.layout: MegatronLayout | None = None

    @property
    def pipeline_parallel_rank(self) -> int:
        """This rank's place in its pipeline."""
        return group_rank(self.groups.pp)

    def create_process_group(self, parallel_strategy: ParallelStrategy | None = None) -> None:
        """Join the groups of ``parallel_strategy`` (None: that of ``config.backend``).

        Raises:
            ConfigError: the layout fits neither the processes of this job nor the model, its sizes do not fit
                together, or another Megatron engine of this process has another one.
        """
        strategy = self._strategy_or_own(parallel_strategy)
        dims = MegatronDims.from_strategy(strategy, self.config.megatron.virtual_pipeline_parallel_size)
        check_options(self.config, self._device)
        check_model(self.shape, dims, self.config)
        if self.config.megatron.use_deterministic_algorithms:
            use_deterministic_algorithms()  # before NCCL and cuBLAS start, which read their settings then
        with runs_on(self._device):
            self.groups = join_groups(dims, self._device, self.config.backend)
        self.dims = dims

    def initialize(self, addr: str | None = None, ft_spec: FinetuneSpec | None = None, **kwargs: Any) -> None:
        """Build the stages of this rank, load their weights, build optimizer and schedule.

        Args:
            addr: must be None; a train engine listens nowhere.
            ft_spec: length of the run, for the learning-rate schedule.
            kwargs: must be empty; unknown arguments are refused.
        """
        self._check_start(addr, kwargs)
        if self.dims is None:
            self.create_process_group()
        assert self.dims is not None
        with runs_on(self._device):
            self._build(self.dims, ft_spec)
        self._started(self._gradient_buffers)

    def _build(self, dims: MegatronDims, ft_spec: FinetuneSpec | None) -> None:
        """Everything that needs megatron-core."""
        from areal.engine.megatron_utils import build

        config = self.config
        built = build.build_engine(config, self.model_config, self.shape, dims, self.groups, self._device, ft_spec)
        self.stages, self.layout, self.module = built.stages, built.layout, nn.ModuleList(built.stages)
        self._shards = built.shards
        self._loop = TrainLoop(config, built.runner, self.groups, self._device, built.optimizer)
        self._checkpoints = build.build_checkpoints(built, config, self.groups, self._device)

    # -- contexts ------------------------------------------------------------------------------------------------------

    @contextmanager
    def working(self, phase: str) -> Iterator[None]:
        """See ``ResidencyFacade``."""
        with super().working(phase), runs_on(self._device):
            yield

    def forward_backward_batch(self, *args: Any, **kwargs: Any) -> None:
        """See ``ComputeFacade``."""
        runner: Any = self.loop.runner
        with runner.accumulating():
            super().forward_backward_batch(*args, **kwargs)

    def named_full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See :class:`WeightsFacade`; the first rank of the job gets the tensors, the others give what they hold."""
        from areal.engine.megatron_utils.weights import full_tensors

        self._saving()
        assert self.layout is not None
        with self.resident():
            yield from full_tensors(self.layout, getattr(torch, self.config.dtype), self._device)

    def destroy(self) -> None:
        """Free the model; the last engine of the process leaves the groups. Safe to call twice."""
        self._release()
        self.stages, self.layout = [], None
        if self.dims is not None:
            leave_groups()
        self.dims, self.groups = None, ParallelGroups()

    def _gradient_buffers(self) -> Iterator[Tensor]:
        for stage in self.stages if self._shards is not None else ():
            for buffer in (*stage.buffers, *stage.expert_parallel_buffers):  # megatron's, of gradients
                yield buffer.grad_data

    def _drop_gradients(self) -> None:
        if self._loop is not None and self._shards is not None:
            self._loop.optimizer.zero_grad()
