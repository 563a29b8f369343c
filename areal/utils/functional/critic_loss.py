"""The value model's clipped regression loss, and how much of the returns its values explain; called by the PPO critic.

Packed 1-D ``[T]`` or padded 2-D ``[n, S]`` tensors. Values at mask == 0 reach no result.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from areal.utils.functional.precision import at_least_float32

CRITIC_LOSSES = ("mse", "huber")


def critic_loss(  # noqa: PLR0913 - tensors of one formula
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    loss_mask: Tensor,
    eps_clip: float = 0.5,
    kind: str = "mse",
    huber_delta: float = 10.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped value loss, averaged over the tokens of ``loss_mask``.

    With ``Vc = old + clamp(V - old, -eps_clip, eps_clip)``, per token ``max(l(V - R), l(Vc - R))`` where ``l(d)`` is
    ``d^2 / 2`` (mse), or the same within ``huber_delta`` and ``delta * (|d| - delta / 2)`` beyond it (huber).
    Denominator: the token count of ``loss_mask``.

    Args:
        values: of the current weights, float32 (float64 is kept), with gradient.
        old_values: of the weights the step began with, same shape.
        returns: regression targets R, same shape.
        loss_mask: same shape, non-zero on trained positions.
        eps_clip: bound of the change of a value, > 0.
        kind: ``mse`` or ``huber``.
        huber_delta: where huber becomes linear, > 0.

    Returns: scalar loss (0 with zero gradient when nothing is masked in), and tensors of the input's shape without
        gradient: ``loss`` per token and ``clip_mask`` (the clipped value gave the larger loss), 0 off the mask.

    Raises:
        ValueError: unknown ``kind``, shapes differ, or a bound is not positive.

    Source: PPO (1707.06347) with the value clipping of its reference code; Huber (1964).
    """
    for other in (old_values, returns, loss_mask):
        if other.shape != values.shape:
            raise ValueError(f"tensors of the loss differ in shape: {tuple(values.shape)} and {tuple(other.shape)}")
    if kind not in CRITIC_LOSSES:
        raise ValueError(f"critic loss {kind!r} is unknown; allowed: {', '.join(CRITIC_LOSSES)}")
    if eps_clip <= 0 or huber_delta <= 0:
        raise ValueError(f"eps_clip={eps_clip} and huber_delta={huber_delta} must be > 0")
    mask = loss_mask != 0
    value = torch.where(mask, at_least_float32(values), 0.0)
    old = torch.where(mask, old_values.detach().to(value.dtype), 0.0)
    target = torch.where(mask, returns.detach().to(value.dtype), 0.0)
    clipped = old + (value - old).clamp(-eps_clip, eps_clip)
    plain, bounded = (_error(v - target, kind, huber_delta) for v in (value, clipped))
    loss = torch.maximum(plain, bounded)
    stats = {"loss": loss.detach(), "clip_mask": (bounded > plain).detach()}
    return loss.sum() / mask.sum().clamp(min=1), stats


@torch.no_grad()
def explained_variance(
    values: Tensor, returns: Tensor, loss_mask: Tensor, group: dist.ProcessGroup | None = None
) -> Tensor:
    """``1 - Var(R - V) / Var(R)`` over the tokens of ``loss_mask``.

    1: the values are the returns, up to a constant; 0: they say no more than a constant does; below 0: they mislead.

    Args:
        values: V, any shape, float.
        returns: R, same shape.
        loss_mask: same shape, non-zero on tokens that count.
        group: ranks whose tokens are taken together; all of them must call. None: these tokens alone.

    Returns: float32 scalar; 0 where the returns do not vary, or nothing is masked in.
    """
    mask = loss_mask != 0
    target = torch.where(mask, returns, 0.0).double()
    error = torch.where(mask, returns - values, 0.0).double()
    sums = torch.stack([mask.sum().double(), target.sum(), target.square().sum(), error.sum(), error.square().sum()])
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(sums, group=group)
    means = sums[1:] / sums[0].clamp(min=1)
    variance, rest = means[1] - means[0].square(), means[3] - means[2].square()
    varies = variance > 1e-12 * means[1]
    return torch.where(varies, 1 - rest / torch.where(varies, variance, 1.0), 0.0).float()


def _error(d: Tensor, kind: str, delta: float) -> Tensor:
    square = d.square() / 2
    if kind == "mse":
        return square
    size = d.abs()
    return torch.where(size < delta, square, delta * (size - delta / 2))
