"""The HTTP side of a worker: who may ask, what there is to ask, and how refusals look.

Every request carries the run's id and token. A refused request (4xx, 504) is answered with JSON ``{"error",
"detail"}``, logged once per kind, and has changed nothing. A remote exception is a 500 with a typed message. Called by
``server``.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import unquote

from aiohttp import web

from areal.infra.rpc.hosting import Hosting, Refusal, Reply, failure
from areal.infra.rpc.identity import RunIdentity
from areal.infra.rpc.lanes import DeadlinePassedError, EngineLane
from areal.utils import logging

logger = logging.getLogger("RPCServer")

RUN_HEADER, OBJECT_HEADER, METHOD_HEADER, CLASS_HEADER, TIMEOUT_HEADER = (
    "X-Areal-Run",
    "X-Areal-Object",
    "X-Areal-Method",
    "X-Areal-Class",
    "X-Areal-Timeout",
)
MESSAGE_TYPE = "application/x-areal"
POOL_THREADS = 32
CODEC_THREADS = 2

_OBJECT_ROUTES = ("/call", "/create_engine")

Handler = Callable[[web.BaseRequest], Awaitable[web.Response]]
_PLAIN_RESULTS = (type(None), bool, int, float, str)


class Routes:
    """Answers requests. ``table`` maps (method, path) to a handler; ``server`` adds those that are its own.

    ``ending``: the worker destroys its objects. Calls are no longer answered then: the caller must see that the worker
    has ended, not the errors of half-destroyed objects.
    """

    def __init__(self, identity: RunIdentity, hosting: Hosting, lane: EngineLane, max_body_bytes: int) -> None:
        self._identity = identity
        self._hosting = hosting
        self._lane = lane
        self._max_body_bytes = max_body_bytes
        self._pool = ThreadPoolExecutor(POOL_THREADS, thread_name_prefix="rpc-call")
        self._codec = ThreadPoolExecutor(CODEC_THREADS, thread_name_prefix="rpc-codec")
        self._said: set[tuple[int, str]] = set()
        self.ending = False
        self.table: dict[tuple[str, str], Handler] = {
            ("POST", "/call"): self._call,
            ("POST", "/create_engine"): self._create,
            ("GET", "/method"): self._describe,
        }

    def close(self) -> None:
        """Let the threads end when their work does."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._codec.shutdown(wait=False, cancel_futures=True)

    async def handle(self, request: web.BaseRequest) -> web.Response:
        """Answer one request, whatever it is."""
        response = await self._answer(request)
        if self.ending and request.path in _OBJECT_ROUTES:
            await asyncio.Event().wait()  # until the connection is closed
        return response

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        try:
            self._authorise(request)
            handler = self.table.get((request.method, request.path))
            if handler is None and request.path.startswith("/data/"):
                handler = self.table.get((request.method, "/data/"))
            if handler is None:
                raise Refusal(404, "unknown route", f"there is no {request.method} {request.path}")
            return await handler(request)
        except Refusal as refusal:
            return self._refused(request, refusal)
        except DeadlinePassedError as exc:
            return self._refused(request, Refusal(504, "deadline passed", str(exc)))
        except Exception as exc:  # noqa: BLE001 - a request ends here; the client raises it
            logger.exception(f"{request.method} {request.path} failed")
            return self.message(failure(exc))

    async def body(self, request: web.BaseRequest) -> bytearray:
        """The whole body.

        Raises:
            Refusal: 413, it is too large.
        """
        announced = request.content_length
        if announced is not None and announced > self._max_body_bytes:
            raise self._too_large(announced)
        received = bytearray()
        async for chunk in request.content.iter_any():
            received += chunk
            if len(received) > self._max_body_bytes:
                raise self._too_large(len(received))
        return received

    async def json_body(self, request: web.BaseRequest) -> dict[str, Any]:
        """The body as a JSON object.

        Raises:
            Refusal: 400, it is none; 413, it is too large.
        """
        try:
            parsed = json.loads(await self.body(request))
        except (ValueError, RecursionError) as exc:
            raise Refusal(400, "malformed JSON", f"the body is no JSON ({exc})") from exc
        if not isinstance(parsed, dict):
            raise Refusal(400, "malformed JSON", "the body must be a JSON object")
        return parsed

    async def in_codec(self, work: Callable[[], Any]) -> Any:
        """Run ``work`` beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._codec, work)

    def message(self, reply: Reply) -> web.Response:
        """HTTP response of a reply."""
        return web.Response(body=reply.body, status=500 if reply.failed else 200, content_type=MESSAGE_TYPE)

    def _authorise(self, request: web.BaseRequest) -> None:
        run_id = request.headers.get(RUN_HEADER)
        if run_id is not None and run_id != self._identity.run_id:
            raise Refusal(409, "foreign run", f"this worker belongs to another run than {run_id!r}")
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme != "Bearer" or not self._identity.matches_token(token):
            raise Refusal(401, "wrong token", "the Authorization header must be 'Bearer <token of this run>'")
        if run_id is None:
            raise Refusal(409, "foreign run", f"the {RUN_HEADER} header is missing: whose run is this request of?")

    def _refused(self, request: web.BaseRequest, refusal: Refusal) -> web.Response:
        key = (refusal.status, refusal.kind)
        if key not in self._said:
            self._said.add(key)
            logger.warning(
                f"{request.method} {request.path} of {request.remote} refused with {refusal.status} ({refusal.kind}): "
                f"{refusal}. Further ones of this kind are not logged"
            )
        headers = {"WWW-Authenticate": "Bearer"} if refusal.status == 401 else None
        return web.json_response(
            {"error": refusal.kind, "detail": str(refusal)}, status=refusal.status, headers=headers
        )

    def _too_large(self, size: int) -> Refusal:
        return Refusal(
            413,
            "too large",
            f"a body of {size} bytes or more is above the limit of {self._max_body_bytes}; send tensors, which travel "
            "by the stream, or less at once",
        )

    async def _call(self, request: web.BaseRequest) -> web.Response:
        method, spec = self._hosting.find(_header(request, OBJECT_HEADER), _header(request, METHOD_HEADER))
        timeout_s = _timeout(request)
        body = await self.body(request)
        loop = asyncio.get_running_loop()
        if not spec.concurrent:
            outcome = await self._lane.run(lambda: self._hosting.call(method, body, loop), timeout_s)
        elif inspect.iscoroutinefunction(method):
            outcome = await self._call_on_loop(method, body)
        else:
            limit = None if timeout_s is None else time.monotonic() + timeout_s
            outcome = await loop.run_in_executor(self._pool, lambda: self._call_in_pool(method, body, loop, limit))
        if isinstance(outcome, Refusal):
            raise outcome
        return self.message(outcome)

    def _call_in_pool(
        self, method: Callable[..., Any], body: bytearray, loop: asyncio.AbstractEventLoop, limit: float | None
    ) -> Reply | Refusal:
        if limit is not None and time.monotonic() > limit:
            return Refusal(504, "deadline passed", "the call did not begin within its time limit; it was not run")
        return self._hosting.call(method, body, loop)

    async def _call_on_loop(self, method: Callable[..., Any], body: bytearray) -> Reply:
        args, kwargs = await self.in_codec(lambda: self._hosting.arguments(body)) if body else ([], {})
        try:
            result = await method(*args, **kwargs)
            if isinstance(result, _PLAIN_RESULTS):
                return Reply(self._hosting.encode_result(result))
            return Reply(await self.in_codec(lambda: self._hosting.encode_result(result)))
        except asyncio.CancelledError as exc:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return failure(exc)
        except BaseException as exc:  # noqa: BLE001 - the caller's to see, SystemExit too
            return failure(exc)

    async def _create(self, request: web.BaseRequest) -> web.Response:
        name, class_path = _header(request, OBJECT_HEADER), _header(request, CLASS_HEADER)
        timeout_s = _timeout(request)
        body = await self.body(request)
        self._hosting.reserve(name)
        try:
            outcome = await self._lane.run(lambda: self._hosting.create(name, class_path, body), timeout_s)
        finally:
            self._hosting.release(name)
        if isinstance(outcome, Refusal):
            raise outcome
        return self.message(outcome)

    async def _describe(self, request: web.BaseRequest) -> web.Response:
        _, spec = self._hosting.find(_header(request, OBJECT_HEADER), _header(request, METHOD_HEADER))
        return web.json_response({"concurrent": spec.concurrent, "idempotent": spec.idempotent})


def _header(request: web.BaseRequest, name: str) -> str:
    value = request.headers.get(name)
    if value is None:
        raise Refusal(400, "missing header", f"the header {name} is missing")
    return unquote(value)


def _timeout(request: web.BaseRequest) -> float | None:
    text = request.headers.get(TIMEOUT_HEADER)
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e9:
        raise Refusal(400, "malformed header", f"{TIMEOUT_HEADER}={text!r} must be seconds >= 0")
    return seconds
