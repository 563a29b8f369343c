"""The stream server: who is refused, and that a malformed frame costs only its own connection."""

from __future__ import annotations

import contextlib
import socket
import struct

import pytest
import torch

from areal.infra.rpc import frames
from areal.infra.rpc.errors import RequestRefusedError
from areal.infra.rpc.identity import RunIdentity
from areal.infra.rpc.rtensor import local_store
from areal.infra.rpc.server import WorkerServer
from areal.infra.rpc.store import process_store
from areal.infra.rpc.stream import StreamConnection

IDENTITY = RunIdentity("run-1", "token-1")


@pytest.fixture
def server():
    server = WorkerServer(IDENTITY, role="actor", index=0)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def stream_connection(server):
    """Makes connections to the server's stream and closes them."""
    with contextlib.ExitStack() as stack:

        def connect(**changes):
            identity = RunIdentity(changes.get("run_id", "run-1"), changes.get("token", "token-1"))
            address = f"127.0.0.1:{server.stream.port}"
            connection = StreamConnection(address, identity, changes.get("purpose", frames.DATA))
            stack.callback(connection.close)
            return connection

        yield connect


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"token": "x"}, "401"), ({"run_id": "run-2"}, "409"), ({"purpose": "steal"}, "400")],
)
def test_stream_refuses_strangers(stream_connection, changes, says):
    with pytest.raises(RequestRefusedError, match=says):
        stream_connection(**changes)


def test_stream_put_above_limit_is_refused_before_its_body(server, stream_connection):
    server.stream.max_put_bytes = 1000
    connection = stream_connection()

    frames.send_frame(connection.sock, frames.PUT, ["k", "float32", [1000]], [memoryview(bytes(4000))])
    status, answer, _ = frames.receive_head(connection.sock)

    assert (status, answer[:3]) == (frames.ERROR, "413")
    assert "k" not in process_store()


JUNK = {
    "noise": b"\xff" * 64,
    "huge meta": struct.pack("<BxxxIQ", 2, 0xFFFFFFFF, 0),
    "unknown": struct.pack("<BxxxIQ", 9, 1, 0) + b"\x90",
    "no list": struct.pack("<BxxxIQ", 2, 1, 0) + b"\x05",
    "get form": struct.pack("<BxxxIQ", 2, 2, 0) + b"\x91\x05",
    "put form": struct.pack("<BxxxIQ", 4, 2, 5) + b"\x91\x05",
    "cut": struct.pack("<BxxxIQ", 2, 100, 0) + b"\x91",
    "get with body": struct.pack("<BxxxIQ", 2, 1, 10) + b"\x90" + bytes(10),
}


@pytest.mark.parametrize("name", JUNK)
def test_stream_malformed_frame_closes_only_that_connection(stream_connection, name):
    connection, other = stream_connection(), stream_connection()
    connection.sock.settimeout(10)

    with contextlib.suppress(OSError):  # reset, where the server closed before it had read all
        connection.sock.sendall(JUNK[name])
        connection.sock.shutdown(socket.SHUT_WR)
        assert connection.sock.recv(1) == b""

    assert other.request(frames.FREE, ["nothing"]) == [0, 0]


def test_stream_without_hello_is_closed(server):
    with socket.create_connection(("127.0.0.1", server.stream.port), timeout=10) as sock:
        frames.send_frame(sock, frames.FREE, ["x"])
        assert sock.recv(1) == b""


def test_stream_lost_tensor_is_named_and_others_arrive(stream_connection):
    kept = local_store().put(torch.arange(4, dtype=torch.int64))
    first, second = bytearray(32), bytearray(8)

    sizes = stream_connection().read(
        frames.GET, [(kept.shard_id, 0, memoryview(first)), ("gone", 0, memoryview(second))]
    )

    assert sizes == [32, -1]
    assert struct.unpack("<4q", first) == (0, 1, 2, 3)
    local_store().free([kept.shard_id])
