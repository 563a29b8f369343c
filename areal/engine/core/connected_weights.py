"""Weights from a train engine to the remote inference engine that a script connected it to (the public 1.x path).

    connect_engine(rollout, meta) ─► update_weights(meta) on every rank ─► the servers generate with the new version

    disk   every rank saves ─► the first one has the servers load the directory
    xccl   the first rank and the servers share a group ─► every rank gathers, the first one sends

The inference engine pauses its servers around each, and has what their ranks recorded compared with what was sent
before it goes on with it. A group is built at the first update and again after one that failed. Made by
``RolloutFacade.connect_engine``.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from torch import Tensor

from areal.api.io_struct import ParamSpec
from areal.engine.core.weight_sender import WeightSender
from areal.engine.core.weight_sources import WeightGroup
from areal.engine.core.weight_transfer import compare_ranks
from areal.engine.core.weight_wire import make_buckets
from areal.utils.errors import ConfigError, UnsupportedFeatureError, WeightSyncError
from areal.utils.network import address_towards
from areal.utils.ranks import is_first_rank, together

if TYPE_CHECKING:
    from areal.api.engine_api import TrainEngine
    from areal.api.io_struct import WeightUpdateMeta
    from areal.engine.core.weight_sync import ParamRecord, Received
    from areal.engine.inference.remote_engine import RemoteInfEngine

_WAYS = ("disk", "xccl")


class ConnectedWeights:
    """One rank's side; only the first rank calls ``rollout``.

    Args:
        engine: of this rank, initialised.
        rollout: connected to its servers.
        meta: how weights will travel.

    Raises:
        UnsupportedFeatureError: a way that a script cannot use.
    """

    def __init__(self, engine: TrainEngine, rollout: RemoteInfEngine, meta: WeightUpdateMeta) -> None:
        _check_meta(meta)
        self._engine, self._rollout = engine, rollout
        self._sender = WeightSender(engine, is_first_rank)
        self._group: WeightGroup | None = None
        self._specs: list[ParamSpec] | None = None

    def update(self, meta: WeightUpdateMeta) -> None:
        """Have the servers generate with this engine's weights, as ``meta.version``; every rank calls.

        Raises:
            WeightSyncError: they did not take them, or got something else than was sent.
            ConfigError: ``meta`` describes other servers than those that the inference engine has.
        """
        _check_meta(meta)
        meta = self._complete(meta)
        if meta.type == "disk":
            self._by_directory(meta)
        else:
            self._by_broadcast(meta)

    @property
    def group(self) -> WeightGroup | None:
        """The group that broadcasts travel in, on the first rank; None: the next one builds it."""
        return self._group

    @property
    def rollout(self) -> RemoteInfEngine:
        """Connected to the servers."""
        return self._rollout

    def open_group(self, meta: WeightUpdateMeta) -> None:
        """Build the group of broadcasts now, unless there is one; every rank calls.

        Raises:
            WeightSyncError: not every server joined.
            ConfigError: as ``update``.
        """
        _check_meta(meta)
        with together("the weight group was not built", WeightSyncError):
            if is_first_rank() and self._group is None:
                self._group = self._build(self._complete(meta))

    def send(self, meta: WeightUpdateMeta, pairs: Sequence[tuple[str, Tensor]]) -> None:
        """Have the servers generate with ``pairs``, the tensors of a whole version; the first rank calls, whose group
        is open.

        Raises:
            WeightSyncError: as ``update``, or no group is open.
        """
        meta, group = self._complete(meta), self._group
        if group is None:
            raise WeightSyncError("no weight group is open; call open_group() first")
        specs = [ParamSpec(name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in pairs]
        self._group = None
        sent: Future[Any] = Future()
        received = self._rollout.update_weights_from_distributed(meta, specs, self._check(meta, sent))
        buckets = make_buckets(specs, meta.weight_chunked_mem_mb << 20)
        self._both(group.name, received, lambda: _fulfil(sent, lambda: self._sender.send(group.name, buckets, pairs)))
        self._group = group

    def close(self) -> None:
        """Leave the group. Safe to call twice."""
        self._sender.close()
        self._group = None

    def _complete(self, meta: WeightUpdateMeta) -> WeightUpdateMeta:
        """``meta`` with the version and the limit that it leaves to this side."""
        config = self._engine.config  # type: ignore[attr-defined]  # every engine has one
        return dataclasses.replace(
            meta,
            version=self._engine.get_version() + 1 if meta.version is None else meta.version,
            timeout_s=meta.timeout_s or config.weight_update_timeout_s,
        )

    def _by_directory(self, meta: WeightUpdateMeta) -> None:
        if meta.path is None:
            raise ConfigError("update_weights: meta.path is None; it names the directory that weights travel through")
        sent: Future[Any] = Future()
        sent.set_result(self._sender.write_directory(meta.path))
        with self._agreed(meta):
            if is_first_rank():
                self._rollout.update_weights_from_disk(meta, self._check(meta, sent)).result()

    def _by_broadcast(self, meta: WeightUpdateMeta) -> None:
        if self._specs is None:
            self._specs = self._sender.specs() or []
        buckets = make_buckets(self._specs, meta.weight_chunked_mem_mb << 20)
        group, self._group = self._group, None  # it does not survive an error
        sent: Future[Any] = Future()
        received: Future[Any] = Future()
        with self._agreed(meta):
            if is_first_rank():
                group = group or self._build(meta)
                check = self._check(meta, sent)
                received = self._rollout.update_weights_from_distributed(meta, self._specs, check)
        with self._agreed(meta):
            if group is not None:
                name = group.name
                self._both(name, received, lambda: _fulfil(sent, lambda: self._sender.send(name, buckets)))
            else:
                self._sender.send("", buckets)  # helps to gather what the first rank sends
        self._group = group

    def _build(self, meta: WeightUpdateMeta) -> WeightGroup:
        """A group of this rank and every rank of the servers."""
        sampler, config = self._rollout.sampler, self._rollout.config
        expected = sampler.group_ranks if meta.gen_allocation is None else meta.gen_allocation.parallel.world_size
        if expected != sampler.group_ranks:
            raise ConfigError(
                f"WeightUpdateMeta.gen_allocation describes {expected} ranks of servers, but the connected inference "
                f"engine has {sampler.group_ranks}; give both the same servers"
            )
        limit_s = meta.timeout_s or config.request_timeout
        host = meta.nccl_master_address or address_towards(sampler.addresses[0])
        host, port, backend = self._sender.open_store(host, limit_s)
        group = WeightGroup(
            f"{meta.nccl_group_name or 'update_weight_group'}-{secrets.token_hex(4)}",
            host,
            port,
            1 + sampler.group_ranks,
            backend=backend,  # type: ignore[arg-type]
            torch_helper=sampler.protocol.capabilities.torch_groups,
            timeout_s=limit_s,
        )
        place = dataclasses.replace(
            meta, nccl_master_address=host, nccl_master_port=port, nccl_group_name=group.name, version=None
        )
        joined = self._rollout.init_weights_update_group(place)
        self._both(group.name, joined, lambda: self._sender.join_group(group))
        return group

    def _both(self, name: str, theirs: Future[Any], ours: Callable[[], Any]) -> None:
        """Both halves of a collective; the servers' reason comes before the echo of it that we meet."""
        theirs.add_done_callback(lambda done: self._sender.leave_group(name) if done.exception() else None)
        try:
            ours()
        except WeightSyncError as exc:
            if (reason := theirs.exception()) is not None:
                raise reason from exc
            raise
        theirs.result()

    def _check(self, meta: WeightUpdateMeta, sent: Future[list[ParamRecord]]) -> Callable[[Received], None]:
        """Compares what servers received with what will have been sent."""
        version = meta.version or 0

        def check(received: Received) -> None:
            try:
                records = sent.result(meta.timeout_s)
            except Exception as exc:  # noqa: BLE001 - whatever keeps the sender from sending
                raise WeightSyncError(f"weights v{version} were not sent: {exc}") from exc
            compare_ranks(records, received, version, self._rollout.protocol.name)

        return check

    def _agreed(self, meta: WeightUpdateMeta) -> Any:
        return together(f"weights v{meta.version} were not published", WeightSyncError)


def _fulfil(future: Future[Any], work: Callable[[], Any]) -> None:
    """Do ``work`` and give its end to whoever waits for the future."""
    try:
        future.set_result(work())
    except BaseException as exc:
        future.set_exception(exc)
        raise


def _check_meta(meta: WeightUpdateMeta) -> None:
    if meta.type not in _WAYS:
        raise UnsupportedFeatureError(
            f"WeightUpdateMeta.type={meta.type!r}: a script's engine publishes by {' or '.join(_WAYS)}; the trainer "
            "offers the other ways (actor.weight_update_mode)"
        )
    if meta.use_lora:
        raise UnsupportedFeatureError(
            "WeightUpdateMeta.use_lora=True: a script publishes whole models, adapters merged in; leave it false (the "
            "trainer sends adapters with rollout.use_lora=true)"
        )
