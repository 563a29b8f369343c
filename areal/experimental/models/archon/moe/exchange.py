"""Expert parallelism: rows travel to the rank that holds their expert, and their outputs travel back.

In: rows sorted by expert, of all experts. Out: their outputs, in the same order. Set as ``MoE.exchange`` by
``expert_parallel.py``; every rank of the group must call, also one without rows.

::

    counts [E] ──all-to-all──► counts [R * E / R]         which rows come, by sender and expert
    rows [N, dim] ──all-to-all──► rows [M, dim] ─► own experts ─► outputs [M, dim] ──all-to-all──► outputs [N, dim]
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from areal.engine.core.distributed import group_size
from areal.experimental.models.archon.moe.experts import Experts

__all__ = ["ExpertExchange", "exchange_rows"]


class ExpertExchange:
    """Calls experts that are spread over ranks.

    Args:
        experts: this rank's, an equal and contiguous share.
        group: ranks in the order of their experts.
    """

    def __init__(self, experts: Experts, group: dist.ProcessGroup) -> None:
        self.experts, self.group = experts, group

    def __call__(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Arguments and result as those of ``Experts.forward`` with all experts; two host syncs."""
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.group)
        ranks = group_size(self.group)
        sent, received = torch.stack((counts, arriving)).view(2, ranks, -1).sum(-1).tolist()
        outputs = self.experts(exchange_rows(rows, sent, received, self.group), arriving)
        return exchange_rows(outputs, received, sent, self.group)


def exchange_rows(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Send the first ``sent[0]`` rows of ``[N, ...]`` to rank 0 of ``group``, the next to rank 1, and so on.

    Returns: ``[sum(received), ...]``, the rows that came, by sender. Backward goes the other way.
    """
    exchanged: Tensor = _ExchangeRows.apply(x, sent, received, group)  # type: ignore[no-untyped-call]
    return exchanged


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _all_to_all(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return _all_to_all(grad, ctx.received, ctx.sent, ctx.group), None, None, None


def _all_to_all(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    # The functional op, whose result activation checkpointing can keep.
    ops = torch.ops._c10d_functional
    out: Tensor = ops.wait_tensor(ops.all_to_all_single(x.contiguous(), received, sent, group.group_name))
    return out
