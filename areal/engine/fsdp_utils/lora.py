"""LoRA in the FSDP engine: adapters in a transformers model, and the two layouts that checkpoints read.

In: an unsharded model and the engine's config. Out: the same model with adapters, then one layout of what is trained
and one of the whole model with the adapters merged in. Called by ``areal/engine/fsdp_engine.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor, nn
from transformers import PreTrainedModel

from areal.engine.core.lora import LoraSpec, adapted_layers, add_adapters, is_adapter, merged_weight
from areal.engine.core.lora_layout import AdapterLayout
from areal.engine.core.optimizer import parameter_dtype
from areal.engine.core.value_head import VALUE_HEAD, has_value_head
from areal.engine.fsdp_utils.checkpoint import HfLayout
from areal.utils.errors import UnsupportedFeatureError

if TYPE_CHECKING:
    from areal.api.alloc_mode import ParallelStrategy
    from areal.api.cli_args import TrainEngineConfig

__all__ = ["MergedLayout", "add_lora", "lora_layouts"]


def add_lora(model: PreTrainedModel, config: TrainEngineConfig, strategy: ParallelStrategy) -> LoraSpec:
    """Give ``model`` the adapters of ``config``, in place; before it is sharded.

    Raises:
        ConfigError: as ``add_adapters``.
        UnsupportedFeatureError: tensor or expert parallelism, whose plans know plain layers only.
    """
    for letter, size in (("t", strategy.tensor_parallel_size), ("e", strategy.expert_parallel_size)):
        if size > 1:
            raise UnsupportedFeatureError(
                f"use_lora=true with {letter}{size}: adapters are not cut by t or e; use d and c, which work"
            )
    return add_adapters(model, config, parameter_dtype(config), _heads(model), in_place=True)


def lora_layouts(model: PreTrainedModel, spec: LoraSpec) -> tuple[AdapterLayout, MergedLayout]:
    """What checkpoints hold, and what an export of the whole model does."""
    merged = MergedLayout(model)
    return AdapterLayout(merged, model.named_parameters, spec), merged


class MergedLayout(HfLayout):
    """The plain model, each weight with what its adapter adds.

    ``split`` is a collective of all ranks where the tensor is not on the meta device.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self._adapted = dict(adapted_layers(model))

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """See ``ModelLayout``: those of the plain model."""
        return ((name, parameter) for name, parameter in super().named_parameters() if not is_adapter(name))

    def split(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        """See ``ModelLayout``."""
        layer = None if tensor.is_meta else self._adapted.get(name)
        return super().split(name, tensor if layer is None else merged_weight(layer, tensor))


def _heads(model: PreTrainedModel) -> list[str]:
    """Names of the output layers, of whose weight log-probs or values are made."""
    if has_value_head(model):
        return [VALUE_HEAD.rpartition(".")[0]]
    head = model.get_output_embeddings()
    return [name for name, child in model.named_modules() if child is head]
