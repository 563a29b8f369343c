"""Real Redis and etcd for tests, on free loopback ports; each context stops exactly what it started.

``require_program`` and ``require_module`` say what a test needs: without it the test fails in CI, where
tests/components/install.sh has installed everything, and is skipped with the reason elsewhere.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import platform
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from areal.utils import environ

INSTALL = "install it with tests/components/install.sh"
_START_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 10.0
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def require_program(name: str) -> str:
    """Path of the program ``name``; fails in CI and skips elsewhere when it is not there."""
    found = shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/local/sbin:/usr/sbin:/sbin")
    if found is None:
        _refuse(f"the program {name} is not there; {INSTALL}")
    return str(found)


def require_module(name: str) -> None:
    """Fail in CI, skip elsewhere, when the Python package ``name`` is not there."""
    if importlib.util.find_spec(name) is None:
        _refuse(f"the package {name} is not there; {INSTALL}")


def _refuse(reason: str) -> None:
    if environ.is_in_ci() or environ.get_bool_env_var("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def free_port() -> int:
    """A loopback port that was free just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def redis_server(directory: Path, port: int | None = None) -> Iterator[str]:
    """A Redis without persistence; gives its address."""
    program = require_program("redis-server")
    port = port or free_port()

    def answers() -> bool:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(16).startswith(b"+PONG")

    options = ["--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no", "--dir", str(directory)]
    with _running([program, *options], directory / "redis.log", answers):
        yield f"127.0.0.1:{port}"


@contextlib.contextmanager
def etcd_server(directory: Path) -> Iterator[str]:
    """A single etcd member; gives its address."""
    program = require_program("etcd")
    client, peer = f"http://127.0.0.1:{free_port()}", f"http://127.0.0.1:{free_port()}"
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def answers() -> bool:
        return b"true" in direct.open(f"{client}/health", timeout=1).read()

    options = [
        *("--data-dir", str(directory / "etcd"), "--initial-cluster", f"default={peer}"),
        *("--listen-client-urls", client, "--advertise-client-urls", client),
        *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
    ]
    with _running([program, *options], directory / "etcd.log", answers):
        yield client.removeprefix("http://")


@contextlib.contextmanager
def _running(command: list[str], log: Path, answers: Callable[[], bool]) -> Iterator[None]:
    """The process of ``command`` from when it answers until the context ends."""
    environment = {**os.environ, "ETCD_UNSUPPORTED_ARCH": platform.machine().replace("aarch64", "arm64")}
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),  # it must not outlive a killed pytest
        )
    try:
        _await(process, log, answers)
        yield
    finally:
        process.terminate()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _await(process: subprocess.Popen[bytes], log: Path, answers: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while True:
        with contextlib.suppress(OSError):
            if answers():
                return
        ended = process.poll() is not None
        if ended or time.monotonic() > deadline:
            how = f"ended with code {process.returncode}" if ended else f"did not answer within {_START_TIMEOUT_S:g} s"
            raise RuntimeError(f"{process.args!r} {how}:\n{log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.02)
