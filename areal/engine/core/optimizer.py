"""Optimizer step on plain local shards: gather gradients, clip to the global norm, step, write back.

In: ``ParamShards``, the only thing a backend supplies, and an ``OptimizerConfig``. Every backend's parameters appear
here as plain float32 tensors, so one code path serves one process, FSDP and the others. Called by
``engine/core/loop.py``.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from areal.engine.core.distributed import all_reduce_sum
from areal.engine.core.lr_schedule import LrSchedule
from areal.engine.core.model import cast_parameters
from areal.utils import logging
from areal.utils.errors import UnsupportedFeatureError

if TYPE_CHECKING:
    from areal.api.cli_args import OptimizerConfig

logger = logging.getLogger("Optimizer")
_CLIP_EPS = 1e-6


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

    def __init__(self, module: nn.Module) -> None:
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

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
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


class ClippedOptimizer:
    """Steps the shards of one rank after clipping to the global L2 norm."""

    def __init__(
        self,
        config: OptimizerConfig,
        shards: ParamShards,
        schedule: LrSchedule,
        grad_norm_group: dist.ProcessGroup | None,
    ) -> None:
        """Args: ``grad_norm_group`` holds the other shards of the same parameters."""
        self.config, self.shards, self.schedule = config, shards, schedule
        self.group = grad_norm_group
        self.torch_optimizer = _build(config, [s for s in shards.shards.values() if s.numel()])

    def zero_grad(self) -> None:
        """Drop all gradients."""
        self.shards.zero_grad()

    @torch.no_grad()
    def step(self) -> dict[str, float]:
        """Clip and step; every rank of the group must call.

        Returns: ``update_successful`` (0 when the norm is not finite: gradients are dropped, weights stay),
        ``grad_norm`` before clipping (0 when not finite, so that averages stay numbers) and ``lr``.
        """
        grads = self.shards.collect_gradients()
        norm = global_norm(grads, self.group)
        lr = self.schedule.lr
        if not math.isfinite(norm):
            logger.warning(f"gradient norm is {norm}: step skipped, weights unchanged")
            self.zero_grad()
            return {"update_successful": 0.0, "grad_norm": 0.0, "lr": lr}
        scale = self.config.gradient_clipping / (norm + _CLIP_EPS)
        if scale < 1.0 and grads:
            torch._foreach_mul_(grads, scale)
        for group in self.torch_optimizer.param_groups:
            group["lr"] = lr
        self.torch_optimizer.step()
        self.shards.write_back()
        return {"update_successful": 1.0, "grad_norm": norm, "lr": lr}

    def state_tensors(self, name: str) -> dict[str, Tensor]:
        """Optimizer state of one shard, made if no step was taken yet; writing into it changes the optimizer."""
        shard = self.shards.shards[name]
        if not shard.numel() or self.config.type == "sgd":
            return {}
        state = self.torch_optimizer.state[shard]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(shard, requires_grad=False)
            state["exp_avg_sq"] = torch.zeros_like(shard, requires_grad=False)
        return dict(state)


def global_norm(grads: list[Tensor], group: dist.ProcessGroup | None) -> float:
    """L2 norm over all gradients of all ranks of ``group``; every rank of it must call, one host sync."""
    norms = torch._foreach_norm(grads) if grads else [torch.zeros(())]
    norm = torch.linalg.vector_norm(torch.stack(list(norms)).float())
    if group is not None:
        norm = all_reduce_sum(norm.square(), group).sqrt()
    return float(norm)


def _build(config: OptimizerConfig, shards: list[Tensor]) -> torch.optim.Optimizer:
    if config.type == "adam":
        return torch.optim.AdamW(
            shards,
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
    if config.type == "sgd":
        return torch.optim.SGD(shards, lr=config.lr, weight_decay=config.weight_decay)
    raise UnsupportedFeatureError(f"optimizer.type={config.type} is not available in this version; use adam or sgd")


def _move_gradient_to(master: Tensor) -> Any:
    def hook(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if master.grad is None:
            master.grad = parameter.grad.float()
        else:
            master.grad.add_(parameter.grad)
        parameter.grad = None

    return hook
