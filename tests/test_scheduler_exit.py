"""However the controller ends, nothing that it started is left: no process, no port, no token."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from areal.infra.scheduler import exit_guard, process_tree
from areal.utils import environ
from tests.scheduler_engines import wait_gone


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A controller process with two workers, one of which left a child, that waits in a call; and what it started."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.scheduler_engines", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        process.kill()
        pytest.fail(f"the controller did not start: {process.communicate()[1]}")
    yield process, json.loads(line)
    process.kill()
    process.communicate()


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_controller_ended_by_signal_leaves_no_process_or_port(
    controller: tuple[subprocess.Popen[str], dict[str, Any]], number: signal.Signals, tmp_path: Path
) -> None:
    process, started = controller
    assert wait_gone(started["pids"], 0.0) == started["pids"]
    assert all(is_listening(port) for port in started["ports"])

    process.send_signal(number)
    left = wait_gone(started["pids"], 30.0)

    assert left == []
    assert not any(is_listening(port) for port in started["ports"])
    assert process.wait(timeout=30.0) == -number
    assert wait_until(lambda: list(tmp_path.rglob(".token-*")) == [], 30.0)


@pytest.mark.slow
@pytest.mark.ci
def test_controller_killed_while_a_worker_is_stopped_leaves_neither(
    controller: tuple[subprocess.Popen[str], dict[str, Any]],
) -> None:
    process, started = controller
    os.kill(started["pids"][0], signal.SIGSTOP)

    process.kill()

    assert wait_gone(started["pids"], 30.0) == []


class Owner:
    """Counts what the guard asks for."""

    def __init__(self) -> None:
        self.stopped: list[float] = []

    def stop_all(self, grace_s: float) -> None:
        self.stopped.append(grace_s)

    def close(self) -> None:
        exit_guard.release(self)


def test_exit_guard_signal_stops_the_owners_and_calls_the_handler_before_it() -> None:
    calls: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: calls.append(number))
    owners = [Owner(), Owner()]
    try:
        for owner in owners:
            exit_guard.protect(owner)

        os.kill(os.getpid(), signal.SIGTERM)
        exit_guard.release(owners[0])
        os.kill(os.getpid(), signal.SIGTERM)
        exit_guard.release(owners[1])
        os.kill(os.getpid(), signal.SIGTERM)  # ours is gone: only the one before it is called
    finally:
        signal.signal(signal.SIGTERM, before)

    assert [len(owner.stopped) for owner in owners] == [1, 2]
    assert calls == [signal.SIGTERM] * 3


def test_exit_guard_in_another_thread_leaves_signal_handlers_alone() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    owner = Owner()

    thread = threading.Thread(target=exit_guard.protect, args=(owner,))
    thread.start()
    thread.join()
    after = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    exit_guard.release(owner)

    assert after == before


def test_exit_guard_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    owner = Owner()
    try:
        exit_guard.protect(owner)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        exit_guard.release(owner)
        signal.signal(signal.SIGHUP, before)


def test_kill_marked_ends_those_with_the_mark_only() -> None:
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    mine, other = (
        subprocess.Popen(sleeper, env={**environ.environ_copy(), process_tree.MARK: mark}, start_new_session=True)
        for mark in ("test-of-marks/actor/0/0", "test-of-marks-too/actor/0/0")
    )
    try:
        deadline = time.monotonic() + 5.0
        while not process_tree.find_marked(["test-of-marks"]) and time.monotonic() < deadline:
            time.sleep(0.02)

        process_tree.kill_marked(["test-of-marks"])

        assert mine.wait(timeout=5.0) == -signal.SIGKILL
        assert other.poll() is None
    finally:
        for process in (mine, other):
            process.kill()
            process.wait()


def test_signal_all_recycled_process_number_is_not_touched() -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        earlier = psutil.Process(sleeper.pid)
        earlier._ident = (sleeper.pid, earlier._ident[1] - 100.0)  # as if an earlier process had had this number

        process_tree.signal_all([earlier], signal.SIGKILL)

        assert sleeper.poll() is None
    finally:
        sleeper.kill()
        sleeper.wait()
