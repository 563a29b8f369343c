"""Forward and backward over micro-batches, one after the other or as a pipeline over ranks.

In: packed micro-batches. ``run`` hands each micro-batch's output to a callback and goes backward through the loss that
it returns; it knows nothing of losses. Called by ``engine/core/loop.py``; built by :func:`create_runner`.

A pipeline (``torch.distributed.pipelining``) takes all micro-batches at once, as rows of equal length::

    inputs ─stack─► ids, positions, cu_seqlens [M, …] ─► first stage ─► … ─► last stage ─► hidden [1, L, dim]
                    index of the row            [M, 1] ─────────────────────► which micro-batch this is
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._utils import _StageMeta, extract_tensor_metas
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from areal.engine.core.distributed import gather_rows, group_rank, group_size
from areal.engine.core.runner import ForwardBackwardRunner, LmOutput, ProcessOutput, SequentialRunner

if TYPE_CHECKING:
    from areal.engine.core.inputs import ModelInput
    from areal.engine.core.parallel_dims import ParallelGroups
    from areal.experimental.models.archon.base import ArchonModel

__all__ = ["ForwardBackwardRunner", "PipelineRows", "PipelinedRunner", "SequentialRunner", "Stage", "create_runner"]

PipelineLoss = Callable[[Tensor, Tensor], Tensor]


class Stage(PipelineStage):
    """One pipeline stage of this rank.

    Args:
        model: what it computes.
        index, count: its number, and how many there are.
        dtype: of hidden states.
    """

    def __init__(
        self,
        model: ArchonModel,
        index: int,
        count: int,
        device: torch.device,
        group: dist.ProcessGroup,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(model, index, count, device, group=group)
        self.model, self.dtype = model, dtype

    def output(self, hidden: Tensor, item: ModelInput, groups: ParallelGroups) -> LmOutput:
        """What the last stage gives for one micro-batch, whose hidden states are ``[L / (c * t), dim]``."""
        hidden = own_hidden(hidden, item, groups, whole_head=self.model.args.is_critic)
        return LmOutput(hidden, self.model.head_weight, None, groups, item.batch.n_tokens)

    def expect(self, rows: PipelineRows, tensor: int, *, training: bool) -> None:
        """Say what a row is like on its way in and out; torch would run the first one once more to learn it.

        Args:
            rows: of this rank.
            tensor: number of tensor-parallel ranks, which share the hidden states of a row.
            training: whether gradients come back.
        """
        ids = rows.ids[:1]
        size = (1, ids.shape[1] // tensor, self.model.args.dim)
        hidden = torch.empty(size, dtype=self.dtype, device="meta", requires_grad=training)
        inputs, outputs = (extract_tensor_metas((x,)) for x in (ids if self.is_first else hidden, hidden))
        self._user_meta = _StageMeta(inputs=inputs, outputs=outputs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """See ``PipelineStage``, which puts gradients into parameters here and leaves out what hooks do with them."""
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                for hook in (parameter._post_accumulate_grad_hooks or {}).values():
                    hook(parameter)

    def _post_metadata_inference_cleanup(self) -> None:
        """Nothing: no row was run for its metadata. Torch would drop the gradients of earlier calls."""

    # Without a backward pass nothing is handed back; torch's V-shaped schedules ask all the same.

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """See ``PipelineStage``."""
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """See ``PipelineStage``."""
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)


class PipelinedRunner:
    """Runs the stages of this rank in a pipeline with those of the others; every rank of the pipeline must call.

    ``process`` is called on the rank with the last stage only.

    Args:
        stages: of this rank, in the order of their numbers.
        schedule: name of a schedule of ``torch.distributed.pipelining``.
        groups: of this rank.
        prepare_inputs: makes rows of micro-batches; their number must be a multiple of its second argument.
        create_loss_fn: makes the ``(hidden [1, L, dim], index [1, 1]) -> loss`` that the last stage calls.
        release: see :class:`SequentialRunner`.
    """

    def __init__(  # noqa: PLR0913 - what differs between engines
        self,
        stages: Sequence[Stage],
        schedule: str,
        groups: ParallelGroups,
        prepare_inputs: Callable[[Sequence[ModelInput], int], PipelineRows],
        create_loss_fn: Callable[[Sequence[ModelInput], ProcessOutput], PipelineLoss],
        release: Callable[[], None] | None = None,
    ) -> None:
        self.stages, self.groups, self.release = list(stages), groups, release
        self._prepare_inputs, self._create_loss_fn = prepare_inputs, create_loss_fn
        self._schedule_class: Any = get_schedule_class(schedule)
        self._first = any(stage.is_first for stage in stages)
        self._last = next((stage for stage in stages if stage.is_last), None)
        # NCCL connects a group at its first collective, which all ranks must call; a pipeline's sends are not that.
        dist.all_reduce(torch.zeros(1, device=stages[0].device), group=stages[0].group)

    def run(self, inputs: Iterable[ModelInput], process: ProcessOutput, *, forward_only: bool) -> None:
        """See :class:`ForwardBackwardRunner`."""
        items = list(inputs)
        if not items:
            return
        rows = self._prepare_inputs(items, self.stages[0].group_size)  # every schedule runs multiples of the ranks
        args = (rows.ids,) if self._first else ()
        try:
            if forward_only:
                self._evaluate(items, rows, args, process)
            else:
                self._train(items, rows, args, process)
        finally:
            if self.release is not None:
                self.release()

    def _train(
        self, items: list[ModelInput], rows: PipelineRows, args: tuple[Any, ...], process: ProcessOutput
    ) -> None:
        schedule = self._schedule(rows, self._create_loss_fn(items, process))
        target = None if self._last is None else rows.index
        schedule.step(*args, target=target, return_outputs=False, **rows.for_every_stage())

    @torch.no_grad()
    def _evaluate(
        self, items: list[ModelInput], rows: PipelineRows, args: tuple[Any, ...], process: ProcessOutput
    ) -> None:
        hidden = self._schedule(rows, None).eval(*args, **rows.for_every_stage())
        if self._last is None:
            return
        if isinstance(self._last.model, FSDPModule):
            self._last.model.unshard()  # the schedule ends with sharded weights, and the head's is used once more
        for row, item in zip(hidden, items, strict=False):
            process(self._last.output(row, item, self.groups), item)

    def _schedule(self, rows: PipelineRows, loss_fn: PipelineLoss | None) -> Any:
        single = issubclass(self._schedule_class, PipelineScheduleSingle)
        stages = self.stages[0] if single else self.stages
        for stage in self.stages:
            stage.expect(rows, group_size(self.groups.tensor), training=loss_fn is not None)
        return self._schedule_class(stages, rows.ids.shape[0], loss_fn=loss_fn, scale_grads=False)


@dataclass
class PipelineRows:
    """Micro-batches as rows of one length L; more rows than micro-batches where the schedule needs them.

    Attributes:
        ids, positions: int64 ``[M, L]``, or this rank's slice of the tokens, ``[M, L / c]``.
        cu_seqlens: int32 ``[M, K]``, of whole rows, ending in repeated L.
        max_seqlen: int64 ``[M]``.
        index: int64 ``[M, 1]``, number of the row.
    """

    ids: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    max_seqlen: Tensor
    index: Tensor

    @classmethod
    def stack(cls, items: Sequence[ModelInput], multiple: int) -> PipelineRows:
        """Stack the padded side of ``items`` into a multiple of ``multiple`` rows; the last item is repeated."""
        batches = [item.padded for item in items]
        batches += [batches[-1]] * (-len(items) % multiple)
        length = max(batch.n_tokens for batch in batches)
        bounds = 2 + max(batch.n_sequences for batch in batches)
        ids, positions, cu_seqlens, longest = [], [], [], []
        for batch in batches:
            missing = length - batch.n_tokens  # one more sequence, which nothing reads
            tail = batch.cu_seqlens.new_full((bounds - len(batch.cu_seqlens),), length)
            device = batch.cu_seqlens.device
            ids.append(nn.functional.pad(batch.tokens["input_ids"], (0, missing)))
            positions.append(torch.cat([batch.tokens["position_ids"], torch.arange(missing, device=device)]))
            cu_seqlens.append(torch.cat([batch.cu_seqlens, tail]))
            longest.append(max(batch.max_seqlen, missing))
        rows = torch.arange(len(batches), device=ids[0].device)
        return cls(
            torch.stack(ids), torch.stack(positions), torch.stack(cu_seqlens),
            torch.tensor(longest, device=rows.device), rows[:, None],
        )  # fmt: skip

    def slice(self, group: dist.ProcessGroup | None) -> PipelineRows:
        """The same rows with this rank's slice of their tokens; a group of None has them whole."""
        if group is None:
            return self
        ids, positions = (x.chunk(group_size(group), dim=1)[group_rank(group)] for x in (self.ids, self.positions))
        return replace(self, ids=ids, positions=positions)

    def for_every_stage(self) -> dict[str, Tensor]:
        """Keyword arguments of the model."""
        return {"positions": self.positions, "cu_seqlens": self.cu_seqlens, "max_seqlen": self.max_seqlen}


def own_hidden(hidden: Tensor, item: ModelInput, groups: ParallelGroups, *, whole_head: bool) -> Tensor:
    """Hidden states that the loss takes: of all tokens of this rank's slice, of the real ones where it has them all.

    Args:
        hidden: ``[L / (c * t), dim]``; tensor-parallel ranks each have a share, which is gathered here.
        whole_head: every tensor-parallel rank applies the same head, so each has the whole gradient; else each has a
            share of the vocabulary, and a part of the gradient.
    """
    hidden = gather_rows(hidden, groups.tensor, mean_gradient=whole_head)
    return hidden if groups.sequence is not None else hidden[: item.batch.n_tokens]


def create_runner(model: Any, release: Callable[[], None] | None = None, **pipeline: Any) -> ForwardBackwardRunner:
    """One micro-batch after the other through ``model``; a pipeline, with these arguments, where ``stages`` are given.

    Args:
        model: as core sees it; None for a pipeline.
        release: see :class:`SequentialRunner`.
        pipeline: arguments of :class:`PipelinedRunner`.
    """
    if pipeline.get("stages"):
        return PipelinedRunner(release=release, **pipeline)
    return SequentialRunner(model, release)
