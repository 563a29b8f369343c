"""A run in a process of its own for the tests of ``areal status`` and ``areal stack``: a real executor whose episodes
never end, real hooks' place taken by plain values, and a main thread that hangs as the test says.

    python -m tests.status_child LOG_DIR (waits | sleeps | holds-gil)

Prints ``ready`` once ``controller.json`` is there and the episodes run.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from areal.infra.rollout.executor import WorkflowExecutor
from areal.infra.rollout.failures import RolloutStoppedError
from areal.infra.run_status import WorkerStatus, executor_status
from areal.trainer.diagnostics import RunDiagnostics
from tests.rollout_fakes import FunctionWorkflow, config, executor, loader
from tests.timing import wait_until

HANG_S = 120


def fake_hooks() -> Any:
    """What RunDiagnostics reads of RunHooks."""
    return SimpleNamespace(
        rank=0,
        config=SimpleNamespace(experiment_name="exp", trial_name="trial"),
        plan=SimpleNamespace(total_steps=10),
        global_step=3,
        phase="rollout",
        phase_since=time.time(),
        tokens_per_s=1234.5,
        diagnostics=None,
    )


def workers() -> list[WorkerStatus]:
    """One that lives and one that does not."""
    return [
        WorkerStatus("rollout", 0, address="127.0.0.1:4001", last_seen=time.time(), version=3, engine_busy_s=0.5),
        WorkerStatus("rollout", 1, state="failed", detail="signal SIGKILL"),
    ]


async def endless_episode(engine: Any, row: dict[str, Any]) -> None:
    """Never returns."""
    await asyncio.sleep(HANG_S)


def wait_for_batch(made: WorkflowExecutor) -> None:
    """What a trainer does at the start of a step."""
    with contextlib.suppress(RolloutStoppedError):
        made.next_batch(loader(16, 4), FunctionWorkflow(endless_episode))


def stuck_in_sleep() -> None:
    """A C call that lets other threads run."""
    time.sleep(HANG_S)


def stuck_with_the_gil() -> None:
    """A C call that lets no other thread run: it reads an empty pipe with the interpreter's lock taken."""
    reader, _writer = os.pipe()
    ctypes.PyDLL(None).read(reader, ctypes.create_string_buffer(1), 1)


def main(log_dir: Path, how: str) -> None:
    log_dir.mkdir(parents=True, exist_ok=True)
    with executor(config(4)) as made:
        diagnostics = RunDiagnostics(log_dir, fake_hooks(), [made], workers, lambda: {"rollout/0": "stack of a worker"})
        diagnostics.start()
        threading.Thread(target=wait_for_batch, args=(made,), daemon=True).start()
        wait_until(lambda: executor_status(made).running == 4 and executor_status(made).wait is not None)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        if how == "waits":
            sys.stdin.read()
            diagnostics.close()
        elif how == "sleeps":
            stuck_in_sleep()
        else:
            stuck_with_the_gil()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
