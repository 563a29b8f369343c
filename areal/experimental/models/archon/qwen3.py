"""Qwen3 and Qwen3-MoE: query and key norms per head, no biases; layers of the MoE type may hold experts."""

from __future__ import annotations

from dataclasses import dataclass

from areal.experimental.models.archon.base import ArchonModel, ModelArgs
from areal.experimental.models.archon.model_spec import ModelSpec, register_model_spec
from areal.experimental.models.archon.moe.layer import MoE
from areal.experimental.models.archon.state_dict import StateDictAdapter


@dataclass(frozen=True)
class Qwen3ModelArgs(ModelArgs):
    """``ModelArgs`` with the family's options."""

    qk_norm: bool = True


class Qwen3Model(ArchonModel):
    """The shared decoder; ``ModelArgs.moe`` says which layers are a mixture of experts."""

    moe_class = MoE


QWEN3 = register_model_spec(
    ModelSpec(
        name="qwen3",
        model_class=Qwen3Model,
        model_args_class=Qwen3ModelArgs,
        state_dict_adapter_class=StateDictAdapter,
        parallelize_fn=None,
        supported_model_types=frozenset({"qwen3", "qwen3_moe"}),
    )
)
