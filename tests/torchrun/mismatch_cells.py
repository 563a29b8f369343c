"""What the live ranks run for the mismatch monitor."""

from __future__ import annotations

import torch

from areal.trainer.ppo.mismatch import MismatchMeter, record_mismatch
from areal.utils import stats_tracker


def tokens() -> tuple[torch.Tensor, ...]:
    """Log-probs of both sides, mask and versions of twenty tokens."""
    generator = torch.Generator().manual_seed(3)
    sampler, trainer = (-torch.rand(20, generator=generator) for _ in range(2))
    return sampler, trainer, torch.rand(20, generator=generator) < 0.6, torch.randint(2, 6, (20,), generator=generator)


def measure(of_rank_0: int) -> tuple[dict[str, float], dict[str, float]]:
    """Numbers of the first tokens on rank 0 and the others on rank 1, and what the tracker makes of them."""
    group = torch.distributed.group.WORLD
    rank = torch.distributed.get_rank()
    mine = slice(0, of_rank_0) if rank == 0 else slice(of_rank_0, None)
    meter = MismatchMeter(0.3, 5)
    if of_rank_0 < 20 or rank == 0:
        meter.add(*(x[mine] for x in tokens()))
    numbers = meter.reduce(group)
    stats_tracker.export_all()
    record_mismatch(stats_tracker.get("ppo_actor"), numbers, 5)
    return numbers, stats_tracker.export_all(reduce_group=group)
