"""Runs whose workers are killed: each finishes, and trains what an undisturbed run trains."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from areal.utils.errors import WorkerFailedError
from tests.controller.runs import TableTrainer, record_tables, worker_config
from tests.trainer_runs import stats_of, tiny_policy


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Hugging Face directory of the initial policy."""
    return tiny_policy(tmp_path_factory.mktemp("policy"))


class KillingTrainer(TableTrainer):
    """Kills a worker once, at the beginning of a step."""

    victim, at_step, how = "rollout/0", 2, signal.SIGKILL

    def _train_step(self, step: Any, *args: Any) -> Any:
        if step.global_step == self.at_step and not getattr(self, "killed", False):
            self.killed = True
            os.kill(self.scheduler.client(self.victim).health()["pid"], self.how)
        return super()._train_step(step, *args)


def killing(victim: str, at_step: int = 2, how: int = signal.SIGKILL) -> type[KillingTrainer]:
    """A trainer class that kills ``victim``."""
    return type("Killing", (KillingTrainer,), {"victim": victim, "at_step": at_step, "how": how})


def assert_every_row_trained_once(trainer: TableTrainer, steps: int, batch: int) -> None:
    """Full steps, no row twice in an epoch, and no open end."""
    last = {}  # steps that were trained again replace what they were
    for step, (row, columns) in trainer.groups:
        last.setdefault(step, {})[row] = columns
    assert sorted(last) == list(range(steps))
    assert all(len(rows) == batch for rows in last.values())
    rows = [row for rows in last.values() for row in rows]
    assert len(rows) == len(set(rows))


def assert_no_children() -> None:
    """No worker of ours is left."""
    left = [
        child.cmdline() for child in psutil.Process().children(recursive=True) if "rpc_server" in str(child.cmdline())
    ]
    assert left == []


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("eta", [0, 2])
def test_killed_rollout_worker_is_replaced_and_rows_are_generated_again(policy: str, tmp_path: Path, eta: int) -> None:
    config = worker_config(
        tmp_path, policy, "total_train_steps=6", f"rollout.max_head_offpolicyness={eta}", "rollout.backend='native:d2'"
    )
    trainer = record_tables(config, trainer_class=killing("rollout/0"))
    assert trainer.killed
    assert_every_row_trained_once(trainer, steps=6, batch=4)
    assert len(stats_of(config)) == 6
    assert_no_children()


@pytest.mark.slow
@pytest.mark.ci
def test_killed_train_worker_restarts_the_run_from_its_recover_point(policy: str, tmp_path: Path) -> None:
    config = worker_config(tmp_path, policy, "total_train_steps=6", "recover.mode=auto", "recover.freq_steps=2")
    trainer = record_tables(config, trainer_class=killing("actor/0", at_step=3))
    assert trainer.killed
    assert_every_row_trained_once(trainer, steps=6, batch=4)
    assert len(stats_of(config)) == 6
    assert_no_children()


@pytest.mark.slow
@pytest.mark.ci
def test_killed_train_worker_without_recovery_ends_the_run_with_its_cause(policy: str, tmp_path: Path) -> None:
    config = worker_config(tmp_path, policy, "total_train_steps=6")
    with pytest.raises(WorkerFailedError, match="SIGKILL") as caught:
        record_tables(config, trainer_class=killing("actor/0"))
    assert any("recover.mode=auto" in note for note in caught.value.__notes__)
    assert_no_children()
