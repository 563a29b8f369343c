"""``torch.compile`` for the layers of Archon models.

In: a model after activation checkpointing and before FSDP. Out: the same model whose layers run compiled code;
parameters keep their names. Called by ``parallelize.py``; compiling happens at the first batch.

Functions are compiled, not modules: FSDP's hooks stay outside of the graphs, and layers of one kind share them. Token
counts are dynamic from the start. What the compiler cannot take in runs as it is between two graphs: experts, and
attention that exchanges heads or plans in Python over the lengths.

===========================  =========================================================================================
layer                        compiled
===========================  =========================================================================================
dense, attention traceable   the whole layer with its checkpointing as one graph, so the choice by op acts inside it
others                       the parts between attention and experts; checkpointing repeats these parts as a whole
===========================  =========================================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

from areal.experimental.models.archon.attention import PackedAttention
from areal.utils import logging

if TYPE_CHECKING:
    from areal.experimental.models.archon.base import ArchonModel, Block

__all__ = ["CompileOptions", "compile_model"]

logger = logging.getLogger("ArchonCompile")


@dataclass(frozen=True)
class CompileOptions:
    """How layers are compiled.

    Attributes:
        flash: attention of type ``varlen`` is one kernel here, as on CUDA in half precision.
        memory_budget: share of the activations that the compiler keeps for the backward pass; the rest is computed
            again, cheapest first. 1: all that it would keep anyway.
    """

    flash: bool = False
    memory_budget: float = 1.0


def compile_model(model: ArchonModel, options: CompileOptions | None = None) -> None:
    """Compile the layers of ``model``, or of its part in a pipeline stage, in place."""
    options = options or CompileOptions()
    backend = _budgeted(options.memory_budget) if options.memory_budget < 1 else "inductor"
    compiled: dict[Callable[..., Any], Callable[..., Any]] = {}
    for layer in model.layers.values():
        target = _prepare(layer, options.flash)
        forward = type(target).forward
        if forward not in compiled:
            compiled[forward] = torch.compile(forward, dynamic=True, backend=backend)
        target.forward = partial(compiled[forward], target)
    logger.info(f"{len(model.layers)} layers will be compiled at the first batch ({options})")


def _prepare(layer: nn.Module, flash: bool) -> Any:
    """The module whose forward is compiled; parts that cannot be are marked."""
    block = cast("Block", layer._checkpoint_wrapped_module if isinstance(layer, CheckpointWrapper) else layer)
    inner: Any = block.attention.inner
    traceable = isinstance(inner, PackedAttention) and (flash or inner.attn_type == "sdpa")
    if traceable and block.moe is None:
        return layer
    for part, kept_out in ((inner, not traceable), (block.moe, True)):
        if part is not None and kept_out:
            part.forward = torch.compiler.disable(part.forward)  # type: ignore[no-untyped-call]
    return block


def _budgeted(memory_budget: float) -> Callable[..., Any]:
    """The default compiler with a budget, which torch has as a setting of the whole process only."""

    def compile_graph(graph: torch.fx.GraphModule, inputs: list[torch.Tensor], **settings: Any) -> Any:
        from torch._functorch import config
        from torch._inductor.compile_fx import compile_fx

        with config.patch(activation_memory_budget=memory_budget):
            return compile_fx(graph, inputs, **settings)

    return compile_graph
