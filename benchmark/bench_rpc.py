"""Calls to a worker in another process: empty round trips per second, and how fast one large tensor is fetched.

``python benchmark/bench_rpc.py [--calls N] [--mib N]`` prints one JSON object. The fetch is compared with a bare copy
of as many bytes through a loopback socket between the same two processes (``sendall``, ``recv_into``), in turn; once
into one buffer made for it, as the fetch makes one, and once into memory that is there already. Budgets: at least 1,500
calls per second from one thread, and at least 0.60 of the bare copy.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from areal.api.config.cluster import NameResolveConfig
from areal.api.remote import remote
from areal.infra.rpc.client import WorkerClient
from areal.infra.rpc.identity import RunIdentity, set_identity, write_token
from areal.infra.rpc.rtensor import RTensor, clear_node, local_store
from areal.infra.rpc.stream import Leash
from areal.utils import environ, name_resolve, names
from benchmark import common

BARE_CHUNK = 1 << 30


class Probe:
    """What the worker hosts: an empty method, a tensor to fetch, and a bare socket that sends as many bytes."""

    @remote
    def nothing(self) -> None:
        """Return nothing."""

    @remote(concurrent=True)
    async def nothing_concurrent(self) -> None:
        """Return nothing, beside the engine thread."""

    @remote
    def store(self, size: int) -> RTensor:
        """Keep a tensor of ``size`` bytes."""
        self.data = torch.randint(0, 256, (size,), dtype=torch.uint8)
        return local_store().put(self.data)

    @remote
    def serve_bare(self) -> int:
        """Send the tensor's bytes to whoever connects, on each byte received; returns the port."""
        import threading

        listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._send, args=(listener,), daemon=True).start()
        return int(listener.getsockname()[1])

    def _send(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        view = memoryview(self.data.numpy())
        while connection.recv(1):
            connection.sendall(view)


class Worker:
    """A worker process and a client of it."""

    def __init__(self, directory: str) -> None:
        identity = RunIdentity.new()
        set_identity(identity)
        token, store = f"{directory}/token", f"{directory}/names"
        write_token(token, identity.token)
        name_resolve.reconfigure(NameResolveConfig(type="nfs", nfs_record_root=store))
        flags = {
            "--role": "bench", "--worker-index": "0", "--experiment-name": "bench", "--trial-name": "rpc",
            "--run-id": identity.run_id, "--token-file": token, "--nfs-record-root": store,
        }  # fmt: skip
        command = [sys.executable, "-m", "areal.infra.rpc.rpc_server", *(w for pair in flags.items() for w in pair)]
        root = Path(__file__).resolve().parent
        path = f"{root.parent}:{root}"
        self.process = subprocess.Popen(command, env={**environ.environ_copy(), "PYTHONPATH": path})
        address = name_resolve.wait(names.worker("bench", "rpc", "bench", 0), timeout=60, poll_frequency=0.05)
        self.client = WorkerClient(address)
        self.leash = Leash()
        self.leash.hold("bench/0", self.client.stream_address())
        self.client.create("probe", "bench_rpc.Probe")

    def close(self) -> None:
        """End it."""
        self.client.close()
        self.process.terminate()
        self.process.wait(10)


def calls_per_second(client: WorkerClient, calls: int, method: str = "nothing") -> float:
    """Sequential calls from this thread."""
    for _ in range(50):
        client.call("probe", method)
    began = time.perf_counter()
    for _ in range(calls):
        client.call("probe", method)
    return calls / (time.perf_counter() - began)


def async_calls_per_second(client: WorkerClient, calls: int, at_once: int) -> float:
    """Calls from coroutines, ``at_once`` under way."""

    async def caller(count: int) -> None:
        for _ in range(count):
            await client.acall("probe", "nothing")

    async def run() -> float:
        began = time.perf_counter()
        await asyncio.gather(*(caller(calls // at_once) for _ in range(at_once)))
        return calls / (time.perf_counter() - began)

    return asyncio.run(run())


def bare_seconds(connection: socket.socket, size: int) -> float:
    """One copy through a bare socket into new memory."""
    began = time.perf_counter()
    buffer = torch.empty(size, dtype=torch.uint8)
    view = memoryview(buffer.numpy())
    connection.sendall(b"x")
    done = 0
    while done < size:
        done += connection.recv_into(view[done:])
    return time.perf_counter() - began


def reused_seconds(connection: socket.socket, view: memoryview) -> float:
    """One copy through a bare socket into memory that is there already."""
    began = time.perf_counter()
    connection.sendall(b"x")
    done = 0
    while done < view.nbytes:
        done += connection.recv_into(view[done:])
    return time.perf_counter() - began


def fetch_seconds(reference: RTensor) -> float:
    """One fetch."""
    began = time.perf_counter()
    reference.fetch()
    return time.perf_counter() - began


def main() -> None:
    parser = common.arguments(__doc__ or "")
    parser.add_argument("--calls", type=int, default=3000)
    parser.add_argument("--mib", type=int, default=256)
    args = parser.parse_args()
    torch.set_num_threads(1)
    size = args.mib << 20
    with tempfile.TemporaryDirectory(prefix="areal-bench-rpc-") as directory:
        worker = Worker(directory)
        try:
            client = worker.client
            reference = client.call("probe", "store", size)
            connection = socket.create_connection(("127.0.0.1", client.call("probe", "serve_bare")))
            reused = memoryview(torch.zeros(size, dtype=torch.uint8).numpy())
            calls = common.alternate(
                {
                    "engine lane": lambda: calls_per_second(client, args.calls),
                    "concurrent": lambda: calls_per_second(client, args.calls, "nothing_concurrent"),
                    "asyncio, 1 at once": lambda: async_calls_per_second(client, args.calls, 1),
                    "asyncio, 16 at once": lambda: async_calls_per_second(client, args.calls, 16),
                },
                args.repeats,
            )
            fetch_seconds(reference), bare_seconds(connection, size)
            seconds = common.alternate(
                {
                    "fetch": lambda: fetch_seconds(reference),
                    "bare": lambda: bare_seconds(connection, size),
                    "bare, memory reused": lambda: reused_seconds(connection, reused),
                },
                args.repeats,
            )
            clear_node(reference.address, [reference.shard_id])
        finally:
            worker.close()
    result = {
        "calls_per_second": {name: common.summary(values) for name, values in calls.items()},
        "fetch_mib": args.mib,
        "seconds": {name: common.summary(values) for name, values in seconds.items()},
        "fetch_share_of_bare_copy": common.ratio(seconds["bare"], seconds["fetch"]),
        "fetch_share_of_bare_copy_into_reused_memory": common.ratio(seconds["bare, memory reused"], seconds["fetch"]),
        "targets": {"calls_per_second": 1500, "fetch_share_of_bare_copy": 0.60},
    }
    common.emit("rpc", result, args.out)


if __name__ == "__main__":
    main()
