"""Activation checkpointing: layers compute again in the backward pass what they did not keep in the forward pass.

In: a model on any device, after tensor, expert and context parallelism. Out: the same model whose layers are wrapped;
parameters keep their names but for ``_checkpoint_wrapped_module``, which ``state_dict.plain_name`` takes out. Called by
``parallelize.py`` before compilation and FSDP.

=============  ======================================================================================================
mode           kept of a layer until its backward pass
=============  ======================================================================================================
full           its input
selective op   its input and the outputs of ops that cost much for their size: attention, collectives, every second
               matrix product
selective N    its input in every N-th layer; everything in the others
memory_budget  what the compiler chooses within a share of what it would keep; see ``compile.py``
=============  ======================================================================================================
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from areal.experimental.models.archon.moe.router import Gate
from areal.utils import logging
from areal.utils.errors import ConfigError

if TYPE_CHECKING:
    from areal.experimental.models.archon.base import ArchonModel

__all__ = ["AcMode", "AcOptions", "apply_activation_checkpointing", "is_recomputing"]

logger = logging.getLogger("ActivationCheckpoint")

AcMode = Literal["full", "selective", "memory_budget"]
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

aten, functional = torch.ops.aten, torch.ops._c10d_functional
MATRIX_PRODUCTS = frozenset({aten.mm.default, aten.addmm.default, aten._grouped_mm.default})
SAVED_OPS = frozenset(
    {
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_fused_attention_overrideable.default,
        aten._flash_attention_forward.default,
        functional.all_to_all_single.default,
        functional.reduce_scatter_tensor.default,
        # The experts that tokens visit: small, and a second choice that differed in one token would not fit the first.
        aten.topk.default,
    }
)


@dataclass(frozen=True)
class AcOptions:
    """What is computed again; checked by ``engine/archon_config.py``.

    Attributes:
        mode: see the module.
        every: in mode ``selective``: checkpoint layers ``every - 1, 2 * every - 1, ...``; None: choose by op.
        memory_budget: in its mode: share of the activations that are kept, 0 to 1.
        preserve_rng_state: draw the same random numbers again; compiled layers always do.
        debug: an error in the second computation shows all ops of both; not for a choice by op.
    """

    mode: AcMode = "selective"
    every: int | None = None
    memory_budget: float = 0.5
    preserve_rng_state: bool = False
    debug: bool = False

    @property
    def by_op(self) -> bool:
        """Whether each op's output is kept or not on its own."""
        return self.mode == "selective" and self.every is None


def apply_activation_checkpointing(model: ArchonModel, options: AcOptions) -> None:
    """Wrap layers of ``model``, or of its part in a pipeline stage, in place.

    Raises:
        ConfigError: ``model.layers`` is no dictionary of layers (a ``ValueError``).
    """
    layers = getattr(model, "layers", None)
    if not isinstance(layers, nn.ModuleDict):
        raise ConfigError(
            f"{type(model).__name__} has no layers (an nn.ModuleDict), which activation checkpointing wraps; name them "
            "so, or set gradient_checkpointing=false"
        )
    if options.mode == "memory_budget":
        return
    # By number in the whole model, so a layer is treated the same in every pipeline layout.
    step = options.every or 1
    chosen = [key for key in layers if (int(key) + 1) % step == 0]
    settings: dict[str, Any] = {"preserve_rng_state": options.preserve_rng_state, "debug": options.debug}
    if options.by_op:
        settings["context_fn"] = partial(_selective_contexts, _gate_shapes(model))
    for key in chosen:
        layers[key] = checkpoint_wrapper(layers[key], checkpoint_fn=_run, **settings)
    logger.info(f"{len(chosen)} of {len(layers)} layers are checkpointed ({options})")


def is_recomputing() -> bool:
    """Whether the code that asks runs for the second time, for a backward pass: it must not count anything again."""
    return _recomputing.get()


_recomputing: ContextVar[bool] = ContextVar("recomputing", default=False)


def _run(layer: nn.Module, *args: Any, **settings: Any) -> Any:
    """Checkpoint ``layer(*args)`` where there will be a backward pass."""
    if not (layer.training and torch.is_grad_enabled()):
        return layer(*args)
    function = layer if torch.compiler.is_compiling() else _Passes(layer)
    return checkpoint(function, *args, use_reentrant=False, **settings)


class _Passes:
    """Calls a layer for one micro-batch; from the second call on :func:`is_recomputing`."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer, self.again = layer, False

    def __call__(self, *args: Any) -> Any:
        token = _recomputing.set(self.again)
        self.again = True
        try:
            return self.layer(*args)
        finally:
            _recomputing.reset(token)


def _selective_contexts(gates: frozenset[torch.Size]) -> Contexts:
    """Contexts of the first and of the second computation of one layer."""
    contexts: Contexts = create_selective_checkpoint_contexts(_choose_ops(gates))  # type: ignore[no-untyped-call]
    return contexts


def _choose_ops(gates: frozenset[torch.Size]) -> Callable[..., CheckpointPolicy]:
    """A choice for each op of one layer.

    Of the matrix products every second one is kept, from the second on: nothing needs the output of the last one, the
    down projection of a dense layer. Routers' are small, and always computed again.

    Args:
        gates: shapes ``[dim, E]`` of the routers' weights.
    """
    save, recompute = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
    saved_ops = SAVED_OPS | _varlen_op()
    number = itertools.count(1)

    def choose(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in saved_ops:
            return save
        if op is aten._to_copy.default:
            return save if _leaves_device(args[0], kwargs) else recompute
        if op not in MATRIX_PRODUCTS or args[-1].shape in gates:
            return recompute
        return recompute if next(number) % 2 else save

    return choose


def _leaves_device(x: Tensor, kwargs: dict[str, Any]) -> bool:
    """Whether a copy makes the host wait for a device."""
    device = kwargs.get("device")
    return x.device.type != "cpu" and device is not None and torch.device(device).type == "cpu"


def _gate_shapes(model: nn.Module) -> frozenset[torch.Size]:
    return frozenset(module.weight.t().shape for module in model.modules() if isinstance(module, Gate))


def _varlen_op() -> frozenset[Any]:
    import torch.nn.attention.varlen  # noqa: F401 - defines the op

    return frozenset({torch.ops.torch_attn._varlen_attn.default})
