"""The controller's status server: what the run is doing, over HTTP on the loopback interface.

    GET /status    JSON of a RunStatus
    GET /metrics   the same as Prometheus text
    GET /stack     Python stacks of the controller, then those of every worker (``?timeout=S`` limits the second part)

Every request needs ``Authorization: Bearer <token>``. Address and token stand in ``controller.json`` of the log
directory (see ``controller_file``), which ``areal status`` and ``areal stack`` read. A thread with its own asyncio loop
serves; what may take long runs in threads of its own that nobody waits for, so training never waits for an observer.

    new ──start──► serving ──close──► closed
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import hmac
import os
import signal
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from aiohttp import web

from areal.infra.run_status import RunStatus, to_json
from areal.infra.service import controller_file, prometheus
from areal.infra.service.controller_file import STACKS_NAME, ControllerRecord
from areal.utils import logging, network
from areal.utils.errors import InfrastructureError
from areal.utils.stacks import thread_stacks

logger = logging.getLogger("StatusServer")
T = TypeVar("T")

START_LIMIT_S = 10.0
CLOSE_LIMIT_S = 5.0
SNAPSHOT_LIMIT_S = 5.0  # longest wait for a snapshot; then 503
STACKS_LIMIT_S = 5.0  # default of ?timeout
_HEADER = "Authorization"

_dump_fd: list[int] = []  # file that SIGUSR1 writes to; a handler of the process, so one for all runs in it


class StatusServerError(InfrastructureError):
    """The status server did not start; the run goes on without it."""


class StatusServer:
    """Serves one run.

    Args:
        log_dir: of the run.
        run_id: shown in ``controller.json``.
        snapshot: makes the status; must only read.
        stacks: text of the stacks outside this process; may take long.

    Attributes:
        record: what ``controller.json`` holds; None before the start.
    """

    def __init__(
        self, log_dir: Path, run_id: str, snapshot: Callable[[], RunStatus], stacks: Callable[[], str]
    ) -> None:
        self.record: ControllerRecord | None = None
        self._log_dir = log_dir
        self._run_id = run_id
        self._snapshot = snapshot
        self._stacks = stacks
        self._token = network.new_token()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="status-server", daemon=True)
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._port = 0
        self._closed = False

    def start(self) -> None:
        """Serve from now on; returns when the port is open and ``controller.json`` is written.

        Raises:
            StatusServerError: no port, or the file cannot be written.
        """
        self._thread.start()
        if not self._ready.wait(START_LIMIT_S):
            raise StatusServerError(f"the status server did not open a port within {START_LIMIT_S:g} s")
        if self._failure is not None:
            raise StatusServerError(f"the status server did not start: {self._failure}") from self._failure
        self.record = controller_file.own_record(self._run_id, f"127.0.0.1:{self._port}", self._token)
        try:
            self.record.takes_signal = register_stack_signal(self._log_dir / STACKS_NAME)
            controller_file.write_record(self._log_dir, self.record)
        except OSError as exc:
            self.close()
            raise StatusServerError(f"{exc.filename}: {exc.strerror}; the log directory must be writable") from exc

    def close(self) -> None:
        """Stop serving and remove ``controller.json``; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        if self.record is not None:
            controller_file.remove_record(self._log_dir, self.record)
            _remove_if_empty(self._log_dir / STACKS_NAME)
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSE_LIMIT_S)

    # -- in the server's thread ----------------------------------------------------------------------------------------

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        runner = web.AppRunner(self._application(), access_log=None, shutdown_timeout=0.1)
        try:
            self._loop.run_until_complete(self._open(runner))
            self._ready.set()
            self._loop.run_forever()
            self._loop.run_until_complete(runner.cleanup())
        except Exception as exc:  # noqa: BLE001 - start() raises it
            self._failure = exc
            self._ready.set()
        finally:
            asyncio.set_event_loop(None)
            self._loop.close()

    async def _open(self, runner: web.AppRunner) -> None:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self._port = int(runner.addresses[0][1])

    def _application(self) -> web.Application:
        application = web.Application(middlewares=[self._authorised])
        application.router.add_get("/status", self._get_status)
        application.router.add_get("/metrics", self._get_metrics)
        application.router.add_get("/stack", self._get_stack)
        return application

    @web.middleware
    async def _authorised(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        given = request.headers.get(_HEADER, "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, f"Bearer {self._token}".encode()):
            return web.json_response(
                {"error": "unauthorized", "detail": f"send '{_HEADER}: Bearer <token of controller.json>'"}, status=401
            )
        return await handler(request)

    async def _get_status(self, request: web.Request) -> web.Response:
        return web.Response(body=to_json(await self._take_snapshot()), content_type="application/json")

    async def _get_metrics(self, request: web.Request) -> web.Response:
        page = prometheus.render(await self._take_snapshot())
        return web.Response(body=page.encode(), headers={"Content-Type": prometheus.CONTENT_TYPE})

    async def _get_stack(self, request: web.Request) -> web.Response:
        try:
            limit_s = float(request.query.get("timeout", STACKS_LIMIT_S))
        except ValueError:
            return web.json_response({"error": "bad request", "detail": "timeout must be seconds"}, status=400)
        text = thread_stacks()
        try:
            others = await asyncio.wait_for(_in_thread(self._stacks), limit_s)
        except TimeoutError:
            others = f"(the other stacks did not arrive within {limit_s:g} s)\n"
        except Exception as exc:  # noqa: BLE001 - shown to the one who asked
            others = f"(no other stacks: {type(exc).__name__}: {exc})\n"
        return web.Response(text=f"=== controller, pid {os.getpid()} ===\n{text}\n{others}")

    async def _take_snapshot(self) -> RunStatus:
        try:
            return await asyncio.wait_for(_in_thread(self._snapshot), SNAPSHOT_LIMIT_S)
        except TimeoutError:
            raise web.HTTPServiceUnavailable(
                text=f"no snapshot within {SNAPSHOT_LIMIT_S:g} s; try areal stack"
            ) from None
        except Exception as exc:
            logger.warning(f"no snapshot of the run: {type(exc).__name__}: {exc}", exc_info=exc)
            raise web.HTTPInternalServerError(text=f"no snapshot: {type(exc).__name__}: {exc}") from exc


def register_stack_signal(path: Path) -> bool:
    """Make SIGUSR1 append the stacks of this process to ``path``, whatever its threads are doing.

    The handler stays when the run ends: a signal that arrives late must not end the process.

    Returns:
        False if the script has a handler of its own for the signal; then nothing is changed.

    Raises:
        OSError: the file cannot be written.
    """
    if signal.getsignal(signal.SIGUSR1) not in (signal.SIG_DFL, None):
        return False
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
    faulthandler.register(signal.SIGUSR1, file=descriptor, all_threads=True, chain=False)
    for old in _dump_fd:
        with contextlib.suppress(OSError):
            os.close(old)
    _dump_fd[:] = [descriptor]
    return True


def _remove_if_empty(path: Path) -> None:
    with contextlib.suppress(OSError):
        if path.stat().st_size == 0:
            path.unlink()


async def _in_thread(function: Callable[[], T]) -> T:
    """Await ``function()`` in a daemon thread of its own: one that hangs keeps neither the server nor the process."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(value)  # type: ignore[arg-type]

    def run() -> None:
        value, error = None, None
        try:
            value = function()
        except Exception as exc:  # noqa: BLE001 - raised where it is awaited
            error = exc
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=run, name="status-request", daemon=True).start()
    return await future
