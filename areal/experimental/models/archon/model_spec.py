"""Which model types Archon can train, and the classes of each.

In: a Hugging Face ``model_type``. Out: its ``ModelSpec``. A model package registers its spec when it is imported; the
Archon engine asks for it once, before it builds anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from areal.experimental.models.archon.base import ArchonModel, ModelArgs
from areal.experimental.models.archon.state_dict import StateDictAdapter
from areal.utils.errors import ConfigError
from areal.utils.registry import UnknownNameError


@dataclass(frozen=True)
class ModelSpec:
    """One model family.

    Attributes:
        name: of the family, as messages show it.
        model_class: built from an instance of ``model_args_class``.
        model_args_class: has ``from_hf_config``.
        state_dict_adapter_class: names and shapes of Hugging Face checkpoints.
        parallelize_fn: lays a model out over ranks; None: ``parallelize.parallelize_model``, which has its arguments.
        supported_model_types: values of ``model_type`` in ``config.json``.
        pipelining_fn: cuts a pipeline stage out; None: ``pipeline_split.keep_modules``, which has its arguments.
    """

    name: str
    model_class: type[ArchonModel]
    model_args_class: type[ModelArgs]
    state_dict_adapter_class: type[StateDictAdapter]
    parallelize_fn: Callable[..., Any] | None
    supported_model_types: frozenset[str]
    pipelining_fn: Callable[..., Any] | None = None


_specs: dict[str, ModelSpec] = {}


def register_model_spec(spec: ModelSpec) -> ModelSpec:
    """Make the types of ``spec`` known; returns it.

    Raises:
        ConfigError: one of its types is taken (a ``ValueError``); nothing is registered then.
    """
    for model_type in sorted(spec.supported_model_types):
        if model_type in _specs:
            taken_by = _specs[model_type].name
            raise ConfigError(f"{spec.name!r}: Archon model type {model_type!r} is already registered by {taken_by!r}")
    for model_type in spec.supported_model_types:
        _specs[model_type] = spec
    return spec


def get_model_spec(model_type: str) -> ModelSpec:
    """The spec of a Hugging Face ``model_type``.

    Raises:
        UnknownNameError: Archon has no such model (a ``KeyError`` and a ``ValueError``).
    """
    if model_type not in _specs:
        raise UnknownNameError(
            f"Archon does not support model type {model_type!r}; supported: "
            f"{', '.join(get_supported_model_types()) or 'none'}. Train this model with the FSDP engine"
        )
    return _specs[model_type]


def is_supported_model(model_type: str) -> bool:
    """Whether Archon can train models of this type."""
    return model_type in _specs


def get_supported_model_types() -> list[str]:
    """Registered model types, sorted."""
    return sorted(_specs)
