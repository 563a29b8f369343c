"""Runs the model forward and backward over micro-batches, one after the other.

In: packed micro-batches. ``run`` hands each output to a callback and goes backward through the loss it returns.
Called by ``engine/core/loop.py``; pipelined runners stand beside their backend and follow ``ForwardBackwardRunner``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from areal.engine.core.inputs import ModelInput

if TYPE_CHECKING:
    from areal.engine.core.model import CausalLm


@dataclass
class LmOutput:
    """What a model gives for one micro-batch.

    Attributes:
        hidden: last hidden states of the real tokens, ``[T, H]``; of the distinct ones where prompts are shared.
        head: weight of the output head, ``[V, H]``.
        source: int64 ``[T]``, row of ``hidden`` of each real token; None when they are one to one.
    """

    hidden: Tensor
    head: Tensor
    source: Tensor | None = None

    @property
    def logits(self) -> Tensor:
        """Full logits ``[T, V]`` in the compute dtype, made on every access: for tests and 1.x callbacks."""
        hidden = self.hidden if self.source is None else self.hidden.index_select(0, self.source)
        return hidden @ self.head.t()


ProcessOutput = Callable[[LmOutput, ModelInput], Tensor | None]


class ForwardBackwardRunner(Protocol):
    """A schedule of forward and backward passes over micro-batches."""

    def run(self, inputs: Iterable[ModelInput], process: ProcessOutput, *, forward_only: bool) -> None:
        """Call ``process(output, input)`` for every micro-batch, in order; backward through its result."""
        ...


class SequentialRunner:
    """Forward then backward, micro-batch by micro-batch."""

    def __init__(self, model: CausalLm, release: Callable[[], None] | None = None) -> None:
        """Args: ``release`` frees what only a backward pass would free (gathered weights); called after every run."""
        self.model, self.release = model, release

    def run(self, inputs: Iterable[ModelInput], process: ProcessOutput, *, forward_only: bool) -> None:
        """See :class:`ForwardBackwardRunner`."""
        try:
            for model_input in inputs:
                with torch.set_grad_enabled(not forward_only):
                    hidden, source = self.model.hidden_states(model_input)
                    loss = process(LmOutput(hidden, self.model.head_weight, source), model_input)
                if loss is not None and not forward_only:
                    loss.backward()
        finally:
            if self.release is not None:
                self.release()
