"""Full tensors of an FSDP model under their checkpoint names."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion


def named_full_tensors(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """``(checkpoint name, full tensor of dtype)`` in model order; tied weights once, under their first name.

    Every rank must iterate: each step gathers one tensor. The tensors may alias the model's; copy what must outlive a
    step.
    """
    if _has_conversions(model):
        # Fused tensors (experts) are split by transformers' own conversion, which needs them together.
        yield from revert_weight_conversion(model, dict(_gathered(model, dtype))).items()
    else:
        yield from _gathered(model, dtype)


def _gathered(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    # Detached tensors instead of no_grad: a generator must not hold a global mode while it is suspended.
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        yield name, (value.full_tensor() if isinstance(value, DTensor) else value).to(dtype)
    for name, buffer in _persistent_buffers(model):
        yield name, buffer.detach()


def _persistent_buffers(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def _has_conversions(model: PreTrainedModel) -> bool:
    return bool(getattr(model, "_weight_conversions", None))
