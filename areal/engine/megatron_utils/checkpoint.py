"""Checkpoints of the Megatron engine: Hugging Face directories, and recover points that any layout can read.

In: a ``MegatronLayout``, the optimizer's leaves. Out: as ``core/engine_checkpoints``. A leaf of the distributed
optimizer is a range of a flattened parameter; recover points have it as the boxes of the whole tensor that it covers,
under a name that no layout changes. Called by the Megatron engine; every rank must call every method.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from areal.engine.core.checkpoint import rng_state, save_dcp
from areal.engine.core.engine_checkpoints import EngineCheckpoints, gathered
from areal.engine.core.hf_checkpoint import export_hf
from areal.engine.core.staging import HostStage, Piece, PieceGatherer
from areal.engine.core.tensor_parts import Index
from areal.engine.megatron_utils.device import runs_on
from areal.engine.megatron_utils.weights import MegatronLayout, Run, boxes_of_run, fill_parts
from areal.utils.errors import ConfigError

if TYPE_CHECKING:
    from areal.api.io_struct import SaveLoadMeta
    from areal.engine.core.parallel_dims import ParallelGroups
    from areal.engine.megatron_utils.optimizer import MegatronOptimizer, MegatronShards

__all__ = ["BoxTensor", "MegatronCheckpoints"]


class BoxTensor(torch.Tensor):
    """Boxes of one tensor that this rank holds, as ``torch.distributed.checkpoint`` writes and reads them."""

    boxes: list[tuple[Index, Tensor]]

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], boxes: list[tuple[Index, Tensor]], dtype: torch.dtype) -> Self:
        made: Self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=torch.device("cpu"))
        made.boxes = boxes
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"BoxTensor({tuple(self.shape)}, {[place for place, _ in self.boxes]})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{func} of a BoxTensor")

    def moved(self, move: Callable[[int, Tensor], Tensor]) -> BoxTensor:
        """The same boxes with other memory: ``move(number of the box, values)``."""
        boxes = [(place, move(number, values)) for number, (place, values) in enumerate(self.boxes)]
        return BoxTensor(tuple(self.shape), boxes, self.dtype)

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, _offset(place)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(_offset(place), values.shape),
                    properties=TensorProperties.create_from_tensor(values),
                    size=self.shape,
                ),
            )
            for place, values in self.boxes
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(_offset(place), values.shape) for place, values in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return next(values for place, values in self.boxes if _offset(place) == index.offset)


class MegatronCheckpoints(EngineCheckpoints):
    """See ``EngineCheckpoints``.

    Attributes:
        restores_schedule: a recover point sets the place in the learning-rate schedule.
    """

    layout: MegatronLayout
    shards: MegatronShards | None
    optimizer: MegatronOptimizer | None
    restores_schedule = True

    def __init__(  # noqa: PLR0913 - the parts of an engine
        self,
        layout: MegatronLayout,
        shards: MegatronShards | None,
        optimizer: MegatronOptimizer | None,
        groups: ParallelGroups,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(layout, shards, optimizer, groups, dtype)
        self.device = device

    def load(self, meta: SaveLoadMeta, version: int) -> int:
        """See ``EngineCheckpoints``."""
        schedule = None if self.optimizer is None else self.optimizer.schedule
        steps = 0 if schedule is None else schedule.steps_done
        with runs_on(self.device):
            loaded = super().load(meta, version)
            if self.optimizer is not None and meta.with_optim:
                self.optimizer.take_over_steps()
        if schedule is not None and not self.restores_schedule:
            schedule.steps_done = steps
        return loaded

    def _load_hf(self, meta: SaveLoadMeta) -> None:
        _refuse_optimizer(meta)
        runs = [] if self.shards is None else self.shards.separate_runs
        fill_parts(self.layout, runs, meta.path, self.groups.cpu)

    def _save_hf(self, meta: SaveLoadMeta) -> None:
        _refuse_optimizer(meta)
        pieces = {part.name: Piece(part.view, part.shape, part.offset, self.dtype) for part in self.layout.parts}
        gatherer = PieceGatherer(pieces, self.groups.cpu)
        export = self._export((meta.tokenizer, meta.processor), None, self.layout)
        export_hf(meta.path, export, gathered(self.layout, gatherer), gatherer.total_bytes, self.groups.cpu)

    def _stage_hf(self, meta: SaveLoadMeta, stage: HostStage) -> Callable[[], None]:
        _refuse_optimizer(meta)
        pieces = {}
        for part in self.layout.parts:
            kept = stage.keep(f"hf.{part.name}", part.view, self.dtype)
            pieces[part.name] = Piece(kept, part.shape, part.offset, self.dtype)
        export = self._export((stage.own_copy(meta.tokenizer), stage.own_copy(meta.processor)), None, self.layout)
        path, layout = meta.path, self.layout

        def write() -> None:
            gatherer = PieceGatherer(pieces, stage.group)
            export_hf(path, export, gathered(layout, gatherer), gatherer.total_bytes, stage.group)

        return write

    def _stage_dcp(self, meta: SaveLoadMeta, stage: HostStage, version: int) -> Callable[[], None]:
        tensors: dict[str, Tensor] = {}
        for name, tensor in self._recover_tensors(meta).items():
            if isinstance(tensor, BoxTensor):
                tensors[name] = tensor.moved(lambda box, values, key=name: stage.keep(f"dcp.{key}.{box}", values))
            else:
                tensors[name] = stage.keep(f"dcp.{name}", tensor)
        rng, document, path = rng_state(), self._document(version), meta.path
        return lambda: save_dcp(path, tensors, rng, document, stage.group)

    def _recover_tensors(self, meta: SaveLoadMeta, *, loading: bool = False) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for run in self._runs():
            part = run.part
            if part.is_copy and not loading:
                continue  # its ranges are not those of the original
            tensors[f"model.{part.name}"] = _boxed(run)
            if meta.with_optim and self.optimizer is not None:
                for key, value in self.optimizer.state_tensors(part.name).items():
                    boxed = value if value.dim() == 0 else _boxed(Run(part, value, run.start, run.stop))
                    tensors[f"optim.{part.name}.{key}"] = boxed
        return tensors

    def _runs(self) -> list[Run]:
        """Float32 leaves; of an engine that only scores its parameters."""
        if self.shards is not None:
            return self.shards.runs
        return [Run(part, part.view, 0, part.view.numel()) for part in self.layout.parts]


def _boxed(run: Run) -> BoxTensor:
    return BoxTensor(run.part.shape, boxes_of_run(run), run.leaf.dtype)


def _offset(place: Index) -> torch.Size:
    return torch.Size(size.start for size in place)


def _refuse_optimizer(meta: SaveLoadMeta) -> None:
    if meta.with_optim:
        raise ConfigError(
            "with_optim=True with weight_format=hf: the Megatron engine keeps optimizer state in recover points only; "
            "use weight_format=dcp"
        )
