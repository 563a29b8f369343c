"""Contracts of train and inference engines.

Each contract asks for at most a dozen methods; an engine is the sum of small ones. Trainers and roles depend on these
names only, never on a backend. Shapes: T tokens of a packed micro-batch, n sequences, S padded width.
"""

from __future__ import annotations

import abc
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from areal.api.remote import remote
from areal.utils.errors import ConfigError

if TYPE_CHECKING:
    from concurrent.futures import Future

    import torch
    import torch.distributed as dist
    from torch import Tensor

    from areal.api.alloc_mode import ParallelStrategy
    from areal.api.io_struct import (
        FinetuneSpec,
        ModelRequest,
        ModelResponse,
        ParamSpec,
        SaveLoadMeta,
        WeightUpdateMeta,
    )
    from areal.api.workflow_api import WorkflowLike

LossFn = Callable[..., "Tensor"]
LossWeightFn = Callable[[dict[str, Any]], "Tensor"]
AcceptFn = Callable[[dict[str, Any]], bool]


class EngineTopology(abc.ABC):
    """Where a train engine's rank stands among the others."""

    @remote
    @abc.abstractmethod
    def create_process_group(self, parallel_strategy: ParallelStrategy | None = None) -> None:
        """Join the process groups of ``parallel_strategy`` (None: that of ``config.backend``)."""

    @property
    @abc.abstractmethod
    def data_parallel_group(self) -> dist.ProcessGroup | None:
        """Ranks that hold different rows; None when there is one rank."""

    @property
    @abc.abstractmethod
    def data_parallel_rank(self) -> int:
        """This rank's place in the data-parallel group."""

    @property
    @abc.abstractmethod
    def data_parallel_world_size(self) -> int:
        """Number of ranks that hold different rows."""

    @property
    @abc.abstractmethod
    def context_and_model_parallel_group(self) -> dist.ProcessGroup | None:
        """Ranks that share this rank's rows; None when there is one."""

    @property
    @abc.abstractmethod
    def cpu_group(self) -> dist.ProcessGroup | None:
        """All ranks, over gloo; None when there is one rank."""

    @remote
    @abc.abstractmethod
    def current_data_parallel_head(self) -> int:
        """Global rank that owns the rows of this model-parallel group."""

    @property
    @abc.abstractmethod
    def result_rank(self) -> int:
        """Global rank of this model-parallel group that ends up with losses and log-probs."""

    @remote
    @abc.abstractmethod
    def is_data_parallel_head(self) -> bool:
        """Whether this rank is that head."""


class EngineCompute(abc.ABC):
    """Forward, backward and the optimizer step."""

    @remote
    @abc.abstractmethod
    def train(self, mode: bool = True) -> Any:
        """Switch dropout and gradient checkpointing on; call before an update."""

    @remote
    @abc.abstractmethod
    def eval(self) -> Any:
        """Switch them off."""

    @remote
    @abc.abstractmethod
    def train_batch(
        self, input_: Any, loss_fn: LossFn, loss_weight_fn: LossWeightFn, *, token_mask: str | None = None
    ) -> dict[str, float]:
        """One optimizer step over all micro-batches of ``input_``.

        Args:
            input_: list of trajectories, padded dict or packed batch.
            loss_fn: ``(logprobs, entropy, packed_input) -> loss``, the mean over that micro-batch.
            loss_weight_fn: ``packed_input -> weight`` of that mean, usually its number of loss tokens.
            token_mask: name of an aligned mask; log-probs are only computed where it is not 0.

        Returns:
            ``update_successful`` (0 when the gradient norm was not finite), ``grad_norm`` before clipping, ``lr`` of
            this step, ``num_micro_batches``.
        """

    @remote
    @abc.abstractmethod
    def eval_batch(
        self, input_: Any, loss_fn: LossFn, loss_weight_fn: LossWeightFn, *, token_mask: str | None = None
    ) -> Tensor | None:
        """Weighted mean loss without gradients, reduced over data-parallel ranks."""

    @remote
    @abc.abstractmethod
    def forward_batch(
        self, input_: Any, output_seqlens: list[int] | None = None, aggregate_fn: Callable[..., Any] | None = None
    ) -> Any:
        """Log-probs (or values) in the form of the input: list in, list of ``[n, S]`` out; dict in, tensor out."""

    @abc.abstractmethod
    def forward_backward_batch(
        self, mb_list: Iterable[Any], process_output_fn: Callable[..., Any], forward_only: bool = False
    ) -> None:
        """Run ``process_output_fn(logits, context)`` on each micro-batch; backward through its result."""

    @abc.abstractmethod
    def optimizer_zero_grad(self) -> None:
        """Drop the gradients."""

    @abc.abstractmethod
    def optimizer_step(self) -> dict[str, float]:
        """Clip and step; returns ``update_successful``, ``grad_norm`` and ``lr``."""

    @remote
    @abc.abstractmethod
    def lr_scheduler_step(self) -> None:
        """Advance the learning rate by one global step."""


class EngineState(abc.ABC):
    """Weights, versions and checkpoints."""

    @remote
    @abc.abstractmethod
    def save(self, meta: SaveLoadMeta) -> None:
        """Write ``hf`` (to exchange) or ``dcp`` (to resume); every rank must call."""

    @remote
    @abc.abstractmethod
    def load(self, meta: SaveLoadMeta) -> None:
        """Read what :meth:`save` wrote; every rank must call."""

    sends_adapter: bool = False
    """Whether what is published is a trained adapter, for samplers that hold its base model."""

    @remote
    def send_adapter(self) -> None:
        """Publish the trained adapter alone from here on; ConfigError where none is trained, as by default."""
        raise ConfigError(
            f"rollout.use_lora=true: {type(self).__name__} publishes no adapter; set it to false, then samplers get "
            "whole weights"
        )

    @abc.abstractmethod
    def named_full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """``(checkpoint name, full tensor)`` in model order; every rank must iterate."""

    @remote
    @abc.abstractmethod
    def set_version(self, version: int) -> None:
        """Record the weight version this engine holds."""

    @remote
    @abc.abstractmethod
    def get_version(self) -> int:
        """The weight version this engine holds."""

    @abc.abstractmethod
    def connect_engine(self, engine: Any, meta: WeightUpdateMeta) -> None:
        """Remember where new weights go."""

    @abc.abstractmethod
    def attach_weight_updater(self, updater: Any) -> None:
        """Give the engine what :meth:`update_weights` runs: an object with ``update(version)``."""

    @abc.abstractmethod
    def update_weights(self, meta: WeightUpdateMeta) -> None:
        """Publish the weights as ``meta.version``; blocks until every sampler holds them."""


class TrainEngine(EngineTopology, EngineCompute, EngineState):
    """One model that learns: topology, compute and state under one name."""

    @remote
    @abc.abstractmethod
    def initialize(self, addr: str | None = None, ft_spec: FinetuneSpec | None = None, **kwargs: Any) -> None:
        """Build or load the model, its optimizer and its schedule."""

    @property
    @abc.abstractmethod
    def initialized(self) -> bool:
        """Whether :meth:`initialize` has finished."""

    @property
    @abc.abstractmethod
    def device(self) -> torch.device:
        """Where this rank computes."""

    @remote
    @abc.abstractmethod
    def export_stats(self) -> dict[str, float]:
        """Statistics since the last call, reduced over data-parallel ranks."""

    @abc.abstractmethod
    def destroy(self) -> None:
        """Free the model and leave the process groups; safe to call twice."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Alias of :meth:`forward_batch`."""
        return self.forward_batch(*args, **kwargs)

    def step_lr_scheduler(self) -> None:
        """Alias of :meth:`lr_scheduler_step`."""
        self.lr_scheduler_step()


@runtime_checkable
class Sampler(Protocol):
    """What an episode needs of an inference engine."""

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """Generate one continuation."""
        ...

    def get_version(self) -> int:
        """Weight version that new tokens are drawn from."""
        ...


class WeightReceiver(Protocol):
    """The receiving end of a weight update, such as the embedded inference engine."""

    def stage_weights(self, pairs: Iterable[tuple[str, Tensor]], version: int) -> list[Any]:
        """Copy a complete set of weights aside; returns a record of each tensor that was copied."""
        ...

    def commit_weights(self, version: int) -> None:
        """Switch to the staged weights between two decode steps; returns when it is done."""
        ...

    def discard_weights(self) -> None:
        """Forget what was staged."""
        ...


class WeightPublisher(Protocol):
    """Sends weights in two phases, so that a failure leaves every receiver on its old version."""

    def stage(self, version: int) -> Any:
        """Copy all weights to every receiver; raises WeightSyncError when the records of both sides differ."""
        ...

    def commit(self, version: int) -> None:
        """Let every receiver switch to ``version``."""
        ...

    def discard(self) -> None:
        """Forget what was staged."""
        ...


class Rollout(abc.ABC):
    """Episodes: started, collected, turned into batches."""

    @abc.abstractmethod
    def submit(  # noqa: PLR0913 - public 1.x signature
        self,
        data: dict[str, Any],
        workflow: WorkflowLike,
        workflow_kwargs: dict[str, Any] | None = None,
        should_accept_fn: AcceptFn | str | None = None,
        group_size: int = 1,
        task_id: int | None = None,
        is_eval: bool = False,
    ) -> int:
        """Queue one episode and return its task id; never blocks."""

    @abc.abstractmethod
    def wait(self, count: int, timeout: float | None = None, raise_timeout: bool = True) -> list[dict[str, Any] | None]:
        """Block for ``count`` finished episodes; a rejected one is None. ``timeout`` is in seconds."""

    @abc.abstractmethod
    def wait_for_task(
        self, task_id: int, timeout: float | None = None, raise_timeout: bool = True
    ) -> dict[str, Any] | None:
        """Block for one episode."""

    @abc.abstractmethod
    def rollout_batch(
        self,
        data: list[dict[str, Any]],
        workflow: WorkflowLike,
        workflow_kwargs: dict[str, Any] | None = None,
        group_size: int = 1,
    ) -> list[dict[str, Any]]:
        """Run every row and return the accepted trajectories in the order of ``data``."""

    @abc.abstractmethod
    def prepare_batch(
        self,
        dataloader: Any,
        workflow: WorkflowLike,
        workflow_kwargs: dict[str, Any] | None = None,
        should_accept_fn: AcceptFn | str | None = None,
        group_size: int = 1,
        dynamic_bs: bool = False,
    ) -> list[dict[str, Any]]:
        """The next training batch, ordered by row; generation of later batches goes on."""

    @abc.abstractmethod
    def pause(self) -> None:
        """Start no new episode."""

    @abc.abstractmethod
    def resume(self) -> None:
        """Start episodes again."""

    @abc.abstractmethod
    def export_stats(self) -> dict[str, float]:
        """Rollout statistics since the last call."""


class InferenceEngine(Rollout):
    """Generation for workflows, and the episodes around it."""

    @abc.abstractmethod
    def initialize(
        self, engine_id: str | None = None, addr: Any = None, train_data_parallel_size: int | None = None
    ) -> None:
        """Connect to the sampler and start the rollout threads."""

    @abc.abstractmethod
    def agenerate(self, req: ModelRequest) -> Awaitable[ModelResponse]:
        """Generate one continuation; survives weight updates."""

    @abc.abstractmethod
    def set_version(self, version: int) -> None:
        """Record the version that staleness is counted from."""

    @abc.abstractmethod
    def get_version(self) -> int:
        """That version."""

    @abc.abstractmethod
    def pause_generation(self) -> None:
        """Freeze the sampler."""

    @abc.abstractmethod
    def continue_generation(self) -> None:
        """Let the sampler go on."""

    @abc.abstractmethod
    def destroy(self) -> None:
        """Stop threads and free the sampler; safe to call twice."""


class RemoteWeightUpdate(abc.ABC):
    """Weight updates that a server pulls or joins; none of these calls may block."""

    @abc.abstractmethod
    def init_weights_update_group(self, meta: WeightUpdateMeta, rank_ids: Any = None) -> Future[None]:
        """Join the collective group of ``meta``."""

    @abc.abstractmethod
    def update_weights_from_distributed(self, meta: WeightUpdateMeta, param_specs: list[ParamSpec]) -> Future[Any]:
        """Receive one bucket of tensors by broadcast."""

    @abc.abstractmethod
    def update_weights_from_disk(self, meta: WeightUpdateMeta) -> Future[Any]:
        """Load a checkpoint directory."""
