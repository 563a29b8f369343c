"""Checkpoints of one FSDP engine: which of its shards go where, in every layout.

In: the sharded model, its float32 masters and optimizer. Out: directories of ``engine/core``'s two formats, written at
once or from a snapshot. Called by ``areal/engine/fsdp_engine.py``; every rank must call every method.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from areal.engine.core.checkpoint import load_dcp, load_optimizer_file, rng_state, save_dcp
from areal.engine.core.hf_checkpoint import HfTensor, describe_export, export_hf
from areal.engine.core.hf_names import CheckpointNames
from areal.engine.core.optimizer import ClippedOptimizer, ParamShards
from areal.engine.core.staging import HostStage, Piece, PieceGatherer
from areal.engine.fsdp_utils.hf_load import load_hf_weights
from areal.engine.fsdp_utils.weights import named_full_tensors, persistent_buffers
from areal.utils.errors import ConfigError

if TYPE_CHECKING:
    from areal.api.io_struct import SaveLoadMeta
    from areal.engine.core.parallel_dims import ParallelGroups


class FsdpCheckpoints:
    """Saves and loads one engine.

    Args:
        model: sharded, or whole in a process of its own.
        shards: the float32 masters; None for an engine that only scores.
        optimizer: None for such an engine.
        groups: of this rank.
        dtype: of Hugging Face exports.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        shards: ParamShards | None,
        optimizer: ClippedOptimizer | None,
        groups: ParallelGroups,
        dtype: torch.dtype,
    ) -> None:
        self.model, self.shards, self.optimizer, self.groups, self.dtype = model, shards, optimizer, groups, dtype
        self._stage: HostStage | None = None

    def save(self, meta: SaveLoadMeta, version: int) -> None:
        """Write ``meta.path`` whole or not at all."""
        _check_format(meta)
        if meta.weight_format == "hf":
            optimizer_state = self._optimizer_state() if meta.with_optim else None
            total = sum(parameter.numel() for parameter in self.model.parameters()) * self.dtype.itemsize
            extras = (meta.tokenizer, meta.processor)
            export = describe_export(self.model, self.dtype, total, extras, optimizer_state)
            tensors = (_fetched(name, full) for name, full in named_full_tensors(self.model, self.dtype))
            export_hf(meta.path, export, tensors, self.groups.cpu)
        else:
            tensors_of_all = recover_tensors(self.model, self.shards, self._optimizer_to_save(meta))
            save_dcp(meta.path, tensors_of_all, rng_state(), self._document(version), self.groups.cpu)

    def stage(self, meta: SaveLoadMeta, version: int) -> Callable[[], None]:
        """Copy what :meth:`save` would write to the host; the returned function writes it, from any thread.

        It must be called, on every rank, before the next ``stage``. Meanwhile weights may change.

        Raises:
            EngineError: the function of the previous snapshot has not returned yet.
        """
        _check_format(meta)
        if self._stage is None:
            self._stage = HostStage(self.groups.cpu)
        stage = self._stage
        stage.begin()
        write = self._stage_hf(meta, stage) if meta.weight_format == "hf" else self._stage_dcp(meta, stage, version)
        stage.finish()

        def write_once() -> None:
            try:
                write()
            finally:
                stage.busy = False

        return write_once

    def load(self, meta: SaveLoadMeta, version: int) -> int:
        """Read ``meta.path``; returns the version of the weights (``version`` for ``hf``, which knows none)."""
        _check_format(meta)
        if meta.weight_format == "hf":
            load_hf_weights(self.model, self.shards, meta.path, self.groups.cpu)
            if meta.with_optim:
                load_optimizer_file(meta.path, self._optimizer_state(), self.groups.cpu)
            return version
        tensors = recover_tensors(self.model, self.shards, self._optimizer_to_save(meta))
        state = load_dcp(meta.path, tensors, self._identity(), self.groups.cpu)
        if self.shards is not None:
            self.shards.write_back()
        if self.optimizer is not None:
            self.optimizer.schedule.steps_done = state.get("lr_steps", 0)
        loaded: int = state["version"]
        return loaded

    def close(self) -> None:
        """Free the host buffers; safe to call twice."""
        if self._stage is not None:
            self._stage.close()
            self._stage = None

    def _stage_hf(self, meta: SaveLoadMeta, stage: HostStage) -> Callable[[], None]:
        pieces, total = {}, 0
        for name, tensor in [*self.model.named_parameters(), *persistent_buffers(self.model)]:
            dtype = self.dtype if isinstance(tensor, torch.nn.Parameter) else tensor.dtype
            pieces[name] = piece_of(tensor, stage.keep(f"hf.{name}", local_part(tensor), dtype))
            total += tensor.numel() * dtype.itemsize
        state = None
        if meta.with_optim:
            state = {name: stage.keep(f"hf.optim.{name}", value) for name, value in self._optimizer_state().items()}
        extras = (stage.own_copy(meta.tokenizer), stage.own_copy(meta.processor))
        export = describe_export(self.model, self.dtype, total, extras, state)
        path, model = meta.path, self.model

        def write() -> None:
            gatherer = PieceGatherer(pieces, stage.group)
            export_hf(path, export, _gathered(model, gatherer), stage.group)

        return write

    def _stage_dcp(self, meta: SaveLoadMeta, stage: HostStage, version: int) -> Callable[[], None]:
        tensors = {}
        for name, tensor in recover_tensors(self.model, self.shards, self._optimizer_to_save(meta)).items():
            host = stage.keep(f"dcp.{name}", local_part(tensor))
            tensors[name] = DTensor(host, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else host
        rng, document, path = rng_state(), self._document(version), meta.path
        return lambda: save_dcp(path, tensors, rng, document, stage.group)

    def _document(self, version: int) -> dict[str, Any]:
        state = {"version": version, **self._identity()}
        if self.optimizer is not None:
            state["lr_steps"] = self.optimizer.schedule.steps_done
        return state

    def _identity(self) -> dict[str, Any]:
        return {"model_type": self.model.config.model_type}

    def _optimizer_to_save(self, meta: SaveLoadMeta) -> ClippedOptimizer | None:
        return self.optimizer if meta.with_optim else None

    def _optimizer_state(self) -> dict[str, Tensor]:
        if self.optimizer is None or self.shards is None:
            raise ConfigError("with_optim=True, but this engine has no optimizer (optimizer: null)")
        return local_optimizer_state(self.shards, self.optimizer)


def recover_tensors(
    model: PreTrainedModel, shards: ParamShards | None, optimizer: ClippedOptimizer | None
) -> dict[str, Tensor]:
    """Flat ``{key: tensor}`` of weights (float32 masters) and optimizer state; loading writes into these tensors.

    Keys: ``model.<parameter>``, ``optim.<parameter>.<state>``. Sharded tensors are DTensors, so a recover point can be
    read by another number of ranks in another layout.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        shard = shards.shards.get(name) if shards is not None else None
        local = shard if shard is not None else parameter
        tensors[f"model.{name}"] = _like(parameter, local.detach())
        if optimizer is not None and shard is not None:
            for key, value in optimizer.state_tensors(name).items():
                tensors[f"optim.{name}.{key}"] = value if value.dim() == 0 else _like(parameter, value)
    return tensors


def local_optimizer_state(shards: ParamShards, optimizer: ClippedOptimizer) -> dict[str, Tensor]:
    """This rank's optimizer state as plain tensors; writing into them changes the optimizer."""
    return {f"{name}.{key}": value for name in shards.shards for key, value in optimizer.state_tensors(name).items()}


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, without history."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def piece_of(tensor: Tensor, host: Tensor) -> Piece:
    """``host``, a copy of this rank's part of ``tensor``, with its place in the whole."""
    if not isinstance(tensor, DTensor):
        return Piece(host, tuple(tensor.shape), (0,) * tensor.dim())
    shape = tuple(tensor.shape)
    _, offset = compute_local_shape_and_global_offset(shape, tensor.device_mesh, tensor.placements)
    return Piece(host, shape, tuple(offset))


def _gathered(model: PreTrainedModel, gatherer: PieceGatherer) -> Iterator[HfTensor]:
    """Tensors of a snapshot under their checkpoint names, the same on every rank."""
    names = CheckpointNames(model)
    for name, piece in gatherer.pieces.items():
        whole = _SplitParameter(name, names, gatherer)
        outline = torch.empty(piece.shape, dtype=piece.data.dtype, device="meta")
        for part_name, part in names.split(name, outline):
            n_bytes = part.numel() * part.element_size()
            yield HfTensor(part_name, n_bytes, lambda owner, part=part_name, whole=whole: whole.fetch(part, owner))


class _SplitParameter:
    """A parameter that the checkpoint has in parts (fused experts); gathered once for each rank that writes parts."""

    def __init__(self, name: str, names: CheckpointNames, gatherer: PieceGatherer) -> None:
        self.name, self.names, self.gatherer = name, names, gatherer
        self._owner: int | None = None
        self._parts: dict[str, Tensor] = {}

    def fetch(self, part: str, owner: int) -> Tensor | None:
        """One part on rank ``owner``, None on the others; every rank must call."""
        if owner != self._owner:
            whole = self.gatherer.fetch(self.name, owner)
            self._owner, self._parts = owner, {} if whole is None else dict(self.names.split(self.name, whole))
        return self._parts.get(part)


def _fetched(name: str, full: Tensor) -> HfTensor:
    return HfTensor(name, full.numel() * full.element_size(), lambda owner: full)


def _check_format(meta: SaveLoadMeta) -> None:
    if meta.weight_format not in ("hf", "dcp"):
        raise ConfigError(f"weight_format={meta.weight_format!r} is not valid; allowed: hf, dcp")


def _like(parameter: Tensor, local: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor) or isinstance(local, DTensor):
        return local
    # Not from_local: it would copy what lives in host memory (moments of a layer-by-layer step) to the mesh's device,
    # and loading would fill the copy.
    meta = TensorMeta(parameter.shape, parameter.stride(), local.dtype)
    return DTensor(local, DTensorSpec(parameter.device_mesh, parameter.placements, meta), requires_grad=False)
