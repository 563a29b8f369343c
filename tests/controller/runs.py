"""Short real runs in worker processes, and what they are compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from areal.api.cli_args import GRPOConfig
from tests.trainer_runs import RecordingTrainer, record_rl, rl_config

# One thread a process: sums of floats then do not depend on how many cores a process was given.
ONE_THREAD = (
    "actor.scheduling_spec=[{cpu: 1, mem: 1, env_vars: {OMP_NUM_THREADS: '1'}}]",
    "rollout.scheduling_spec=[{cpu: 1, mem: 1, env_vars: {OMP_NUM_THREADS: '1'}}]",
)
LOCAL = ("scheduler.type=local", *ONE_THREAD)


def worker_config(root: Path, policy: str, *overrides: str, scheduler: tuple[str, ...] = LOCAL) -> GRPOConfig:
    """The base config of the trainer tests, in worker processes."""
    names = f"cluster.name_resolve.nfs_record_root={root}/names"
    return rl_config(root, policy, names, *scheduler, *overrides)


COLUMNS = ("input_ids", "loss_mask", "logprobs", "versions", "rewards")


class TableTrainer(RecordingTrainer):
    """Keeps the tokens of every group, which live in the workers only as long as the step does."""

    def _train_step(self, step: Any, *args: Any) -> Any:
        refs = super(RecordingTrainer, self)._train_step(step, *args)
        for ref in refs:
            columns = {
                key: ref.data[key].clone() for key in ("input_ids", "loss_mask", "logprobs", "versions", "rewards")
            }
            self.groups.append((step.global_step, (ref.row, columns)))
        return refs


def record_tables(config: GRPOConfig, **options: Any) -> TableTrainer:
    """Run to the end and return the closed trainer with the tables of all groups."""
    return record_rl(config, **{"trainer_class": TableTrainer, **options})


def assert_same_groups(one: TableTrainer, other: TableTrainer) -> None:
    """Both runs trained the same rows in the same order, on the same tokens, with log-probs equal to 1e-4."""
    assert [(step, row) for step, (row, _) in one.groups] == [(step, row) for step, (row, _) in other.groups]
    for (_, (row, mine)), (_, (_, theirs)) in zip(one.groups, other.groups, strict=True):
        assert torch.equal(mine["input_ids"], theirs["input_ids"]), row
        assert torch.equal(mine["versions"], theirs["versions"]), row
        torch.testing.assert_close(mine["logprobs"], theirs["logprobs"], rtol=0, atol=1e-4)
        torch.testing.assert_close(mine["rewards"], theirs["rewards"], rtol=0, atol=0)
