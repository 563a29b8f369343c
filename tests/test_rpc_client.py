"""The client: retries, timeouts, cancelling, broken connections, many threads and loops."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading

import pytest
import torch

from areal.infra.rpc.client import WorkerClient
from areal.infra.rpc.errors import RPCConnectionError, RPCTimeoutError
from areal.infra.rpc.identity import RunIdentity, get_identity, read_token, set_identity, write_token
from areal.infra.rpc.server import WorkerServer
from areal.utils.errors import ConfigError, SchedulerError
from areal.utils.network import split_hostport
from tests.rpc_fakes import Counter
from tests.timing import wait_until

IDENTITY = RunIdentity("run-1", "token-1")


@pytest.fixture
def server():
    server = WorkerServer(IDENTITY, role="actor", index=0)
    server.host_object("counter", Counter(10))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def client(server):
    client = WorkerClient(server.address, IDENTITY)
    yield client
    client.close()


class CuttingProxy:
    """Forwards connections to a server; the first ``cuts`` answers to ``path`` are swallowed and the connection cut."""

    def __init__(self, target: str, path: bytes, cuts: int) -> None:
        self.target, self.path, self.cuts = target, path, cuts
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self.listener.accept()
                threading.Thread(target=self.forward, args=(sock,), daemon=True).start()

    def forward(self, near: socket.socket) -> None:
        with near, contextlib.suppress(OSError), socket.create_connection(split_hostport(self.target)) as far:
            while request := near.recv(65536):
                far.sendall(request)
                answer = far.recv(65536)
                if self.path in request and self.cuts > 0:
                    self.cuts -= 1
                    return
                near.sendall(answer)

    def close(self) -> None:
        self.listener.close()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_idempotent_call_is_repeated_when_the_connection_breaks(server, asynchronous):
    proxy = CuttingProxy(server.address, b"/call", cuts=2)
    client = WorkerClient(proxy.address, IDENTITY)

    result = asyncio.run(client.acall("counter", "peek")) if asynchronous else client.call("counter", "peek")

    assert result == 10
    assert server.objects["counter"].peeks == 3
    client.close()
    proxy.close()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_other_call_is_not_repeated_when_the_connection_breaks(server, asynchronous):
    proxy = CuttingProxy(server.address, b"/call", cuts=1)
    client = WorkerClient(proxy.address, IDENTITY)

    with pytest.raises(RPCConnectionError, match="broke"):
        _ = asyncio.run(client.acall("counter", "add")) if asynchronous else client.call("counter", "add")

    assert server.objects["counter"].value == 11
    client.close()
    proxy.close()


def test_call_to_absent_worker_raises_connection_error():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    client = WorkerClient(f"127.0.0.1:{port}", IDENTITY)

    with pytest.raises(RPCConnectionError, match=str(port)):
        client.health()
    with pytest.raises(RPCConnectionError):
        asyncio.run(client.acall("counter", "add"))


def test_call_after_server_restart_uses_a_new_connection(server, client):
    assert client.call("counter", "add") == 11
    server.stop()
    again = WorkerServer(IDENTITY, role="actor", index=0, port=server.port)
    again.host_object("counter", Counter(20))
    again.start()

    assert client.call("counter", "add") == 21
    again.stop()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_call_longer_than_timeout_raises_and_client_stays_usable(client, asynchronous):
    call = (lambda *a, **k: asyncio.run(client.acall(*a, **k))) if asynchronous else client.call
    with pytest.raises(RPCTimeoutError, match=r"0\.3"):
        call("counter", "hold", timeout_s=0.3)

    assert client.health()["engine_busy_s"] > 0  # the worker has not ended the call: the client did not wait for it
    client.call("counter", "release")
    assert client.call("counter", "add", 0) == 10


def test_acall_cancelled_ends_at_once_and_remote_goes_on(client):
    async def run() -> None:
        task = asyncio.create_task(client.acall("counter", "hold"))
        await asyncio.to_thread(wait_until, lambda: client.health()["engine_busy_s"] > 0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())

    assert client.health()["engine_busy_s"] > 0  # it still runs: nobody waited for its end
    client.call("counter", "release")


def test_close_ends_calls_that_wait(server):
    client = WorkerClient(server.address, IDENTITY)
    errors = []

    def wait() -> None:
        try:
            client.call("counter", "hold")
        except RPCConnectionError as exc:
            errors.append(exc)

    thread = threading.Thread(target=wait)
    thread.start()
    asker = WorkerClient(server.address, IDENTITY)
    wait_until(lambda: asker.health()["engine_busy_s"] > 0)
    client.close()
    thread.join(20)
    asker.close()
    server.objects["counter"].gate.set()

    assert len(errors) == 1


def test_server_that_stops_during_call_breaks_it(server, client):
    stopper = threading.Timer(0.3, server.stop)
    stopper.start()

    with pytest.raises(RPCConnectionError):
        client.call("counter", "hold", 5.0)
    stopper.join()


def test_many_threads_and_loops_share_one_client(client):
    def work() -> None:
        for _ in range(20):
            client.call("counter", "add")

        async def run() -> None:
            await asyncio.gather(*(client.acall("counter", "add") for _ in range(20)))

        asyncio.run(run())

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert client.call("counter", "add", 0) == 10 + 6 * 40


def test_acall_moves_large_tensors_without_blocking_the_loop(client):
    large = torch.randn(2_000_000)

    async def run():
        beats = 0

        async def beat() -> None:
            nonlocal beats
            while True:
                await asyncio.sleep(0.001)
                beats += 1

        task = asyncio.create_task(beat())
        result = await client.acall("counter", "echo", large)
        task.cancel()
        return result, beats

    result, beats = asyncio.run(run())

    assert torch.equal(result[0][0], large)
    assert beats >= 1


def test_identity_must_be_set_and_token_file_is_private(tmp_path, monkeypatch):
    monkeypatch.setattr("areal.infra.rpc.identity._identity", None)
    path = tmp_path / "secret" / "token"

    with pytest.raises(SchedulerError, match="set_identity"):
        get_identity()
    set_identity(IDENTITY)
    write_token(path, IDENTITY.token)

    assert get_identity() is IDENTITY
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_token(path) == "token-1"
    assert "token-1" not in repr(IDENTITY)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_token(tmp_path / "none")
