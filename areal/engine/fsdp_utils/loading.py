"""Fills the shards of an empty model tensor by tensor from a Hugging Face directory.

In: a sharded model on the meta device and a directory of safetensors files. Out: the same model with this rank's shards
in memory; beside them there is never more than one tensor. Called by ``areal/engine/fsdp_engine.py``; ``hf_load`` reads
through the same names.

Names: a checkpoint may have older names than the model, and one tensor per expert where the model has one for all.
transformers' own conversions say so; what they make of a checkpoint is found out on the meta device, then read in
pieces.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from huggingface_hub import snapshot_download
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoConfig, PreTrainedModel
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

from areal.engine.core.checkpoint import check_names, listed
from areal.engine.core.distributed import group_rank
from areal.engine.core.empty_model import materialize
from areal.engine.core.hf_checkpoint import HfDirectory
from areal.engine.core.staging import box_index
from areal.engine.fsdp_utils.weights import persistent_buffers
from areal.utils import logging
from areal.utils.errors import CheckpointError, ConfigError
from areal.utils.ranks import gather_json, together

if TYPE_CHECKING:
    from areal.api.cli_args import TrainEngineConfig

logger = logging.getLogger("Loading")

Index = tuple[slice, ...]


class TensorSource(Protocol):
    """Whole tensors under the model's names, read in pieces."""

    shapes: Mapping[str, tuple[int, ...]]

    def pieces(self, name: str, index: Index) -> Iterator[tuple[Index, Tensor]]:
        """The part ``index`` of a tensor, as parts of it and their places."""
        ...


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
        names: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        names.update(persistent_buffers(model))
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.unexpected: list[str] = []
        self._direct: dict[str, str] = {}
        self._fused: dict[str, _Fusion] = {}
        self._map(names)
        self._untie()

    def read(self, name: str, index: Index) -> Tensor:
        """The part ``index`` of one tensor, in the dtype of the files."""
        if name in self._direct:
            return self.directory.read(self._direct[name], index)
        whole: Tensor | None = None
        for place, part in self.pieces(name, index):
            if whole is None:
                whole = part.new_empty([size.stop - size.start for size in index])
            whole[tuple(slice(p.start - i.start, p.stop - i.start) for p, i in zip(place, index, strict=True))] = part
        assert whole is not None, f"{name} has no part {index}"
        return whole

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
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
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


class FromFirstRank:
    """What rank 0 of a group reads; the others need no files. Every rank asks for the same tensors in turn."""

    def __init__(self, source: ModelNames | None, model: PreTrainedModel, group: dist.ProcessGroup) -> None:
        """Args: ``source`` is given on rank 0 only; ``model`` tells dtypes."""
        told = gather_json(None if source is None else source.shapes, group)[0]
        self.shapes = {name: tuple(shape) for name, shape in told.items()}
        self._source, self._group = source, group
        self._dtypes = {name: t.dtype for name, t in [*model.named_parameters(), *persistent_buffers(model)]}

    def pieces(self, name: str, index: Index) -> Iterator[tuple[Index, Tensor]]:
        """See :class:`TensorSource`; a collective, whole tensors travel.

        Raises:
            CheckpointError: rank 0 could not read the tensor.
        """
        shape, dtype = self.shapes[name], self._dtypes[name]
        whole, failure = torch.empty(0), None
        if self._source is None:
            whole = torch.empty(shape, dtype=dtype)
        else:
            try:
                whole = self._source.read(name, tuple(slice(0, size) for size in shape)).to(dtype).contiguous()
            except Exception as exc:  # noqa: BLE001 - raised below, once the other ranks know
                failure = exc
        good = torch.tensor([failure is None], dtype=torch.uint8)
        self._send(good)
        if not good.item():
            raise CheckpointError(f"{name} could not be read on rank 0: {failure or 'see its log'}") from failure
        self._send(whole.view(-1).view(torch.uint8))  # as bytes: not every backend knows every dtype
        yield index, whole[index]

    def _send(self, tensor: Tensor) -> None:
        dist.broadcast(tensor, src=dist.get_global_rank(self._group, 0), group=self._group)


def weights_directory(path: str) -> Path | None:
    """Directory of plain safetensors weights at ``path`` (a hub id is downloaded); None: transformers must load it.

    That is so for quantised weights, adapters and other file formats.
    """
    if not path:
        return None
    root = Path(path)
    if not root.is_dir():
        try:
            root = Path(snapshot_download(path, allow_patterns=["model*.safetensors", "*.json"]))
        except (OSError, ValueError):  # transformers says better what is wrong
            return None
    if not HfDirectory.has_weights(root) or (root / "adapter_config.json").is_file():
        return None
    config = AutoConfig.from_pretrained(root)
    special = ("quantization_config", "transformers_weights", "fusion_config")
    if any(getattr(config, name, None) for name in special) or getattr(type(config), "extra_files", ()):
        return None
    return root


def find_weights(config: TrainEngineConfig, group: dist.ProcessGroup | None) -> Path | None:
    """Where :func:`load_streamed` can read ``config.path``; None where transformers must make the model.

    With ``fsdp.memory_efficient_load`` rank 0 decides, and only it needs the weights; every rank must call then.

    Raises:
        ConfigError: ``fsdp.memory_efficient_load`` with weights that cannot be streamed.
    """
    if config.init_from_scratch:
        return None
    own = weights_directory(config.path)
    if not config.fsdp.memory_efficient_load:
        return own
    if not (own is not None if group is None else gather_json(own is not None, group)[0]):
        raise ConfigError(
            f"fsdp.memory_efficient_load=true: {config.path} has no plain safetensors weights; "
            "set it to false or convert the checkpoint"
        )
    return own or Path(config.path)


def load_streamed(
    model: PreTrainedModel,
    path: str | os.PathLike[str],
    device: torch.device,
    group: dist.ProcessGroup | None,
    *,
    first_rank_reads: bool = False,
) -> None:
    """Give an empty, possibly sharded model its memory and weights; every rank of ``group`` must call.

    Args:
        path: directory of safetensors files; read on rank 0 only with ``first_rank_reads``.
        device: where the shards go.
        group: all ranks, over gloo; None in a process of its own.

    Raises:
        CheckpointError: on every rank; tensors are missing or of another shape (all are named), or cannot be read.
    """
    targets = dict([*model.named_parameters(), *persistent_buffers(model)])
    computed = _computed(model)
    wanted = {name: tuple(tensor.shape) for name, tensor in targets.items() if name not in computed}
    reads = not first_rank_reads or group_rank(group) == 0
    names: ModelNames | None = None
    with together(f"{path} could not be loaded", CheckpointError, group, alone=group is None):
        if reads:
            names = ModelNames(HfDirectory(path), model)
            check_names(path, wanted, names.shapes)
            if names.unexpected and group_rank(group) == 0:
                logger.warning(f"{path}: {len(names.unexpected)} tensors have no place: {listed(names.unexpected)}")
    _remember_conversions(model, names, group)
    source: TensorSource
    if first_rank_reads and group is not None:
        source = FromFirstRank(names, model, group)
    else:
        assert names is not None
        source = names
    materialize(model, device)
    with together(f"{path} could not be loaded", CheckpointError, group, alone=group is None), torch.no_grad():
        for name, tensor in [*model.named_parameters(), *persistent_buffers(model)]:
            if name in wanted:
                fill(source, name, tensor)


def fill(source: TensorSource, name: str, tensor: Tensor) -> None:
    """Copy this rank's part of a tensor from ``source`` into it."""
    local, own = (tensor.to_local() if isinstance(tensor, DTensor) else tensor), own_index(tensor)
    for place, part in source.pieces(name, own):
        inside = tuple(slice(p.start - o.start, p.stop - o.start) for p, o in zip(place, own, strict=True))
        if part.numel():
            local.detach()[inside].copy_(part)


def own_index(tensor: Tensor) -> Index:
    """The part of a whole tensor that this rank holds."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return box_index(tuple(offset), tuple(shape))


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


def _computed(model: PreTrainedModel) -> set[str]:
    """Persistent buffers that the model computes and that its checkpoints lack."""
    ignored = list(model._keys_to_ignore_on_load_missing or ())
    return {name for name, _ in persistent_buffers(model) if any(re.search(p, name) for p in ignored)}


def _remember_conversions(model: PreTrainedModel, names: ModelNames | None, group: dist.ProcessGroup | None) -> None:
    """Exports undo the conversions that loading needed; every rank must know them."""
    mapping = conversions_of(model)
    if names is not None:
        model._weight_conversions = names.conversions
    if group is None:
        return
    used = gather_json(None if names is None else [str(entry) for entry in names.conversions], group)[0]
    if names is None:
        model._weight_conversions = [entry for entry in mapping if str(entry) in used]
