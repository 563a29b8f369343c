"""What a script defines in itself runs in worker processes: workflow object, reward function and filter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.controller.runs import worker_config
from tests.trainer_runs import stats_of, tiny_policy

SCRIPT = Path(__file__).with_name("script_of_user.py")


@pytest.mark.slow
@pytest.mark.ci
def test_script_with_its_own_workflow_reward_and_filter_runs_in_workers(tmp_path: Path) -> None:
    policy = tiny_policy(tmp_path / "policy")
    config = worker_config(tmp_path / "run", policy)
    root = Path(__file__).parents[2]
    command = [
        *(sys.executable, str(SCRIPT), "--config", str(tmp_path / "run" / "config-in.yaml")),
        *(f"cluster.fileroot={tmp_path / 'run'}", f"cluster.name_resolve.nfs_record_root={tmp_path / 'names'}"),
        *(f"actor.path={policy}", "scheduler.type=local", "total_train_steps=2"),
    ]

    done = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=240)

    assert done.returncode == 0, done.stderr[-3000:]
    stats = stats_of(config)
    assert len(stats) == 2
    assert all(0 < row["rollout/reward"] <= 1 for row in stats)
    assert sum(row["rollout/rejected"] for row in stats) > 0
