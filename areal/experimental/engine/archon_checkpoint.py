"""Archon's models as core sees them: their tensors, their checkpoint names, and the files these are read from.

In: the parts of a model that one rank holds, perhaps sharded or on the meta device. Out: a ``ModelLayout``, for
``core/hf_load`` and ``core/engine_checkpoints``. Called by the Archon engine.

A pipeline rank describes its own stages only; core brings the ranks together when it writes files.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from areal.engine.core import lora
from areal.engine.core.checkpoint import check_names
from areal.engine.core.empty_model import materialize
from areal.engine.core.hf_checkpoint import HfDirectory
from areal.engine.core.hf_kind import HfKind
from areal.engine.core.lora import is_adapter
from areal.engine.core.model_layout import named_tensors, persistent_buffers
from areal.engine.core.tensor_parts import Index
from areal.engine.core.value_head import VALUE_HEAD, fill_value_head, refuse_head_bias
from areal.experimental.models.archon.base import ArchonModel
from areal.experimental.models.archon.model_spec import get_model_spec
from areal.experimental.models.archon.moe.state_dict import is_expert_key, join_experts
from areal.experimental.models.archon.state_dict import EMBEDDING, HEAD, StateDictAdapter, plain_name
from areal.utils.errors import CheckpointError

__all__ = ["ArchonLayout"]

_BASE_PREFIX = "model."  # checkpoints of a base model, without its head, lack it
_NEVER_LOADED = "rotary_emb.inv_freq"  # buffers of old checkpoints that models compute now


class ArchonLayout:
    """The ``ModelLayout`` of an Archon model, or of the parts of it that this rank holds.

    Args:
        parts: stages that keep the names of the whole model, so names never clash.
        adapter: of the whole model.
        config: Hugging Face config that the model was made from.
        path: directory or hub id where ``config`` is from; exports keep its generation config, if it has one.
    """

    def __init__(
        self, parts: list[ArchonModel], adapter: StateDictAdapter, config: PretrainedConfig, path: str
    ) -> None:
        self.parts, self.adapter = parts, adapter
        self.args = adapter.args
        self.kind = HfKind(config, path, is_critic=self.args.is_critic)
        self.model_type = self.kind.model_type
        self.optional: set[str] = {VALUE_HEAD} if self.args.is_critic else set()
        self.optional |= {name for name, _ in self.named_parameters() if is_adapter(name)}
        names = [name for name, _ in named_tensors(self)]
        assert len(names) == len(set(names)), "parts of a model have the same names"
        # Only a head that is a parameter of its own, in a stage without the embedding, has a name.
        self.copies = {HEAD: EMBEDDING} if self.args.tied and HEAD in names else {}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """See ``ModelLayout``; without the parts of names that wrappers of modules and adapters add."""
        for part in self.parts:
            for name, parameter in part.named_parameters():
                yield lora.plain_name(plain_name(name)), parameter

    def persistent_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """See ``ModelLayout``."""
        for part in self.parts:
            for name, buffer in persistent_buffers(part):
                yield plain_name(name), buffer

    def materialize(self, device: torch.device) -> None:
        """See ``ModelLayout``. Buffers are computed, on ``device`` too; an empty value head gets the same random values
        in every layout of ranks.
        """
        empty = {name for name, parameter in self.named_parameters() if parameter.is_meta}
        for part in self.parts:
            materialize(part, device)
            part.init_buffers(device)
            if any(is_adapter(name) for name in empty):
                lora.fill_adapters(part)
        for name, parameter in self.named_parameters():
            if name == VALUE_HEAD and name in empty:
                fill_value_head(parameter, self.args.init_std)

    def split(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        """See ``ModelLayout``; empty for the head of a tied model."""
        if name == VALUE_HEAD:
            return [(name, tensor)]
        return self.adapter.convert_single_to_hf(name, tensor)

    def source(self, path: str | os.PathLike[str]) -> ArchonSource:
        """See ``ModelLayout``.

        Raises:
            CheckpointError: also for files that are not plain safetensors, for missing tensors and for other shapes;
                all of them are listed under their checkpoint names.
        """
        source = ArchonSource(self.kind.directory(path), self)
        if self.args.is_critic:
            refuse_head_bias(path, source.unexpected)
        return source

    def configs(self) -> tuple[Any, Any]:
        """See ``ModelLayout``. A critic is exported as a sequence classifier with one label."""
        return self.kind.configs()

    @cached_property
    def whole_names(self) -> dict[str, list[str]]:
        """Checkpoint names of every tensor of the whole model, by own name."""
        with torch.device("meta"):
            whole = get_model_spec(self.model_type).model_class(self.args)
        tensors = [*whole.named_parameters(), *persistent_buffers(whole)]
        return {name: [key for key, _ in self.split(name, tensor)] for name, tensor in tensors}

    @cached_property
    def head_key(self) -> str:
        """Checkpoint name of the language head, also where this model has none of its own."""
        untied = type(self.adapter)(replace(self.args, tied=False))
        [(key, _)] = untied.convert_single_to_hf(HEAD, torch.empty(0))
        return key


@dataclass(frozen=True)
class _Place:
    """Where files have one of our tensors.

    Attributes:
        keys: one checkpoint tensor, or one for each expert.
        by_expert: the first dimension of ours counts experts; they are read one by one.
        shift: where our part of each expert's matrix begins, if the file has all experts in one tensor.
    """

    keys: list[str]
    by_expert: bool = False
    shift: int | None = None


class ArchonSource:
    """A directory under Archon's names; see ``TensorSource``."""

    def __init__(self, directory: HfDirectory, layout: ArchonLayout) -> None:
        """Raises CheckpointError: tensors are missing or of another shape."""
        self.directory, self._layout = directory, layout
        self._fused = _fused_experts(directory)
        self._places: dict[str, _Place] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        wanted: dict[str, tuple[int, ...]] = {}
        for name, tensor in named_tensors(layout):
            shape = tuple(tensor.shape)
            place, needs = self._find(name, shape)
            if name in layout.optional and not any(key in directory.shapes for key in needs):
                continue
            wanted.update(needs)
            self._places[name], self.shapes[name] = place, shape
        check_names(directory.path, wanted, directory.shapes)
        if layout.args.tied and not self.shapes.keys().isdisjoint((EMBEDDING, HEAD)):
            self._check_tied()
        self.unexpected = self._without_place()

    def pieces(self, name: str, index: Index) -> Iterator[tuple[Index, Tensor]]:
        """See ``TensorSource``; experts come one by one, so a rank that holds some of them reads no others."""
        place = self._places[name]
        if not place.by_expert:
            yield index, self.directory.read(place.keys[0], index)
            return
        experts, rest = index[0], index[1:]
        for expert in range(experts.start, experts.stop):
            row = slice(expert, expert + 1)
            if place.shift is None:
                matrix = self.directory.read(place.keys[expert], rest)[None]
            else:
                moved = slice(rest[0].start + place.shift, rest[0].stop + place.shift)
                matrix = self.directory.read(place.keys[0], (row, moved, *rest[1:]))
            yield (row, *rest), matrix

    def _find(self, name: str, shape: tuple[int, ...]) -> tuple[_Place, dict[str, tuple[int, ...]]]:
        """Where ``name`` is, and the checkpoint tensors that must be there, with their shapes."""
        if self._layout.args.tied and name in (EMBEDDING, HEAD):
            key = self._tied_keys()[0]
            return _Place([key]), {key: shape}
        parts = self._layout.split(name, torch.empty(shape, device="meta"))
        keys = [self._key(key) for key, _ in parts]
        shapes = [tuple(part.shape) for _, part in parts]
        if shapes == [shape]:
            return _Place(keys), {keys[0]: shape}
        if name in self._fused and keys[0] not in self.directory.shapes:
            key, shift, parts_of_matrix = self._fused[name]
            experts, rows, *rest = shape
            return _Place([key], by_expert=True, shift=shift), {key: (experts, rows * parts_of_matrix, *rest)}
        return _Place(keys, by_expert=True), dict(zip(keys, shapes, strict=True))

    def _key(self, key: str) -> str:
        """``key`` as the directory has it."""
        short = key.removeprefix(_BASE_PREFIX)
        return short if key not in self.directory.shapes and short in self.directory.shapes else key

    def _tied_keys(self) -> list[str]:
        """Names under which the directory has the embedding, which is the head too; the usual one if it has none."""
        [(usual, _)] = self._layout.split(EMBEDDING, torch.empty(0))
        found = [key for key in (self._key(usual), self._layout.head_key) if key in self.directory.shapes]
        return found or [usual]

    def _check_tied(self) -> None:
        keys = self._tied_keys()
        if len(keys) == 2 and not torch.equal(*(self.directory.read(key) for key in keys)):
            raise CheckpointError(
                f"{self.directory.path}: {keys[0]} and {keys[1]} differ, but the config ties them; "
                "set tie_word_embeddings=false in its config.json"
            )

    def _without_place(self) -> list[str]:
        """Checkpoint names that no part of the whole model has a place for."""
        names = self._layout.whole_names
        known = {self._key(key) for keys in names.values() for key in keys}
        known |= {key for name, (key, *_) in self._fused.items() if name in names}
        if self._layout.args.tied or self._layout.args.is_critic:
            known.add(self._layout.head_key)
        return [key for key in self.directory.shapes if key not in known and not key.endswith(_NEVER_LOADED)]


def _fused_experts(directory: HfDirectory) -> dict[str, tuple[str, int, int]]:
    """Our expert tensors that a directory has in one tensor for all experts, perhaps two of ours in one.

    Returns: by own name: the checkpoint name, where ours begins in each expert's matrix, how many share the matrix.
    """
    found = {}
    for key, shape in directory.shapes.items():
        if is_expert_key(key) and len(shape) == 3:
            joined = join_experts({key: torch.empty(shape, device="meta")})
            for name, view in joined.items():
                found[name] = (key, view.storage_offset() // view.stride(1), len(joined))
    return found
