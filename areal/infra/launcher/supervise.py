"""The program between a worker and an inference server: nothing of the server outlives the worker.

Usage: ``python -I -S supervise.py PARENT_PID COMMAND...`` with a pipe of the parent as standard input. Runs the command
and, when it ends, the pipe closes or the parent is another process, kills every process that descends from it, also
those that left its group or lost their parent. Ends as the command ended. SIGTERM is passed on to the command.
Standard library only; started by ``inference_server``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time

CANNOT_START = 127
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_CHECK_S = 0.5
_KILL_S = 10.0


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _start(command: list[str]) -> int:
    me = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        if os.getppid() == me:
            null = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null, 0)
            os.execvp(command[0], command)
    except OSError as exc:
        os.write(2, f"{command[0]} cannot be started: {exc}\n".encode())
    os._exit(CANNOT_START)


def _ended(child: int) -> int | None:
    """How the command ended, as ``waitpid`` says; None while it runs. Adopted orphans are reaped on the way."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == child:
                return status
            if pid == 0:
                return None
    return 0


def _children() -> list[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            return [int(word) for word in file.read().split()]
    except OSError:
        return []


def _kill(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _kill_rest(child: int) -> None:
    """Kill descendants level by level: those of a killed process become ours."""
    deadline = time.monotonic() + _KILL_S
    while time.monotonic() < deadline:
        for pid in _children() or [child]:
            _kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.01)


def main(parent: int, command: list[str]) -> int:
    """Supervise ``command``; returns the exit code to end with."""
    wake, signalled = os.pipe()
    os.set_blocking(signalled, False)
    signal.set_wakeup_fd(signalled)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    child = _start(command)
    signal.signal(signal.SIGTERM, lambda *_: _kill(child, signal.SIGTERM))
    status = None
    while status is None and os.getppid() == parent:
        ready = select.select([0, wake], [], [], _CHECK_S)[0]
        if wake in ready:
            os.read(wake, 4096)
        if 0 in ready and not os.read(0, 1):
            break
        status = _ended(child)
    _kill_rest(child)
    if status is None:
        return 128 + signal.SIGKILL
    if os.WIFSIGNALED(status):
        return 128 + os.WTERMSIG(status)
    return os.WEXITSTATUS(status)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
