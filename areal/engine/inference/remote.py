"""The sampler whose model runs in inference servers: what a rollout worker needs, over HTTP.

In: requests, weight sources, pauses, from any thread. Out: responses whose tokens carry log-probs and versions. What is
said to a server comes from its :class:`ServerProtocol`; everything else lives once, for every kind of server:
connections (``http_client``), routing (``server_pool``), health (``server_health``), requests in parts (``traffic``,
``request_parts``), weights (``server_weights``), and the thread for all of it (``server_loop``). Used by
``RolloutWorker`` and ``RemoteInfEngine``.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from areal.engine.inference.http_client import ServerHttp, ServerRefusedError
from areal.engine.inference.request_parts import open_request
from areal.engine.inference.server_health import ServerHealth
from areal.engine.inference.server_loop import ServerLoop
from areal.engine.inference.server_pool import Server, ServerPool
from areal.engine.inference.server_weights import ServerWeights
from areal.engine.inference.traffic import StaleServerError, Traffic, Waits
from areal.utils import logging
from areal.utils.errors import ConfigError, EngineError, UnsupportedFeatureError

if TYPE_CHECKING:
    from areal.api.config.rollout import InferenceEngineConfig
    from areal.api.io_struct import ModelRequest, ModelResponse
    from areal.engine.core.weight_sources import WeightGroup, WeightSource
    from areal.engine.core.weight_sync import Received
    from areal.engine.inference.protocol import ServerProtocol
    from areal.engine.inference.request_parts import PartedRequest, SequenceLimits

logger = logging.getLogger("RemoteSampler")

_GOODBYE_S = 2.0  # limit of resuming servers that outlive us


class RemoteSampler:
    """Generates on servers that hold the same model.

    Args:
        protocol: of the servers.
        addresses: ``host:port`` of each.
        config: limits and retries (``rollout`` section).
        limits: of the model.
        tokenizer: for stop strings of requests that bring none.
        watch: how a server that we started has ended; None while it runs.
        ranks_per_server: ranks that a server takes in a weight group.
        waits: replaces the limits that follow from ``config``.

    Attributes:
        on_failure: told once, on a thread of the sampler, when the servers are lost; must not block.
    """

    def __init__(  # noqa: PLR0913 - the pieces it joins
        self,
        protocol: ServerProtocol,
        addresses: Sequence[str],
        config: InferenceEngineConfig,
        limits: SequenceLimits,
        *,
        tokenizer: Any = None,
        watch: Callable[[], str | None] | None = None,
        ranks_per_server: int = 1,
        waits: Waits | None = None,
    ) -> None:
        if not addresses:
            raise ConfigError("no address of an inference server was given")
        self.protocol, self.config, self.tokenizer = protocol, config, tokenizer
        self.on_failure: Callable[[BaseException], None] | None = None
        self._limits, self._outlives_us = limits, watch is None
        self._waits = waits or Waits.of(config)
        self._pool = ServerPool(
            [
                Server(
                    ServerHttp(address, config.request_timeout, config.request_retries, protocol.headers()), position
                )
                for position, address in enumerate(addresses)
            ]
        )
        keep = keeps_requests(config, protocol)
        self._traffic = Traffic(protocol, self._pool, self._waits, keep=keep, vocab_size=limits.vocab_size)
        self._loop = ServerLoop(lambda error: None if self.on_failure is None else self.on_failure(error))
        self._weights = ServerWeights(protocol, self._pool, self._loop, config, ranks_per_server)
        self._health = ServerHealth(protocol, self._pool, watch, config.setup_timeout, lambda: self._traffic.frozen)
        self._starting, self._pausing = threading.Lock(), threading.Lock()
        self._pauses = 0
        self._started = False

    @property
    def addresses(self) -> list[str]:
        """``host:port`` of each server."""
        return [server.address for server in self._pool.servers]

    def start(self) -> None:
        """Connect; returns when every server is healthy. Does nothing if it runs.

        Raises:
            ServerUnavailableError: a server is not healthy within ``rollout.setup_timeout``.
            ServerRefusedError: it refuses us.
        """
        with self._starting:
            if self._started:
                return
            self._loop.start()
            try:
                limit_s = self.config.setup_timeout + 2 * self._waits.control_s
                self._loop.run("connecting to inference servers (rollout.setup_timeout)", limit_s, self._connect)
            except BaseException:
                self.stop()
                raise
            self._loop.background(lambda: self._health.watch(self._loop))
            self._loop.background(self._health.revive)
            self._started = True

    def stop(self) -> None:
        """Disconnect; requests in flight raise EngineStoppedError. Servers keep running, and are not left paused."""
        self._loop.stop(self._close)

    async def _connect(self) -> None:
        await self._health.wait()
        await self._traffic.everywhere(self.protocol.stamp(self._traffic.version))

    async def _close(self) -> None:
        if self._traffic.frozen and self._outlives_us:
            try:
                async with asyncio.timeout(_GOODBYE_S):
                    await self._traffic.everywhere(self.protocol.resume())
            except (TimeoutError, EngineError, ServerRefusedError) as exc:
                logger.warning(f"{self._pool.addresses} may be left paused: {exc}")
        await self._traffic.close()
        for server in self._pool.servers:
            await server.http.close()

    @property
    def failure(self) -> BaseException | None:
        """What the sampler failed of."""
        return self._loop.failure

    # -- generation ----------------------------------------------------------------------------------------------------

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """One continuation, from any event loop; survives weight updates. Cancelling it aborts the request.

        Raises:
            InvalidRequestError: something about the request cannot be served; nothing was sent.
            EngineStoppedError: the sampler does not run.
            ArealError: see :meth:`Traffic.generate`.
        """
        request = open_request(req, self._limits, self.protocol, self.tokenizer)
        return await asyncio.wrap_future(self._loop.submit(self._generate, request))

    async def _generate(self, request: PartedRequest) -> ModelResponse:
        try:
            return await self._traffic.generate(request)
        except StaleServerError as exc:
            self._loop.fail(exc)
            raise

    def pause(self) -> None:
        """Freeze the servers; returns when frozen, every aborted reply parsed. Pauses nest.

        Raises:
            EngineError: a server did not freeze; the sampler has failed.
        """
        with self._pausing:
            if self._pauses == 0:
                self._control("pausing the inference servers", self._traffic.freeze)
            self._pauses += 1

    def resume(self) -> None:
        """Undo one pause.

        Raises:
            EngineError: a server did not go on; the sampler has failed.
        """
        with self._pausing:
            if self._pauses == 1 and self._loop.alive:
                self._control("resuming the inference servers", self._traffic.thaw)
            self._pauses = max(0, self._pauses - 1)

    def get_version(self) -> int:
        """Version of the weights that draw the next token."""
        return self._traffic.version

    def set_version(self, v: int) -> None:
        """Rename the current weights, on the servers too."""
        if v == self._traffic.version:
            return
        calls = self.protocol.stamp(v)
        if calls and self._loop.alive:
            self._control("setting the version of the inference servers", self._traffic.everywhere, calls)
        self._traffic.version = v

    def _control(self, what: str, work: Callable[..., Any], *args: Any) -> None:
        """Make a change that every server must follow; if one does not, the sampler is of no use any more."""
        self._loop.check_alive()
        try:
            self._loop.run(what, self._waits.change_s(self.config.request_retries), work, *args)
        except (EngineError, ServerRefusedError, TimeoutError) as exc:
            error = EngineError(f"{what} failed: {exc}")
            self._loop.fail(error)
            raise error from exc

    # -- weights -------------------------------------------------------------------------------------------------------

    @property
    def group_ranks(self) -> int:
        """Ranks that this sampler takes in a weight group."""
        return self._weights.group_ranks

    def stage_source(self, source: WeightSource, version: int) -> Received:
        """Bring a version's bytes to every server.

        Returns: the records of each receiving rank, or what each server holds; None if they cannot tell.
        Raises:
            WeightSyncError: a server did not take them. The old version serves on, unless the sampler has failed.
            EngineStoppedError: the servers are lost.
        """
        return self._weights.stage(source, version)

    def commit_weights(self, version: int) -> None:
        """Have every server go on with the staged weights; they are paused.

        Raises:
            WeightSyncError: a server did not; versions may differ now, so the sampler has failed.
        """
        self._weights.commit(version)
        self._traffic.exchanged(version, self._weights.adapter)

    def discard_weights(self) -> None:
        """Forget what was staged, on every server; one that has it in service already is of no use any more."""
        self._weights.discard()

    def join_group(self, group: WeightGroup) -> None:
        """Join a weight group as ranks ``group.rank ..``; returns when rank 0 has joined too."""
        self._weights.join(group)

    def leave_group(self, group: WeightGroup) -> None:
        """Leave it."""
        self._weights.leave(group)


def keeps_requests(config: InferenceEngineConfig, protocol: ServerProtocol) -> bool:
    """Whether running requests stay in their servers during a weight update.

    Raises:
        UnsupportedFeatureError: ``rollout.on_weight_update: keep`` with a server that cannot.
    """
    can = protocol.capabilities.keeps_requests
    if config.use_lora and protocol.capabilities.named_adapters:
        if config.on_weight_update == "keep":
            raise UnsupportedFeatureError(
                f"rollout.on_weight_update=keep with rollout.use_lora=true: a request that stays in a {protocol.name} "
                "server goes on with the adapter that it asked for; use abort or auto"
            )
        return False
    if config.on_weight_update == "keep" and not can:
        raise UnsupportedFeatureError(
            f"rollout.on_weight_update=keep: a {protocol.name} server cannot keep requests through an update; use "
            "abort or auto, or the backend native or vllm"
        )
    return can and config.on_weight_update != "abort"
