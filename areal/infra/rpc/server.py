"""The RPC server of a worker process: hosts objects, runs their methods, keeps tensors.

::

    main thread: event loop (HTTP) --+--> engine thread: create, call, in order of arrival
                                     +--> thread pool and loop: @remote(concurrent=True)
    stream threads: tensors, leash

Made by ``rpc_server`` in a process of its own, or in a thread of a process that has other work.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from typing import Any

from aiohttp import web

from areal.infra.rpc.children import Children
from areal.infra.rpc.control_routes import ControlRoutes
from areal.infra.rpc.hosting import Hosting
from areal.infra.rpc.identity import RunIdentity
from areal.infra.rpc.lanes import EngineLane
from areal.infra.rpc.routes import Routes
from areal.infra.rpc.store import process_store
from areal.infra.rpc.stream_server import StreamServer
from areal.utils import logging
from areal.utils.errors import NetworkError, SchedulerError
from areal.utils.network import format_hostport, gethostip

logger = logging.getLogger("RPCServer")

MAX_BODY_BYTES = 256 << 20
_START_TIMEOUT_S = 30.0
_KEEPALIVE_S = 86400.0  # an idle client stays connected: closing is its business
_SHUTDOWN_S = 0.5
_ALL_ADDRESSES = ("", "0.0.0.0", "::")


class WorkerServer:
    """One worker. ``start`` serves in a background thread, ``serve_forever`` in the calling one, until ``stop``.

    Args:
        identity: run and token that requests must carry.
        role, index: name of the worker.
        host: address to bind, and under which others find it.
        port: HTTP port; 0 lets the operating system choose.
        max_body_bytes: limit of one request; that of one tensor is ``stream.max_put_bytes``.
    """

    def __init__(
        self,
        identity: RunIdentity,
        *,
        role: str,
        index: int,
        host: str = "127.0.0.1",
        port: int = 0,
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> None:
        self.identity, self.role, self.index, self.host, self.port = identity, role, index, host, port
        self.config: Any = None
        self.children = Children()
        self.hosting = Hosting(process_store())
        self.hosting.before_create = self._seed_once
        self.lane = EngineLane()
        self.stream = StreamServer(identity, process_store(), host)
        self._routes = Routes(identity, self.hosting, self.lane, max_body_bytes)
        self.seed: tuple[int, str] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._routes.table.update(ControlRoutes(self, self._routes).table)

    @property
    def address(self) -> str:
        """``host:port`` of the HTTP side, as others reach it."""
        return format_hostport(self.advertised_host, self.port)

    @property
    def advertised_host(self) -> str:
        """The bound address, or this machine's own where that means all of them."""
        return gethostip() if self.host in _ALL_ADDRESSES else self.host

    @property
    def objects(self) -> dict[str, Any]:
        """Hosted objects by name."""
        return self.hosting.objects

    def host_object(self, name: str, hosted: Any) -> None:
        """Offer an object that was made here."""
        self.objects[name] = hosted

    def begin_end(self) -> None:
        """Objects are about to be destroyed: answer no call from now on."""
        self._routes.ending = True

    def start(self) -> None:
        """Serve in a background thread; returns when requests are answered."""
        self._thread = threading.Thread(target=self._run_thread, name="rpc-loop", daemon=True)
        self._thread.start()
        if not self._ready.wait(_START_TIMEOUT_S):
            raise SchedulerError(f"worker {self.role}/{self.index}: its server did not start in {_START_TIMEOUT_S:g} s")
        if self._failure is not None:
            raise self._failure

    def serve_forever(self, on_ready: Callable[[], None] | None = None) -> None:
        """Serve in this thread until :meth:`stop`; ``on_ready`` is called on the loop once requests are answered."""
        asyncio.run(self._serve(on_ready))

    def stop(self) -> None:
        """Stop serving; from any thread, more than once."""
        loop, stopping = self._loop, self._stopping
        if loop is not None and stopping is not None and not loop.is_closed():
            loop.call_soon_threadsafe(stopping.set)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_START_TIMEOUT_S)

    async def _serve(self, on_ready: Callable[[], None] | None = None) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        sock = _bind(self.host, self.port)
        self.port = sock.getsockname()[1]
        self.stream.start()
        process_store().address = format_hostport(self.advertised_host, self.stream.port)
        self.lane.start()
        server = web.Server(self._routes.handle, access_log=None, keepalive_timeout=_KEEPALIVE_S)
        runner = web.ServerRunner(server, shutdown_timeout=_SHUTDOWN_S)
        await runner.setup()
        await web.SockSite(runner, sock).start()
        if on_ready is not None:
            on_ready()
        self._ready.set()
        try:
            await self._stopping.wait()
        finally:
            await runner.cleanup()
            self.stream.stop()
            self.lane.stop()
            self._routes.close()
            self.children.stop_all()

    def _run_thread(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as exc:  # noqa: BLE001 - start() raises it
            self._failure = exc
            self._ready.set()

    def _seed_once(self) -> None:
        """Seed the generators before the first object is made: only then is torch needed at all."""
        if self.seed is not None:
            from areal.utils.seeding import set_random_seed

            set_random_seed(*self.seed)
            self.seed = None


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=256)
    except OSError as exc:
        raise NetworkError(f"the RPC server cannot bind {format_hostport(host, port)}: {exc}; use port 0") from exc
