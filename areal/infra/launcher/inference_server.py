"""One inference server as a child process: its command, its log, how it ended, and that it never outlives us.

    start() ─► supervisor (own session) ─► server ─► its workers
                  └─ when the server ends, this process ends, or stop() loses patience: everything below is killed

In: a command, an environment, a log file. Called by ``areal.engine.inference.launch``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from areal.utils import environ, logging
from areal.utils.errors import SchedulerError

logger = logging.getLogger("InferenceServer")

STOP_GRACE_S = 10.0
_KILL_S = 15.0
_TAIL_LINES = 40
_TAIL_BYTES = 64 << 10
_SIGNAL_BASE = 128
_SUPERVISOR = Path(__file__).with_name("supervise.py")
# Of our environment and its processes; a server would take them for its own.
_NOT_PASSED = frozenset(
    {
        *("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV", "AREAL_TOKEN_FILE"),
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
        *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "FTP_PROXY", "NO_PROXY"),
    }
)


class ServerStartError(SchedulerError):
    """A server could not be started or was not ready in time; the message holds the end of its log."""


def server_environment(changes: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without proxies, ranks and import paths, and with ``changes``."""
    kept = {
        name: value
        for name, value in environ.environ_copy().items()
        if name.upper() not in _NOT_PASSED and not name.startswith("TORCHELASTIC_")
    }
    return {**kept, **changes}


class ServerProcess:
    """A server process and everything it starts.

    Args:
        command: program and arguments.
        env: its whole environment.
        log_path: file that its output is appended to.
        name: for messages, such as ``vllm/0``.
        hold: a socket that keeps the server's port for it; closed by :meth:`stop`.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        log_path: str | Path,
        name: str,
        hold: socket.socket | None = None,
    ) -> None:
        self.command = list(command)
        self.name = name
        self.log_path = Path(log_path)
        self._env = dict(env)
        self._hold = hold
        self._log_start = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False

    @property
    def pid(self) -> int | None:
        """Process that leads the server's session; None before :meth:`start`."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start it; returns at once.

        Raises:
            ServerStartError: it runs already, or the log or program cannot be opened.
        """
        if self._process is not None and self.ended() is None:
            raise ServerStartError(f"{self.name} runs already, as process {self.pid}")
        self._stopped = False
        try:
            self.log_path.parent.mkdir(parents=True, exist_ok=True)
            with self.log_path.open("ab") as log:
                self._log_start = log.tell()
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(_SUPERVISOR), str(os.getpid()), *self.command],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self._env,
                    start_new_session=True,
                )
        except OSError as exc:
            raise ServerStartError(f"{self.name} cannot be started: {exc}") from exc
        logger.info(f"started {self.name} as process {self._process.pid}; its log is {self.log_path}")

    def ended(self) -> str | None:
        """How it ended: ``exit code 1``, ``signal SIGKILL``, ``stopped``; None while it runs."""
        if self._process is None:
            return "not started"
        code = self._process.poll()
        if code is None:
            return None
        _close_pipe(self._process)
        if self._stopped:
            return "stopped"
        number = -code if code < 0 else code - _SIGNAL_BASE
        if number > 0:
            with contextlib.suppress(ValueError):
                return f"signal {signal.Signals(number).name}"
        return f"exit code {code}"

    def log_tail(self, lines: int = _TAIL_LINES) -> str:
        """Last lines of what this start wrote; at most 64 KiB."""
        try:
            with self.log_path.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_start, size - _TAIL_BYTES))
                text = log.read().decode("utf-8", "replace")
        except OSError as exc:
            return f"(no log: {exc})"
        return "\n".join(text.splitlines()[-lines:]) or "(it wrote nothing)"

    def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Ask it to end, wait ``grace_s`` seconds, then kill it and all it started. Safe to call twice."""
        try:
            if self._process is not None:
                self._end(self._process, grace_s)
        finally:
            if self._hold is not None:
                self._hold.close()

    def _end(self, process: subprocess.Popen[bytes], grace_s: float) -> None:
        if process.poll() is None:
            self._stopped = True
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, grace_s))
        _close_pipe(process)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_KILL_S)
        if process.returncode is None or process.returncode < 0:  # the supervisor hangs or was killed itself
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1.0)


def _close_pipe(process: subprocess.Popen[bytes]) -> None:
    """Tells a supervisor that still runs to kill what is left."""
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
