"""A Hugging Face causal LM without weights: parameters on the meta device, buffers computed where they are used.

In: a model directory or hub id. Out: a model that takes no memory until a backend has sharded it and filled its shards.
Called by ``engine/core/model.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

__all__ = ["empty_causal_lm", "materialize"]


class TiedModule(Protocol):
    """A module that can tie its parameters again after they were replaced."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    def tie_weights(self) -> None: ...

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> Any: ...


def empty_causal_lm(path: str, attention: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The model that ``from_pretrained(path)`` gives, but with parameters of ``dtype`` on the meta device.

    Persistent buffers are on ``device`` too, with undefined content.
    """
    config = AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)
    _keep_in_float32(model, dtype)
    _compute_buffers(model, device)
    model.tie_weights()
    if model.can_generate():
        try:
            model.generation_config = GenerationConfig.from_pretrained(path)
        except OSError:  # no such file: what the model's own config implies
            model.generation_config = GenerationConfig.from_model_config(model.config)
    return model.eval()


def materialize(model: TiedModule, device: torch.device) -> None:
    """Give every meta parameter and buffer memory on ``device``, with undefined content; tied parameters stay one."""
    tied = len(list(model.named_parameters()))
    model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    if len(list(model.named_parameters())) != tied:  # plain parameters become new objects, one for each name
        model.tie_weights()


def _keep_in_float32(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Parameters that the family never computes in a lower precision."""
    plan = model._get_dtype_plan(dtype)
    pattern = re.compile("|".join(name.replace("*", ".*") for name in plan)) if plan else None
    for name, parameter in list(model.named_parameters()):
        if pattern is not None and pattern.search(name):
            owner = model.get_submodule(name.rpartition(".")[0])
            owner.register_parameter(name.rpartition(".")[2], nn.Parameter(parameter.detach().float()))


def _compute_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Run the model's own initialisation, which computes buffers; parameters count as initialised and stay empty."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=device)
        module._is_hf_initialized = False
    for parameter in model.parameters():
        parameter._is_hf_initialized = True
    model.initialize_weights()
