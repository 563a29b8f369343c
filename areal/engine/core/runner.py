"""Runs the model forward and backward over micro-batches, one after the other.

In: packed micro-batches. ``run`` hands each output to a callback and goes backward through the loss it returns.
Called by ``engine/core/loop.py``; pipelined runners stand beside their backend and follow ``ForwardBackwardRunner``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from areal.engine.core.distributed import gather_rows
from areal.engine.core.inputs import ModelInput
from areal.engine.core.parallel_dims import ParallelGroups
from areal.engine.core.value_head import token_values

if TYPE_CHECKING:
    from areal.engine.core.model import CausalLm


@dataclass
class LmOutput:
    """What a model gives for one micro-batch.

    Attributes:
        hidden: last hidden states of the real tokens, ``[T, H]``; of the distinct ones where prompts are shared; of
            this rank's slice of the padded row under sequence parallelism.
        head: weight of the output head, ``[V, H]``; this rank's vocabulary shard under tensor parallelism. Of a value
            model ``[1, H]``, whole on every rank.
        source: int64 ``[T]``, row of ``hidden`` of each real token; None when they are one to one.
        groups: who holds the other slices and shards.
        n_tokens: real tokens T.
    """

    hidden: Tensor
    head: Tensor
    source: Tensor | None = None
    groups: ParallelGroups = field(default_factory=ParallelGroups)
    n_tokens: int | None = None

    @property
    def logits(self) -> Tensor:
        """Full logits ``[T, V]`` in the compute dtype, made on every access: for tests and 1.x callbacks.

        Every rank of the model group must ask for them.
        """
        hidden = self.hidden if self.source is None else self.hidden.index_select(0, self.source)
        logits = hidden @ self.head.t()
        if self.groups.tensor is not None:
            # Every rank goes on with equal logits, so their gradients are equal too: average what backward sums.
            logits = gather_rows(logits.t().contiguous(), self.groups.tensor, mean_gradient=True).t()
        return gather_rows(logits, self.groups.sequence)[: self.n_tokens]

    @property
    def values(self) -> Tensor:
        """Value of every real token, float32 ``[T]``, of a value model; made on every access.

        Every rank of the model group must ask for them.
        """
        values = token_values(self.hidden, self.head)
        values = values if self.source is None else values.index_select(0, self.source)
        return gather_rows(values, self.groups.sequence)[: self.n_tokens]


ProcessOutput = Callable[[LmOutput, ModelInput], Tensor | None]


class ForwardBackwardRunner(Protocol):
    """A schedule of forward and backward passes over micro-batches."""

    def run(self, inputs: Iterable[ModelInput], process: ProcessOutput, *, forward_only: bool) -> None:
        """Call ``process(output, input)`` for every micro-batch, in order; backward through its result."""
        ...


class SequentialRunner:
    """Forward then backward, micro-batch by micro-batch."""

    def __init__(
        self,
        model: CausalLm,
        release: Callable[[], None] | None = None,
        keeping: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """Args:
        release: frees what only a backward pass would free (gathered weights); called after every run.
        keeping: context of the model's forward pass, which decides what is kept for backward.
        """
        self.model, self.release, self.keeping = model, release, keeping

    def run(self, inputs: Iterable[ModelInput], process: ProcessOutput, *, forward_only: bool) -> None:
        """See :class:`ForwardBackwardRunner`."""
        try:
            for model_input in inputs:
                with torch.set_grad_enabled(not forward_only):
                    with self.keeping():
                        hidden, source = self.model.hidden_states(model_input)
                    head, groups = self.model.head_weight, self.model.groups
                    output = LmOutput(hidden, head, source, groups, model_input.batch.n_tokens)
                    loss = process(output, model_input)
                if loss is not None and not forward_only:
                    loss.backward()
        finally:
            if self.release is not None:
                self.release()
