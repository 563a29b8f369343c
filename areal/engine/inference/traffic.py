"""Generation on servers across weight updates: parts are sent, frozen, and sent again.

    open ──freeze──► closed: new parts wait; running ones come back (abort) or stay where they are (keep)
      ▲                 │
      └─────thaw────────┘

Aborted parts are parsed before ``freeze`` returns, and none is sent while closed: the version at the time of sending is
the version of every token of a part that bears no stamps. Lives on the loop of ``server_loop``; used by ``remote``.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from areal.engine.inference.http_client import (
    ServerRefusedError,
    ServerTimeoutError,
    ServerUnavailableError,
    pause_before_retry,
)
from areal.engine.inference.protocol import ReplyError
from areal.engine.inference.request_parts import Ask, PartedRequest, check_reply
from areal.utils import logging
from areal.utils.errors import ArealError, EngineError, WaitTimeoutError

if TYPE_CHECKING:
    from areal.api.config.rollout import InferenceEngineConfig
    from areal.api.io_struct import ModelResponse
    from areal.engine.inference.protocol import GenerationPart, ServerProtocol
    from areal.engine.inference.server_pool import Server, ServerPool

T = TypeVar("T")

logger = logging.getLogger("RemoteSampler")

_BETWEEN_S = 10.0  # pause before a call is tried again, at most
_LOOK_S = 0.1  # between looks for a healthy server
_ABORT_S = 5.0  # limit of the call that ends a request which nobody waits for
_MOST_FRUITLESS = 12  # aborts in a row without progress that end a request


class StarvedRequestError(ArealError, RuntimeError):
    """A request was aborted again and again without progress."""


class StaleServerError(EngineError):
    """A server lacks the weights or the adapter that it was given: it was started again behind our back."""


@dataclass(frozen=True)
class Waits:
    """Limits of the waits around generation.

    Attributes:
        request_s: for a closed gate.
        control_s: of one attempt of a call that is answered at once (pause, resume, abort, health).
        attempts: of one request; more if there are more servers.
        grace_s: pause after freezing.
        straggler_s: after a freeze, for replies, before what is left is aborted by name.
        give_up_s: from then on, before it is given up and sent anew.
        protected_s: for parts that a freeze must not cut.
        fruitless: aborts in a row after which a part is protected.
        slice_tokens: of a protected part.
    """

    request_s: float
    attempts: int
    control_s: float = 60.0
    grace_s: float = 0.0
    straggler_s: float = 1.0
    give_up_s: float = 3.0
    protected_s: float = 30.0
    fruitless: int = 3
    slice_tokens: int = 16

    @classmethod
    def of(cls, config: InferenceEngineConfig) -> Waits:
        """What the ``rollout`` section says."""
        return cls(
            request_s=config.request_timeout,
            attempts=config.request_retries,
            control_s=config.control_timeout,
            grace_s=config.pause_grace_period,
        )

    def change_s(self, attempts: int) -> float:
        """Limit of freezing or thawing: two calls to each server, and the waits for replies."""
        calls_s = 2 * attempts * (self.control_s + _BETWEEN_S)
        return calls_s + self.grace_s + self.protected_s + self.straggler_s + 2 * self.give_up_s


@dataclass(eq=False)
class _Sent:
    """A part on its way."""

    rid: str
    server: Server
    ask: Ask
    version: int
    exchanges: int
    freezes: int
    protected: bool
    reply: asyncio.Task[Any]
    read: asyncio.Future[None]  # done when nothing more will come of it
    given_up: bool = False


async def together(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results; the first exception ends the others and is raised."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        raise


class Traffic:
    """Generates on the servers of ``pool``.

    Args:
        keep: servers keep running requests through a freeze.
        vocab_size: replies with other ids are refused.
    """

    def __init__(
        self, protocol: ServerProtocol, pool: ServerPool, waits: Waits, *, keep: bool, vocab_size: int
    ) -> None:
        self.protocol, self.pool, self.waits, self.keep = protocol, pool, waits, keep
        self.version = 0
        self._vocab_size = vocab_size
        self._gate = asyncio.Event()
        self._gate.set()
        self._sent: set[_Sent] = set()
        self._numbers = itertools.count()
        self._exchanges = 0  # of weights
        self._adapter = ""  # that requests ask for; empty: none
        self._freezes = 0
        self._aborts: set[asyncio.Task[None]] = set()

    @property
    def frozen(self) -> bool:
        """Whether servers are, or may be, frozen."""
        return not self._gate.is_set()

    async def generate(self, request: PartedRequest) -> ModelResponse:
        """Send parts until the request is complete; cancelling it aborts it on its server.

        Raises:
            ServerUnavailableError: no server answered.
            ServerRefusedError: a server says that the request is wrong.
            StaleServerError: a server has lost the weights or the adapter that it was given.
            ReplyError: a reply cannot be used.
            StarvedRequestError: aborted too often in a row.
        """
        while True:
            await self._pass_gate()
            sent = self._send(request)
            try:
                part = await self._receive(sent)
            except ServerUnavailableError as exc:
                await self._failed(request, sent, exc)
                continue
            if part is None:
                request.lost()
            elif request.take(sent.ask, part, sent.version):
                return request.respond()
            if request.fruitless:
                await self._fruitless(request, sent)

    async def freeze(self) -> None:
        """Close the gate and freeze every server; returns when every aborted reply is parsed, or (keep) at once.

        Raises:
            ServerUnavailableError, ServerRefusedError: a server did not freeze.
        """
        self._gate.clear()
        self._freezes += 1
        await self._replies([sent for sent in self._sent if sent.protected], self.waits.protected_s)
        await self.everywhere(self.protocol.pause(self.keep))
        if self.waits.grace_s:
            await asyncio.sleep(self.waits.grace_s)
        if not self.keep:
            await self._collect()

    async def thaw(self) -> None:
        """Let every server go on and open the gate."""
        await self.everywhere(self.protocol.resume())
        self._gate.set()

    def exchanged(self, version: int, adapter: str = "") -> None:
        """Servers generate with other weights from here on, or requests ask for another adapter; they are frozen."""
        self._exchanges += 1
        self.version, self._adapter = version, adapter

    async def everywhere(self, calls: Sequence[Any]) -> None:
        """Make control calls, in order on each server, on all servers at once."""

        async def on(server: Server) -> None:
            for call in calls:
                await server.http.send(call, timeout_s=self.waits.control_s)

        await together(on(server) for server in self.pool.servers)

    async def close(self) -> None:
        """Wait a little for aborts that are under way."""
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=1.0)

    async def _pass_gate(self) -> None:
        if self._gate.is_set():
            return
        try:
            async with asyncio.timeout(self.waits.request_s):
                while not self._gate.is_set():  # it may close again before this task runs
                    await self._gate.wait()
        except TimeoutError as exc:
            raise WaitTimeoutError(
                f"generation was paused for {self.waits.request_s:g} s (rollout.request_timeout): who paused it?"
            ) from exc

    def _send(self, request: PartedRequest) -> _Sent:
        """Send the next part; no other task runs between the gate and here."""
        protected = not self.keep and request.fruitless >= self.waits.fruitless
        rid = f"{request.request.rid}.{next(self._numbers)}"
        ask = request.ask(rid, self.waits.slice_tokens if protected else None)
        server = self.pool.pick(request.request.rid)
        call = self.protocol.generate(ask.request, ask.request.gconfig, ask.seed)
        if self._adapter:
            call = self.protocol.with_adapter(call, self._adapter)
        reply = asyncio.create_task(server.http.send(call, attempts=1, fresh=request.failures > 0))
        read = asyncio.get_running_loop().create_future()
        sent = _Sent(rid, server, ask, self.version, self._exchanges, self._freezes, protected, reply, read)
        self._sent.add(sent)
        server.in_flight += 1
        return sent

    async def _receive(self, sent: _Sent) -> GenerationPart | None:
        """The reply, checked; None if it was given up during a freeze."""
        try:
            part = self._parse(await sent.reply, sent)
            self.pool.worked(sent.server)
            return part
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if sent.given_up and task is not None and not task.cancelling():
                return None
            self._abort(sent)
            raise
        except ServerTimeoutError:
            self._abort(sent)
            raise
        except ServerRefusedError as exc:
            if self._adapter and self._adapter in str(exc):
                raise StaleServerError(
                    f"{sent.server.address} has lost adapter {self._adapter}, which it was given (started again?): "
                    f"{exc}"
                ) from exc
            raise
        except ReplyError as exc:
            self.pool.failed(sent.server, exc)
            raise
        finally:
            self._sent.discard(sent)
            sent.server.in_flight -= 1
            if not sent.read.done():
                sent.read.set_result(None)

    def _parse(self, reply: Any, sent: _Sent) -> GenerationPart:
        where = f"{sent.server.address} answered request {sent.rid}"
        if not isinstance(reply, dict | list):
            raise ReplyError(f"{where} with {str(reply)[:200]!r}, not with a JSON object")
        try:
            part = self.protocol.parse(reply)
        except ReplyError as exc:
            raise ReplyError(f"{where}: {exc}") from exc
        check_reply(part, sent.ask, self._vocab_size, where)
        if part.versions and min(part.versions) < min(sent.version, self.version):
            raise StaleServerError(
                f"{where} with weights v{min(part.versions)}, but v{sent.version} was in service when it was sent: the "
                "server has lost the weights that it was given"
            )
        if part.versions is None and part.tokens and self.protocol.capabilities.stamps:
            raise StaleServerError(
                f"{where} without a version, but it was told v{sent.version}: it was started again and has lost the "
                "weights that it was given"
            )
        if part.versions is None and part.tokens and sent.exchanges != self._exchanges:
            raise ReplyError(f"{where} across a weight update without saying which version drew which token")
        return part

    async def _failed(self, request: PartedRequest, sent: _Sent, error: ServerUnavailableError) -> None:
        """Note a failed sending; returns when the next one is due: while no server is healthy, none is."""
        self.pool.failed(sent.server, error)
        request.failures += 1
        if request.failures >= max(self.waits.attempts, len(self.pool.servers)):
            raise error
        if not self.pool.healthy:
            await asyncio.sleep(pause_before_retry(request.failures - 1))
        deadline = time.monotonic() + self.waits.request_s
        while not self.pool.healthy:  # until ``server_health`` finds one, or gives the servers up
            if time.monotonic() > deadline:
                raise error
            await asyncio.sleep(_LOOK_S)

    async def _fruitless(self, request: PartedRequest, sent: _Sent) -> None:
        """After an abort that added nothing."""
        if request.fruitless >= _MOST_FRUITLESS:
            raise StarvedRequestError(
                f"request {request.request.rid} was aborted {request.fruitless} times in a row without progress; use "
                "rollout.on_weight_update=keep where the backend can, or shorter answers (with frequency_penalty an "
                "aborted answer starts over)"
            )
        if sent.freezes == self._freezes:  # the server did it by itself
            await asyncio.sleep(pause_before_retry(request.fruitless - 1))

    async def _collect(self) -> None:
        """Have every part that is on its way come back: by itself, by name, or not at all.

        Long answers take their time to travel, so patience ends only when nothing came back for a while.
        """
        await self._replies(list(self._sent), self.waits.straggler_s)
        late = list(self._sent)
        for sent in late:  # reached the server after it froze: it waits there for the end of the pause
            self._abort(sent)
        deadline = time.monotonic() + self.waits.control_s
        while waiting := [sent for sent in late if not sent.read.done()]:
            limit_s = min(self.waits.give_up_s, deadline - time.monotonic())
            await self._replies(waiting, limit_s, any_of_them=True)
            if not any(sent.read.done() for sent in waiting):
                break
        for sent in waiting:
            logger.warning(f"{sent.server.address}: request {sent.rid} does not come back; it will be sent again")
            sent.given_up = True
            sent.reply.cancel()
        await self._replies(late, self.waits.give_up_s)

    async def _replies(self, parts: Sequence[_Sent], limit_s: float, *, any_of_them: bool = False) -> None:
        """Wait until replies are read, all or the next one."""
        waiting = [sent.read for sent in parts if not sent.read.done()]
        if waiting:
            until = asyncio.FIRST_COMPLETED if any_of_them else asyncio.ALL_COMPLETED
            await asyncio.wait(waiting, timeout=max(0.0, limit_s), return_when=until)

    def _abort(self, sent: _Sent) -> None:
        """End a request on its server, beside everything else."""

        async def call() -> None:
            try:
                await sent.server.http.send(self.protocol.abort(sent.rid), attempts=1, timeout_s=_ABORT_S)
            except (ArealError, OSError) as exc:
                logger.debug(f"{sent.server.address}: request {sent.rid} was not aborted: {exc}")

        task = asyncio.create_task(call())
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)
