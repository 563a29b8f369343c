"""The public ``TrainEngine`` names, written once; a backend inherits them and supplies the collaborators.

In: calls of roles, trainers and user scripts. Out: calls of ``TrainLoop``, ``ParallelGroups`` and the backend's
checkpoint functions. Inherited by ``FSDPEngine`` and later backends.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from areal.api.engine_api import EngineCompute, EngineTopology, LossFn, LossWeightFn
from areal.engine.core.distributed import group_rank, group_size
from areal.engine.core.loop import TrainLoop
from areal.engine.core.offload import ResidencyFacade
from areal.engine.core.parallel_dims import ParallelGroups
from areal.utils import stats_tracker
from areal.utils.errors import EngineError

if TYPE_CHECKING:
    import torch.distributed as dist

    from areal.api.io_struct import WeightUpdateMeta
    from areal.engine.core.connected_weights import ConnectedWeights

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
        self.loop.optimizer.zero_grad()

    def optimizer_step(self) -> dict[str, float]:
        self.onload()
        return self.loop.optimizer.step()

    def lr_scheduler_step(self) -> None:
        self.loop.optimizer.schedule.step()


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
        """Statistics since the last call, reduced over data-parallel ranks; every rank must call."""
        return stats_tracker.export_all(reduce_group=self.groups.data)

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
