"""Adapters as core sees them: what is trained of a model with LoRA, and peft's directories.

In: a model whose linear layers have adapters. Out: a ``ModelLayout`` of the trained tensors alone, so that recover
points, exports and optimizer hold nothing of the frozen base; pairs that samplers with the same base can take. Called
by the backends, by ``weight_sender`` and ``weight_receiver``.

An export is ``adapter_config.json`` and ``adapter_model.safetensors`` as ``PeftModel.from_pretrained`` reads them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from areal.engine.core.lora import ADAPTER, LoraSpec, is_adapter
from areal.engine.core.model_layout import ModelLayout, TensorSource
from areal.engine.core.tensor_parts import Index
from areal.engine.core.value_head import VALUE_HEAD
from areal.utils.errors import CheckpointError
from areal.utils.hf_utils import ADAPTER_CONFIG

__all__ = ["ADAPTER_PREFIX", "SCALING", "AdapterLayout", "PublishedAdapter", "adapter_pairs"]

ADAPTER_STEM = "adapter_model"
ADAPTER_PREFIX = "base_model.model."
"""What peft puts before the names of the model's own modules."""
SCALING = "lora_scaling"
"""Name under which ``alpha / rank``, float32 ``[1]``, travels beside the tensors of a published adapter."""
_PLAIN = {"use_rslora": False, "use_dora": False, "rank_pattern": {}, "alpha_pattern": {}, "bias": "none"}


class AdapterLayout:
    """The trained part of a model with adapters, as a ``ModelLayout``.

    Own names are those of the model's parameters; checkpoint names are peft's.
    """

    def __init__(
        self,
        whole: ModelLayout,
        named: Callable[[], Iterator[tuple[str, nn.Parameter]]],
        spec: LoraSpec,
        outside: Callable[[str], str] = str,
    ) -> None:
        """Args:
        whole: of the model with its base.
        named: the model's own parameters.
        spec: of its adapters.
        outside: name of an adapter's parameter in the model that checkpoints describe; default: its own.
        """
        self.whole, self.spec, self._named, self._outside = whole, spec, named, outside
        self.model_type = whole.model_type
        self.optional: set[str] = set()
        self.copies: dict[str, str] = {}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """See ``ModelLayout``: adapters, and the value head of a critic."""
        for name, parameter in self._named():
            if is_adapter(name) or (self.spec.is_critic and name == VALUE_HEAD):
                yield name, parameter

    def persistent_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """See ``ModelLayout``: adapters have none."""
        return iter(())

    def materialize(self, device: torch.device) -> None:
        """See ``ModelLayout``."""
        self.whole.materialize(device)

    def split(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        """See ``ModelLayout``."""
        return [(self.peft_name(name), tensor)]

    def source(self, path: str | os.PathLike[str]) -> TensorSource:
        """See ``ModelLayout``: an adapter of the same kind."""
        return _AdapterFile(path, {name: self.peft_name(name) for name, _ in self.named_parameters()}, self.spec)

    def peft_name(self, name: str) -> str:
        """What peft calls a parameter."""
        return ADAPTER_PREFIX + self._outside(name).replace(f".{ADAPTER}.weight", ".weight")

    def configs(self) -> tuple[Any, Any]:
        """See ``ModelLayout``: peft's config."""
        return _AdapterConfig(self.spec), None


class PublishedAdapter(AdapterLayout):
    """What a sampler that holds the base is sent: the adapter and its scale."""

    @classmethod
    def of(cls, layout: AdapterLayout) -> PublishedAdapter:
        """That of the same model."""
        return cls(layout.whole, layout._named, layout.spec, layout._outside)

    def persistent_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """See ``ModelLayout``: the scale."""
        device = next(iter(self._named()))[1].device
        yield SCALING, torch.tensor([self.spec.scaling], dtype=torch.float32, device=device)

    def split(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        """See ``ModelLayout``."""
        return [(name, tensor)] if name == SCALING else super().split(name, tensor)


def adapter_pairs(path: str | os.PathLike[str]) -> Iterator[tuple[str, Tensor]]:
    """What :class:`PublishedAdapter` stands for, from a directory: ``(peft's name, tensor)`` and the scale.

    Raises:
        CheckpointError: it is no complete adapter, or one of another kind than plain LoRA of one rank.
    """
    config = _read_config(path)
    handle = _open(path)
    for name in handle.keys():  # noqa: SIM118 - not a dict
        yield name, handle.get_tensor(name)
    yield SCALING, torch.tensor([config["lora_alpha"] / config["r"]], dtype=torch.float32)


class _AdapterConfig:
    """Stands in an export where a model's config does."""

    def __init__(self, spec: LoraSpec) -> None:
        self.spec = spec
        self.dtype: torch.dtype | None = None

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Write peft's ``adapter_config.json``."""
        self.spec.peft_config().save_pretrained(os.fspath(directory))


class _AdapterFile:
    """A directory with an adapter as a ``TensorSource`` under a model's own names."""

    def __init__(self, path: str | os.PathLike[str], names: Mapping[str, str], spec: LoraSpec) -> None:
        """Args: ``names`` are own name to peft's."""
        config = _read_config(path)
        found = config["lora_alpha"] / config["r"]
        if found != spec.scaling:
            raise CheckpointError(
                f"{path}: lora_alpha={config['lora_alpha']} with r={config['r']} scales by {found:g}, this engine by "
                f"{spec.scaling:g} (lora_alpha={spec.alpha}, lora_rank={spec.rank}); give the engine the adapter's"
            )
        self._handle = _open(path)
        shapes = {name: tuple(self._handle.get_slice(name).get_shape()) for name in self._handle.keys()}  # noqa: SIM118
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: shapes.pop(outside) for name, outside in names.items() if outside in shapes
        }
        self.unexpected = sorted(shapes)
        self._names = names

    def pieces(self, name: str, index: Index) -> Iterator[tuple[Index, Tensor]]:
        """See ``TensorSource``."""
        yield index, self._handle.get_slice(self._names[name])[index]


def _open(path: str | os.PathLike[str]) -> Any:
    file = Path(path) / f"{ADAPTER_STEM}.safetensors"
    try:
        return safe_open(file, "pt")
    except Exception as exc:  # the library has an exception class of its own, without a public name
        raise CheckpointError(f"{file} is missing or damaged: {exc}") from exc


def _read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    file = Path(path) / ADAPTER_CONFIG
    try:
        config: dict[str, Any] = json.loads(file.read_text())
        kind, alpha, rank = config["peft_type"], float(config["lora_alpha"]), int(config["r"])
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise CheckpointError(f"{path} is no complete adapter: {file.name} cannot be read ({exc})") from exc
    other = [name for name, value in _PLAIN.items() if (config.get(name) or value) != value]
    if kind != "LORA" or rank < 1 or other:
        raise CheckpointError(
            f"{path}: {', '.join(f'{name}={config[name]}' for name in ['peft_type', 'r', *other])}; only plain LoRA "
            "with one rank for all modules can be read"
        )
    return {**config, "lora_alpha": alpha, "r": rank}
