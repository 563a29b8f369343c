"""Whether an inference server can really serve: health, the endpoints that are used, one probe generation.

In: an address, a protocol and, for a server that we started, its process. Out: nothing, or an error that says what is
wrong; with the end of the server's log where there is one. Blocking, on an event loop of its own: it runs before there
is a sampler. Called by ``launch`` and ``server_sampler``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from areal.api.config.rollout import GenerationHyperparameters
from areal.api.io_struct import ModelRequest
from areal.engine.inference.http_client import ServerHttp, ServerRefusedError, ServerUnavailableError
from areal.engine.inference.protocol import ReplyError, ServerCall
from areal.infra.launcher.inference_server import ServerStartError
from areal.utils.errors import EngineError

if TYPE_CHECKING:
    from areal.engine.inference.protocol import ServerProtocol
    from areal.infra.launcher.inference_server import ServerProcess

T = TypeVar("T")

_POLL_S = 0.25
_HEALTH_S = 30.0  # SGLang generates a token to answer
_PROBE_PROMPT = [1]
_PROBE_TOKENS = 2
_ANSWERS = (ServerUnavailableError, ServerRefusedError, ReplyError)


class UnfitServerError(EngineError):
    """A server answers, but cannot be used: an endpoint is missing, or what it generates cannot be read."""


def wait_until_ready(process: ServerProcess, address: str, protocol: ServerProtocol, limit_s: float) -> None:
    """Return when the server of ``process`` serves.

    Raises:
        ServerStartError: it ended, was not ready within ``limit_s`` seconds or is unfit; the message holds its command
            and the end of its log.
    """
    try:
        _run_blocking(lambda: _serving(address, protocol, limit_s, process.ended))
    except (ServerUnavailableError, UnfitServerError) as exc:
        raise ServerStartError(
            f"{process.name} (process {process.pid}) {exc}\ncommand: {' '.join(process.command)}\n"
            f"end of {process.log_path}:\n{process.log_tail()}"
        ) from exc


def check_external(address: str, protocol: ServerProtocol, limit_s: float) -> None:
    """Return when the server that somebody else runs at ``address`` serves.

    One that is paused is resumed: whoever paused it was killed before it could do so.

    Raises:
        ServerUnavailableError: not within ``limit_s`` seconds.
        UnfitServerError: it lacks an endpoint, or its probe failed.
    """
    try:
        _run_blocking(lambda: _serving(address, protocol, limit_s, lambda: None, resume=True))
    except ServerUnavailableError as exc:
        raise ServerUnavailableError(f"server {address} {exc}") from exc
    except UnfitServerError as exc:
        raise UnfitServerError(f"server {address} {exc}") from exc


async def _serving(
    address: str, protocol: ServerProtocol, limit_s: float, ended: Callable[[], str | None], *, resume: bool = False
) -> None:
    deadline = time.monotonic() + limit_s
    http = ServerHttp(address, limit_s, 1, protocol.headers())
    stage = "answers no health check"
    try:
        await _watched(_until_healthy(http, protocol), deadline, ended)
        stage = "is healthy, but does not list its endpoints"
        await _watched(_check_endpoints(http, protocol), deadline, ended)
        if resume:
            stage = "is healthy, but does not resume"
            await _watched(_resume(http, protocol), deadline, ended)
        stage = "is healthy, but does not generate"
        await _watched(_probe(http, protocol), deadline, ended)
    except TimeoutError:
        raise ServerUnavailableError(
            f"{stage} after {limit_s:g} s; raise rollout.setup_timeout or read its log"
        ) from None
    finally:
        await http.close()


async def _watched(work: Coroutine[Any, Any, None], deadline: float, ended: Callable[[], str | None]) -> None:
    """Await ``work`` for as long as the server lives and the time lasts."""
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            how = ended()
            if how is not None:
                raise ServerUnavailableError(f"ended before it served ({how})")
            if time.monotonic() >= deadline:
                raise TimeoutError
            await asyncio.wait([task], timeout=_POLL_S)
        task.result()
    finally:
        task.cancel()


async def _until_healthy(http: ServerHttp, protocol: ServerProtocol) -> None:
    while True:
        try:
            await http.send(protocol.health(), attempts=1, timeout_s=_HEALTH_S)
            return
        except _ANSWERS:
            await asyncio.sleep(_POLL_S)


async def _check_endpoints(http: ServerHttp, protocol: ServerProtocol) -> None:
    if not protocol.endpoints:
        return
    try:
        listed = await http.send(ServerCall("GET", "/openapi.json"))
        found = set(listed["paths"])
    except (*_ANSWERS, TypeError, KeyError) as exc:
        raise UnfitServerError(f"does not list its endpoints at /openapi.json: {exc}") from exc
    missing = [path for path in protocol.endpoints if path not in found]
    if missing:
        raise UnfitServerError(
            f"lacks {', '.join(missing)}; is this a {protocol.name} server of a version that was tested "
            f"(`areal install-server {protocol.name} DIR` installs it), started with the flags that open them?"
        )


async def _resume(http: ServerHttp, protocol: ServerProtocol) -> None:
    try:
        for call in protocol.resume():
            await http.send(call)
    except _ANSWERS as exc:
        raise UnfitServerError(f"is healthy, but does not resume: {exc}") from exc


async def _probe(http: ServerHttp, protocol: ServerProtocol) -> None:
    settings = GenerationHyperparameters(max_new_tokens=_PROBE_TOKENS, greedy=True, ignore_eos=True)
    request = ModelRequest(input_ids=list(_PROBE_PROMPT), gconfig=settings)
    try:
        part = protocol.parse(await http.send(protocol.generate(request, settings, None)))
    except _ANSWERS as exc:
        raise UnfitServerError(f"is healthy, but a probe generation failed: {exc}") from exc
    if len(part.tokens) != _PROBE_TOKENS or len(part.logprobs) != _PROBE_TOKENS:
        raise UnfitServerError(
            f"is healthy, but a probe generation of {_PROBE_TOKENS} tokens returned {len(part.tokens)} tokens and "
            f"{len(part.logprobs)} log-probs"
        )


def _run_blocking(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(make())
    with ThreadPoolExecutor(1) as pool:  # the caller blocks a loop of its own
        return pool.submit(lambda: asyncio.run(make())).result()
