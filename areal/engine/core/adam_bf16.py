"""AdamW that keeps its moments in bfloat16, with a compensation buffer so that small steps move bfloat16 weights.

In: float leaves with gradients. Out: stepped leaves. Built by ``engine/core/optimizer.py`` for ``optimizer.type:
adam_bf16``. A bfloat16 weight with its three buffers takes 8 bytes, AdamW with float32 master weights 14.

Per element, with t the step, s = lr / (1 - beta1^t) and every buffer kept in bfloat16::

    p    <- p (1 - lr weight_decay)
    comp <- comp - s m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
    p'   <- p + comp;   comp <- comp + p - p'

Arithmetic is float32; only what is stored is rounded. What ``p'`` loses when it is stored, decay included, stays in
``comp`` (Kahan summation), so a step far below the spacing of bfloat16 is not lost. A bfloat16 second moment cannot
shrink by less than half its spacing: with ``beta2`` = 0.999 it hardly decays after large gradients; 0.99 or 0.95 does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["AdamBf16", "new_bf16_state"]


class AdamBf16(torch.optim.Optimizer):
    """AdamW on leaves of any float dtype; state ``step``, ``exp_avg``, ``exp_avg_sq``, ``compensation``."""

    def __init__(
        self, params: Iterable[Tensor], lr: float, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One step of every leaf that has a gradient; ``closure`` must be None."""
        assert closure is None, "gradients come from the engine loop"
        for group in self.param_groups:
            for leaf in group["params"]:
                if leaf.grad is None:
                    continue
                state = self.state[leaf]
                if not state:
                    state.update(new_bf16_state(leaf))
                _step_leaf(leaf, leaf.grad, state, group)


def new_bf16_state(leaf: Tensor) -> dict[str, Tensor]:
    """State of a leaf before its first step; the step count stays on the host."""
    state = {"step": torch.zeros((), dtype=torch.float32)}
    for name in ("exp_avg", "exp_avg_sq", "compensation"):
        state[name] = torch.zeros_like(leaf, dtype=torch.bfloat16, requires_grad=False)
    return state


def _step_leaf(leaf: Tensor, grad: Tensor, state: dict[str, Tensor], settings: dict[str, Any]) -> None:
    lr, eps, (beta1, beta2) = settings["lr"], settings["eps"], settings["betas"]
    grad = grad.float()
    state["step"] += 1
    step = float(state["step"])
    first = state["exp_avg"].float().mul_(beta1).add_(grad, alpha=1 - beta1)
    second = state["exp_avg_sq"].float().mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    state["exp_avg"].copy_(first)
    state["exp_avg_sq"].copy_(second)
    denominator = second.sqrt_().div_((1 - beta2**step) ** 0.5).add_(eps)
    decayed = leaf.float() * (1 - lr * settings["weight_decay"])
    compensation = state["compensation"].float().addcdiv_(first, denominator, value=-lr / (1 - beta1**step))
    leaf.copy_(decayed + compensation)
    state["compensation"].copy_(compensation.add_(decayed).sub_(leaf.float()))
