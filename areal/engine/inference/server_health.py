"""Are the servers there? Waits for them at the start, and looks after them until the end.

A server that we started and that ended, or servers for which nothing has worked for long, fail the sampler; a server
that answers its health call again gets requests again. Lives on the loop of ``server_loop``; used by ``remote``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from areal.engine.inference.http_client import ServerRefusedError, ServerUnavailableError
from areal.engine.inference.protocol import ReplyError
from areal.engine.inference.traffic import together
from areal.utils.errors import EngineError

if TYPE_CHECKING:
    from areal.engine.inference.protocol import ServerProtocol
    from areal.engine.inference.server_loop import ServerLoop
    from areal.engine.inference.server_pool import Server, ServerPool

_LOOK_S = 0.5  # between looks at servers
_PROBE_S = 10.0  # limit of a health call that brings none
_LEAST_FAILURES = 8  # requests that must have failed in a row before servers that seem healthy count as lost


class ServerHealth:
    """Looks after the servers of ``pool``.

    Args:
        watch: how a server that we started has ended; None while it runs.
        setup_s: limit of the wait for health (``rollout.setup_timeout``).
        paused: whether the servers are frozen now; some do not answer health calls then.
    """

    def __init__(
        self,
        protocol: ServerProtocol,
        pool: ServerPool,
        watch: Callable[[], str | None] | None,
        setup_s: float,
        paused: Callable[[], bool],
    ) -> None:
        self._protocol, self._pool, self._watch, self._paused = protocol, pool, watch, paused
        self._setup_s = setup_s

    async def wait(self) -> None:
        """Until every server is healthy.

        Raises:
            ServerUnavailableError: one was not in time.
            EngineError: one has ended.
        """
        deadline = time.monotonic() + self._setup_s
        await together(self._until_healthy(server, deadline) for server in self._pool.servers)

    async def watch(self, loop: ServerLoop) -> None:
        """Until the end: fail ``loop`` when the servers are lost."""
        while True:
            await asyncio.sleep(_LOOK_S)
            ended = self._ended()
            if ended is not None:
                loop.fail(EngineError(f"the inference server at {self._pool.addresses} ended: {ended}"))
                return
            since, failures = self._pool.failing_since, self._pool.failures
            if since is None or (failures < _LEAST_FAILURES and (self._pool.healthy or self._paused())):
                continue
            lasted_s = time.monotonic() - since
            if lasted_s > self._setup_s:
                loop.fail(
                    EngineError(
                        f"{self._pool.addresses}: the last {failures} requests failed and none has worked for "
                        f"{lasted_s:.0f} s (limit: rollout.setup_timeout)"
                    )
                )
                return

    async def revive(self) -> None:
        """Until the end: have unhealthy servers used again when they answer."""
        while True:
            await asyncio.sleep(_LOOK_S)
            for server in self._pool.servers:
                if not server.healthy and not self._paused() and await self._answers(server):
                    self._pool.recovered(server)

    async def _answers(self, server: Server) -> bool:
        try:
            return await self._problem(server) is None
        except ServerRefusedError:  # what stands before it says that it is not there, or not for us, at the moment
            return False

    async def _until_healthy(self, server: Server, deadline: float) -> None:
        while (problem := await self._problem(server)) is not None:
            ended = self._ended()
            if ended is not None:
                raise EngineError(f"server {server.address} ended before it was healthy: {ended}")
            if time.monotonic() > deadline:
                raise ServerUnavailableError(
                    f"server {server.address} was not healthy within {self._setup_s:g} s (rollout.setup_timeout): "
                    f"{problem}"
                )
            await asyncio.sleep(_LOOK_S)

    async def _problem(self, server: Server) -> BaseException | None:
        """Why the server is not healthy; None if it is.

        Raises:
            ServerRefusedError: the call is wrong, as with a wrong path or token.
        """
        try:
            await server.http.send(self._protocol.health(), attempts=1, timeout_s=min(_PROBE_S, self._setup_s))
        except (ServerUnavailableError, ReplyError) as exc:
            return exc
        return None

    def _ended(self) -> str | None:
        return self._watch() if self._watch is not None else None
