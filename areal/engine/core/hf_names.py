"""Checkpoint names of a model's parameters, where transformers keeps them under other names or fused in memory.

In: a parameter as the model holds it (all experts of a layer in one tensor, say). Out: the tensors that its checkpoint
has for it, as views where possible. One table for export and publishing: transformers' own conversion, run backwards,
one parameter at a time. Called by the backends' ``named_full_tensors``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightConverter, revert_weight_conversion

from areal.utils.errors import UnsupportedFeatureError


class CheckpointNames:
    """Splits and renames the parameters of one model; nothing happens for models that keep their names."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises UnsupportedFeatureError: the model mixes several parameters into one checkpoint tensor."""
        loaded_with = getattr(model, "_weight_conversions", None)
        if loaded_with is None:  # made from a config
            mapping = get_model_conversion_mapping(model, add_legacy=False)
            loaded_with = [entry for entry in mapping if not isinstance(entry, PrefixChange)]
        self._conversions = loaded_with
        self._view = _ModelView(model, loaded_with)
        for entry in loaded_with:
            if isinstance(entry, WeightConverter) and len(entry.target_patterns) > 1:
                raise UnsupportedFeatureError(
                    f"{type(model).__name__}: {', '.join(entry.target_patterns)} are made from each other's checkpoint "
                    "tensors, which export and publishing do not support"
                )

    @property
    def differ(self) -> bool:
        """Whether parameters can have other names or shapes than checkpoint tensors."""
        return bool(self._conversions)

    def split(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        """``(checkpoint name, tensor)`` of one whole parameter; may alias it."""
        if not self.differ:
            return [(name, tensor)]
        return list(revert_weight_conversion(self._view, {name: tensor}).items())


class _ModelView:
    """A model with its conversions at hand, which transformers else looks up again for every parameter."""

    def __init__(self, model: PreTrainedModel, conversions: list[Any]) -> None:
        self._model, self._weight_conversions = model, conversions

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
