"""Fills the shards of a model tensor by tensor from Hugging Face weights.

In: a ``ModelLayout``, whose parameters may be sharded in any way, and a directory. Out: this rank's shards (and float32
masters) with the directory's values; beside them there is never more than one tensor. Every rank reads only the part
that it holds. Called by the engines when they start, and by ``engine_checkpoints`` to load later.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from huggingface_hub import snapshot_download
from torch import Tensor
from transformers import AutoConfig

from areal.engine.core.checkpoint import check_names, listed
from areal.engine.core.distributed import group_rank
from areal.engine.core.hf_checkpoint import HfDirectory
from areal.engine.core.model_layout import ModelLayout, TensorSource, named_tensors, read_part
from areal.engine.core.tensor_parts import Index, local_part, own_index, relative_index
from areal.utils import logging
from areal.utils.errors import CheckpointError
from areal.utils.hf_utils import holds_adapter
from areal.utils.ranks import gather_json, together

if TYPE_CHECKING:
    from areal.engine.core.optimizer import ParamShards

__all__ = ["check_model_type", "load_hf_weights", "load_streamed", "weights_directory"]

logger = logging.getLogger("Loading")


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
    if not HfDirectory.has_weights(root) or holds_adapter(root):
        return None
    config = AutoConfig.from_pretrained(root)
    special = ("quantization_config", "transformers_weights", "fusion_config")
    if any(getattr(config, name, None) for name in special) or getattr(type(config), "extra_files", ()):
        return None
    return root


def load_streamed(
    layout: ModelLayout,
    path: str | os.PathLike[str],
    device: torch.device,
    group: dist.ProcessGroup | None,
    *,
    first_rank_reads: bool = False,
) -> TensorSource | None:
    """Give an empty, possibly sharded model its memory and weights; every rank of ``group`` must call.

    Args:
        layout: of the model; tensors that the directory lacks and the layout calls optional keep the model's values.
        path: directory of safetensors files; read on rank 0 only with ``first_rank_reads``.
        device: where the shards go.
        group: all ranks, over gloo; None in a process of its own.
        first_rank_reads: the others get the tensors from rank 0; all ranks must hold parts of the same tensors then.

    Returns: what was read from; None on ranks that got everything from rank 0.

    Raises:
        CheckpointError: on every rank; tensors are missing or of another shape (all are named), or cannot be read.
    """
    source: TensorSource | None = None
    with together(f"{path} could not be loaded", CheckpointError, group, alone=group is None):
        if not first_rank_reads or group_rank(group) == 0:
            source = layout.source(path)
            check_names(path, _wanted(layout, source), source.shapes)
            if source.unexpected and group_rank(group) == 0:
                logger.warning(f"{path}: {len(source.unexpected)} tensors have no place: {listed(source.unexpected)}")
    read_from = source
    if first_rank_reads and group is not None:
        read_from = _FromFirstRank(source, layout, group)
    assert read_from is not None
    layout.materialize(device)
    with together(f"{path} could not be loaded", CheckpointError, group, alone=group is None), torch.no_grad():
        for name, tensor in named_tensors(layout):
            if name in read_from.shapes:
                _fill(read_from, name, tensor, local_part(tensor))
    return source


def load_hf_weights(
    layout: ModelLayout,
    shards: ParamShards | None,
    path: str | os.PathLike[str],
    group: dist.ProcessGroup | None,
) -> None:
    """Copy Hugging Face weights into a model and its float32 masters; every rank must call.

    Raises:
        CheckpointError: on every rank; the directory is of another architecture, lacks tensors, has tensors that the
            model lacks, or others of another shape. All are named, and nothing was loaded.
    """
    with together(f"{path} could not be loaded", CheckpointError, group, alone=group is None):
        source = layout.source(path)
        check_names(path, {name: tuple(tensor.shape) for name, tensor in named_tensors(layout)}, source.shapes)
        if source.unexpected:
            extra = source.unexpected
            raise CheckpointError(f"{path}: the model has no place for {len(extra)} tensors: {listed(extra)}")
    with together(f"{path} could not be loaded", CheckpointError, group, alone=group is None), torch.no_grad():
        for name, tensor in named_tensors(layout):
            master = shards.shards.get(name) if shards is not None else None
            local = local_part(tensor) if master is None else master.detach()
            if local.numel():
                _fill(source, name, tensor, local)
    if shards is not None:
        shards.write_back()


def check_model_type(path: str | os.PathLike[str], found: str | None, wanted: str, class_name: str) -> None:
    """Refuse weights of another model type.

    Raises:
        CheckpointError: ``found`` (None: the directory does not say) is not ``wanted``.
    """
    if found is not None and found != wanted:
        raise CheckpointError(
            f"{path} holds a model of type {found}, this engine trains {wanted} ({class_name}); "
            "set path to the model that the checkpoint was made from"
        )


def _wanted(layout: ModelLayout, source: TensorSource) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that must be there, and of the optional ones that are."""
    return {
        name: tuple(tensor.shape)
        for name, tensor in named_tensors(layout)
        if name in source.shapes or name not in layout.optional
    }


def _fill(source: TensorSource, name: str, tensor: Tensor, local: Tensor) -> None:
    """Copy this rank's part of ``tensor`` into ``local``; a collective where rank 0 reads."""
    own = own_index(tensor)
    for place, part in source.pieces(name, own):
        if part.numel():
            local[relative_index(place, own)].copy_(part)


class _FromFirstRank:
    """What rank 0 of a group reads; the others need no files. Every rank asks for the same tensors in turn."""

    def __init__(self, source: TensorSource | None, layout: ModelLayout, group: dist.ProcessGroup) -> None:
        """Args: ``source`` is given on rank 0 only; ``layout`` tells dtypes."""
        told = gather_json(None if source is None else dict(source.shapes), group)[0]
        self.shapes = {name: tuple(shape) for name, shape in told.items()}
        self.unexpected: list[str] = []
        self._source, self._group = source, group
        self._dtypes = {name: tensor.dtype for name, tensor in named_tensors(layout)}

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
                whole = read_part(self._source, name, tuple(slice(0, size) for size in shape)).to(dtype).contiguous()
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
