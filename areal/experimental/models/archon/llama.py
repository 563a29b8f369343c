"""Llama 2, 3 and models of their shape: no biases, no query and key norms; rope scaling comes with the config."""

from __future__ import annotations

from areal.experimental.models.archon.base import ArchonModel, ModelArgs
from areal.experimental.models.archon.model_spec import ModelSpec, register_model_spec
from areal.experimental.models.archon.state_dict import StateDictAdapter


class LlamaModel(ArchonModel):
    """The shared decoder, as it stands."""


LLAMA = register_model_spec(
    ModelSpec(
        name="llama",
        model_class=LlamaModel,
        model_args_class=ModelArgs,
        state_dict_adapter_class=StateDictAdapter,
        parallelize_fn=None,
        supported_model_types=frozenset({"llama"}),
    )
)
