"""A transformers model as core sees it: its tensors, their checkpoint names, and the files they can come from."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from areal.engine.core.empty_model import materialize
from areal.engine.core.hf_checkpoint import HfDirectory
from areal.engine.core.hf_load import check_model_type
from areal.engine.core.hf_names import CheckpointNames
from areal.engine.core.lora import fill_adapters, is_adapter, plain_name
from areal.engine.core.model_layout import TensorSource, persistent_buffers
from areal.engine.core.tensor_parts import Index
from areal.engine.core.value_head import (
    VALUE_HEAD,
    classifier_config,
    dropped_head,
    fill_value_head,
    has_value_head,
    refuse_head_bias,
    value_weight,
)
from areal.engine.fsdp_utils.model_names import ModelNames
from areal.utils.errors import CheckpointError

__all__ = ["HfLayout"]

_NEVER_LOADED = r"rotary_emb\.inv_freq$"  # buffers of old checkpoints that models compute now


class HfLayout:
    """The ``ModelLayout`` of a transformers model, sharded or not."""

    def __init__(self, model: PreTrainedModel, *, check_type: bool = True) -> None:
        """Args: ``check_type`` refuses weights of another model type; not needed where the model was made from them."""
        self.model, self.check_type = model, check_type
        self.model_type: str = model.config.model_type
        self.copies: dict[str, str] = {}
        # Buffers that the model computes and that its checkpoints lack.
        ignored = list(model._keys_to_ignore_on_load_missing or ())
        self.optional = {name for name, _ in persistent_buffers(model) if any(re.search(p, name) for p in ignored)}
        self.is_critic = has_value_head(model)
        self.optional |= {name for name, _ in model.named_parameters() if is_adapter(name)}
        if self.is_critic:
            self.optional.add(VALUE_HEAD)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """See ``ModelLayout``; the names are transformers', of the plain model where there are adapters."""
        for name, parameter in self.model.named_parameters():
            yield plain_name(name), parameter

    def persistent_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """See ``ModelLayout``."""
        return persistent_buffers(self.model)

    def materialize(self, device: torch.device) -> None:
        """See ``ModelLayout``; an empty value head and empty adapters get their fresh values."""
        fresh = self.is_critic and value_weight(self.model).is_meta
        adapters = any(is_adapter(name) and p.is_meta for name, p in self.model.named_parameters())
        materialize(self.model, device)
        if fresh:
            fill_value_head(value_weight(self.model), self.model.config.get_text_config().initializer_range)
        if adapters:
            fill_adapters(self.model)

    def split(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        """See ``ModelLayout``."""
        return self._checkpoint_names.split(name, tensor)

    def source(self, path: str | os.PathLike[str]) -> TensorSource:
        """See ``ModelLayout``: the files where they are safetensors, else what transformers makes of it."""
        if not HfDirectory.has_weights(path):
            return _Converted(path, self)
        directory = HfDirectory(path)
        self.check(path, directory.model_type)
        names = ModelNames(directory, self.model)
        names.unexpected = self.without_ignored(names.unexpected)
        if self.is_critic:
            refuse_head_bias(path, names.unexpected)
        return names

    def configs(self) -> tuple[Any, Any]:
        """See ``ModelLayout``."""
        config = copy.deepcopy(self.model.config)
        if self.is_critic:
            return classifier_config(config), None
        config.architectures = [self._class_name]
        return config, copy.deepcopy(self.model.generation_config) if self.model.can_generate() else None

    def check(self, path: str | os.PathLike[str], model_type: str | None) -> None:
        """Refuse a directory of another ``model_type``."""
        if self.check_type:
            check_model_type(path, model_type, self.model_type, self._class_name)

    def without_ignored(self, names: list[str]) -> list[str]:
        """Those of ``names`` that should not be in a checkpoint of this model."""
        ignored = [*(self.model._keys_to_ignore_on_load_unexpected or ()), _NEVER_LOADED]
        ignored += [re.escape(name) + "$" for name in self._tied_names()]
        if self.is_critic:
            ignored.append(f"^{re.escape(dropped_head(self.model))}\\.")
        return [name for name in names if not any(re.search(pattern, name) for pattern in ignored)]

    @cached_property
    def _checkpoint_names(self) -> CheckpointNames:
        return CheckpointNames(self.model)  # at first use: loading says which conversions an export undoes

    @property
    def _class_name(self) -> str:
        return type(self.model).__name__.removeprefix("FSDP")

    def _tied_names(self) -> set[str]:
        """Names that share another parameter's storage; older checkpoints hold them too."""
        once = {name for name, _ in self.model.named_parameters()}
        return {name for name, _ in self.model.named_parameters(remove_duplicate=False)} - once


class _Converted:
    """Weights that transformers itself must load: older names, other file formats, hub ids."""

    def __init__(self, path: str | os.PathLike[str], layout: HfLayout) -> None:
        try:
            layout.check(path, AutoConfig.from_pretrained(path).model_type)
            # Float32 so that masters get every bit; mismatched shapes are reported by us, with all names.
            loaded, report = AutoModelForCausalLM.from_pretrained(
                path, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True
            )
        except (OSError, ValueError) as exc:
            raise CheckpointError(f"{path} cannot be loaded: {exc}") from exc
        missing = set(report["missing_keys"])
        self._tensors = {
            name: tensor.detach()
            for name, tensor in [*loaded.named_parameters(), *persistent_buffers(loaded)]
            if name not in missing
        }
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}
        for name, found, *_ in report["mismatched_keys"]:
            self.shapes[name] = tuple(found)
        known = {name for name, _ in [*layout.named_parameters(), *layout.persistent_buffers()]}
        self.unexpected = layout.without_ignored([name for name in self.shapes if name not in known])

    def pieces(self, name: str, index: Index) -> Iterator[tuple[Index, Tensor]]:
        """See ``TensorSource``."""
        yield index, self._tensors[name][index]
