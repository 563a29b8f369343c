"""A run that is stopped and started again goes on as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.trainer_runs import (
    RecordingTrainer,
    assert_same_weights,
    checkpoints,
    log_dir,
    record_rl,
    rl_config,
    run_rl,
    seeded,
    stats_of,
)

STEPS = 6
BASE = (
    f"total_train_steps={STEPS}",
    f"saver.freq_steps={STEPS}",
    "actor.optimizer.lr_scheduler_type=linear",
    "actor.optimizer.weight_decay=0.01",
)
RECOVER = ("recover.mode=on", "recover.freq_steps=2")


class Crash(Exception):
    """Stands for a kill."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, policy: str) -> Any:
    """The uninterrupted run."""
    config = rl_config(tmp_path_factory.mktemp("whole"), policy, *BASE)
    return config, record_rl(config)


def crash_after(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Let the run die once step ``step`` is in stats.jsonl, before its recover point (if any) is written."""
    from areal.trainer.hooks import RunHooks

    original = RunHooks.commit

    def commit(self: RunHooks, info: Any, *args: Any, **kwargs: Any) -> None:
        original(self, info, *args, **kwargs)
        if info.global_step == step:
            raise Crash(f"after step {step}")

    monkeypatch.setattr(RunHooks, "commit", commit)


def interrupted(config: Any, step: int) -> None:
    """Run until the crash after ``step``."""
    with pytest.MonkeyPatch.context() as patch:
        crash_after(patch, step)
        with pytest.raises(Crash):
            run_rl(config)


@pytest.mark.parametrize("crash_step", [2, 3, 4])
def test_resumed_synchronous_run_equals_the_uninterrupted_one(
    crash_step: int, whole: Any, policy: str, tmp_path: Path
) -> None:
    expected, _ = whole
    config = rl_config(tmp_path, policy, *BASE, *RECOVER)
    interrupted(config, crash_step)
    assert [row["global_step"] for row in _lines(config)] == list(range(crash_step + 1))
    record_rl(config)
    assert [row["global_step"] for row in _lines(config)] == list(range(STEPS))
    assert [seeded(row) for row in stats_of(config)] == [seeded(row) for row in stats_of(expected)]
    assert_same_weights(checkpoints(config)[-1], checkpoints(expected)[-1])


def test_resume_starts_after_the_recover_point_with_its_version(policy: str, tmp_path: Path) -> None:
    config = rl_config(tmp_path, policy, *BASE, *RECOVER)
    interrupted(config, 4)  # the newest recover point is that of step 3
    trainer = record_rl(config)
    assert trainer.start_step == 4
    assert trainer.versions == [(5, 5, 5), (6, 6, 6)]


def test_each_row_is_trained_once_along_the_lineage(whole: Any, policy: str, tmp_path: Path) -> None:
    _, expected = whole
    config = rl_config(tmp_path, policy, *BASE, *RECOVER)
    first: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        crash_after(patch, 4)
        original = RecordingTrainer._train_step

        def note(self: RecordingTrainer, step: Any, *args: Any) -> Any:
            refs = original(self, step, *args)
            if step.global_step <= 3:  # what the recover point holds
                first.extend((step.global_step, ref.row) for ref in refs)
            return refs

        patch.setattr(RecordingTrainer, "_train_step", note)
        with pytest.raises(Crash):
            record_rl(config)
    second = [(version, group.row) for version, group in record_rl(config).groups]
    assert first + second == [(version, group.row) for version, group in expected.groups]


@pytest.mark.parametrize("bound", [1, 2])
def test_resumed_asynchronous_run_keeps_rows_and_bound(bound: int, policy: str, tmp_path: Path) -> None:
    overrides = (f"rollout.max_head_offpolicyness={bound}", "total_train_steps=8")
    config = rl_config(tmp_path, policy, *overrides, *RECOVER)
    trained: dict[int, list[Any]] = {}
    with pytest.MonkeyPatch.context() as patch:
        original = RecordingTrainer._train_step

        def note(self: RecordingTrainer, step: Any, *args: Any) -> Any:
            refs = original(self, step, *args)
            trained[step.global_step] = [ref.row for ref in refs]  # a later run replaces steps that were undone
            return refs

        patch.setattr(RecordingTrainer, "_train_step", note)
        with pytest.MonkeyPatch.context() as crash:
            crash_after(crash, 4)
            with pytest.raises(Crash):
                record_rl(config)
        record_rl(config)
    rows = [(row.epoch, row.index) for step in range(8) for row in trained[step]]
    assert sorted(rows) == [(0, index) for index in range(32)]
    assert max(row["rollout/staleness/max"] for row in stats_of(config)) <= bound
    assert [row["global_step"] for row in _lines(config)] == list(range(8))


def test_resume_of_a_finished_run_does_nothing(policy: str, tmp_path: Path) -> None:
    config = rl_config(tmp_path, policy, *BASE, *RECOVER)
    run_rl(config)
    before = stats_of(config)
    again = record_rl(config)
    assert again.groups == []
    assert stats_of(config) == before


def test_recover_off_starts_afresh_and_keeps_the_old_statistics(policy: str, tmp_path: Path) -> None:
    config = rl_config(tmp_path, policy, *BASE, "recover.mode=off")
    run_rl(config)
    run_rl(config)
    assert len(stats_of(config)) == STEPS
    assert (log_dir(config) / "stats.1.jsonl").is_file()


def test_resume_with_another_dataset_is_refused(policy: str, tmp_path: Path) -> None:
    config = rl_config(tmp_path, policy, *BASE, *RECOVER)
    interrupted(config, 2)
    changed = rl_config(tmp_path, policy, *BASE, *RECOVER, "train_dataset.dataset_kwargs.size=28")
    with pytest.raises(ValueError, match="dataset_size"):
        run_rl(changed)


def _lines(config: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (log_dir(config) / "stats.jsonl").read_text().splitlines()]


SCRIPT = """
import sys
from pathlib import Path
from tests.trainer_runs import rl_config, run_rl
run_rl(rl_config(Path(sys.argv[1]), sys.argv[2], *sys.argv[3:]))
"""


@pytest.mark.slow
@pytest.mark.ci
def test_killed_process_resumes_to_the_same_weights(whole: Any, policy: str, tmp_path: Path) -> None:
    expected, _ = whole
    overrides = (*BASE, "recover.mode=on", "recover.freq_steps=1")
    config = rl_config(tmp_path, policy, *overrides)
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), policy, *overrides]
    root = Path(__file__).parents[2]
    child = subprocess.Popen(command, cwd=root, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    file, deadline = log_dir(config) / "stats.jsonl", time.monotonic() + 240
    while time.monotonic() < deadline and child.poll() is None:
        if file.is_file() and len(file.read_text().splitlines()) >= 3:
            os.kill(child.pid, signal.SIGKILL)
            break
        time.sleep(0.005)
    assert child.wait(timeout=60) == -signal.SIGKILL, "the run ended before it could be killed"
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "resumed after step" in done.stderr
    assert [row["global_step"] for row in _lines(config)] == list(range(STEPS))
    assert [seeded(row) for row in stats_of(config)] == [seeded(row) for row in stats_of(expected)]
    assert_same_weights(checkpoints(config)[-1], checkpoints(expected)[-1])
