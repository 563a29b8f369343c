"""Processes, ports and shared memory that belong to a run, and a stranger beside it that must not be touched."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from areal.infra.scheduler.process_tree import MARK

TAG = "AREAL_CHAOS"  # in the environment of a controller, and so of whatever it starts
SHM = Path("/dev/shm")
STRANGER = """
import socket, sys, time
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
time.sleep(3600)
"""


@dataclass(frozen=True)
class WorkerProcess:
    """A worker of the run under test; ``mark`` is its run, name and incarnation."""

    process: psutil.Process
    role: str
    mark: str


def tagged(tag: str) -> list[psutil.Process]:
    """Live processes with ``tag``."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(TAG) == tag and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def workers(tag: str) -> list[WorkerProcess]:
    """The worker processes of the run, sorted by mark; not their children."""
    found = []
    for process in tagged(tag):
        with contextlib.suppress(psutil.Error, OSError):
            mark = process.environ().get(MARK)
            if mark is not None and any("rpc_server" in word for word in process.cmdline()):
                found.append(WorkerProcess(process, mark.split("/")[1], mark))
    return sorted(found, key=lambda worker: worker.mark)


@dataclass
class Traces:
    """What a run has had so far, to be looked for after its end.

    Attributes:
        ports: on which its processes were seen listening.
        shm: names in /dev/shm before it began.
    """

    tag: str
    ports: set[int] = field(default_factory=set)
    shm: set[str] = field(default_factory=lambda: set(os.listdir(SHM)) if SHM.is_dir() else set())

    def look(self) -> None:
        """Note the ports of this moment."""
        for process in tagged(self.tag):
            with contextlib.suppress(psutil.Error):
                self.ports |= {
                    connection.laddr.port
                    for connection in process.net_connections("inet")
                    if connection.status == psutil.CONN_LISTEN
                }

    def left(self) -> list[str]:
        """What is left of the run now, in words."""
        found = []
        for process in tagged(self.tag):
            with contextlib.suppress(psutil.Error):
                found.append(f"process {process.pid}: {' '.join(process.cmdline())[:160]}")
        found += [f"port {port} is still listened on" for port in self.ports if self._is_ours(port)]
        found += [f"shared memory /dev/shm/{name}" for name in self._orphans()]
        return found

    def wait_gone(self, limit_s: float) -> tuple[float, list[str]]:
        """Seconds until nothing was left, and what was left after ``limit_s``."""
        began = time.monotonic()
        while (left := self.left()) and time.monotonic() - began < limit_s:
            time.sleep(0.1)
        return time.monotonic() - began, left

    def _is_ours(self, port: int) -> bool:
        """Whether somebody listens, and it is not a process of someone else who was given the port since."""
        with socket.socket() as probe:
            probe.settimeout(1.0)
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return False
        listeners = [
            c for c in psutil.net_connections("inet") if c.status == psutil.CONN_LISTEN and c.laddr[1:2] == (port,)
        ]
        if any(listener.pid is None for listener in listeners):
            return True
        ours = {process.pid for process in tagged(self.tag)}
        return any(listener.pid in ours for listener in listeners)

    def _orphans(self) -> set[str]:
        """Segments made since the beginning that no living process has mapped or open."""
        fresh = set(os.listdir(SHM)) - self.shm if SHM.is_dir() else set()
        return {name for name in fresh if not _in_use(SHM / name)}


def _in_use(path: Path) -> bool:
    pattern = re.compile(re.escape(str(path)) + r"$", re.MULTILINE)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if pattern.search((entry / "maps").read_text()):
                    return True
                if any(os.readlink(link) == str(path) for link in (entry / "fd").iterdir()):
                    return True
    return False


@contextlib.contextmanager
def stranger() -> Iterator[subprocess.Popen[str]]:
    """A process that looks like a worker of another run of the same trial, listening on a port."""
    code = f"# areal.infra.rpc.rpc_server --role actor --worker-index 0\n{STRANGER}"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, MARK: "another-run/actor/0/0"},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().strip().isdigit()
            yield process
        finally:
            process.kill()
