"""What the RPC tests host and start: objects with observable state, worker processes, raw HTTP requests."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal.api.remote import remote
from areal.infra.rpc.client import WorkerClient
from areal.infra.rpc.identity import RunIdentity, write_token
from areal.infra.rpc.stream import Leash
from areal.utils import name_resolve, names

ROOT = Path(__file__).resolve().parents[1]


class Base:
    """Marks a method that the derived class overrides."""

    @remote
    def overridden(self) -> str:
        return "base"


class Counter(Base):
    """Counts what reaches it."""

    def __init__(self, start: int = 0, other: Any = None) -> None:
        self.value = start
        self.other = other
        self.order: list[int] = []
        self.gate = threading.Event()

    def overridden(self) -> str:
        return "derived"

    @remote
    def add(self, amount: int = 1) -> int:
        self.value += amount
        return self.value

    @remote
    def note(self, number: int, seconds: float = 0.0) -> None:
        time.sleep(seconds)
        self.order.append(number)

    @remote
    def noted(self) -> list[int]:
        return self.order

    @remote
    def hold(self, seconds: float = 30.0) -> bool:
        return self.gate.wait(seconds)

    @remote(concurrent=True)
    def release(self) -> None:
        self.gate.set()

    @remote(concurrent=True, idempotent=True)
    def peek(self) -> int:
        self.peeks = getattr(self, "peeks", 0) + 1
        return self.value

    @remote(concurrent=True)
    async def peek_async(self, value: Any = None) -> Any:
        await asyncio.sleep(0)
        return self.value if value is None else value

    @remote
    async def on_loop(self) -> str:
        await asyncio.sleep(0)
        return threading.current_thread().name

    @remote
    def thread(self) -> tuple[str, bool]:
        current = threading.current_thread()
        return current.name, current is threading.main_thread()

    @remote
    def echo(self, *args: Any, **kwargs: Any) -> Any:
        return [list(args), kwargs]

    @remote
    def spin(self, seconds: float) -> int:
        """Hold the interpreter busy with pure Python."""
        count, end = 0, time.monotonic() + seconds
        while time.monotonic() < end:
            count += 1
        return count

    @remote
    def other_value(self) -> int:
        return self.other.value

    @remote
    def fail(self, kind: str) -> None:
        raise make_error(kind)

    @remote(concurrent=True)
    async def fail_async(self, kind: str) -> None:
        raise make_error(kind)

    @remote
    def apply(self, function: Any, value: Any) -> Any:
        return function(value)

    @remote
    def unsendable(self) -> Any:
        self.value += 1
        return threading.Lock()

    @remote
    def seed_draw(self) -> float:
        import random

        return random.random()

    @remote
    def loaded(self, module: str) -> bool:
        return module in sys.modules

    @remote
    def pid(self) -> int:
        return os.getpid()

    def unmarked(self) -> None:
        self.value += 1

    def status(self) -> dict[str, Any]:
        return {"value": self.value}


class OddError(Exception):
    """A type that the client does not know."""


def make_error(kind: str) -> BaseException:
    from areal.api.config.fields import FieldError
    from areal.utils.errors import CheckpointError

    errors = {
        "key": KeyError("missing"),
        "value": ValueError("bad value", 3),
        "os": FileNotFoundError(2, "No such file", "/x"),
        "areal": CheckpointError("disk is full"),
        "field": FieldError("a.b", 3, "4"),
        "odd": OddError("strange"),
        "exit": SystemExit(3),
        "stop": StopIteration("x"),
        "interrupt": KeyboardInterrupt(),
        "unicode": UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        "cancelled": asyncio.CancelledError(),
    }
    return errors[kind]


class Tensors:
    """Makes, keeps and frees tensors in its process."""

    @remote
    def keep(self, shape: tuple[int, ...], dtype: str = "float32") -> Any:
        import torch

        from areal.infra.rpc.rtensor import remotize

        count = 1
        for extent in shape:
            count *= extent
        return remotize({"x": torch.arange(count).reshape(shape).to(getattr(torch, dtype))})["x"]

    @remote
    def free(self, ids: list[str]) -> tuple[int, int]:
        from areal.infra.rpc.rtensor import local_store

        return local_store().free(ids)

    @remote
    def stats(self) -> dict[str, int]:
        from areal.infra.rpc.rtensor import local_store

        return local_store().stats()

    @remote
    def total(self, tree: Any) -> float:
        from areal.infra.rpc.rtensor import localize

        return float(localize(tree).sum())

    @remote
    def made(self, size: int) -> Any:
        import torch

        self.tensor = torch.ones(size)
        return self.tensor

    @remote
    def spoil(self) -> None:
        self.tensor.zero_()

    @remote
    def back(self, tree: Any) -> Any:
        return tree

    @remote
    def same(self, first: Any, second: Any) -> bool:
        return first is second

    @remote
    def raise_after(self, tensor: Any) -> None:
        raise ValueError(f"got {tuple(tensor.shape)}")


class Destroyed:
    """Writes a file when it is destroyed."""

    def __init__(self, path: str) -> None:
        self.path = path

    @remote
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def destroy(self) -> None:
        Path(self.path).write_text("destroyed", encoding="utf-8")


@dataclass
class WorkerUnderTest:
    """A worker process of its own run."""

    process: subprocess.Popen[bytes]
    identity: RunIdentity
    client: WorkerClient
    log: Path
    leash: Leash | None = None


def worker_command(directory: Path, identity: RunIdentity, *extra: str) -> list[str]:
    """Command line of worker ``test/0``; its names are files below ``directory``."""
    write_token(directory / "token", identity.token)
    flags = {
        "--role": "test",
        "--worker-index": "0",
        "--experiment-name": "exp",
        "--trial-name": "trial",
        "--run-id": identity.run_id,
        "--token-file": str(directory / "token"),
        "--name-resolve-type": "nfs",
        "--nfs-record-root": str(directory / "names"),
    }
    words = [word for pair in flags.items() for word in pair]
    return [sys.executable, "-m", "areal.infra.rpc.rpc_server", *words, *extra]


def worker_env() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}


def wait_address(directory: Path, process: subprocess.Popen[bytes] | None = None, timeout_s: float = 30.0) -> str:
    """Address that the worker registers."""
    store = name_resolve.NameStore(name_resolve.NfsBackend(directory / "names"))
    limit = time.monotonic() + timeout_s
    while time.monotonic() < limit:
        with contextlib.suppress(name_resolve.NameEntryNotFoundError):
            return store.get(names.worker("exp", "trial", "test", 0))
        if process is not None and process.poll() is not None:
            raise AssertionError(f"the worker ended with {process.returncode}")
        time.sleep(0.02)
    raise AssertionError("the worker did not register")


@contextlib.contextmanager
def worker_process(directory: Path, *extra: str, leash: bool = True) -> Iterator[WorkerUnderTest]:
    """A worker process with a client; ended afterwards."""
    identity = RunIdentity.new()
    log = directory / "worker.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            worker_command(directory, identity, *extra), env=worker_env(), stdout=output, stderr=subprocess.STDOUT
        )
    held = None
    try:
        client = WorkerClient(wait_address(directory, process), identity)
        if leash:
            held = Leash(identity)
            held.hold("test/0", client.stream_address())
        yield WorkerUnderTest(process, identity, client, log, held)
        client.close()
    finally:
        if held is not None:
            held.close()
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)


def raw_request(
    address: str, method: str, path: str, headers: dict[str, str], body: bytes = b""
) -> tuple[int, dict[str, Any] | bytes]:
    """One request by the standard library's client; JSON answers are parsed."""
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=20)
    try:
        connection.request(method, path, body=body, headers=headers)
        response = connection.getresponse()
        data = response.read()
        if "json" in (response.getheader("Content-Type") or ""):
            return response.status, json.loads(data)
        return response.status, data
    finally:
        connection.close()


def headers_of(identity: RunIdentity, **more: str) -> dict[str, str]:
    """Headers of an authorised request; ``Object="x"`` gives ``X-Areal-Object``."""
    base = {"Authorization": f"Bearer {identity.token}", "X-Areal-Run": identity.run_id}
    return {**base, **{f"X-Areal-{key}": value for key, value in more.items()}}


def process_gone(pid: int, within_s: float) -> bool:
    """Whether a process ends (or is a zombie) in time."""
    limit = time.monotonic() + within_s
    while time.monotonic() < limit:
        try:
            state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state in ("Z", "X"):
            return True
        time.sleep(0.05)
    return False


def doubled(value: Any) -> Any:
    return 2 * value
