"""Qwen2 and Qwen2.5: biased query, key and value projections, no query and key norms."""

from __future__ import annotations

from dataclasses import dataclass

from areal.experimental.models.archon.base import ArchonModel, ModelArgs
from areal.experimental.models.archon.model_spec import ModelSpec, register_model_spec
from areal.experimental.models.archon.state_dict import StateDictAdapter


@dataclass(frozen=True)
class Qwen2ModelArgs(ModelArgs):
    """``ModelArgs`` with the family's options."""

    qkv_bias: bool = True


class Qwen2Model(ArchonModel):
    """The shared decoder, as it stands."""


QWEN2 = register_model_spec(
    ModelSpec(
        name="qwen2",
        model_class=Qwen2Model,
        model_args_class=Qwen2ModelArgs,
        state_dict_adapter_class=StateDictAdapter,
        parallelize_fn=None,
        supported_model_types=frozenset({"qwen2"}),
    )
)
