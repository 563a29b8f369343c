"""Weight calls to the servers of one sampler: stage, commit, discard, join and leave groups.

The calls come from a :class:`ServerProtocol`; all servers are told at once, each in order, and the first that fails
ends the wait. What may have left servers with different weights fails the sampler, so that its owner starts it again.
Used by ``remote``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from areal.engine.core.weight_sources import XcclSource
from areal.engine.inference.http_client import ServerRefusedError
from areal.engine.inference.protocol import ReplyError, ServerCall
from areal.engine.inference.traffic import together
from areal.utils.errors import EngineError, EngineStoppedError, WeightSyncError

if TYPE_CHECKING:
    from areal.api.config.rollout import InferenceEngineConfig
    from areal.engine.core.weight_sources import WeightGroup, WeightSource
    from areal.engine.core.weight_sync import ParamRecord
    from areal.engine.inference.protocol import ServerProtocol
    from areal.engine.inference.server_loop import ServerLoop
    from areal.engine.inference.server_pool import Server, ServerPool

_BETWEEN_S = 10.0  # pause before a call is tried again, at most


class ServerWeights:
    """Moves weight versions into servers; any thread but the loop's.

    Args:
        config: retries, and the limit of calls that bring none.
        ranks_per_server: ranks that a server takes in a group.
    """

    def __init__(
        self,
        protocol: ServerProtocol,
        pool: ServerPool,
        loop: ServerLoop,
        config: InferenceEngineConfig,
        ranks_per_server: int,
    ) -> None:
        self._protocol, self._pool, self._loop = protocol, pool, loop
        self._attempts, self._usual_s = config.request_retries, config.request_timeout
        self._ranks_per_server = ranks_per_server
        self._staged = False

    @property
    def group_ranks(self) -> int:
        """Ranks that the servers take in a weight group."""
        return self._ranks_per_server * len(self._pool.servers)

    def stage(self, source: WeightSource, version: int) -> list[list[ParamRecord]] | None:
        """See :meth:`RemoteSampler.stage_source`."""
        servers = self._pool.servers
        self._staged = False
        calls = [self._protocol.stage(self._source_for(server, source), version) for server in servers]
        try:
            replies = self._send(f"receiving weights v{version}", calls)
            records = [self._protocol.records(answers) for answers in replies]
        except (ReplyError, WeightSyncError) as exc:
            one_of_many = self._protocol.capabilities.applies_at_once and len(servers) > 1
            if one_of_many or self._protocol.harmed(source, exc.__cause__ or exc):
                self._loop.fail(WeightSyncError(f"a server may hold a mix of weight versions: {exc}"))
            if isinstance(exc, WeightSyncError):
                raise
            raise WeightSyncError(f"{self._pool.addresses}: weights v{version}: {exc}") from exc
        self._staged = True
        found = [rank for ranks in records if ranks is not None for rank in ranks]
        return None if None in records else found

    def commit(self, version: int) -> None:
        """See :meth:`RemoteSampler.commit_weights`."""
        calls = [self._protocol.commit(version) for _ in self._pool.servers]
        try:
            self._confirmed(f"switching to weights v{version}", calls)
        except WeightSyncError as exc:
            self._loop.fail(exc)
            raise
        self._staged = False

    def discard(self) -> None:
        """See :meth:`RemoteSampler.discard_weights`."""
        staged, self._staged = self._staged, False
        if staged and self._protocol.capabilities.applies_at_once:
            self._loop.fail(
                WeightSyncError(
                    f"{self._pool.addresses}: a {self._protocol.name} server has the weights of an update that was "
                    "given up, and cannot go back to the ones before"
                )
            )
            return
        self._confirmed("discarding staged weights", [self._protocol.discard() for _ in self._pool.servers])

    def join(self, group: WeightGroup) -> None:
        """See :meth:`RemoteSampler.join_group`."""
        calls = [self._protocol.join_group(self._group_for(server, group)) for server in self._pool.servers]
        self._confirmed(f"joining weight group {group.name}", calls)

    def leave(self, group: WeightGroup) -> None:
        """See :meth:`RemoteSampler.leave_group`."""
        calls = [self._protocol.leave_group(self._group_for(server, group)) for server in self._pool.servers]
        self._confirmed(f"leaving weight group {group.name}", calls)

    def _group_for(self, server: Server, group: WeightGroup) -> WeightGroup:
        return dataclasses.replace(group, rank=group.rank + server.position * self._ranks_per_server)

    def _source_for(self, server: Server, source: WeightSource) -> WeightSource:
        if isinstance(source, XcclSource):
            return dataclasses.replace(source, group=self._group_for(server, source.group))
        return source

    def _confirmed(self, what: str, per_server: Sequence[Sequence[ServerCall]]) -> None:
        for server, replies in zip(self._pool.servers, self._send(what, per_server), strict=True):
            try:
                self._protocol.confirm(replies)
            except (ReplyError, WeightSyncError) as exc:
                raise WeightSyncError(f"{what}: {server.address}: {exc}") from exc

    def _send(self, what: str, per_server: Sequence[Sequence[ServerCall]]) -> list[list[Any]]:
        """The replies of each server to its calls, up to the first that says it failed: what follows needs it."""

        async def on(server: Server, calls: Sequence[ServerCall]) -> list[Any]:
            replies: list[Any] = []
            for call in calls:
                replies.append(await server.http.send(call))
                try:
                    self._protocol.confirm(replies[-1:])
                except (ReplyError, WeightSyncError):  # raised by whoever reads the replies
                    break
            return replies

        async def work() -> list[list[Any]]:
            pairs = zip(self._pool.servers, per_server, strict=True)
            return await together(on(server, calls) for server, calls in pairs)

        try:
            return self._loop.run(what, self._limit_s(per_server), work)
        except EngineStoppedError:
            raise  # lost for good: not a failed update of a sampler that goes on
        except (EngineError, ServerRefusedError, TimeoutError) as exc:
            raise WeightSyncError(f"{what} failed: {exc}") from exc

    def _limit_s(self, per_server: Sequence[Sequence[ServerCall]]) -> float:
        """Of the whole: what the calls of the slowest server may take, every try included."""

        def one(call: ServerCall) -> float:
            return (1 if call.once else self._attempts) * ((call.timeout_s or self._usual_s) + _BETWEEN_S)

        return 1.0 + max((sum(map(one, calls)) for calls in per_server), default=0.0)
