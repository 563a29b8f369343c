"""Tiny engines that the scheduler tests host on real workers, and a controller script that is killed.

``python -m tests.scheduler_engines ROOT`` starts two workers, prints what it started as one JSON line, and waits in a
call.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from areal.api.config.cluster import NameResolveConfig
from areal.api.config.scheduling import SchedulingSpec
from areal.api.remote import remote
from areal.api.scheduler_api import Job
from areal.infra.run_context import RunContext
from areal.infra.scheduler.local import LocalScheduler
from areal.utils import environ, name_resolve
from areal.utils.fs import get_log_path

COMMAND = "python -m areal.infra.rpc.rpc_server"
ENGINE = "tests.scheduler_engines.Counter"


class Counter:
    """Adds up, tells where it lives, sleeps, fails, leaves children."""

    def __init__(self, start: int = 0) -> None:
        if start < 0:
            raise ValueError(f"start={start} must be >= 0")
        self.total = start

    @remote
    def add(self, count: int) -> int:
        self.total += count
        return self.total

    @remote
    def where(self) -> dict[str, Any]:
        """Process, its parent, working directory."""
        return {"pid": os.getpid(), "parent": os.getppid(), "cwd": os.getcwd()}

    @remote
    def variable(self, name: str) -> str | None:
        return environ.get_env(name)

    @remote
    def say(self, text: str) -> None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    @remote
    def sleep(self, seconds: float) -> str:
        time.sleep(seconds)
        return "slept"

    @remote
    def fail(self) -> None:
        raise KeyError("no such row")

    @remote
    def leave_child(self) -> int:
        """Start a process that leaves this one's session and outlives it; returns its pid."""
        script = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
        child = subprocess.Popen([sys.executable, "-c", script], start_new_session=True)
        return child.pid


def make_context(root: Path, **settings: Any) -> RunContext:
    """A run of its own with the names ``exp`` and ``trial`` below ``root``, without clearing anybody's names."""
    from areal.infra.rpc.identity import RunIdentity, write_token

    store = NameResolveConfig(type="nfs", nfs_record_root=str(root / "names"))
    name_resolve.reconfigure(store)
    log_dir = get_log_path(root, "exp", "trial")
    identity = RunIdentity.new()
    token_path = log_dir / f".token-{identity.run_id}"
    write_token(token_path, identity.token)
    return RunContext("exp", "trial", str(root), log_dir, identity, token_path, store, **settings)


def make_job(role: str, replicas: int = 1, **spec: Any) -> Job:
    """A job of RPC servers with one spec for all."""
    return Job(role=role, replicas=replicas, tasks=[SchedulingSpec(**{"cmd": COMMAND, "cpu": 1, **spec})])


def wait_gone(pids: list[int], timeout_s: float) -> list[int]:
    """Those that still run after ``timeout_s`` seconds."""
    deadline = time.monotonic() + timeout_s
    while True:
        left = [pid for pid in pids if _runs(pid)]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def main(root: str) -> None:
    """Start two workers and a child of one of them, say so, then wait in a call."""
    scheduler = LocalScheduler(make_context(Path(root)), gpu_devices=[])
    workers = scheduler.create_workers(make_job("actor", 2))
    ports = [int(port) for worker in scheduler.get_workers("actor") for port in worker.worker_ports[:1]]
    for worker in workers:
        scheduler.make_engine(worker, ENGINE)
    pids = [scheduler.call_engine(worker, "where")["pid"] for worker in workers]
    pids.append(scheduler.call_engine(workers[0], "leave_child"))
    sys.stdout.write(json.dumps({"pids": pids, "ports": ports}) + "\n")
    sys.stdout.flush()
    scheduler.call_engine(workers[1], "sleep", 600.0)


if __name__ == "__main__":
    main(sys.argv[1])
