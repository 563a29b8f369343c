"""Ends processes and everything they started, and nothing else.

A worker's environment carries a mark that all its descendants inherit, also those that left its session or lost their
parent. Processes are found by that mark; psutil compares the start time before each signal, so a process that was
given the number of one that ended is never touched.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection

import psutil

MARK = "AREAL_WORKER"  # environment variable: run/role/index/incarnation
_POLL_S = 0.05
_KILL_WAIT_S = 5.0


def find_marked(marks: Collection[str]) -> list[psutil.Process]:
    """Live processes, other than this one, whose mark is one of ``marks`` or begins with one and a slash.

    Processes of other users are not seen.
    """
    found = []
    for pid in psutil.pids():  # process_iter() would reuse objects of earlier processes with the same number
        with contextlib.suppress(psutil.Error, OSError):
            process = psutil.Process(pid)
            mark = process.environ().get(MARK)
            if mark is None or pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if any(mark == wanted or mark.startswith(f"{wanted}/") for wanted in marks):
                found.append(process)
    return found


def signal_all(processes: Collection[psutil.Process], number: signal.Signals) -> None:
    """Send a signal to those that are still the same processes."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


def kill_marked(marks: Collection[str]) -> None:
    """SIGKILL everything with a mark, again until nothing new appears: a process may be forking right now."""
    deadline = time.monotonic() + _KILL_WAIT_S
    while (left := find_marked(marks)) and time.monotonic() < deadline:
        signal_all(left, signal.SIGKILL)
        time.sleep(_POLL_S)
