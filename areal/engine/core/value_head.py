"""The head of a value model: one linear row without bias, ``score.weight`` ``[1, H]``, in place of the language head.

In: a causal LM, or hidden states and the head's weight. Out: the same body with a value head; values of every token.
Called by the models of each backend and by ``runner``; the name and the fresh values are the same for all backends, so
that their critics are exchangeable. Checkpoints have it as the head of a sequence classifier with one label.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from areal.engine.core.tensor_parts import local_part, own_index
from areal.utils.errors import CheckpointError
from areal.utils.functional.precision import at_least_float32

__all__ = [
    "VALUE_HEAD",
    "classifier_config",
    "classifier_name",
    "dropped_head",
    "fill_value_head",
    "give_value_head",
    "has_value_head",
    "refuse_head_bias",
    "token_values",
    "value_weight",
]

VALUE_HEAD = "score.weight"
_SEED = 0


def give_value_head(module: PreTrainedModel) -> None:
    """Replace the language head of ``module`` by an empty value head, in place; an embedding that was tied stays.

    The head must be a linear layer. It gets the language head's device and dtype; ``fill_value_head`` fills it.
    """
    head = module.get_output_embeddings()
    assert isinstance(head, nn.Linear)
    name = next(name for name, child in module.named_modules() if child is head)
    parent, _, attribute = name.rpartition(".")
    delattr(module.get_submodule(parent), attribute)
    weight = head.weight
    module.score = nn.Linear(head.in_features, 1, bias=False, device=weight.device, dtype=weight.dtype)
    module._areal_dropped_head = name
    module._tied_weights_keys = None
    module.all_tied_weights_keys = {}
    module.config.tie_word_embeddings = False


def value_weight(module: nn.Module) -> nn.Parameter:
    """The head's weight ``[1, H]`` of a module with a value head."""
    return module.get_parameter(VALUE_HEAD)


def has_value_head(module: nn.Module) -> bool:
    """Whether :func:`give_value_head` was applied."""
    return hasattr(module, "_areal_dropped_head")


def dropped_head(module: nn.Module) -> str:
    """Name of the language head that ``module`` had; its causal LM's checkpoints still hold it."""
    name: str = module._areal_dropped_head  # type: ignore[assignment]
    return name


@torch.no_grad()
def fill_value_head(weight: Tensor, std: float) -> None:
    """Fresh values for a head ``[1, H]``, sharded or not: normal, the same in every layout of ranks and backend."""
    whole = torch.empty(weight.shape)
    whole.normal_(std=std, generator=torch.Generator().manual_seed(_SEED))
    local_part(weight).copy_(whole[own_index(weight)])


def refuse_head_bias(path: str | os.PathLike[str], unexpected: Collection[str]) -> None:
    """Raises CheckpointError: the head of the classifier at ``path``, whose names these are, has a bias."""
    bias = VALUE_HEAD.replace("weight", "bias")
    if bias in unexpected:
        raise CheckpointError(f"{path}: its value head has a bias ({bias}); critics have {VALUE_HEAD} alone")


def token_values(hidden: Tensor, head: Tensor) -> Tensor:
    """Values of hidden states ``[N, H]`` under the head ``[1, H]``: float32 (float64 is kept) ``[N]``, differentiable.

    Computed in float32 whatever the model computes in: a bfloat16 value has three digits, and advantages are
    differences of values.
    """
    return torch.mv(at_least_float32(hidden), at_least_float32(head[0]))


def classifier_name(model_type: str) -> str:
    """Class of the sequence classifiers of a family; where transformers has none, the name it would have."""
    known: str | None = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(model_type)
    if known is not None:
        return known
    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]).replace("ForCausalLM", "ForSequenceClassification")


def classifier_config(config: Any) -> Any:
    """``config``, edited to describe the body with a value head: a sequence classifier with one label."""
    config.architectures = [classifier_name(config.model_type)]
    config.num_labels, config.tie_word_embeddings = 1, False
    return config
