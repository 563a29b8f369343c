"""The public ``TrainEngine`` names, written once; a backend inherits them and supplies the collaborators.

In: calls of roles, trainers and user scripts. Out: calls of ``TrainLoop``, ``ParallelGroups`` and the backend's
checkpoint functions. Inherited by ``FSDPEngine`` and later backends.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from areal.api.engine_api import EngineCompute, EngineTopology, LossFn, LossWeightFn
from areal.engine.core.distributed import group_rank, group_size
from areal.engine.core.loop import TrainLoop
from areal.engine.core.lora_layout import AdapterLayout, PublishedAdapter
from areal.engine.core.memory import MEMORY_SCOPE, memory_of
from areal.engine.core.model_layout import named_full_tensors
from areal.engine.core.offload import ResidencyFacade
from areal.engine.core.parallel_dims import ParallelGroups
from areal.utils import stats_tracker
from areal.utils.errors import ConfigError, EngineError
from areal.utils.ranks import gather_json, value_of_rank

if TYPE_CHECKING:
    from areal.api.cli_args import TrainEngineConfig
    from areal.api.io_struct import SaveLoadMeta, WeightUpdateMeta
    from areal.engine.core.connected_weights import ConnectedWeights
    from areal.engine.core.engine_checkpoints import EngineCheckpoints
    from areal.engine.core.model_layout import ModelLayout
    from areal.engine.core.optimizer import ParamShards

_GIB = 1024**3


class TopologyFacade(EngineTopology):
    """Where this rank stands, read from ``groups``."""

    groups: ParallelGroups

    @property
    def data_parallel_group(self) -> dist.ProcessGroup | None:
        return self.groups.data

    @property
    def data_parallel_rank(self) -> int:
        return group_rank(self.groups.data)

    @property
    def data_parallel_world_size(self) -> int:
        return group_size(self.groups.data)

    @property
    def context_and_model_parallel_group(self) -> dist.ProcessGroup | None:
        return self.groups.model

    @property
    def cpu_group(self) -> dist.ProcessGroup | None:
        return self.groups.cpu

    def current_data_parallel_head(self) -> int:
        model = self.groups.model
        return self.groups.result_rank if model is None else dist.get_process_group_ranks(model)[0]

    @property
    def result_rank(self) -> int:
        """Global rank, within the model group, that ends up with losses and log-probs: the last pipeline stage."""
        return self.groups.result_rank

    def is_data_parallel_head(self) -> bool:
        return self.groups.is_head


class ComputeFacade(ResidencyFacade, EngineCompute):
    """Forward, backward and steps, done by ``loop``."""

    module: torch.nn.Module | None
    _loop: TrainLoop | None

    @property
    def loop(self) -> TrainLoop:
        """The engine loop; EngineError before ``initialize``."""
        if self._loop is None:
            raise _not_initialized(self)
        return self._loop

    def train(self, mode: bool = True) -> Any:
        """Switch dropout and gradient checkpointing on; returns the engine."""
        if self.module is None:
            raise _not_initialized(self)
        self.onload()
        self.module.train(mode)
        return self

    def eval(self) -> Any:
        """Switch them off; returns the engine."""
        return self.train(False)

    def train_batch(
        self, input_: Any, loss_fn: LossFn, loss_weight_fn: LossWeightFn, *, token_mask: str | None = None
    ) -> dict[str, float]:
        """One optimizer step over all micro-batches; every rank must call.

        Args:
            input_: list of trajectories, one padded dict, or a ``PackedBatch``.
            loss_fn: ``(logprobs, entropy, packed_input) -> scalar``, the mean over that micro-batch; ``[T]`` inputs.
            loss_weight_fn: ``(packed_input) -> scalar``, usually the number of loss tokens.
            token_mask: key of a per-token mask; log-probs and entropy are computed only where it is non-zero (0
                elsewhere). Exact when the loss reads nothing else.

        Returns: ``update_successful``, ``grad_norm`` before clipping, ``lr`` of this step, ``num_micro_batches``.
        """
        with self.working("train"):
            return self.loop.train_batch(input_, loss_fn, loss_weight_fn, token_mask)

    def eval_batch(
        self, input_: Any, loss_fn: LossFn, loss_weight_fn: LossWeightFn, *, token_mask: str | None = None
    ) -> Tensor | None:
        """Weighted mean loss without gradients, the same on every rank; arguments as ``train_batch``."""
        with self.working("eval"):
            return self.loop.eval_batch(input_, loss_fn, loss_weight_fn, token_mask)

    def forward_batch(
        self, input_: Any, output_seqlens: list[int] | None = None, aggregate_fn: Callable[..., Any] | None = None
    ) -> Any:
        """Log-probs without gradients: ``[t]`` is log π(token t+1 | tokens ≤ t) / temperature, 0 at the last position.

        Args:
            input_: as in ``train_batch``.
            output_seqlens, aggregate_fn: accepted for 1.x callers; lengths follow from the input, results are
                concatenated.

        Returns: list of ``[n_i, S_i]`` for a list, ``[n, S]`` for a padded dict, ``[T]`` for a ``PackedBatch``.
        """
        with self.working("forward"):
            return self.loop.forward_batch(input_)

    def forward_backward_batch(
        self, mb_list: Iterable[Any], process_output_fn: Callable[..., Any], forward_only: bool = False
    ) -> None:
        """Run ``process_output_fn(logits [T, V], packed_input)`` on each micro-batch, backward through its result."""
        with self.working("forward" if forward_only else "train"):
            self.loop.forward_backward_batch(mb_list, process_output_fn, forward_only)

    def optimizer_zero_grad(self) -> None:
        self.onload()  # some engines keep gradients in buffers
        self.loop.optimizer.zero_grad()

    def optimizer_step(self) -> dict[str, float]:
        self.onload()
        return self.loop.optimizer.step()

    def lr_scheduler_step(self) -> None:
        self.loop.optimizer.schedule.step()


class WeightsFacade(ResidencyFacade):
    """The model's tensors: full ones to publish, checkpoints, their version. Backends set what is declared here."""

    config: TrainEngineConfig
    module: torch.nn.Module | None
    device: torch.device
    _loop: TrainLoop | None
    _checkpoints: EngineCheckpoints | None
    _shards: ParamShards | None
    _version: int
    sends_adapter: bool = False

    def named_full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """``(checkpoint name, full tensor)`` in ``config.dtype``, tied weights once; every rank must iterate.

        Adapters are merged in, or after :meth:`send_adapter` all there is. Tensors may alias the engine's own: a
        receiver copies them.
        """
        with self.resident():
            yield from named_full_tensors(self.published_layout, getattr(torch, self.config.dtype))

    @property
    def published_layout(self) -> ModelLayout:
        """Of what samplers get."""
        saving = self._saving()
        if not self.sends_adapter:
            return saving.whole
        assert isinstance(saving.layout, AdapterLayout)
        return PublishedAdapter.of(saving.layout)

    def send_adapter(self) -> None:
        """Publish the trained adapter from here on, to samplers that hold the base model; every rank calls.

        Raises:
            ConfigError: the model has none.
        """
        if not isinstance(self._saving().layout, AdapterLayout):
            raise ConfigError("rollout.use_lora=true: the actor trains no adapter; set actor.use_lora=true")
        self.sends_adapter = True

    @property
    def hf_config(self) -> Any:
        """A copy of the model's Hugging Face config, as a checkpoint has it."""
        return self._saving().whole.configs()[0]

    def save(self, meta: SaveLoadMeta) -> None:
        """Write ``meta.path`` as ``hf`` (to exchange) or ``dcp`` (to resume), whole or not at all; every rank calls.

        Raises:
            CheckpointError: a rank could not write; every rank raises, and what was at ``meta.path`` is unchanged.
        """
        with self.resident(), memory_of("save", self.device):
            self._saving().save(meta, self._version)

    def stage_save(self, meta: SaveLoadMeta) -> Callable[[], None]:
        """Copy what :meth:`save` would write to host memory; every rank calls.

        Returns: the function that writes it, for a background thread; every rank calls it before the next
            ``stage_save``. Training may go on meanwhile.
        """
        with self.resident(), memory_of("save", self.device):
            return self._saving().stage(meta, self._version)

    def load(self, meta: SaveLoadMeta) -> None:
        """Read what :meth:`save` wrote in any layout; every rank calls. ``dcp`` restores schedule, RNG and version too.

        Raises:
            CheckpointError: the directory is incomplete or of another model; every rank raises.
        """
        with self.resident():
            self._version = self._saving().load(meta, self._version)

    def set_version(self, version: int) -> None:
        self._version = version

    def get_version(self) -> int:
        return self._version

    def _saving(self) -> EngineCheckpoints:
        if self._checkpoints is None:
            raise _not_initialized(self)
        return self._checkpoints

    def _tensors_to_move(self) -> Iterator[Tensor]:
        """Weights, masters and optimizer state; aliases may come several times."""
        assert self.module is not None
        yield from self.module.parameters()
        if self._shards is not None and self._loop is not None:
            yield from self._shards.shards.values()
            for state in self._loop.optimizer.torch_optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor))

    def _drop_gradients(self) -> None:
        assert self.module is not None
        for parameter in self.module.parameters():
            parameter.grad = None
        if self._shards is not None:
            self._shards.zero_grad()


class RolloutFacade:
    """The inference engine that a train engine was connected to, and the weights it gets."""

    _rollout: Any = None
    _weight_updater: Any = None
    _connected_weights: ConnectedWeights | None = None

    def connect_engine(self, engine: Any, meta: WeightUpdateMeta) -> None:
        """Remember the inference engine, and how weights reach it.

        Args:
            engine: a remote one on every rank, initialised on the first; or an embedded one, for whose weights the
                trainer attaches an updater.
            meta: of type ``disk`` or ``xccl`` for a remote one.
        """
        self.disconnect_engine()
        self._rollout = engine
        if meta.type != "inproc":
            from areal.engine.core.connected_weights import ConnectedWeights

            train_engine: Any = self
            self._connected_weights = ConnectedWeights(train_engine, engine, meta)

    def disconnect_engine(self) -> None:
        """Undo :meth:`connect_engine`; safe to call twice."""
        connected, self._connected_weights, self._rollout = self._connected_weights, None, None
        if connected is not None:
            connected.close()

    @property
    def connected_weights(self) -> ConnectedWeights:
        """What brings weights to the connected inference engine; EngineError where none is connected by address."""
        if self._connected_weights is None:
            raise EngineError("no remote inference engine is connected; call connect_engine() first")
        return self._connected_weights

    def attach_weight_updater(self, updater: Any) -> None:
        """Give the engine the ``WeightUpdater`` that ``update_weights`` runs."""
        self._weight_updater = updater

    def update_weights(self, meta: WeightUpdateMeta) -> None:
        """Publish the weights as ``meta.version``; blocks until every sampler holds them. Every rank must call.

        Raises:
            EngineError: no sampler is connected, or ``meta`` carries no version for the trainer's updater.
            WeightSyncError: the samplers did not take the weights.
        """
        if self._connected_weights is not None:
            self._connected_weights.update(meta)
            return
        if self._weight_updater is None:
            raise EngineError("update_weights: no sampler is connected; call connect_engine() first")
        if meta.version is None:
            raise EngineError("update_weights: meta.version is None; use meta.with_version(v)")
        self._weight_updater.update(meta.version)

    def rollout_batch(self, *args: Any, **kwargs: Any) -> list[dict[str, Any]]:
        """Forwarded to the connected inference engine."""
        return self._connected().rollout_batch(*args, **kwargs)

    def prepare_batch(self, *args: Any, **kwargs: Any) -> list[dict[str, Any]]:
        """Forwarded to the connected inference engine."""
        return self._connected().prepare_batch(*args, **kwargs)

    def _connected(self) -> Any:
        if self._rollout is None:
            raise EngineError("no inference engine is connected; call connect_engine() first")
        return self._rollout


class ServiceFacade:
    """Statistics, profiling and memory."""

    groups: ParallelGroups
    device: torch.device

    def export_stats(self) -> dict[str, float]:
        """Statistics since the last call, reduced over data-parallel ranks; every rank must call.

        All stages of a pipeline return the same: what the last one recorded, as the loss was there, then what only
        others did. Memory is that of the stage with most.
        """
        stats = stats_tracker.export_all(reduce_group=self.groups.data)
        if self.groups.pp is None:
            return stats
        last = value_of_rank(stats, self.groups.result_rank, self.groups.model)
        merged: dict[str, float] = {}
        exports = gather_json(stats, self.groups.pp)
        for export in [last, *exports]:
            merged = {**export, **merged}
        for key in (key for key in merged if key.startswith(MEMORY_SCOPE)):
            merged[key] = max(export[key] for export in exports if key in export)
        return merged

    def get_device_stats(self) -> Any:
        """Memory of this rank's device as a ``DeviceRuntimeInfo`` in GB."""
        from areal.engine.core.device_stats import DeviceRuntimeInfo

        return DeviceRuntimeInfo.get_current()

    def start_memory_profile(self, max_entries: int = 100_000) -> None:
        """Start recording allocations; does nothing on a CPU."""
        if self.device.type == "cuda":
            torch.cuda.memory._record_memory_history(max_entries=max_entries)

    def stop_memory_profile(self, directory: str) -> None:
        """Write the recorded allocations into ``directory``; does nothing on a CPU."""
        if self.device.type == "cuda":
            os.makedirs(directory, exist_ok=True)
            path = os.path.join(directory, f"memory_rank{group_rank(self.groups.cpu)}.pickle")
            torch.cuda.memory._dump_snapshot(path)
            torch.cuda.memory._record_memory_history(enabled=None)

    def config_perf_tracer(self, config: Any, rank: int, role: str) -> None:
        """Configure this process's tracer."""
        from areal.utils import perf_tracer

        perf_tracer.configure(config, rank=rank, role=role)

    def save_perf_tracer(self, step: int | None = None, force: bool = False) -> None:
        """Write this process's trace."""
        from areal.utils import perf_tracer

        perf_tracer.save(step=step, force=force)

    def clear_batches(self, shard_ids: Any = None) -> None:
        """Nothing is kept between calls in this process; accepted for 1.x callers."""

    def fetch_buffer_stats(self) -> dict[str, float]:
        """No buffers are kept in this process: an empty dict."""
        return {}


def _not_initialized(engine: object) -> EngineError:
    return EngineError(f"{type(engine).__name__} is not initialized; call create_process_group() and initialize()")
