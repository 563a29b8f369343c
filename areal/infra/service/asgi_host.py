"""Serves an ASGI application from a worker, on whichever scheduler placed that worker.

In: the import path of an application or of a function that makes one. Out: the address it is served on. Created with
``scheduler.create_engine(worker_id, "areal.infra.service.asgi_host.AsgiHost", "pkg.module:app", **kwargs)``: because it
is an ordinary hosted object, child processes, Slurm tasks and Ray actors all serve HTTP in the same way.

::

    created --start()--> serving --stop()--> created       destroy() stops from any state

uvicorn runs in a thread with a loop of its own, so requests are answered while the worker's engine thread computes.
"""

from __future__ import annotations

import asyncio
import inspect
import socket
import threading
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from areal.api.remote import remote
from areal.utils import logging
from areal.utils.dynamic_import import import_from_string
from areal.utils.errors import ConfigError, EngineError, NetworkError
from areal.utils.network import format_hostport

STARTUP_TIMEOUT_S = 60.0
SHUTDOWN_TIMEOUT_S = 5.0  # open requests get this long, then their connections are closed

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

logger = logging.getLogger("AsgiHost")


class AsgiHost:
    """Hosts one ASGI application.

    Args:
        app: ``"pkg.module:name"`` of an application, or of a class or function that returns one.
        kwargs: arguments of that class or function; an ``ObjectRef`` arrives as the object it names.
    """

    def __init__(self, app: str, **kwargs: Any) -> None:
        self.path = app
        self._app = load_app(app, kwargs)
        self._server: _Server | None = None

    @remote
    def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Serve the application; returns its ``host:port``, also when it is served already.

        Args:
            host: address to bind.
            port: 0 lets the system choose.

        Raises:
            NetworkError: the port is taken or the address is not of this machine.
            EngineError: the application's own start-up failed.
        """
        if self._server is None:
            server = _Server(self._app, self.path, host, port)
            server.start()
            self._server = server
            logger.info(f"{self.path} is served on {server.address}")
        return self._server.address

    @remote
    def stop(self) -> None:
        """Stop serving; does nothing when it is not served."""
        server, self._server = self._server, None
        if server is not None:
            server.stop()

    @remote
    def destroy(self) -> None:
        """Called by the worker when it ends."""
        self.stop()

    @remote(concurrent=True, idempotent=True)
    def status(self) -> dict[str, Any]:
        """What is served and where; ``address`` is None while it is not."""
        server = self._server
        return {"app": self.path, "address": server.address if server and server.alive else None}


def load_app(path: str, kwargs: dict[str, Any]) -> AsgiApp:
    """The application named by ``path``; a class or a plain function is called with ``kwargs`` first.

    Raises:
        ConfigError: ``path`` names no application, or arguments were given for one that is made already.
    """
    try:
        target = import_from_string(path)
    except (ImportError, AttributeError, ValueError) as exc:
        raise ConfigError(f"ASGI application {path!r} cannot be loaded: {exc}; expected 'package.module:name'") from exc
    if inspect.isclass(target) or (inspect.isroutine(target) and not inspect.iscoroutinefunction(target)):
        try:
            target = target(**kwargs)
        except TypeError as exc:
            raise ConfigError(f"ASGI factory {path!r} cannot be called with {sorted(kwargs)}: {exc}") from exc
    elif kwargs:
        raise ConfigError(f"{path!r} is an application, not a factory: it takes no arguments, got {sorted(kwargs)}")
    if not callable(target):
        raise ConfigError(f"{path!r} gave a {type(target).__name__}, expected an ASGI application (a callable)")
    app: AsgiApp = target
    return app


class _Server:
    """One uvicorn in one thread, from a bound socket until ``stop``."""

    def __init__(self, app: AsgiApp, path: str, host: str, port: int) -> None:
        import uvicorn

        self._path = path
        self._startup = _StartupWatch(app)
        self._socket = _bind(host, port)
        self.address = format_hostport(host, self._socket.getsockname()[1])
        config = uvicorn.Config(
            self._startup,
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=int(SHUTDOWN_TIMEOUT_S),
        )
        self._uvicorn = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._serve, name=f"asgi-{self.address}", daemon=True)
        self._error: BaseException | None = None

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and bool(self._uvicorn.started)

    def start(self) -> None:
        self._thread.start()
        waited = 0.0
        while not self._uvicorn.started and self._thread.is_alive() and waited < STARTUP_TIMEOUT_S:
            self._thread.join(0.01)
            waited += 0.01
        if not self.alive:
            self.stop()
            reason = self._startup.failure or self._error or f"no answer within {STARTUP_TIMEOUT_S:g} s"
            raise EngineError(f"{self._path} did not start on {self.address}: {reason}")

    def stop(self) -> None:
        self._uvicorn.should_exit = True
        self._thread.join(SHUTDOWN_TIMEOUT_S + 1)
        self._uvicorn.force_exit = True
        self._thread.join(SHUTDOWN_TIMEOUT_S)
        self._socket.close()
        if self._thread.is_alive():
            logger.warning(f"{self._path} on {self.address} still runs {2 * SHUTDOWN_TIMEOUT_S:g} s after stop()")

    def _serve(self) -> None:
        try:
            asyncio.run(self._uvicorn.serve(sockets=[self._socket]))
        except (Exception, SystemExit) as exc:  # noqa: BLE001  the thread ends here; start() raises it
            self._error = exc
            if self._uvicorn.started:
                logger.error(f"{self._path} on {self.address} ended: {exc!r}")


class _StartupWatch:
    """Passes everything to the application and keeps the text of a failed lifespan start-up."""

    def __init__(self, app: AsgiApp) -> None:
        self._app = app
        self.failure: str | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return

        async def watched(message: Message) -> None:
            if message["type"] == "lifespan.startup.failed":
                self.failure = message.get("message") or "its lifespan start-up failed"
            await send(message)

        await self._app(scope, receive, watched)


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen()
    except OSError as exc:
        listener.close()
        raise NetworkError(
            f"cannot serve on host={host!r} port={port}: {exc.strerror or exc}; choose port=0 or another address"
        ) from exc
    return listener
