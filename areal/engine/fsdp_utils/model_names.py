"""A Hugging Face directory under the names that a transformers model has for its tensors.

In: a directory of safetensors files and a model, perhaps sharded or empty. Out: the directory's tensors under the
model's names, read in pieces. Called by ``checkpoint``.

Names: a checkpoint may have older names than the model, and one tensor per expert where the model has one for all.
transformers' own conversions say so; what they make of a checkpoint is found out on the meta device, then read in
pieces.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)

from areal.engine.core.checkpoint import listed
from areal.engine.core.hf_checkpoint import HfDirectory
from areal.engine.core.lora import is_adapter, plain_name
from areal.engine.core.model_layout import persistent_buffers
from areal.engine.core.tensor_parts import Index
from areal.utils.errors import CheckpointError

__all__ = ["ModelNames", "conversions_of"]


@dataclass
class _Fusion:
    """One conversion that makes model tensors from several checkpoint tensors."""

    converter: WeightConverter
    target: str
    keys: dict[str, list[str]]
    by_rows: bool


class ModelNames:
    """A directory as the model sees it.

    Attributes:
        shapes: by name of the model; also of tensors that the model has no place for, under their own name.
        conversions: those of transformers that were needed, for a later export.
        unexpected: names that the model has no place for.
    """

    def __init__(self, directory: HfDirectory, model: PreTrainedModel) -> None:
        """Args: ``model`` may be sharded, and on the meta device."""
        self.directory, self._model = directory, model
        named = model.named_parameters(remove_duplicate=False)
        names: dict[str, Tensor] = {plain_name(name): tensor for name, tensor in named if not is_adapter(name)}
        names.update(persistent_buffers(model))
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.unexpected: list[str] = []
        self._direct: dict[str, str] = {}
        self._fused: dict[str, _Fusion] = {}
        self._map(names)
        self._untie()

    def pieces(self, name: str, index: Index) -> Iterator[tuple[Index, Tensor]]:
        """See :class:`TensorSource`; fused tensors come row by row (expert by expert) where they can."""
        fusion = self._fused.get(name)
        if fusion is None:
            yield index, self.directory.read(self._direct[name], index)
        elif not fusion.by_rows:
            yield index, self._convert(fusion, fusion.keys)[name][index]
        else:
            rows, rest = index[0], index[1:]
            for row in range(rows.start, rows.stop):
                made = self._convert(fusion, {pattern: [keys[row]] for pattern, keys in fusion.keys.items()})
                yield (slice(row, row + 1), *rest), made[name][(slice(None), *rest)]

    def _map(self, names: Mapping[str, Tensor]) -> None:
        mapping = conversions_of(self._model)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
        sources: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        base = self._model.base_model_prefix
        for key in sorted(self.directory.shapes, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, base, names)
            if name not in names and key in names:
                name, pattern = rename_source_key(key, [], [], base, names)
            if name not in names:
                self.unexpected.append(key)
                self.shapes[key] = self.directory.shapes[key]
            elif pattern is not None:
                sources[name][pattern].append(key)
            else:
                self._direct[name] = key
                self.shapes[name] = self.directory.shapes[key]
        self.conversions = [entry for entry in mapping if entry.was_used()]
        for target, keys in sources.items():
            self._add_fusion(target, keys, by_pattern[next(iter(keys))])

    def _add_fusion(self, target: str, keys: dict[str, list[str]], converter: WeightConverter) -> None:
        first, *rest = converter.operations
        by_rows = isinstance(first, MergeModulelist) and first.dim == 0
        by_rows = by_rows and all(isinstance(op, Concatenate) and op.dim != 0 for op in rest)
        fusion = _Fusion(converter, target, {pattern: list(names) for pattern, names in keys.items()}, by_rows)
        try:
            made = self._convert(fusion, fusion.keys, meta=True)
        except Exception as exc:  # whatever transformers' operation raises on tensors that do not fit
            some = [name for names in keys.values() for name in names]
            raise CheckpointError(f"{self.directory.path}: {target} cannot be made from {listed(some)}: {exc}") from exc
        for name, tensor in made.items():
            self._fused[name] = fusion
            self.shapes[name] = tuple(tensor.shape)

    def _convert(self, fusion: _Fusion, keys: Mapping[str, list[str]], *, meta: bool = False) -> dict[str, Tensor]:
        converter = deepcopy(fusion.converter)
        for pattern, names in keys.items():
            for key in names:
                shape = self.directory.shapes[key]
                tensor = torch.empty(shape, device="meta") if meta else self.directory.read(key)
                converter.add_tensor(fusion.target, key, pattern, tensor)
        made = converter.convert(fusion.target, model=self._model, config=self._model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def _untie(self) -> None:
        """Let a tied weight be found under any of its names.

        Raises:
            CheckpointError: the files hold two different tensors for weights that the config ties.
        """
        first: dict[int, str] = {}
        for own, parameter in self._model.named_parameters(remove_duplicate=False):
            name = plain_name(own)
            kept = first.setdefault(id(parameter), name)
            if kept == name or name not in self._direct:
                continue
            if kept not in self._direct:
                self._direct[kept], self.shapes[kept] = self._direct[name], self.shapes[name]
            elif not torch.equal(*(self.directory.read(self._direct[each]) for each in (kept, name))):
                raise CheckpointError(
                    f"{self.directory.path}: {kept} and {name} differ, but the config ties them; "
                    "set tie_word_embeddings=false in its config.json"
                )


def conversions_of(model: PreTrainedModel) -> list[WeightTransform]:
    """transformers' conversions between checkpoint and model names; they are looked up by class, which FSDP changes."""
    wrapped = [(module, type(module)) for module in model.modules() if isinstance(module, FSDPModule)]
    try:
        for module, wrapper in wrapped:
            module.__class__ = wrapper.__bases__[1]
        mapping: list[WeightTransform] = get_model_conversion_mapping(model)
        return mapping
    finally:
        for module, wrapper in wrapped:
            module.__class__ = wrapper
