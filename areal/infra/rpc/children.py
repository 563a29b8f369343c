"""Processes that a worker starts next to itself: forked roles and services. They end with the worker.

Each runs in a session of its own, so that it is ended with everything it started; the kernel kills it when the thread
that started it ends, which for a worker is its event loop's. Called by ``server``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

from areal.utils import environ, logging
from areal.utils.errors import SchedulerError

logger = logging.getLogger("RPCServer")

_PR_SET_PDEATHSIG = 1
_GRACE_S = 2.0
# Asks the kernel for a death signal and becomes the program; a plain script so that it costs one bare interpreter.
_EXEC = (
    "import ctypes, os, sys\n"
    f"ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {int(signal.SIGKILL)})\n"
    "if os.getppid() != int(sys.argv[1]):\n"
    "    sys.exit(1)\n"
    "os.execvp(sys.argv[2], sys.argv[2:])\n"
)


class Children:
    """Processes by (role, index)."""

    def __init__(self) -> None:
        self._processes: dict[tuple[str, int], subprocess.Popen[bytes]] = {}

    def start(
        self, role: str, index: int, command: list[str], env: dict[str, str], *, directory: str | None = None
    ) -> int:
        """Start a process, in ``directory`` if that is given; returns its id.

        Raises:
            SchedulerError: there is a live one of that role and index, or it cannot be started.
        """
        running = self._processes.get((role, index))
        if running is not None and running.poll() is None:
            raise SchedulerError(f"{role}/{index} runs next to this worker already, as process {running.pid}")
        words = [sys.executable, "-S", "-E", "-c", _EXEC, str(os.getpid()), *command]
        try:
            process = subprocess.Popen(
                words if sys.platform == "linux" else command,
                stdin=subprocess.DEVNULL,
                env={**environ.environ_copy(), **env},
                cwd=directory,
                start_new_session=True,
            )
        except OSError as exc:
            raise SchedulerError(f"{role}/{index}: {command[0]!r} cannot be started: {exc}") from exc
        self._processes[role, index] = process
        logger.info(f"started {role}/{index} as process {process.pid}")
        return process.pid

    def stop(self, role: str, index: int) -> bool:
        """End one with its descendants; returns whether there was one."""
        process = self._processes.pop((role, index), None)
        if process is None:
            return False
        _end([process], _GRACE_S)
        return True

    def wait(self, role: str, index: int, limit_s: float) -> int | None:
        """How one ended (negative: by that signal); None if it still runs after ``limit_s`` seconds."""
        try:
            return self._processes[role, index].wait(limit_s)
        except subprocess.TimeoutExpired:
            return None

    def stop_all(self, grace_s: float = _GRACE_S) -> None:
        """End all, with what they started."""
        processes = list(self._processes.values())
        self._processes.clear()
        _end(processes, grace_s)

    def names(self) -> list[str]:
        """``role/index`` of those that run."""
        return [f"{role}/{index}" for (role, index), process in self._processes.items() if process.poll() is None]


def _end(processes: list[subprocess.Popen[bytes]], grace_s: float) -> None:
    for process in processes:
        _signal(process, signal.SIGTERM)
    limit = time.monotonic() + grace_s
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, limit - time.monotonic()))
    for process in processes:
        _signal(process, signal.SIGKILL)  # the group: what it started may still be there
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
