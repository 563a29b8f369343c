"""Which of several equal servers gets the next request, and which are out of service.

A request id stays with its server (caches there know it); others go where least is in flight. A server that failed gets
nothing until its health call answers. Lives on the event loop of its connections; used by ``remote``.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from areal.engine.inference.http_client import ServerHttp
from areal.utils import logging

logger = logging.getLogger("RemoteSampler")

_STICKY = 128  # most recent request ids that keep their server


@dataclass(eq=False)
class Server:
    """One server.

    Attributes:
        position: in the list of addresses.
        in_flight: requests that were sent and not answered.
        healthy: whether new requests go there.
    """

    http: ServerHttp
    position: int
    in_flight: int = 0
    healthy: bool = True

    @property
    def address(self) -> str:
        """``host:port``."""
        return self.http.address


@dataclass
class ServerPool:
    """The servers of one sampler.

    Attributes:
        failing_since: when the first failure happened after which nothing worked; None: the last request worked.
        failures: requests that failed since.
    """

    servers: Sequence[Server]
    failing_since: float | None = None
    failures: int = 0
    _homes: OrderedDict[str, Server] = field(default_factory=OrderedDict)
    _turn: int = 0

    @property
    def addresses(self) -> str:
        """Of all, for messages."""
        return ", ".join(server.address for server in self.servers)

    @property
    def healthy(self) -> bool:
        """Whether there is one that gets requests."""
        return any(server.healthy for server in self.servers)

    def pick(self, rid: str) -> Server:
        """The server for ``rid``: the one that it had, else the healthy one with least in flight."""
        home = self._homes.get(rid)
        if home is None or not home.healthy:
            usable = [server for server in self.servers if server.healthy] or list(self.servers)
            count = len(self.servers)
            home = min(usable, key=lambda s: (s.in_flight, (s.position - self._turn) % count))
            self._turn = home.position + 1  # equal ones take turns
        self._homes[rid] = home
        self._homes.move_to_end(rid)
        if len(self._homes) > _STICKY:
            self._homes.popitem(last=False)
        return home

    def worked(self, server: Server) -> None:
        """A request was answered."""
        self.failing_since, self.failures = None, 0
        self.recovered(server)

    def failed(self, server: Server, error: BaseException) -> None:
        """A request failed: the server gets no more until it is healthy."""
        if self.failing_since is None:
            self.failing_since = time.monotonic()
        self.failures += 1
        if server.healthy:
            server.healthy = False
            logger.warning(f"server {server.address} gets no requests until it is healthy: {error}")

    def recovered(self, server: Server) -> None:
        """The server answers again."""
        if not server.healthy:
            server.healthy = True
            logger.info(f"server {server.address} is healthy again")
