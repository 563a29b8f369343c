"""The optimizer steps of one PPO update: balanced parts of a step's batch, as many on every data-parallel rank.

Called by the roles of the PPO family.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from areal.utils import logging
from areal.utils.batch import MicroBatch, PackedBatch, split_micro_batches

if TYPE_CHECKING:
    from areal.api.config.ppo import PPOActorConfig, PPOCriticConfig

logger = logging.getLogger("MiniBatches")


def mini_batches(
    batch: PackedBatch, config: PPOActorConfig | PPOCriticConfig, group: dist.ProcessGroup | None
) -> list[MicroBatch]:
    """At most ``config.ppo_n_minibatches`` parts, fewer where a rank has too few sequences; every rank must call.

    Args:
        batch: this rank's rows.
        config: of the role.
        group: data-parallel ranks; None: this rank alone.
    """
    wanted = config.ppo_n_minibatches
    count = min(wanted, batch.n_sequences // config.mb_spec.granularity)
    if group is not None:
        smallest = torch.tensor(count, device=batch.device)
        dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=group)
        count = int(smallest)
    if count < wanted:
        logger.warning(
            "only %d sequences for ppo_n_minibatches=%d: %d optimizer steps", batch.n_sequences, wanted, count
        )
    spec = replace(config.mb_spec, n_mbs=count, max_tokens_per_mb=None, n_mbs_divisor=1)
    return split_micro_batches(batch, spec)
