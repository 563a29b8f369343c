"""LoRA on Archon's dense models: adapters by their checkpoint names, and the layouts that checkpoints read.

In: a whole model on the meta device and the engine's config. Out: the same model with peft's layers in it; one layout
of what is trained and one of the whole model with the adapters merged in. Called by the Archon engine, before any
parallelism is applied.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from areal.engine.core.lora import LoraSpec, adapted_layers, add_adapters, is_adapter, merged_weight
from areal.engine.core.lora_layout import AdapterLayout
from areal.engine.core.optimizer import parameter_dtype
from areal.experimental.engine.archon_checkpoint import ArchonLayout
from areal.experimental.models.archon.state_dict import plain_name
from areal.utils.errors import UnsupportedFeatureError

if TYPE_CHECKING:
    from areal.api.cli_args import TrainEngineConfig
    from areal.experimental.engine.archon_dims import ArchonParallelDims
    from areal.experimental.models.archon.base import ArchonModel
    from areal.experimental.models.archon.state_dict import StateDictAdapter

__all__ = ["MergedArchonLayout", "add_lora", "check_lora", "lora_layouts"]

_HEADS = ("output", "score")


def check_lora(config: TrainEngineConfig, dims: ArchonParallelDims, *, has_experts: bool) -> None:
    """Refuse layouts and models that cannot have adapters.

    Raises:
        UnsupportedFeatureError: tensor, pipeline or expert parallelism, or experts.
    """
    if not config.use_lora:
        return
    if dims.tp_enabled or dims.pp_enabled or dims.ep_enabled:
        raise UnsupportedFeatureError(
            f"use_lora=true with backend={config.backend}: adapters are not cut by t, p or e; use d and c, which work"
        )
    if has_experts:
        raise UnsupportedFeatureError(f"use_lora=true: {config.path} has experts; only dense models have adapters")


def add_lora(whole: ArchonModel, config: TrainEngineConfig, names: StateDictAdapter) -> LoraSpec:
    """Give ``whole`` the adapters of ``config``, in place. Raises ConfigError: as ``add_adapters``."""

    def outside(name: str) -> str:
        return _outside(names, name)

    return add_adapters(whole, config, parameter_dtype(config), _HEADS, outside)


def lora_layouts(layout: ArchonLayout, path: str, spec: LoraSpec) -> tuple[AdapterLayout, MergedArchonLayout]:
    """What checkpoints hold, and what an export of the whole model does.

    Args:
        layout: of the model with its adapters.
        path: that of ``ArchonLayout``.
    """
    merged = MergedArchonLayout(layout.parts, layout.adapter, layout.kind.config, path)

    def outside(name: str) -> str:
        module, mark, rest = name.partition(".lora_")
        return _outside(layout.adapter, module) + mark + rest if mark else name

    return AdapterLayout(merged, layout.named_parameters, spec, outside), merged


class MergedArchonLayout(ArchonLayout):
    """The plain model, each weight with what its adapter adds.

    ``split`` is a collective of all ranks where the tensor is not on the meta device.
    """

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """See ``ModelLayout``: those of the plain model."""
        return ((name, parameter) for name, parameter in super().named_parameters() if not is_adapter(name))

    def split(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        """See ``ModelLayout``."""
        if not tensor.is_meta:
            layer = self._adapted().get(name)
            tensor = tensor if layer is None else merged_weight(layer, tensor)
        return super().split(name, tensor)

    def _adapted(self) -> dict[str, nn.Module]:
        return {plain_name(name): layer for part in self.parts for name, layer in adapted_layers(part)}


def _outside(names: StateDictAdapter, module: str) -> str:
    """Checkpoint name of a module; its own where it has none."""
    found = names.convert_single_to_hf(f"{module}.weight", torch.empty(0, device="meta"))
    return found[0][0].removesuffix(".weight") if found else module
