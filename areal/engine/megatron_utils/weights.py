"""The tensors that one rank of the Megatron engine holds, as parts of the whole model's.

In: the stages of this rank. Out: ``MegatronLayout``: its parts with their places in own tensors (see ``names.py``),
filled from Hugging Face directories, and whole tensors in checkpoint form for publishers. Called by the Megatron engine
and by ``checkpoint.py``.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PretrainedConfig

from areal.engine.core.distributed import group_rank
from areal.engine.core.hf_kind import HfKind
from areal.engine.core.tensor_parts import Index, box_index, relative_index
from areal.engine.core.value_head import VALUE_HEAD, fill_value_head, refuse_head_bias
from areal.engine.megatron_utils.names import EMBEDDING, HEAD, MegatronSource, NameMap, cut_dimension, own_name
from areal.engine.megatron_utils.shape import ModelShape
from areal.utils import logging
from areal.utils.errors import CheckpointError
from areal.utils.ranks import gather_json, together

if TYPE_CHECKING:
    from areal.engine.megatron_utils.model import StageModel

__all__ = ["MegatronLayout", "Part", "Run", "boxes_of_run", "fill_parts", "full_tensors", "init_parts"]

logger = logging.getLogger("MegatronWeights")


@dataclass(frozen=True)
class Part:
    """What this rank holds of one own tensor.

    Attributes:
        name: own name.
        parameter: the model's.
        view: the parameter's memory in the form of the own tensor.
        shape: of the whole own tensor.
        index: place of the part in it.
        is_copy: another stage has the same tensor: the embedding, of which this is the head.
    """

    name: str
    parameter: nn.Parameter
    view: Tensor
    shape: tuple[int, ...]
    index: Index
    is_copy: bool = False

    @property
    def offset(self) -> tuple[int, ...]:
        """Where the part begins, per dimension."""
        return tuple(size.start for size in self.index)


@dataclass(frozen=True)
class Run:
    """Elements ``start`` to ``stop`` of a flattened part, which the optimizer of this rank steps.

    Attributes:
        part: the part.
        leaf: their float32 values, ``[stop - start]`` or in the form of the parameter.
    """

    part: Part
    leaf: Tensor
    start: int
    stop: int


class MegatronLayout:
    """The ``ModelLayout`` of the stages of one rank.

    Args:
        stages: of this rank, perhaps wrapped.
        shape: of the whole model.
        config: Hugging Face config that it was made from.
        path: directory or hub id where ``config`` is from; exports keep its generation config, if it has one.
        ranks: place and number of ranks among which tensors are cut: of dense ones, and of experts.
        first_expert: number of the first expert of this rank.
    """

    def __init__(  # noqa: PLR0913 - what a rank is
        self,
        stages: list[StageModel],
        shape: ModelShape,
        config: PretrainedConfig,
        path: str,
        ranks: tuple[tuple[int, int], tuple[int, int]],
        first_expert: int,
    ) -> None:
        self.shape = shape
        self.kind = HfKind(config, path, is_critic=shape.is_critic)
        self.names = NameMap(shape)
        self.model_type = self.kind.model_type
        self.optional: set[str] = {VALUE_HEAD} if shape.is_critic else set()
        self.copies: Mapping[str, str] = {}
        self.parts = [
            self._part(name, layer, parameter, ranks, first_expert)
            for stage in stages
            for name, layer, parameter in _parameters(stage)
        ]
        held = [part.name for part in self.parts]
        assert len(held) == len(set(held)), "parts of a model have the same names"

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """``(own name, parameter)`` of this rank, in the form in which megatron has them."""
        for part in self.parts:
            yield part.name, part.parameter

    def persistent_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """There are none."""
        return iter(())

    def materialize(self, device: torch.device) -> None:
        """Nothing to do: parameters have memory from the start."""

    def split(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        """See ``ModelLayout``."""
        return self.names.split(name, tensor)

    def source(self, path: str | os.PathLike[str]) -> MegatronSource:
        """See ``ModelLayout``.

        Raises:
            CheckpointError: also for files that are not plain safetensors.
        """
        held = [part.name for part in self.parts]
        source = MegatronSource(self.kind.directory(path), self.names, held, self.optional)
        if self.shape.is_critic:
            refuse_head_bias(path, source.unexpected)
        return source

    def configs(self) -> tuple[Any, Any]:
        """See ``ModelLayout``. A critic is exported as a sequence classifier with one label."""
        return self.kind.configs()

    def _part(
        self,
        name: str,
        layer: int | None,
        parameter: nn.Parameter,
        ranks: tuple[tuple[int, int], tuple[int, int]],
        first_expert: int,
    ) -> Part:
        own, dim = own_name(name, layer, first_expert), cut_dimension(name)
        is_copy = own == HEAD and self.shape.tied
        own = EMBEDDING if is_copy else own
        rank, count = ranks[".experts." in name]
        shape = self.names.shapes[own]
        view = parameter.detach()
        if len(shape) > view.dim():  # gate and up
            view = view.view(2, -1, view.shape[-1])
            dim = None if dim is None else dim + 1
        offset = [0] * len(shape)
        if dim is not None:
            assert view.shape[dim] * count == shape[dim], f"{own}: {tuple(view.shape)} is no part of {shape}"
            offset[dim] = rank * view.shape[dim]
        return Part(own, parameter, view, shape, box_index(tuple(offset), tuple(view.shape)), is_copy)


def boxes_of_run(run: Run) -> list[tuple[Index, Tensor]]:
    """A run of elements as boxes: places in the whole own tensor, and their elements of the leaf."""
    flat = run.leaf.detach().reshape(-1)
    found = []
    for offset, size in _boxes(run.part.view.shape, run.start, run.stop):
        first = _flat_offset(run.part.view.shape, offset) - run.start
        place = tuple(a + b for a, b in zip(offset, run.part.offset, strict=True))
        found.append((box_index(place, size), flat[first : first + math.prod(size)].view(size)))
    return found


def fill_parts(
    layout: MegatronLayout,
    runs: list[Run],
    path: str | os.PathLike[str],
    group: dist.ProcessGroup | None,
    *,
    strict: bool = True,
) -> set[str]:
    """Copy Hugging Face weights into the parameters and the float32 leaves of this rank; every rank must call.

    Every rank reads what it holds; beside it there is never more than one tensor.

    Args:
        runs: leaves that are no views of parameters.
        strict: refuse tensors that the model lacks; else they are only named.

    Returns: own names of optional tensors that the directory lacks.

    Raises:
        CheckpointError: on every rank; the directory is of another architecture, or lacks tensors.
    """
    with together(f"{path} could not be loaded", CheckpointError, group, alone=group is None):
        source = layout.source(path)
        if source.unexpected and strict:
            raise CheckpointError(f"{path}: the model has no place for {_listed(source.unexpected)}")
        if source.unexpected and group_rank(group) == 0:
            logger.warning(f"{path}: no place for {_listed(source.unexpected)}")
    with together(f"{path} could not be loaded", CheckpointError, group, alone=group is None), torch.no_grad():
        for part in layout.parts:
            if part.name in source.shapes:
                _fill(source, part.name, part.index, part.view)
        for run in runs:
            if run.part.name in source.shapes:
                for place, values in boxes_of_run(run):
                    _fill(source, run.part.name, place, values)
    return {part.name for part in layout.parts} - source.shapes.keys()


@torch.no_grad()
def init_parts(layout: MegatronLayout, runs: list[Run], group: dist.ProcessGroup | None, names: set[str]) -> None:
    """Fresh values for the own tensors ``names``, the same in every layout of ranks; every rank must call.

    Matrices from a normal distribution, norms with 1, biases with 0. The random numbers of a tensor follow from its
    name and the seed of the first rank.
    """
    seed = torch.initial_seed() if group is None else gather_json(torch.initial_seed(), group)[0]

    def whole(name: str, shape: tuple[int, ...]) -> Tensor:
        if name == VALUE_HEAD:
            values = torch.empty(shape)
            fill_value_head(values, layout.shape.init_std)
            return values
        if len(shape) == 1:
            return torch.full(shape, 0.0 if name.endswith("bias") else 1.0)
        generator = torch.Generator().manual_seed((seed + zlib.crc32(name.encode())) % 2**63)
        return torch.empty(shape).normal_(std=layout.shape.init_std, generator=generator)

    for part in layout.parts:
        if part.name in names:
            part.view.copy_(whole(part.name, part.shape)[part.index])
    for run in runs:
        if run.part.name in names:
            values = whole(run.part.name, run.part.shape)
            for place, own in boxes_of_run(run):
                own.copy_(values[place])


def full_tensors(layout: MegatronLayout, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """``(checkpoint name, full tensor of dtype)`` in model order, tied weights once; every rank must iterate.

    The first rank gets them, the others give what they hold and get nothing. They come one by one: a rank holds two
    whole tensors at most.
    """
    own = {part.name: part for part in layout.parts}
    world = dist.group.WORLD if dist.is_initialized() and dist.get_world_size() > 1 else None
    if world is None:
        for name in layout.names.shapes:
            yield from layout.split(name, own[name].view.to(dtype))
        return
    boxes = {name: [list(part.offset), list(part.view.shape)] for name, part in own.items()}
    told = gather_json(boxes, world)
    rank = dist.get_rank()
    pending: list[tuple[Any, Tensor]] = []  # sent, with the memory that is read
    for name, shape in layout.names.shapes.items():
        senders: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
        for owner, held in enumerate(told):
            if name in held:
                offset, size = held[name]
                senders.setdefault((tuple(offset), tuple(size)), owner)
        if rank != 0:
            if rank in senders.values():
                values = own[name].view.to(dtype).contiguous()
                pending = [*pending[-1:], (dist.isend(values, 0), values)]
                if len(pending) == 2:
                    pending[0][0].wait()
            continue
        yield from layout.split(name, _assembled(shape, senders, own.get(name), dtype, device))
    for work, _ in pending[-1:]:
        work.wait()


def _assembled(
    shape: tuple[int, ...],
    senders: dict[tuple[tuple[int, ...], tuple[int, ...]], int],
    own: Part | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """One whole tensor on the first rank."""
    if len(senders) == 1 and 0 in senders.values():
        assert own is not None
        return own.view.to(dtype)
    whole = torch.empty(shape, dtype=dtype, device=device)
    for (offset, size), owner in senders.items():
        if owner == 0:
            assert own is not None
            whole[box_index(offset, size)] = own.view.to(dtype)
        else:
            values = torch.empty(size, dtype=dtype, device=device)
            dist.recv(values, owner)
            whole[box_index(offset, size)] = values
    return whole


def _fill(source: MegatronSource, name: str, index: Index, values: Tensor) -> None:
    for place, piece in source.pieces(name, index):
        values[relative_index(place, index)].copy_(piece)


def _parameters(stage: StageModel) -> Iterator[tuple[str, int | None, nn.Parameter]]:
    """``(name in the stage, number of its layer in the whole model, parameter)``."""
    for name, parameter in stage.named_parameters():
        layer: int | None = None
        if name.startswith("decoder.layers."):
            layer = stage.decoder.layers[int(name.split(".")[2])].layer_number - 1
        yield name, layer, parameter


def _boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """``(offset, size)`` of boxes that are the elements ``start`` to ``stop`` of a flattened tensor, in order."""
    if start >= stop:
        return
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # inside one row
        for offset, size in _boxes(shape[1:], start - last * row, stop - last * row):
            yield (last, *offset), (1, *size)
        return
    if start < first * row:
        for offset, size in _boxes(shape[1:], start - (first - 1) * row, row):
            yield (first - 1, *offset), (1, *size)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    if last * row < stop:
        for offset, size in _boxes(shape[1:], 0, stop - last * row):
            yield (last, *offset), (1, *size)


def _flat_offset(shape: tuple[int, ...], offset: tuple[int, ...]) -> int:
    place = 0
    for size, start in zip(shape, offset, strict=True):
        place = place * size + start
    return place


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    return f"{len(names)} tensors: {', '.join(names[:20])}{more}"
