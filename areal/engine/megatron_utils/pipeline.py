"""megatron's schedules of forward and backward passes as a ``ForwardBackwardRunner``.

In: packed micro-batches. ``run`` hands each micro-batch's output to a callback and goes backward through the loss that
it returns, on the rank with the last stage. Without a pipeline micro-batches follow each other; with one megatron runs
1F1B, or its interleaved form where a rank has several stages. Built by the Megatron engine, used by
``engine/core/loop.py``.

megatron divides a loss by the number of micro-batches, and multiplies it by that of context-parallel ranks; core's loss
is complete, so both are undone first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.utils import unwrap_model
from torch import Tensor

from areal.engine.core.distributed import gather_rows, group_size
from areal.engine.core.runner import LmOutput, ProcessOutput
from areal.engine.megatron_utils.device import runs_on
from areal.engine.megatron_utils.packed_cp import PackedRow, own_slices, row_length

if TYPE_CHECKING:
    from torch import nn

    from areal.engine.core.inputs import ModelInput
    from areal.engine.core.parallel_dims import ParallelGroups
    from areal.engine.megatron_utils.model import StageModel
    from areal.engine.megatron_utils.parallel import MegatronDims

__all__ = ["MegatronRunner"]


class MegatronRunner:
    """Runs the stages of this rank with those of the others; every rank of a model group must call.

    Args:
        stages: of this rank, perhaps wrapped, in the order of the pipeline.
        dims: sizes of the layout.
        groups: of this rank.
        device: of the stages.
        is_critic: the head gives values.
    """

    def __init__(  # noqa: PLR0913 - the parts of an engine
        self,
        stages: list[nn.Module],
        dims: MegatronDims,
        groups: ParallelGroups,
        device: torch.device,
        *,
        is_critic: bool,
    ) -> None:
        self.stages, self.dims, self.groups, self.device, self.is_critic = stages, dims, groups, device, is_critic

    def run(self, inputs: Iterable[ModelInput], process: ProcessOutput, *, forward_only: bool) -> None:
        """See ``ForwardBackwardRunner``."""
        items = list(inputs)
        if not items:
            return
        longest = max(row_length(item, self.groups) for item in items)
        count, length = len(items), None
        if self.dims.vpp > 1:
            # The interleaved schedule runs multiples of the ranks, so the last item fills it up. Its rows have one
            # length: between two ranks megatron-core takes the shape of the next stage's message for the last one's.
            count, length = -(-count // self.dims.pp) * self.dims.pp, longest
        rows = [PackedRow.of(item, self.groups, length) for item in items]
        params = [_packed(row) for row in rows]

        def loss_of(number: int, stage: StageModel, hidden: Tensor) -> tuple[Tensor, dict[str, Any]]:
            loss: Tensor | None = None
            if number < len(items):
                loss = process(self._output(stage, hidden, rows[number], items[number]), items[number])
            if forward_only:
                loss = hidden.sum() * 0
            elif loss is None:
                # Gradients of zero, of the head too: their reduction starts once all of a bucket's are there.
                loss = (hidden.sum() + stage.head_weight.sum()) * 0
            return loss * (count / self.dims.cp), {}

        def forward_step(numbers: Iterator[int], stage: nn.Module) -> tuple[Tensor, Any]:
            number = next(numbers)
            index = min(number, len(items) - 1)
            row = rows[index]
            hidden = stage(
                input_ids=row.ids, position_ids=row.positions, attention_mask=None, packed_seq_params=params[index]
            )
            return hidden, partial(loss_of, number, unwrap_model(stage))

        iterators = [iter(range(count)) for _ in self.stages]
        with runs_on(self.device), torch.set_grad_enabled(not forward_only):
            get_forward_backward_func(self.dims.pp, self.dims.vpp if self.dims.vpp > 1 else None)(
                forward_step_func=forward_step,
                data_iterator=iterators if self.dims.vpp > 1 else iterators[0],
                model=self.stages if self.dims.vpp > 1 else self.stages[0],
                num_microbatches=count,
                seq_length=longest,
                micro_batch_size=1,
                forward_only=forward_only,
            )

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Context of runs behind which others may add gradients before the step: none of them reduces gradients.

        Without it, under ``megatron.ddp.overlap_grad_reduce``, every run does once its last micro-batch is there.
        """
        config = unwrap_model(self.stages[0]).config
        syncs, config.no_sync_func = config.no_sync_func, None  # megatron's own, which end with the last micro-batch
        with ExitStack() as held:
            try:
                if syncs is not None:
                    for stage in self.stages:
                        held.enter_context(stage.no_sync())
                yield
            finally:
                config.no_sync_func = syncs

    def _output(self, stage: StageModel, hidden: Tensor, row: PackedRow, item: ModelInput) -> LmOutput:
        """What the last stage gives for one micro-batch, whose hidden states are ``[L / (c * t), 1, H]``."""
        # Tensor-parallel ranks have shares of the tokens. Each applies the whole value head, or its rows of the
        # vocabulary, so it has the whole gradient of the hidden states, or a part of it.
        hidden = gather_rows(hidden.squeeze(1), self.groups.tensor, mean_gradient=self.is_critic)
        n_tokens = item.batch.n_tokens
        if self.groups.sequence is not None:
            width = item.padded.n_tokens // group_size(self.groups.sequence)
            hidden = own_slices(hidden, row, width, self.groups.sequence)
        else:
            hidden = hidden[:n_tokens]
        return LmOutput(hidden, stage.head_weight, None, self.groups, n_tokens)


def _packed(row: PackedRow) -> PackedSeqParams:
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=row.cu_seqlens,
        cu_seqlens_kv=row.cu_seqlens,
        cu_seqlens_q_padded=row.cu_seqlens,
        cu_seqlens_kv_padded=row.cu_seqlens,
        max_seqlen_q=row.max_seqlen,
        max_seqlen_kv=row.max_seqlen,
    )
