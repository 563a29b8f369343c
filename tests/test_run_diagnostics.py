"""The diagnostics of a trainer: what they show of its hooks and executors, and the stacks of a wait that failed."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areal.cli import main
from areal.infra.rpc.identity import RunIdentity
from areal.infra.run_status import RunStatus, WorkerStatus
from areal.infra.service.controller_file import FILE_NAME, read_record
from areal.infra.service.status_server import StatusServer
from areal.trainer import diagnostics as module
from areal.trainer.diagnostics import RunDiagnostics, start_diagnostics
from areal.trainer.run import prepare_run
from areal.utils.errors import RolloutTimeoutError
from tests.rollout_fakes import FunctionWorkflow, InstantWorkflow, config, executor, loader
from tests.test_worker_overview import Source
from tests.timing import wait_until
from tests.trainer_runs import rl_config, rl_rows, tiny_policy


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_policy(tmp_path_factory.mktemp("diagnostics"))


@pytest.fixture
def hooks(model: str, tmp_path: Path) -> Any:
    settings = rl_config(tmp_path, model)
    made = prepare_run(settings, rl_rows(settings), None, gconfig=settings.gconfig).hooks
    yield made
    made.close()


async def endless_episode(engine: Any, row: dict[str, Any]) -> None:
    await asyncio.sleep(60)


def wait_in_vain(made: Any) -> str:
    """The message of a wait that fails."""
    with pytest.raises(RolloutTimeoutError) as failed:
        made.next_batch(loader(8, 2), FunctionWorkflow(endless_episode))
    return str(failed.value)


def test_snapshot_shows_step_phase_and_workers(hooks):
    worker = WorkerStatus("rollout", 0, version=2)
    with executor(config(4)) as made:
        diagnostics = RunDiagnostics(hooks.log_dir, hooks, [made], lambda: [worker])
        diagnostics.start()
        made.next_batch(loader(8, 4), InstantWorkflow())
        made.set_version(1)
        hooks.show_phase("train_step")
        found = diagnostics.snapshot()
    assert (found.experiment, found.trial, found.pid) == ("tests", "grpo", os.getpid())
    assert (found.step, found.total_steps, found.version, found.phase) == (None, 3, 1, "train_step")
    assert time.time() - found.phase_since < 60
    assert found.workers == [worker]
    assert found.rollouts[0].counts["trained"] == 4


def test_last_error_is_the_newest_of_the_run_and_its_episodes(hooks):
    def fails(engine, row):
        raise LookupError("nothing there")

    with executor(config(2, max_row_retries=0, failure_window=1000)) as made:
        diagnostics = RunDiagnostics(hooks.log_dir, hooks, [made])
        diagnostics.note_error(RuntimeError("before"))
        made.submit({"x": 1}, FunctionWorkflow(fails))
        made.wait(1, timeout=30)
        assert diagnostics.snapshot().last_error.text == "nothing there"
        diagnostics.note_error(RuntimeError("after"))
        assert diagnostics.snapshot().last_error.text == "after"


def test_close_of_the_hooks_ends_the_server_and_lets_the_executor_go(hooks):
    with executor(config(4)) as made:
        RunDiagnostics(hooks.log_dir, hooks, [made]).start()
        assert main(["status", str(hooks.log_dir)]) == 0
        hooks.close()
        assert not (hooks.log_dir / FILE_NAME).exists()
        assert hooks.diagnostics is None
        alive = weakref.ref(made)
        assert made.waiter.on_timeout is None
    del made
    gc.collect()
    assert alive() is None


def test_start_without_a_place_for_its_file_is_a_warning(hooks, caplog, tmp_path):
    diagnostics = RunDiagnostics(tmp_path / "missing", hooks)
    diagnostics.start()
    diagnostics.refresh()
    assert "will not see this run" in caplog.text
    assert diagnostics.snapshot().pid == 0


def test_diagnostics_of_a_scheduler_watch_its_workers_before_anything_is_built(hooks):
    class Scheduler(Source):
        context = SimpleNamespace(identity=RunIdentity("r7", "secret"))

        def worker_ids(self) -> list[str]:
            return ["ok/0", "starts/0"]

    diagnostics = start_diagnostics(hooks, Scheduler())
    found = diagnostics.snapshot()
    with executor(config(4)) as made:
        diagnostics.watch(made)
        later = diagnostics.snapshot()
    assert (found.run_id, found.phase, found.rollouts) == ("r7", "start", [])
    assert [(worker.id, worker.state) for worker in found.workers] == [("ok/0", "alive"), ("starts/0", "starting")]
    assert [rollout.name for rollout in later.rollouts] == ["rollout"]


def test_other_ranks_have_no_server(hooks):
    hooks.rank = 1
    RunDiagnostics(hooks.log_dir, hooks).start()
    assert not (hooks.log_dir / FILE_NAME).exists()


def test_wait_that_fails_leaves_the_stacks_of_everything(hooks):
    with executor(config(2, wait_timeout_s=0.3)) as made:
        RunDiagnostics(hooks.log_dir, hooks, [made], stacks=lambda: {"rollout/0": "its stack"}).start()
        message = wait_in_vain(made)
        again = wait_in_vain(made)
    (file,) = hooks.log_dir.glob("stacks-2*.txt")
    text = file.read_text()
    assert message.endswith(f"Stacks of all workers: {file}")
    assert str(file) not in again  # one a minute is enough
    assert text.startswith("waiting for 2 of 2 groups")
    for part in (
        "Thread MainThread",
        "wait_in_vain",
        "2 tasks at:",
        "endless_episode",
        "worker rollout/0",
        "its stack",
    ):
        assert part in text


def test_stacks_of_workers_that_hang_or_fail_do_not_hide_the_rest(hooks, monkeypatch):
    monkeypatch.setattr(module, "STACKS_LIMIT_S", 0.5)
    monkeypatch.setattr(module, "STACKS_EVERY_S", 0.0)
    answers = [lambda: time.sleep(5), lambda: 1 / 0]
    diagnostics = RunDiagnostics(hooks.log_dir, hooks, stacks=lambda: answers.pop(0)())
    hanging, failing = (Path(diagnostics.write_stacks("why")).read_text() for _ in range(2))
    assert "did not arrive within 0.5 s" in hanging
    assert "ZeroDivisionError" in failing
    assert hanging.startswith("why\n\n=== controller ===\nThread MainThread")


def test_stack_asks_the_workers_itself_where_the_controller_cannot(hooks, tmp_path, capsys, monkeypatch):
    worker_dir = tmp_path / "worker"
    worker_dir.mkdir()
    worker = StatusServer(worker_dir, "r9", lambda: RunStatus("e", "t"), lambda: "inside the worker")
    worker.start()
    places = [WorkerStatus("rollout", 0, address=worker.record.address), WorkerStatus("actor", 0)]
    diagnostics = RunDiagnostics(hooks.log_dir, hooks, workers=lambda: places)
    diagnostics.identify(RunIdentity("r9", worker.record.token))
    monkeypatch.setattr(module, "REFRESH_EVERY_S", 0.0)
    diagnostics.start()
    wait_until(lambda: read_record(hooks.log_dir).workers == {"rollout/0": worker.record.address})
    assert read_record(hooks.log_dir).run_id == "r9"
    places[1].address = "127.0.0.1:9"
    diagnostics.refresh()
    wait_until(lambda: sorted(read_record(hooks.log_dir).workers) == ["actor/0", "rollout/0"])
    diagnostics._server._loop.call_soon_threadsafe(time.sleep, 2)  # the status server does not answer now
    before = signal.getsignal(signal.SIGUSR1)
    assert main(["stack", str(hooks.log_dir), "--timeout", "0.5"]) == 0
    worker.close()
    captured = capsys.readouterr()
    assert "=== worker rollout/0 ===" in captured.out
    assert "inside the worker" in captured.out
    assert "worker actor/0 at 127.0.0.1:9: " in captured.err
    assert signal.getsignal(signal.SIGUSR1) == before
