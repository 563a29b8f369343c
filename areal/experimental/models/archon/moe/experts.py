"""All experts of a layer as three tensors, and the rows that each of them computes.

In: rows ``[N, dim]`` sorted by expert, and how many rows each expert has. Out: the experts' outputs, in the same order.
Called by ``moe/layer.py``.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

__all__ = ["Experts", "aligned_rows", "expert_range", "run_grouped", "run_one_by_one"]

# Grouped matrix products want every group to start at a multiple of 16 bytes in the dimension that is summed over in
# the weights' gradient: 8 rows of bfloat16.
GROUP_ALIGNMENT = 8


class Experts(nn.Module):
    """SwiGLU experts: ``w2(silu(w1 x) * w3 x)`` with weights of the row's own expert.

    Args:
        num_experts: E.
        dim: width of the rows.
        hidden_dim: width of one expert.
    """

    def __init__(self, num_experts: int, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
        self.w2 = nn.Parameter(torch.empty(num_experts, dim, hidden_dim))
        self.w3 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
        for weight in (self.w1, self.w2, self.w3):
            nn.init.normal_(weight, std=0.02)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Each row through its expert.

        Args:
            rows: ``[N, dim]``, those of expert 0 first.
            counts: int64 ``[E]``, rows of each expert; sums to N. ``[R * E]``: rows come from each of R senders in
                turn. E experts are those of this rank.

        Returns: ``[N, dim]`` in the dtype of ``rows``.
        """
        run = run_grouped if rows.is_cuda and rows.dtype == torch.bfloat16 else run_one_by_one
        w1, w2, w3 = (w.to_local() if isinstance(w, DTensor) else w for w in (self.w1, self.w2, self.w3))
        return run(rows, counts, w1, w2, w3)


def run_one_by_one(rows: Tensor, counts: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    """One expert after the other, in any dtype; the counts come to the host. Arguments as in :class:`Experts`."""
    parts = torch.split(rows, counts.tolist())
    weights = itertools.cycle(zip(w1, w2, w3, strict=True))  # once for each sender
    # An expert without rows computes an empty part, so its gradient is zero.
    return torch.cat([_swiglu(part, *own) for part, own in zip(parts, weights, strict=False)])


def run_grouped(rows: Tensor, counts: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    """All experts in one kernel for each product, without a host sync; bfloat16. Arguments as in :class:`Experts`."""
    place, sizes = aligned_rows(counts, len(w1), len(rows))
    length = -(-(len(rows) + GROUP_ALIGNMENT * len(w1)) // GROUP_ALIGNMENT) * GROUP_ALIGNMENT
    ends = sizes.cumsum(0, dtype=torch.int32)
    x = rows.new_zeros(length, rows.shape[1]).index_copy(0, place, rows)
    hidden = F.silu(F.grouped_mm(x, w1.transpose(1, 2), offs=ends)) * F.grouped_mm(x, w3.transpose(1, 2), offs=ends)
    # Outputs behind the last group are undefined; ``place`` never points there.
    return F.grouped_mm(hidden, w2.transpose(1, 2), offs=ends).index_select(0, place)


def aligned_rows(
    counts: Tensor, num_experts: int, num_rows: int, alignment: int = GROUP_ALIGNMENT
) -> tuple[Tensor, Tensor]:
    """Where rows go so that experts follow each other and each starts at a multiple of ``alignment``.

    Args:
        counts: int64 ``[R * E]``: rows arrive in this order, from each of R senders those of expert 0 first.
        num_experts: E.
        num_rows: the sum of ``counts``, known on the host.
        alignment: an expert's space is a multiple of it, and at least one of it.

    Returns: int64 ``[num_rows]``, the place of each arrived row; int64 ``[E]``, the space of each expert. The last
        place is below the sum of the spaces, which is at most ``num_rows + E * alignment``.
    """
    by_sender = counts.view(-1, num_experts)
    sizes = (by_sender.sum(0) + alignment - 1).div(alignment, rounding_mode="floor").clamp(min=1) * alignment
    starts = sizes.cumsum(0) - sizes + (by_sender.cumsum(0) - by_sender)  # [R, E]: where a sender's rows go
    arrived = counts.cumsum(0)
    row = torch.arange(num_rows, device=counts.device)
    source = torch.searchsorted(arrived, row, right=True)
    return row - (arrived - counts)[source] + starts.flatten()[source], sizes


def expert_range(num_experts: int, shard: tuple[int, int], strided: tuple[int, int] = (0, 1)) -> range:
    """Experts of one rank when the expert dimension is sharded, by FSDP also on top of expert parallelism.

    Both are ``(rank, number of ranks)``. With placements ``[StridedShard(0), Shard(0)]`` the second dimension of the
    mesh cuts first (``shard``), and the first one cuts what is left (``strided``).

    Raises:
        ValueError: the experts do not divide evenly.
    """
    degree = strided[1] * shard[1]
    if num_experts % degree:
        raise ValueError(f"{num_experts} experts over {strided[1]} x {shard[1]} ranks: they must divide evenly")
    block = num_experts // degree
    start = block * (strided[1] * shard[0] + strided[0])
    return range(start, start + block)


def _swiglu(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, w1)) * F.linear(x, w3), w2)
