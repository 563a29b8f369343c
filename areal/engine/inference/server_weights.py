"""Weight calls to the servers of one sampler: stage, commit, discard, join and leave groups.

The calls come from a :class:`ServerProtocol`; all servers are told at once, each in order, and the first that fails
ends the wait. What may have left servers with different weights fails the sampler, so that its owner starts it again.
Used by ``remote``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from areal.engine.core.weight_heads import head_names
from areal.engine.core.weight_sources import DiskSource, XcclSource
from areal.engine.inference.http_client import ServerRefusedError
from areal.engine.inference.protocol import ReplyError, ServerCall
from areal.engine.inference.traffic import together
from areal.utils import logging
from areal.utils.errors import ArealError, CheckpointError, EngineError, EngineStoppedError, WeightSyncError

if TYPE_CHECKING:
    from areal.api.config.rollout import InferenceEngineConfig
    from areal.engine.core.weight_heads import ServerHeads
    from areal.engine.core.weight_sources import WeightGroup, WeightSource
    from areal.engine.core.weight_sync import Received
    from areal.engine.inference.protocol import ServerProtocol
    from areal.engine.inference.server_loop import ServerLoop
    from areal.engine.inference.server_pool import Server, ServerPool

logger = logging.getLogger("RemoteSampler")

_BETWEEN_S = 10.0  # pause before a call is tried again, at most
_SLACK_S = 30.0


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
        self._limit_s: float | None = None  # of every step of the update under way
        self._tells = True  # what its weights are, as far as we know
        self._arriving = ""  # adapter that is loaded, but not asked for yet
        self.adapter = ""  # that requests ask for; empty: none

    @property
    def group_ranks(self) -> int:
        """Ranks that the servers take in a weight group."""
        return self._ranks_per_server * len(self._pool.servers)

    def stage(self, source: WeightSource, version: int) -> Received:
        """See :meth:`RemoteSampler.stage_source`."""
        servers = self._pool.servers
        self._staged, self._arriving = False, ""
        self._limit_s = source.timeout_s
        if isinstance(source, DiskSource) and source.adapter and self._protocol.capabilities.named_adapters:
            self._load_adapter(source)
            return None
        if isinstance(source, XcclSource):
            self._limit_s = source.timeout_s + _SLACK_S  # the group's own limit says more
        calls = [self._protocol.stage(self._source_for(server, source), version) for server in servers]
        try:
            replies = self._send(f"receiving weights v{version}", calls, self._limit_s)
            records = [self._protocol.records(answers) for answers in replies]
            found = [rank for ranks in records if ranks is not None for rank in ranks]
            received: Received = self._heads(source) if None in records else found
        except (ReplyError, WeightSyncError) as exc:
            one_of_many = self._protocol.capabilities.applies_at_once and len(servers) > 1
            if one_of_many or self._protocol.harmed(source, exc.__cause__ or exc):
                self._loop.fail(WeightSyncError(f"a server may hold a mix of weight versions: {exc}"))
            if isinstance(exc, WeightSyncError):
                raise
            raise WeightSyncError(f"{self._pool.addresses}: weights v{version}: {exc}") from exc
        self._staged = True
        return received

    def commit(self, version: int) -> None:
        """See :meth:`RemoteSampler.commit_weights`."""
        named = [self._protocol.stamp(version) for _ in self._pool.servers]
        calls = named if self._arriving else [self._protocol.commit(version) for _ in self._pool.servers]
        try:
            self._confirmed(f"switching to weights v{version}", calls, self._limit_s)
        except WeightSyncError as exc:
            self._loop.fail(exc)
            raise
        self._staged = False
        if self._arriving:
            old, self.adapter, self._arriving = self.adapter, self._arriving, ""
            if old and old != self.adapter:
                self._unload(old)

    def discard(self) -> None:
        """See :meth:`RemoteSampler.discard_weights`."""
        if self._arriving:
            arriving, self._arriving = self._arriving, ""
            self._unload(arriving)
            return
        staged, self._staged = self._staged, False
        if staged and self._protocol.capabilities.applies_at_once:
            self._loop.fail(
                WeightSyncError(
                    f"{self._pool.addresses}: a {self._protocol.name} server has the weights of an update that was "
                    "given up, and cannot go back to the ones before"
                )
            )
            return
        calls = [self._protocol.discard() for _ in self._pool.servers]
        self._confirmed("discarding staged weights", calls, self._limit_s)

    def join(self, group: WeightGroup) -> None:
        """See :meth:`RemoteSampler.join_group`."""
        calls = [self._protocol.join_group(self._group_for(server, group)) for server in self._pool.servers]
        self._confirmed(f"joining weight group {group.name}", calls)

    def leave(self, group: WeightGroup) -> None:
        """See :meth:`RemoteSampler.leave_group`."""
        calls = [self._protocol.leave_group(self._group_for(server, group)) for server in self._pool.servers]
        self._confirmed(f"leaving weight group {group.name}", calls)

    def _load_adapter(self, source: DiskSource) -> None:
        """Offer an adapter beside the one that requests ask for; servers keep no records of it."""
        calls = [self._protocol.load_adapter(source.adapter, source.path) for _ in self._pool.servers]
        self._arriving = source.adapter
        self._confirmed(f"loading adapter {source.adapter}", calls, self._limit_s)

    def _unload(self, adapter: str) -> None:
        """Free the place of an adapter; one that stays does no harm but for the place."""
        calls = self._protocol.unload_adapter(adapter)

        async def on(server: Server) -> None:
            try:
                for call in calls:
                    self._protocol.confirm([await server.http.send(call)])
            except ArealError as exc:
                logger.warning(f"{server.address} keeps adapter {adapter} until it ends: {exc}")

        async def work() -> None:
            await together(on(server) for server in self._pool.servers)

        try:
            self._loop.run(f"unloading adapter {adapter}", self._longest_s([calls]), work)
        except TimeoutError as exc:
            logger.warning(f"{exc}; the servers may keep it until they end")

    def _heads(self, source: WeightSource) -> list[ServerHeads] | None:
        """What servers that keep no records hold now; None where they do not tell."""
        if not self._tells:
            return None
        shapes = _shapes(source)
        names = head_names(shapes)
        calls = self._protocol.heads({name: shapes[name] for name in names})
        if not calls:
            return None
        try:
            replies = self._send("reading weights back", [calls for _ in self._pool.servers], self._limit_s)
        except WeightSyncError as exc:
            if not isinstance(exc.__cause__, ServerRefusedError):
                raise
            self._tells = False
            logger.warning(
                f"{self._pool.addresses}: a {self._protocol.name} server does not tell what weights it holds, so only "
                f"rollout.weight_probe_interval checks them: {exc.__cause__}"
            )
            return None
        return [self._protocol.read_heads(names, answers) for answers in replies]

    def _group_for(self, server: Server, group: WeightGroup) -> WeightGroup:
        return dataclasses.replace(group, rank=group.rank + server.position * self._ranks_per_server)

    def _source_for(self, server: Server, source: WeightSource) -> WeightSource:
        if isinstance(source, XcclSource):
            return dataclasses.replace(source, group=self._group_for(server, source.group))
        return source

    def _confirmed(self, what: str, per_server: Sequence[Sequence[ServerCall]], limit_s: float | None = None) -> None:
        for server, replies in zip(self._pool.servers, self._send(what, per_server, limit_s), strict=True):
            try:
                self._protocol.confirm(replies)
            except (ReplyError, WeightSyncError) as exc:
                raise WeightSyncError(f"{what}: {server.address}: {exc}") from exc

    def _send(
        self, what: str, per_server: Sequence[Sequence[ServerCall]], limit_s: float | None = None
    ) -> list[list[Any]]:
        """The replies of each server to its calls, up to the first that says it failed: what follows needs it.

        Args:
            limit_s: of the whole, every try included; None: what the calls of the slowest server may take.
        """

        async def on(server: Server, calls: Sequence[ServerCall]) -> list[Any]:
            replies: list[Any] = []
            for call in calls:
                replies.append(await server.http.send(call, timeout_s=limit_s))
                try:
                    self._protocol.confirm(replies[-1:])
                except (ReplyError, WeightSyncError):  # raised by whoever reads the replies
                    break
            return replies

        async def work() -> list[list[Any]]:
            pairs = zip(self._pool.servers, per_server, strict=True)
            return await together(on(server, calls) for server, calls in pairs)

        try:
            return self._loop.run(what, limit_s or self._longest_s(per_server), work)
        except EngineStoppedError:
            raise  # lost for good: not a failed update of a sampler that goes on
        except (EngineError, ServerRefusedError, TimeoutError) as exc:
            setting = " (actor.weight_update_timeout_s)" if limit_s and isinstance(exc, TimeoutError) else ""
            raise WeightSyncError(f"{what} failed{setting}: {exc}") from exc

    def _longest_s(self, per_server: Sequence[Sequence[ServerCall]]) -> float:
        def one(call: ServerCall) -> float:
            return (1 if call.once else self._attempts) * ((call.timeout_s or self._usual_s) + _BETWEEN_S)

        return 1.0 + max((sum(map(one, calls)) for calls in per_server), default=0.0)


def _shapes(source: WeightSource) -> dict[str, tuple[int, ...]]:
    """Of every tensor that is known to be in it."""
    if isinstance(source, XcclSource):
        return {spec.name: spec.shape for bucket in source.buckets for spec in bucket}
    if not isinstance(source, DiskSource):
        return {}
    if source.records:
        return {record.name: record.shape for record in source.records}
    from areal.engine.core.hf_checkpoint import HfDirectory

    try:
        return dict(HfDirectory(source.path).shapes)
    except CheckpointError:
        return {}  # the servers could read it
