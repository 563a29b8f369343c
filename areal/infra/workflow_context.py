"""Who am I: the episode that the running code belongs to, and the per-thread HTTP sessions it may use.

The rollout executor sets the context around each sample. Workflows read it (:func:`get`, :func:`stat_scope`); inference
engines call :func:`prepare_request` before and :func:`note_response` after each generation, which gives every request
its seed and admission order and records why it stopped.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from areal.utils.seeding import derive_seed

if TYPE_CHECKING:
    import aiohttp
    import httpx

    from areal.api.io_struct import ModelRequest, ModelResponse


@dataclass
class EpisodeContext:
    """Coordinates of one sample, and what its engine calls reported.

    Attributes:
        epoch, row, sample: pass over the data, dataset index, place in the row's group.
        position: place of the row in its epoch's order, which is the order of admission; None means ``row``.
        turn: generations asked for so far.
        run_seed: seed of the run.
        stop_reasons: why each finished generation stopped, in order of completion.
        on_request: called once, when the first request is made; the executor waits for it to admit a batch together.
    """

    epoch: int = 0
    row: int = 0
    sample: int = 0
    position: int | None = None
    turn: int = 0
    run_seed: int = 1
    stop_reasons: list[str] = field(default_factory=list)
    on_request: Callable[[], None] | None = None


@dataclass
class WorkflowContext:
    """What a workflow may know about where it runs."""

    is_eval: bool = False
    task_id: int | None = None
    episode: EpisodeContext | None = None


_current: ContextVar[WorkflowContext | None] = ContextVar("areal_workflow_context", default=None)


def get() -> WorkflowContext:
    """The current context; a fresh default outside an episode."""
    context = _current.get()
    return WorkflowContext() if context is None else context


def set(context: WorkflowContext) -> None:  # public 1.x name; shadows the builtin here only
    """Make ``context`` current for this task and the tasks it starts."""
    _current.set(context)


def stat_scope() -> str:
    """Name of the stats tracker that the running episode records into."""
    return "eval-rollout" if get().is_eval else "rollout"


def prepare_request(req: ModelRequest) -> ModelRequest:
    """Fill seed and admission order from the running episode, unless the request names them; counts a turn."""
    episode = get().episode
    if episode is None:
        return req
    turn, episode.turn = episode.turn, episode.turn + 1
    if req.seed is None:
        req.seed = derive_seed(episode.run_seed, episode.epoch, episode.row, episode.sample, turn)
    if not req.order:
        place = episode.row if episode.position is None else episode.position
        req.order = (episode.epoch, place, episode.sample, turn)
    if episode.on_request is not None:
        notify, episode.on_request = episode.on_request, None
        notify()
    return req


def note_response(response: ModelResponse) -> None:
    """Record why a generation of the running episode stopped."""
    episode = get().episode
    if episode is not None:
        episode.stop_reasons.append(response.stop_reason)


class _Sessions(threading.local):
    """HTTP clients of one thread, with the loop they belong to."""

    aiohttp: tuple[asyncio.AbstractEventLoop, aiohttp.ClientSession] | None = None
    httpx: tuple[asyncio.AbstractEventLoop, httpx.AsyncClient] | None = None


_sessions = _Sessions()


async def get_aiohttp_session() -> aiohttp.ClientSession:
    """This thread's session; a new one when the event loop changed. Closed when the loop shuts down."""
    import aiohttp

    loop = asyncio.get_running_loop()
    held = _sessions.aiohttp
    if held is None or held[0] is not loop or held[1].closed:
        session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        held = _sessions.aiohttp = (loop, session)
        await _close_at_shutdown(session.close)
    return held[1]


async def get_httpx_client() -> httpx.AsyncClient:
    """This thread's client; a new one when the event loop changed. Closed when the loop shuts down."""
    import httpx

    loop = asyncio.get_running_loop()
    held = _sessions.httpx
    if held is None or held[0] is not loop or held[1].is_closed:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        client = httpx.AsyncClient(limits=limits, timeout=httpx.Timeout(None))
        held = _sessions.httpx = (loop, client)
        await _close_at_shutdown(client.aclose)
    return held[1]


_guards: dict[int, Any] = {}


async def _close_at_shutdown(close: Callable[[], Any]) -> None:
    """Have the running loop's ``shutdown_asyncgens`` close a session: a suspended generator is finalised by it."""

    async def guard() -> Any:
        try:
            yield
        finally:
            _guards.pop(key, None)
            await close()

    generator = guard()
    key = id(generator)
    _guards[key] = (
        generator  # nobody else holds it; without this it would be collected, and the session closed, at once
    )
    await anext(generator)
