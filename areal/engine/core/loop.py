"""The engine loop, once for every backend: split, pack, forward/backward, scale, clip, step; log-probs; evaluation.

In: trajectories and loss callbacks. Out: step results, losses, log-probs or, of a value model (``is_critic``), values.
Called by the engine facades.

Loss scaling: with W the loss weight summed over micro-batches and data-parallel ranks, a micro-batch of weight w
back-propagates ``loss * w / W * dp``; ``dp`` cancels the gradient average over ranks. So the result does not depend on
how rows are cut into micro-batches or ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from areal.engine.core.distributed import all_reduce_sum, group_size
from areal.engine.core.failure_capture import StepWatcher, TrainCall
from areal.engine.core.inputs import EngineBatch, ModelInput, Trajectories, as_model_input, own_slice, prepare_batch
from areal.engine.core.lm_head import TokenOutput, token_output
from areal.engine.core.runner import ForwardBackwardRunner, LmOutput
from areal.engine.core.shared_prefix import distinct_predictions, tree_token_ratio
from areal.utils import logging
from areal.utils.errors import EngineError

if TYPE_CHECKING:
    from areal.api.cli_args import TrainEngineConfig
    from areal.engine.core.optimizer import ClippedOptimizer
    from areal.engine.core.parallel_dims import ParallelGroups

logger = logging.getLogger("TrainEngine")

TokenLossFn = Callable[..., Tensor]
LossWeightFn = Callable[[dict[str, Any]], Tensor]


class TrainLoop:
    """Drives a runner and an optimizer over batches.

    Args:
        config: temperature and micro-batching.
        runner: forward and backward of the backend.
        groups: process groups of this rank.
        device: where batches go.
        optimizer: None for an engine that only scores.
    """

    def __init__(
        self,
        config: TrainEngineConfig,
        runner: ForwardBackwardRunner,
        groups: ParallelGroups,
        device: torch.device,
        optimizer: ClippedOptimizer | None,
    ) -> None:
        self.config, self.runner, self.groups, self.device = config, runner, groups, device
        self._optimizer = optimizer
        self.watcher: StepWatcher | None = None  # sees every step before the weights change

    @property
    def optimizer(self) -> ClippedOptimizer:
        """The optimizer; EngineError when the engine was built without one."""
        if self._optimizer is None:
            raise EngineError("this engine has no optimizer (optimizer: null); it can only score and evaluate")
        return self._optimizer

    def train_batch(
        self, input_: Trajectories, loss_fn: TokenLossFn, weight_fn: LossWeightFn, token_mask: str | None = None
    ) -> dict[str, float]:
        """One optimizer step; every rank must call. See ``EngineCompute.train_batch``."""
        optimizer = self.optimizer
        optimizer.zero_grad()
        batch = self._prepare(input_)
        weights, total = self._loss_weights(batch, weight_fn)
        counts = {"num_micro_batches": float(len(batch.inputs))}
        if self.config.enable_tree_training:
            counts["tree_token_ratio"] = tree_token_ratio(batch.inputs)
        if total <= 0:
            logger.warning("no token of this batch has loss weight; step skipped, weights unchanged")
            return {"update_successful": 0.0, "grad_norm": 0.0, "lr": optimizer.schedule.lr, **counts}
        factor = group_size(self.groups.loss) / total
        token_loss = _TokenLoss(self, loss_fn, token_mask)
        weight_of = {id(item): weight for item, weight in zip(batch.inputs, weights, strict=True)}
        call = TrainCall(input_, loss_fn, weight_fn, token_mask)
        probe = self.watcher.start(call, total) if self.watcher is not None else None

        def scaled_loss(output: LmOutput, model_input: ModelInput) -> Tensor:
            weight = weight_of[id(model_input)]
            loss = token_loss(output, model_input, weight)
            if probe is not None:
                probe.add(loss, weight)
            return loss * (weight * factor)

        self.runner.run(batch.inputs, scaled_loss, forward_only=False)
        return {**optimizer.step(probe.inspect if probe is not None else None), **counts}

    def eval_batch(
        self, input_: Trajectories, loss_fn: TokenLossFn, weight_fn: LossWeightFn, token_mask: str | None = None
    ) -> Tensor:
        """Weighted mean loss over all ranks, float32 scalar, no gradients; 0 when nothing has weight."""
        batch = self._prepare(input_)
        weights, total = self._loss_weights(batch, weight_fn)
        token_loss = _TokenLoss(self, loss_fn, token_mask)
        weight_of = {id(item): weight for item, weight in zip(batch.inputs, weights, strict=True)}
        loss_sum = torch.zeros((), dtype=torch.float32, device=self.device)

        def add_loss(output: LmOutput, model_input: ModelInput) -> None:
            weight = weight_of[id(model_input)]
            loss_sum.add_(token_loss(output, model_input, weight).float() * weight)

        self.runner.run(batch.inputs, add_loss, forward_only=True)
        all_reduce_sum(loss_sum, self.groups.pp)  # one stage has it
        return all_reduce_sum(loss_sum, self.groups.loss) / max(total, torch.finfo(torch.float32).tiny)

    def forward_batch(self, input_: Trajectories, aggregate: Callable[..., Any] | None = None) -> Any:
        """In the form of the input: log-probs of the next token at every position, 0 at the last one; of a value model
        the value of every position, float32.
        """
        batch = self._prepare(input_)
        found: dict[int, Tensor] = {}

        def keep(output: LmOutput, model_input: ModelInput) -> None:
            critic = self.config.is_critic
            found[id(model_input)] = output.values if critic else self.tokens(output, model_input, None).logprobs

        self.runner.run(batch.inputs, keep, forward_only=True)
        parts = [found.get(id(item)) for item in batch.inputs]
        return batch.restore(self._from_last_stage(batch.inputs, parts))

    def forward_backward_batch(
        self,
        micro_batches: Iterable[Any],
        process: Callable[[Tensor, dict[str, Any]], Tensor | None],
        forward_only: bool,
    ) -> None:
        """Call ``process(logits [T, V], packed_input)`` on each micro-batch; backward through its loss.

        A value model gives ``values [T]`` instead of logits.
        """
        inputs = [as_model_input(item, self.device, self.groups) for item in micro_batches]

        def call(output: LmOutput, item: ModelInput) -> Tensor | None:
            return process(output.values if self.config.is_critic else output.logits, item.batch.as_loss_input())

        self.runner.run(inputs, call, forward_only=forward_only)

    def tokens(self, output: LmOutput, model_input: ModelInput, token_mask: str | None) -> TokenOutput:
        """Log-probs and entropy of one micro-batch, computed where ``token_mask`` is non-zero (None: everywhere)."""
        key = None if model_input.filler else token_mask
        rows = model_input.predicting_rows(key)
        labels, temperature = model_input.next_tokens(), self.config.temperature
        sequence, tensor = self.groups.sequence, self.groups.tensor
        if sequence is None:
            source = output.source
            if source is None:
                return token_output(output.hidden, output.head, labels, rows, temperature, None, tensor)
            rows, index = distinct_predictions(source, rows)
            tokens = token_output(output.hidden, output.head, labels, rows, temperature, source, tensor)
            return tokens.select(index)
        width = output.hidden.shape[0]
        labels, rows = own_slice(labels, rows, width, sequence)
        tokens = token_output(output.hidden, output.head, labels, rows, temperature, None, tensor)
        return tokens.gather(sequence, model_input.batch.n_tokens)

    def _prepare(self, input_: Trajectories) -> EngineBatch:
        config = self.config
        settings = {"pad_to_maximum": config.pad_to_maximum, "trees": config.enable_tree_training}
        return prepare_batch(input_, config.mb_spec, self.groups, self.device, **settings)

    def _from_last_stage(self, inputs: list[ModelInput], parts: list[Tensor | None]) -> list[Tensor]:
        """``[T]`` of every micro-batch, which one pipeline stage has, on all of them."""
        whole = [
            torch.zeros(item.batch.n_tokens, device=self.device) if part is None else part
            for item, part in zip(inputs, parts, strict=True)
        ]
        if self.groups.pp is None:
            return whole
        together = all_reduce_sum(torch.cat(whole), self.groups.pp)
        return list(together.split([part.shape[0] for part in whole]))

    def _loss_weights(self, batch: EngineBatch, weight_fn: LossWeightFn) -> tuple[list[float], float]:
        """Weight of each micro-batch, and the sum over all ranks; one host sync."""
        own = [
            torch.zeros((), device=self.device)
            if item.filler
            else torch.as_tensor(weight_fn(item.batch.as_loss_input()), device=self.device)
            for item in batch.inputs
        ]
        weights = torch.stack([w.detach().to(torch.float32).reshape(()) for w in own])
        total = all_reduce_sum(weights.sum(), self.groups.loss)
        *values, total_value = torch.cat([weights, total.reshape(1)]).tolist()
        return values, total_value


class _TokenLoss:
    """Calls a loss function on one micro-batch; a micro-batch without weight gives a zero that keeps the graph."""

    def __init__(self, loop: TrainLoop, loss_fn: TokenLossFn, token_mask: str | None) -> None:
        self.loop, self.loss_fn, self.token_mask = loop, loss_fn, token_mask
        self.wants_range = not loop.config.is_critic and _accepts_vocab_range(loss_fn)

    def __call__(self, output: LmOutput, model_input: ModelInput, weight: float) -> Tensor:
        results, extra = self._results(output, model_input)
        nothing = results[0].sum() * 0
        if model_input.filler:
            return nothing
        if weight == 0:
            # Its statistics still count, so that every rank reports the same keys; its loss may be 0/0 and is dropped.
            with torch.no_grad():
                self.loss_fn(*results, model_input.batch.as_loss_input(), **extra)
            return nothing
        return self.loss_fn(*results, model_input.batch.as_loss_input(), **extra)

    def _results(self, output: LmOutput, model_input: ModelInput) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """What the model says of every token, as the loss function takes it: by position and by keyword."""
        if self.loop.config.is_critic:
            return (output.values,), {}
        tokens = self.loop.tokens(output, model_input, self.token_mask)
        extra = {}
        if self.wants_range:
            extra = {"vocab_min_logits": tokens.vocab_min_logits, "vocab_max_logits": tokens.vocab_max_logits}
        return (tokens.logprobs, tokens.entropy), extra


def _accepts_vocab_range(loss_fn: TokenLossFn) -> bool:
    """Whether a loss takes the 1.x keywords ``vocab_min_logits`` and ``vocab_max_logits``."""
    parameters = inspect.signature(loss_fn).parameters.values()
    return any(p.kind is p.VAR_KEYWORD or p.name == "vocab_min_logits" for p in parameters)
