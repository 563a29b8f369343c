"""The process groups that core reads; filled by each backend from its own mesh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist


@dataclass(frozen=True)
class ParallelGroups:
    """Who this rank works with. A group is None when this rank is its only member.

    Attributes:
        data: ranks that hold different rows.
        loss: ranks over which loss weights are summed; gradients are averaged over as many.
        model: ranks that share this rank's rows (sequence, tensor and pipeline parallel).
        sequence: ranks that each hold a contiguous slice of these rows' tokens.
        tensor: ranks that each hold a vocabulary shard of the output head (and a shard of every projection).
        pp: pipeline stages of these rows.
        grad_norm: ranks that hold different shards of the parameters; what several of them hold is counted once.
        cpu: all ranks, over gloo; agrees on micro-batch counts and guards checkpoint files.
        is_head: this rank owns the rows of its model group.
        result_rank: global rank, within the model group, that ends up with losses and log-probs.
    """

    data: dist.ProcessGroup | None = None
    loss: dist.ProcessGroup | None = None
    model: dist.ProcessGroup | None = None
    sequence: dist.ProcessGroup | None = None
    tensor: dist.ProcessGroup | None = None
    pp: dist.ProcessGroup | None = None
    grad_norm: dist.ProcessGroup | None = None
    cpu: dist.ProcessGroup | None = None
    is_head: bool = True
    result_rank: int = 0
