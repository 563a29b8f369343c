"""Attention of packed rows whose tokens or heads are spread over ranks; wraps any attention that transformers knows.

In: query/key/value of this rank's slice of one packed row, ``[1, H, T / c, D]`` with all heads of this rank, and
``cu_seq_lens_q`` ``[n+1]`` of the whole row. Out: ``[1, T / c, H, D]``. Called by: Hugging Face models that
``areal/engine/fsdp_utils/ulysses.py`` switched to it; ``sequence_group`` comes with each forward pass.

Ulysses: an all-to-all gives each rank whole sequences of a share of the heads (key and value heads are repeated where
there are fewer than ranks), the wrapped attention runs as on one rank, and a second all-to-all goes back. Masks of
``sdpa`` and ``eager`` are made here from the bounds, because the model sees only a slice. Source: arXiv 2309.14509.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

PREFIX = "areal_parallel_"
_MASKED = ("sdpa", "eager")


def register_parallel_attention(inner: str) -> str:
    """Make ``areal_parallel_<inner>`` known to transformers; returns that name. Idempotent."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if inner.startswith(PREFIX):
        return inner
    name = PREFIX + inner
    if name not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(name, _ParallelAttention(inner))
    return name


class _ParallelAttention:
    """Attention function in transformers' signature around the one called ``inner``."""

    def __init__(self, inner: str) -> None:
        self.inner = inner

    def __call__(  # noqa: PLR0913 - transformers' signature
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        cu_seq_lens_q: Tensor,
        sequence_group: dist.ProcessGroup | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Raises ValueError: a mask, or attention sinks, whose heads would have to be spread too."""
        if attention_mask is not None or (kwargs.get("s_aux") is not None and sequence_group is not None):
            raise ValueError(f"{PREFIX}{self.inner} takes packed rows without a mask and attention without sinks")
        kwargs.pop("position_ids", None)  # of the slice; the bounds say all
        attend = self._function(module)
        if sequence_group is not None:
            query, key, value = scatter_heads(query, key, value, sequence_group)
        mask = None
        if self.inner in _MASKED:
            mask = _packed_mask(cu_seq_lens_q, query, kwargs.get("sliding_window"))
            mask = mask if self.inner == "sdpa" else _additive(mask, query.dtype)
        view: Any = _ModuleView(module, self.inner, query.shape[1] // key.shape[1])
        output = attend(view, query, key, value, mask, cu_seq_lens_q=cu_seq_lens_q, **kwargs)[0]
        return (output if sequence_group is None else gather_heads(output, sequence_group)), None

    def _function(self, module: nn.Module) -> Callable[..., Any]:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        # The eager form belongs to each model's own file.
        own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        function: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(self.inner, own)
        return function


class _ModuleView:
    """An attention module as the wrapped function must see it: its name and the ratio of heads after the exchange."""

    def __init__(self, module: nn.Module, inner: str, kv_groups: int) -> None:
        self._module, self.num_key_value_groups = module, kv_groups
        self.config = _ConfigView(module.config, inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _ConfigView:
    def __init__(self, config: Any, inner: str) -> None:
        self._config, self._attn_implementation = config, inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


class _AllToAll(torch.autograd.Function):
    """``[c, ...]``: part i goes to rank i, part i of the result came from rank i; its own inverse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        # The functional op, whose result activation checkpointing can keep.
        ops, shares = torch.ops._c10d_functional, [1] * x.shape[0]
        out: Tensor = ops.wait_tensor(ops.all_to_all_single(x.contiguous(), shares, shares, group.group_name))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _AllToAll.apply(grad, ctx.group), None


def scatter_heads(query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """``[1, H, T / c, D]`` each -> ``[1, H / c, T, D]`` each (key and value: at least one head); one collective."""
    size = dist.get_world_size(group)
    if key.shape[1] < size:
        key, value = (x.repeat_interleave(size // x.shape[1], dim=1) for x in (key, value))
    parts = [x.view(size, x.shape[0] // size, *x.shape[1:]) for x in (query[0], key[0], value[0])]
    widths = [part.shape[1] for part in parts]
    exchanged: Tensor = _AllToAll.apply(torch.cat(parts, dim=1), group)  # [c, heads / c, T / c, D], by slice
    whole = exchanged.transpose(0, 1).flatten(1, 2)
    q, k, v = whole[None].split(widths, dim=1)
    return q, k, v


def gather_heads(output: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``[1, T, H / c, D]`` -> ``[1, T / c, H, D]``."""
    size = dist.get_world_size(group)
    _, tokens, heads, width = output.shape
    exchanged: Tensor = _AllToAll.apply(output.view(size, tokens // size, heads, width), group)  # by head
    return exchanged.transpose(0, 1).flatten(1, 2)[None]


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    zero = torch.zeros((), dtype=dtype, device=mask.device)
    return torch.where(mask, zero, torch.finfo(dtype).min)


# The masks of the last bounds seen: all layers of a micro-batch (and their recomputation) share one tensor object.
_last_masks: tuple[weakref.ref[Tensor], dict[int | None, Tensor]] | None = None


def _packed_mask(cu_seqlens: Tensor, query: Tensor, window: int | None) -> Tensor:
    """Bool ``[1, 1, T, T]``: a token sees itself and earlier ones of its sequence, at most ``window`` in all."""
    global _last_masks
    if _last_masks is None or _last_masks[0]() is not cu_seqlens:
        _last_masks = (weakref.ref(cu_seqlens), {})
    masks = _last_masks[1]
    if window not in masks:
        position = torch.arange(query.shape[2], device=query.device)
        bounds = cu_seqlens.to(query.device)
        sequence = torch.searchsorted(bounds[1:].long(), position, right=True)
        distance = position[:, None] - position[None, :]
        seen = (sequence[:, None] == sequence[None, :]) & (distance >= 0)
        masks[window] = (seen if window is None else seen & (distance < window))[None, None]
    return masks[window]
