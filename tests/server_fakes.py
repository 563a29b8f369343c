"""A scripted inference server, in the reply formats of the real ones, and the tiny protocol of its own.

``FakeServer`` runs on a thread of its own. Its "model" draws token and log-prob from (prefix, seed, version), so a test
can say what any part must be. Faults are served once each, in order. ``dialect``: ``fake``, ``sglang`` or ``vllm``.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from areal.api.config.rollout import GenerationHyperparameters, InferenceEngineConfig
from areal.api.io_struct import ModelRequest, ModelResponse
from areal.engine.core.weight_sources import DiskSource, WeightGroup, WeightSource, XcclSource
from areal.engine.core.weight_sync import ParamRecord
from areal.engine.inference.protocol import Capabilities, GenerationPart, ReplyError, ServerCall, ServerProtocol
from areal.engine.inference.remote import RemoteSampler
from areal.engine.inference.traffic import Waits
from areal.engine.native.requests import Limits
from areal.utils.errors import WeightSyncError
from tests.server_dialects import DIALECTS, Asked, Job

VOCAB = 64
CONTEXT = 256
_TICK_S = 0.002


def draw(prefix: Sequence[int], seed: int | None, version: int) -> tuple[int, float]:
    """Token (never 0 or 1) and log-prob after ``prefix``."""
    mixed = zlib.crc32(repr((list(prefix), seed, version)).encode())
    return 2 + mixed % (VOCAB - 2), -0.1 - (mixed % 1000) / 500


@dataclass
class Fault:
    """What goes wrong with one call.

    Attributes:
        kind: ``status``, ``html``, ``truncated``, ``cut`` (connection ends inside the body), ``drop`` (it ends without
            an answer), ``stall``, ``abort`` (by the server itself) or ``edit``.
        status, body: of ``status``.
        after: tokens drawn before ``abort``.
        edit: changes the reply.
    """

    kind: str
    status: int = 500
    body: str = "Internal Server Error"
    after: int = 0
    edit: Callable[[dict[str, Any]], Any] | None = None


class FakeServer:
    """One server.

    Args:
        dialect: reply formats and paths.
        token_s: time of one token.
        model: ``(prefix, seed, version) -> (token, logprob)``.
        decode: text of tokens, for stop strings.
        stamps: replies say which version drew each token.
    """

    def __init__(
        self,
        dialect: str = "fake",
        *,
        token_s: float = 0.0,
        model: Callable[[Sequence[int], int | None, int], tuple[int, float]] = draw,
        decode: Callable[[list[int]], str] | None = None,
        stamps: bool = True,
    ) -> None:
        self.token_s, self.model, self.decode, self.stamps = token_s, model, decode, stamps
        self.dialect = DIALECTS[dialect](self)
        self.version = 0
        self.staged: int | None = None
        self.paused = False
        self.healthy = True
        self.arrival_s = 0.0  # from the call to the job
        self.answer_s: deque[float] = deque()  # from the end of each job to its reply, in the order in which they end
        self.deaf = False  # to aborts by name
        self.jobs: dict[str, Job] = {}
        self.log: list[tuple[str, Any]] = []
        self.connections: set[Any] = set()
        self.authorizations: list[str | None] = []
        self.faults: dict[str, deque[Fault]] = {}
        self.replies: dict[str, Callable[[Any], Any]] = {}
        self.port = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._ready = threading.Event()
        self._end: asyncio.Event | None = None

    # -- life ----------------------------------------------------------------------------------------------------------

    def start(self) -> FakeServer:
        """Listen, on the port of the last time."""
        self._ready.clear()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="fake-server", daemon=True)
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def stop(self) -> None:
        """Stop listening; connections end at once."""
        if self._thread is None or self._loop is None or self._end is None:
            return
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(10)
        assert not self._thread.is_alive()
        self._thread = None

    async def _serve(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._end.wait()
        self.jobs.clear()
        for transport in self.connections:
            transport.abort()
        await runner.cleanup()

    @property
    def address(self) -> str:
        """``host:port``."""
        return f"127.0.0.1:{self.port}"

    # -- for tests -----------------------------------------------------------------------------------------------------

    def fail_next(self, *faults: Fault, path: str | None = None) -> None:
        """The next calls to ``path`` (default: generation) go wrong in this way."""
        self.faults.setdefault(path or self.dialect.generate_path, deque()).extend(faults)

    def reply_to(self, path: str, make: Callable[[Any], Any]) -> None:
        """Have ``make(body)`` answer a path."""
        self.replies[path] = make

    def calls(self, path: str | None = None) -> list[Any]:
        """Bodies of the calls to ``path`` (default: generation) so far."""
        return [body for called, body in list(self.log) if called == (path or self.dialect.generate_path)]

    def wait_for(self, condition: Callable[[FakeServer], bool], limit_s: float = 30.0) -> None:
        """Until ``condition(server)``."""
        wait_until(lambda: condition(self), limit_s)

    def open_connections(self) -> int:
        """Connections that are open."""
        return sum(not transport.is_closing() for transport in list(self.connections))

    # -- service -------------------------------------------------------------------------------------------------------

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        transport = request.transport
        self.connections.add(transport)
        self.authorizations.append(request.headers.get("Authorization"))
        text = await request.text()
        body = json.loads(text) if text else dict(request.query)
        self.log.append((request.path, body))
        waiting = self.faults.get(request.path)
        fault = waiting.popleft() if waiting else None
        if fault is not None and fault.kind not in ("abort", "edit"):
            return await self._broken(request, fault)
        if request.path in self.replies:
            reply = self.replies[request.path](body)
        elif request.path == self.dialect.generate_path:
            reply = await self._generate(self.dialect.read(body), fault)
        else:
            reply = self.dialect.control(request.path, {**request.query, **(body or {})})
        if isinstance(reply, web.Response):
            return reply
        if fault is not None and fault.edit is not None:
            changed = fault.edit(reply)
            reply = reply if changed is None else changed
        return web.Response(text=json.dumps(reply), content_type="application/json")

    async def _broken(self, request: web.Request, fault: Fault) -> web.StreamResponse:
        if fault.kind == "status":
            return web.Response(status=fault.status, text=fault.body)
        if fault.kind == "html":
            return web.Response(text="<html><body>nginx: welcome</body></html>", content_type="text/html")
        if fault.kind == "truncated":
            return web.Response(text='{"tokens": [3, 4', content_type="application/json")
        if fault.kind == "stall":
            await asyncio.sleep(3600)
        if fault.kind == "cut":
            response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": "1000"})
            await response.prepare(request)
            await response.write(b'{"tokens": [3, 4')
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async def _generate(self, asked: Asked, fault: Fault | None) -> dict[str, Any]:
        if self.arrival_s:
            await asyncio.sleep(self.arrival_s)
        job = Job(asked)
        if fault is not None and fault.kind == "abort":
            job.abort_after = fault.after
        self.jobs[asked.rid] = job
        try:
            while len(job.tokens) < asked.most and not self._ended(job):
                if self.paused:
                    await asyncio.sleep(_TICK_S)
                    continue
                if self.token_s:
                    await asyncio.sleep(self.token_s)
                    if self.paused or job.aborted:
                        continue
                self._draw(job)
        finally:
            self.jobs.pop(asked.rid, None)
        if self.answer_s:
            await asyncio.sleep(self.answer_s.popleft())
        return self.dialect.write(job)

    def _ended(self, job: Job) -> bool:
        asked = job.asked
        if job.aborted or job.abort_after == len(job.tokens):
            job.reason = "abort"
        elif job.tokens and len(job.tokens) >= asked.least:
            text = self.decode(job.tokens) if self.decode else ""
            if job.tokens[-1] in asked.stop_ids or any(s in text for s in asked.stop):
                job.reason = "stop"
        return job.reason != "length"

    def _draw(self, job: Job) -> None:
        asked = job.asked
        token, logprob = self.model(asked.ids + job.tokens, asked.seed, self.version)
        while token in asked.stop_ids and len(job.tokens) + 1 < asked.least:
            token = 2 + (token - 1) % (VOCAB - 2)
        job.tokens.append(token)
        job.logprobs.append(logprob)
        job.versions.append(self.version)

    def pause(self, mode: str) -> None:
        """Freeze; ``abort`` ends what runs, not what comes later."""
        self.paused = True
        if mode == "abort":
            for job in self.jobs.values():
                job.aborted = True

    def abort(self, rid: str) -> None:
        """End one job."""
        if rid in self.jobs and not self.deaf:
            self.jobs[rid].aborted = True


class FakeProtocol(ServerProtocol):
    """Speaks the ``fake`` dialect.

    Args:
        keeps, seeds, at_once: capabilities.
    """

    name = "fake"
    capabilities = Capabilities(keeps_requests=True, weight_modes=("disk",), seeds=True)
    endpoints = ()

    def __init__(self, *, keeps: bool = True, seeds: bool = True, at_once: bool = False, token: str = "") -> None:
        refusals = {"use_beam_search": "fake servers sample; use vllm"}
        self.capabilities = Capabilities(keeps, ("disk",), seeds, refusals, at_once)  # type: ignore[misc]
        self.token = token
        self.stage_s: float | None = 60.0
        self.stage_once = True

    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    def stamp(self, version: int) -> list[ServerCall]:
        return [ServerCall("POST", "/stamp", {"version": version})]

    def health(self) -> ServerCall:
        return ServerCall("GET", "/health", timeout_s=10.0)

    def generate(self, req: ModelRequest, gconfig: GenerationHyperparameters, seed: int | None) -> ServerCall:
        body = {
            "ids": req.input_ids,
            "most": gconfig.max_new_tokens,
            "least": gconfig.min_new_tokens,
            "seed": seed,
            "rid": req.rid,
            "stop_ids": gconfig.stop_token_ids,
            "stop": gconfig.stop or [],
        }
        return ServerCall("POST", "/gen", body)

    def parse(self, reply: Any) -> GenerationPart:
        try:
            return GenerationPart(reply["tokens"], reply["logprobs"], reply["reason"], reply.get("versions"))
        except (KeyError, TypeError) as exc:
            raise ReplyError(f"field {exc} is missing") from exc

    def abort(self, rid: str) -> ServerCall:
        return ServerCall("POST", "/abort", {"rid": rid})

    def pause(self, keep: bool) -> list[ServerCall]:
        return [ServerCall("POST", "/pause", {"mode": "keep" if keep else "abort"})]

    def resume(self) -> list[ServerCall]:
        return [ServerCall("POST", "/resume", {})]

    def join_group(self, group: WeightGroup) -> list[ServerCall]:
        return [ServerCall("POST", "/join", {"name": group.name, "rank": group.rank}, group.timeout_s, once=True)]

    def leave_group(self, group: WeightGroup) -> list[ServerCall]:
        return [ServerCall("POST", "/leave", {"name": group.name, "rank": group.rank})]

    def stage(self, source: WeightSource, version: int) -> list[ServerCall]:
        rank = source.group.rank if isinstance(source, XcclSource) else None
        body = {"version": version, "rank": rank}
        return [ServerCall("POST", "/stage", body, self.stage_s, once=self.stage_once)]

    def records(self, replies: Sequence[Any]) -> list[list[ParamRecord]] | None:
        if "error" in replies[0]:
            raise WeightSyncError(replies[0]["error"])
        found = replies[0].get("records")
        return None if found is None else [[ParamRecord(n, tuple(s), d, c) for n, s, d, c in rank] for rank in found]

    def commit(self, version: int) -> list[ServerCall]:
        return [ServerCall("POST", "/commit", {"version": version}, once=True)]

    def discard(self) -> list[ServerCall]:
        return [ServerCall("POST", "/discard", {})]

    def confirm(self, replies: Sequence[Any]) -> None:
        for reply in replies:
            if "error" in reply:
                raise WeightSyncError(reply["error"])


def limits(max_seq_len: int = CONTEXT) -> Limits:
    """Of the fake model."""
    return Limits(VOCAB, max_seq_len, frozenset({1}))


def remote_config(**settings: Any) -> InferenceEngineConfig:
    """Short limits, unless told otherwise."""
    return InferenceEngineConfig(
        **{"backend": "native:d1", "setup_timeout": 30.0, "request_timeout": 60.0, "request_retries": 2, **settings}
    )


def quick_waits(**settings: Any) -> Waits:
    """Limits that let a test of a limit be short."""
    usual = {"request_s": 30.0, "attempts": 2, "control_s": 30.0, "straggler_s": 0.3, "give_up_s": 0.3}
    return Waits(**{**usual, "protected_s": 2.0, **settings})


@contextmanager
def serving(*servers: FakeServer) -> Iterator[None]:
    """The servers run inside the block."""
    try:
        for server in servers:
            server.start()
        yield
    finally:
        for server in servers:
            server.stop()


@contextmanager
def sampling(
    *servers: FakeServer,
    protocol: ServerProtocol | None = None,
    config: InferenceEngineConfig | None = None,
    waits: Waits | None = None,
    **arguments: Any,
) -> Iterator[RemoteSampler]:
    """Started servers, and a started sampler over them."""
    with serving(*servers):
        sampler = RemoteSampler(
            protocol or FakeProtocol(),
            [server.address for server in servers],
            config or remote_config(),
            arguments.pop("limits", limits()),
            waits=waits or quick_waits(),
            **arguments,
        )
        try:
            sampler.start()
            yield sampler
        finally:
            sampler.stop()


def ask(
    ids: Sequence[int] = (5, 6, 7), *, seed: int | None = 1, rid: str | None = None, **settings: Any
) -> ModelRequest:
    """A request."""
    request = ModelRequest(input_ids=list(ids), gconfig=GenerationHyperparameters(**settings), seed=seed)
    if rid is not None:
        request.rid = rid
    return request


def wait_until(condition: Callable[[], bool], limit_s: float = 30.0) -> None:
    """Poll until the condition holds; fails after the limit."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(_TICK_S)


def begin(sampler: RemoteSampler, request: ModelRequest) -> Future[ModelResponse]:
    """A generation that runs beside the test; its ``stop()`` cancels it."""
    loop = asyncio.new_event_loop()
    task = loop.create_task(sampler.agenerate(request))
    future: Future[ModelResponse] = Future()

    def finish() -> None:
        try:
            future.set_result(loop.run_until_complete(task))
        except (Exception, asyncio.CancelledError) as exc:  # noqa: BLE001 - handed to the test
            future.set_exception(exc)
        loop.close()

    future.stop = lambda: loop.call_soon_threadsafe(task.cancel)  # type: ignore[attr-defined]
    threading.Thread(target=finish, daemon=True).start()
    return future


def generate(sampler: RemoteSampler, request: ModelRequest, limit_s: float = 30.0) -> ModelResponse:
    """A generation, waited for."""
    return begin(sampler, request).result(limit_s)


def update(sampler: RemoteSampler, version: int) -> None:
    """What the weight updater does with a server that receives while it is paused."""
    sampler.pause()
    try:
        sampler.stage_source(DiskSource(version, "/nowhere"), version)
        sampler.commit_weights(version)
        sampler.set_version(version)
    finally:
        sampler.resume()


def expected(prompt: Sequence[int], parts: Sequence[tuple[int, int | None, int]]) -> tuple[list[Any], ...]:
    """Tokens, log-probs and versions of parts ``(tokens, seed, version)``."""
    prefix, logprobs, versions = list(prompt), [], []
    for count, seed, version in parts:
        for _ in range(count):
            token, logprob = draw(prefix, seed, version)
            prefix.append(token)
            logprobs.append(logprob)
            versions.append(version)
    return prefix[len(prompt) :], logprobs, versions


def outcome(response: ModelResponse) -> tuple[list[Any], ...]:
    """Tokens, log-probs and versions."""
    return response.output_tokens, response.output_logprobs, response.output_versions
