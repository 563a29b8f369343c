"""Checkpoints of one engine: which of its shards go where, in both formats and every layout of ranks.

In: a ``ModelLayout``, its float32 masters and optimizer. Out: directories of the formats of ``checkpoint`` and
``hf_checkpoint``, written at once or from a snapshot. Called by the engines; every rank must call every method.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from areal.engine.core.checkpoint import load_dcp, load_optimizer_file, rng_state, save_dcp
from areal.engine.core.hf_checkpoint import HfExport, HfTensor, export_hf
from areal.engine.core.hf_load import load_hf_weights
from areal.engine.core.lora_layout import ADAPTER_STEM
from areal.engine.core.model_layout import ModelLayout, named_full_tensors, named_tensors
from areal.engine.core.optimizer import ClippedOptimizer, ParamShards
from areal.engine.core.staging import HostStage, Piece, PieceGatherer
from areal.engine.core.tensor_parts import laid_out_like, local_part
from areal.utils.errors import ConfigError, UnsupportedFeatureError

if TYPE_CHECKING:
    from areal.api.io_struct import SaveLoadMeta
    from areal.engine.core.parallel_dims import ParallelGroups

__all__ = ["EngineCheckpoints", "gathered"]


class EngineCheckpoints:
    """Saves and loads one engine.

    Args:
        layout: of the model, sharded or whole; a pipeline rank's part of it.
        shards: the float32 masters, under the layout's own names; None for an engine that only scores.
        optimizer: None for such an engine.
        groups: of this rank.
        dtype: of Hugging Face exports.
        whole: of the whole model, where ``layout`` is an adapter; its base is in no checkpoint but a merged export.
        identity: further entries that a recover point must agree with.
    """

    def __init__(  # noqa: PLR0913 - what a checkpoint is made of
        self,
        layout: ModelLayout,
        shards: ParamShards | None,
        optimizer: ClippedOptimizer | None,
        groups: ParallelGroups,
        dtype: torch.dtype,
        *,
        whole: ModelLayout | None = None,
        identity: Mapping[str, Any] | None = None,
    ) -> None:
        self.whole, self._more_identity = whole or layout, dict(identity or {})
        self.layout, self.shards, self.optimizer, self.groups, self.dtype = layout, shards, optimizer, groups, dtype
        self._stage: HostStage | None = None

    def save(self, meta: SaveLoadMeta, version: int) -> None:
        """Write ``meta.path`` whole or not at all."""
        _check_format(meta)
        if meta.weight_format == "hf":
            self._save_hf(meta)
        else:
            save_dcp(meta.path, self._recover_tensors(meta), rng_state(), self._document(version), self.groups.cpu)

    def stage(self, meta: SaveLoadMeta, version: int) -> Callable[[], None]:
        """Copy what :meth:`save` would write to the host; the returned function writes it, from any thread.

        It must be called, on every rank, before the next ``stage``. Meanwhile weights may change.
        A merged export cannot be staged.

        Raises:
            EngineError: the function of the previous snapshot has not returned yet.
        """
        _check_format(meta)
        if meta.merged and self.whole is not self.layout:
            raise UnsupportedFeatureError("SaveLoadMeta.merged=True: a merged export is not written in the background")
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
            self._load_hf(meta)
            if meta.with_optim:
                load_optimizer_file(meta.path, self._optimizer_state(), self.groups.cpu)
            return version
        tensors = self._recover_tensors(meta, loading=True)
        state = load_dcp(meta.path, tensors, self._identity(), self.groups.cpu)
        if self.layout.copies:  # where this rank holds both, one was read
            for key, tensor in _recover_pairs(self.layout, self.shards, self._optimizer_to_save(meta)):
                local_part(tensor).copy_(local_part(tensors[key]))
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

    def _load_hf(self, meta: SaveLoadMeta) -> None:
        load_hf_weights(self.layout, self.shards, meta.path, self.groups.cpu)

    def _recover_tensors(self, meta: SaveLoadMeta, *, loading: bool = False) -> dict[str, Tensor]:
        """What a recover point holds of this rank; ``loading`` writes into these tensors."""
        return recover_tensors(self.layout, self.shards, self._optimizer_to_save(meta))

    def _save_hf(self, meta: SaveLoadMeta) -> None:
        layout = self.whole if meta.merged else self.layout
        state = self._optimizer_state() if meta.with_optim else None
        export = self._export((meta.tokenizer, meta.processor), state, layout)
        if self.groups.pp is None:
            total = sum(parameter.numel() for _, parameter in layout.named_parameters()) * self.dtype.itemsize
            pairs = named_full_tensors(layout, self.dtype)
            tensors: Iterator[HfTensor] = (_fetched(name, full) for name, full in pairs)
        else:  # ranks of other stages have other tensors, so gathering takes more than the ranks that hold a part
            pieces = {n: Piece.of(t, local_part(t), self._export_dtype(t)) for n, t in named_tensors(layout)}
            gatherer = PieceGatherer(pieces, self.groups.cpu)
            total, tensors = gatherer.total_bytes, gathered(layout, gatherer)
        export_hf(meta.path, export, tensors, total, self.groups.cpu)

    def _stage_hf(self, meta: SaveLoadMeta, stage: HostStage) -> Callable[[], None]:
        pieces = {}
        for name, tensor in named_tensors(self.layout):
            dtype = self._export_dtype(tensor)
            pieces[name] = Piece.of(tensor, stage.keep(f"hf.{name}", local_part(tensor), dtype), dtype)
        state = None
        if meta.with_optim:
            state = {name: stage.keep(f"hf.optim.{name}", value) for name, value in self._optimizer_state().items()}
        export = self._export((stage.own_copy(meta.tokenizer), stage.own_copy(meta.processor)), state, self.layout)
        path, layout = meta.path, self.layout

        def write() -> None:
            gatherer = PieceGatherer(pieces, stage.group)
            export_hf(path, export, gathered(layout, gatherer), gatherer.total_bytes, stage.group)

        return write

    def _stage_dcp(self, meta: SaveLoadMeta, stage: HostStage, version: int) -> Callable[[], None]:
        tensors = {}
        for name, tensor in self._recover_tensors(meta).items():
            host = stage.keep(f"dcp.{name}", local_part(tensor))
            tensors[name] = DTensor(host, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else host
        rng, document, path = rng_state(), self._document(version), meta.path
        return lambda: save_dcp(path, tensors, rng, document, stage.group)

    def _export(
        self, extras: tuple[Any, ...], optimizer_state: dict[str, Tensor] | None, layout: ModelLayout
    ) -> HfExport:
        """Everything but the weights; beside an adapter there is no tokenizer, as it is its base model's."""
        config, generation_config = layout.configs()
        config.dtype = self.dtype
        if layout is not self.whole:
            return HfExport(config, None, (), optimizer_state, ADAPTER_STEM)
        kept = tuple(extra for extra in extras if extra is not None)
        return HfExport(config, generation_config, kept, optimizer_state)

    def _export_dtype(self, tensor: Tensor) -> torch.dtype:
        return self.dtype if isinstance(tensor, torch.nn.Parameter) else tensor.dtype

    def _document(self, version: int) -> dict[str, Any]:
        state = {"version": version, **self._identity()}
        if self.optimizer is not None:
            state["lr_steps"] = self.optimizer.schedule.steps_done
        return state

    def _identity(self) -> dict[str, Any]:
        return {"model_type": self.layout.model_type, **self._more_identity}

    def _optimizer_to_save(self, meta: SaveLoadMeta) -> ClippedOptimizer | None:
        return self.optimizer if meta.with_optim else None

    def _optimizer_state(self) -> dict[str, Tensor]:
        if self.optimizer is None or self.shards is None:
            raise ConfigError("with_optim=True, but this engine has no optimizer (optimizer: null)")
        return local_optimizer_state(self.shards, self.optimizer)


def recover_tensors(
    layout: ModelLayout, shards: ParamShards | None, optimizer: ClippedOptimizer | None
) -> dict[str, Tensor]:
    """Flat ``{key: tensor}`` of weights (float32 masters) and optimizer state; loading writes into these tensors.

    Keys: ``model.<parameter>``, ``optim.<parameter>.<state>``. Sharded tensors are DTensors, so a recover point can be
    read by another number of ranks in another layout.
    """
    tensors: dict[str, Tensor] = {}
    for key, tensor in _recover_pairs(layout, shards, optimizer):
        tensors.setdefault(key, tensor)
    return tensors


def _recover_pairs(
    layout: ModelLayout, shards: ParamShards | None, optimizer: ClippedOptimizer | None
) -> Iterator[tuple[str, Tensor]]:
    """See :func:`recover_tensors`; copies of a parameter come under its key too."""
    for name, parameter in layout.named_parameters():
        kept = layout.copies.get(name, name)
        shard = shards.shards.get(name) if shards is not None else None
        local = shard if shard is not None else parameter
        yield f"model.{kept}", laid_out_like(parameter, local.detach())
        if optimizer is not None and shard is not None:
            for key, value in optimizer.state_tensors(name).items():
                yield f"optim.{kept}.{key}", value if value.dim() == 0 else laid_out_like(parameter, value)


def local_optimizer_state(shards: ParamShards, optimizer: ClippedOptimizer) -> dict[str, Tensor]:
    """This rank's optimizer state as plain tensors; writing into them changes the optimizer."""
    return {f"{name}.{key}": value for name in shards.shards for key, value in optimizer.state_tensors(name).items()}


def gathered(layout: ModelLayout, gatherer: PieceGatherer) -> Iterator[HfTensor]:
    """Tensors of all ranks' pieces under their checkpoint names, the same on every rank."""
    for name, outline in gatherer.outlines.items():
        whole = _SplitTensor(name, layout, gatherer)
        for part_name, part in layout.split(name, outline):
            yield HfTensor(part_name, part.numel() * part.element_size(), partial(whole.fetch, part_name))


class _SplitTensor:
    """A tensor that the checkpoint has in parts (fused experts); gathered once for each rank that writes parts."""

    def __init__(self, name: str, layout: ModelLayout, gatherer: PieceGatherer) -> None:
        self.name, self.layout, self.gatherer = name, layout, gatherer
        self._owner: int | None = None
        self._parts: dict[str, Tensor] = {}

    def fetch(self, part: str, owner: int) -> Tensor | None:
        """One part on rank ``owner``, None on the others; every rank must call."""
        if owner != self._owner:
            whole = self.gatherer.fetch(self.name, owner)
            self._owner, self._parts = owner, {} if whole is None else dict(self.layout.split(self.name, whole))
        return self._parts.get(part)


def _fetched(name: str, full: Tensor) -> HfTensor:
    return HfTensor(name, full.numel() * full.element_size(), lambda owner: full)


def _check_format(meta: SaveLoadMeta) -> None:
    if meta.weight_format not in ("hf", "dcp"):
        raise ConfigError(f"weight_format={meta.weight_format!r} is not valid; allowed: hf, dcp")
