"""Optimizer step on plain local shards: gather gradients, clip to the global norm, step, write back.

In: ``ParamShards``, the only thing a backend supplies, and an ``OptimizerConfig``. Every backend's parameters appear
here as plain float32 tensors, so one code path serves one process, FSDP and the others. Called by
``engine/core/loop.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from areal.engine.core.adam_bf16 import AdamBf16, new_bf16_state
from areal.engine.core.distributed import all_reduce_sum
from areal.engine.core.layer_step import LayerwiseAdamW
from areal.engine.core.lr_schedule import LrSchedule
from areal.engine.core.model import cast_parameters
from areal.engine.core.model_layout import NamedParameters
from areal.utils import logging
from areal.utils.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from areal.api.cli_args import OptimizerConfig, TrainEngineConfig

logger = logging.getLogger("Optimizer")
_CLIP_EPS = 1e-6


def model_dtype(config: TrainEngineConfig) -> torch.dtype:
    """Dtype that the model is loaded in: of what is trained; a base that stays frozen needs no masters."""
    dtype: torch.dtype = getattr(torch, config.dtype)
    return dtype if config.use_lora else parameter_dtype(config)


def parameter_dtype(config: TrainEngineConfig) -> torch.dtype:
    """Dtype of what is trained: float32 masters, except for adam_bf16; of a model that only scores its own."""
    if config.optimizer is None or config.optimizer.type == "adam_bf16":
        dtype: torch.dtype = getattr(torch, config.dtype)
        return dtype
    return torch.float32


class ParamShards(Protocol):
    """This rank's part of every trainable parameter, as float32 leaves."""

    shards: dict[str, Tensor]

    def collect_gradients(self) -> list[Tensor]:
        """Put the accumulated float32 gradient into every ``shard.grad``; returns those that exist."""
        ...

    def write_back(self) -> None:
        """Make the model compute with the stepped shards."""
        ...

    def zero_grad(self) -> None:
        """Drop all gradients."""
        ...


class PlainShards:
    """One process, float32: the parameters are their own shards."""

    def __init__(self, module: NamedParameters) -> None:
        self.shards: dict[str, Tensor] = {n: p for n, p in module.named_parameters() if p.requires_grad}

    def collect_gradients(self) -> list[Tensor]:
        return [p.grad for p in self.shards.values() if p.grad is not None]

    def write_back(self) -> None:
        """Nothing to do: the model holds the shards."""

    def zero_grad(self) -> None:
        for shard in self.shards.values():
            shard.grad = None


class MasterShards:
    """One process below float32: the model computes in ``dtype``, the optimizer owns float32 master weights.

    Gradients are added to the master's in float32 as soon as backward has made them, so several micro-batches do not
    round, and the low-precision gradient is freed at once.
    """

    def __init__(self, module: NamedParameters, dtype: torch.dtype) -> None:
        """Args: ``module`` holds float32 parameters, the masters from here on; it will compute in ``dtype``."""
        trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self.shards: dict[str, Tensor] = {n: p.data.float().requires_grad_() for n, p in trained.items()}
        cast_parameters(module, dtype)
        self._pairs = [(p, self.shards[n]) for n, p in trained.items()]
        for parameter, master in self._pairs:
            parameter.register_post_accumulate_grad_hook(_move_gradient_to(master))

    def collect_gradients(self) -> list[Tensor]:
        return [s.grad for s in self.shards.values() if s.grad is not None]

    @torch.no_grad()
    def write_back(self) -> None:
        torch._foreach_copy_([p.data for p, _ in self._pairs], [m.data for _, m in self._pairs])

    def zero_grad(self) -> None:
        for parameter, master in self._pairs:
            parameter.grad = None
            master.grad = None


class LowPrecisionShards:
    """Leaves below float32 that the optimizer steps in place (adam_bf16): no master weights.

    Gradients are added up in float32 beside the leaves, as for :class:`MasterShards`.
    """

    def __init__(self, leaves: Mapping[str, tuple[nn.Parameter, Tensor]]) -> None:
        """Args: ``leaves`` maps names to a parameter and this rank's part of it, which shares its storage."""
        self.shards: dict[str, Tensor] = {}
        self._parameters = [parameter for parameter, _ in leaves.values()]
        for name, (parameter, local) in leaves.items():
            leaf = local.detach().requires_grad_()
            leaf.grad_dtype = torch.float32
            parameter.register_post_accumulate_grad_hook(_move_gradient_to(leaf))
            self.shards[name] = leaf

    def collect_gradients(self) -> list[Tensor]:
        return [s.grad for s in self.shards.values() if s.grad is not None and s.grad.numel()]

    def write_back(self) -> None:
        """Nothing to do: the leaves are the parameters' own storage."""

    def zero_grad(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
        for leaf in self.shards.values():
            leaf.grad = None


class ClippedOptimizer:
    """Steps the shards of one rank after clipping to the global L2 norm.

    Attributes:
        nonfinite_steps: steps skipped so far because the norm was not finite.
        copies: ranks that hold the same shard, by parameter name; one where it is absent.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        shards: ParamShards,
        schedule: LrSchedule,
        grad_norm_group: dist.ProcessGroup | None,
        layers_ahead: int | None = None,
    ) -> None:
        """Args:
        grad_norm_group: holds the other shards of the same parameters.
        layers_ahead: keep AdamW's moments in host memory and fetch this many layers ahead; None keeps them where
            the parameters are.
        """
        self.config, self.shards, self.schedule = config, shards, schedule
        self.group = grad_norm_group
        self.nonfinite_steps = 0
        self.copies: Mapping[str, int] = {}
        self._nonfinite_in_a_row = 0
        self.torch_optimizer: torch.optim.Optimizer = self._build(layers_ahead)

    def zero_grad(self) -> None:
        """Drop all gradients."""
        self.shards.zero_grad()

    @torch.no_grad()
    def step(self, inspect: Callable[[float], None] | None = None) -> dict[str, float]:
        """Clip and step; every rank of the group must call.

        Args:
            inspect: called with the norm before gradients or weights change.

        Returns: ``update_successful`` (0 when the norm is not finite: gradients are dropped, weights stay),
        ``grad_norm`` before clipping (0 when not finite, so that averages stay numbers), ``lr`` and ``nonfinite_steps``
        (skipped so far).

        Raises:
            EngineError: ``optimizer.max_nonfinite_steps`` steps in a row had no finite norm.
        """
        grads = self.shards.collect_gradients()
        norm = self._norm(grads)
        lr = self.schedule.lr
        if inspect is not None:
            inspect(norm)
        if not math.isfinite(norm):
            self.zero_grad()
            self._count_nonfinite(norm)
            return {"update_successful": 0.0, "grad_norm": 0.0, "lr": lr, **self._counts()}
        self._nonfinite_in_a_row = 0
        scale = self.config.gradient_clipping / (norm + _CLIP_EPS)
        if scale < 1.0 and grads:
            torch._foreach_mul_(grads, scale)
        self._update(lr)
        return {"update_successful": 1.0, "grad_norm": norm, "lr": lr, **self._counts()}

    def _build(self, layers_ahead: int | None) -> Any:
        own = {name: shard for name, shard in self.shards.shards.items() if shard.numel()}
        return build_torch_optimizer(self.config, own, layers_ahead)

    def _norm(self, grads: list[Tensor]) -> float:
        """L2 norm of all ranks' gradients, before clipping."""
        device = next(iter(self.shards.shards.values())).device
        return global_norm(grads, self.group, self._copies_of_gradients(), device)

    def _update(self, lr: float) -> None:
        """Step with clipped gradients."""
        for group in self.torch_optimizer.param_groups:
            group["lr"] = lr
        self.torch_optimizer.step()
        self.shards.write_back()

    def _copies_of_gradients(self) -> list[int]:
        shards = self.shards.shards.items()
        return [self.copies.get(name, 1) for name, s in shards if s.grad is not None and s.grad.numel()]

    def state_tensors(self, name: str) -> dict[str, Tensor]:
        """Optimizer state of one shard, made if no step was taken yet; writing into it changes the optimizer."""
        shard = self.shards.shards[name]
        if not shard.numel() or self.config.type == "sgd":
            return {}
        state = self.torch_optimizer.state[shard]
        if not state:
            state.update(_new_state(self.torch_optimizer, shard))
        return dict(state)

    def _counts(self) -> dict[str, float]:
        return {"nonfinite_steps": float(self.nonfinite_steps)}

    def _count_nonfinite(self, norm: float) -> None:
        self.nonfinite_steps += 1
        self._nonfinite_in_a_row += 1
        limit = self.config.max_nonfinite_steps
        logger.warning(
            f"gradient norm is {norm}: step skipped, weights unchanged "
            f"({self._nonfinite_in_a_row} in a row, the run stops at {limit})"
        )
        if self._nonfinite_in_a_row >= limit:
            raise EngineError(
                f"the gradient norm was not finite in {limit} steps in a row (last: {norm}); the weights are those of "
                "the last good step. Look at the loss and the rewards of these steps, lower optimizer.lr or "
                "optimizer.gradient_clipping, or raise optimizer.max_nonfinite_steps"
            )


def global_norm(
    grads: list[Tensor],
    group: dist.ProcessGroup | None,
    copies: list[int] | None = None,
    device: torch.device | None = None,
) -> float:
    """L2 norm over all gradients of all ranks of ``group``; every rank of it must call, one host sync.

    Args:
        grads: this rank's shards.
        group: None: this rank alone.
        copies: ranks of the group that hold each gradient; None: one each.
        device: where a rank without gradients joins the reduction.
    """
    norms = torch._foreach_norm(grads) if grads else [torch.zeros((), device=device)]
    squares = torch.stack(list(norms)).float().square()
    if grads and copies is not None and any(n != 1 for n in copies):
        squares = squares / torch.tensor(copies, device=squares.device)
    return float(all_reduce_sum(squares.sum(), group).sqrt())


def build_torch_optimizer(
    config: OptimizerConfig, shards: dict[str, Tensor], layers_ahead: int | None = None
) -> torch.optim.Optimizer:
    """The optimizer that ``config`` names over ``shards``; see :class:`ClippedOptimizer` for ``layers_ahead``.

    Raises:
        ConfigError: an optimizer that cannot step layer by layer, or an unknown one.
    """
    if layers_ahead is not None and config.type != "adam":
        raise ConfigError(
            f"fsdp.per_layer_optim_step=true with optimizer.type={config.type}: only adam steps layer by layer; "
            "set one of the two"
        )
    adam = {
        "lr": config.lr,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
        "weight_decay": config.weight_decay,
    }
    leaves = list(shards.values())
    if config.type == "adam" and layers_ahead is not None:
        return LayerwiseAdamW(shards, adam, layers_ahead)
    if config.type == "adam":
        return torch.optim.AdamW(leaves, fused=True, **adam)
    if config.type == "adam_bf16":
        return AdamBf16(leaves, **adam)
    if config.type == "sgd":
        return torch.optim.SGD(leaves, lr=config.lr, weight_decay=config.weight_decay)
    raise ConfigError(f"optimizer.type={config.type!r} is not valid; allowed: adam, adam_bf16, sgd")


def _new_state(optimizer: torch.optim.Optimizer, shard: Tensor) -> dict[str, Tensor]:
    """State of a shard before its first step, as the optimizer itself would make it."""
    if isinstance(optimizer, LayerwiseAdamW):
        return optimizer.new_state(shard)
    if isinstance(optimizer, AdamBf16):
        return new_bf16_state(shard)
    # The fused kernel counts steps where the parameter is.
    moments = {name: torch.zeros_like(shard, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")}
    return {"step": torch.zeros((), dtype=torch.float32, device=shard.device), **moments}


def _move_gradient_to(master: Tensor) -> Any:
    def hook(parameter: Tensor) -> None:
        grad = parameter.grad
        assert grad is not None
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        if master.grad is None:
            master.grad = local.float()
        else:
            master.grad.add_(local)
        parameter.grad = None

    return hook
