"""Three ways for the bytes of one version from train ranks to receivers: shared memory, a directory, a broadcast.

    prepare(version)    on the trainer's side, while generation goes on
    transfer(workers)   to receivers; what each of their ranks recorded equals what was sent
    in_service() / given_up()

Ranks and receivers are called by name: :class:`Ranks` are those of ``areal.trainer.role_worker``, receivers those of
``areal.engine.inference.rollout_worker``, or stand-ins of both in one process. Chosen once, by ``open_route``.
"""

from __future__ import annotations

import abc
import itertools
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any, Protocol

from areal.api.io_struct import ParamSpec, get_versioned_lora_name
from areal.engine.core.shared_weights import WeightManifest, any_rank
from areal.engine.core.weight_groups import WeightGroupLostError
from areal.engine.core.weight_heads import ServerHeads, compare_heads
from areal.engine.core.weight_sources import DiskSource, WeightGroup, WeightSource, XcclSource
from areal.engine.core.weight_sync import ParamRecord, Received, compare_records
from areal.engine.core.weight_wire import make_buckets
from areal.utils import logging
from areal.utils.errors import ConfigError, WeightSyncError

logger = logging.getLogger("WeightUpdate")


class Ranks(Protocol):
    """The train ranks."""

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method on every rank at once; results in rank order."""
        ...

    def call_one(self, rank: int, method: str, *args: Any) -> Any:
        """Call a method on one rank."""
        ...


class Receivers(Protocol):
    """The samplers, each named; one that is lost meanwhile is missing in a result."""

    def lives(self) -> Mapping[str, int]:
        """Every name, and how often its process was started again."""
        ...

    def call(self, names: Iterable[str], method: str, *args: Any) -> dict[str, Any]:
        """Call a method of several at once; raises what one that lives raised."""
        ...

    def well(self, names: Iterable[str]) -> list[str]:
        """Those of ``names`` that live and can go on."""
        ...


@dataclass(frozen=True)
class TransferSettings:
    """How weights travel.

    Attributes:
        bucket_bytes: xccl: of one bucket; a larger tensor travels alone.
        timeout_s: of joining a group, of receiving a version, and of switching to it.
        directory: disk: where the directories of versions are made.
        torch_helper: xccl: receivers build the group with torch's helper, as SGLang does.
        host: xccl: address of the first train rank; None: that of its job.
        lora_name: disk: what is sent is an adapter; base of the name of each version. Empty: it is a whole model.
    """

    bucket_bytes: int = 1 << 30
    timeout_s: float = 600.0
    directory: str | None = None
    torch_helper: bool = False
    host: str | None = None
    lora_name: str = ""


class Route(abc.ABC):
    """One way; holds what is on it and what is in service."""

    def __init__(self, ranks: Ranks, receivers: Receivers, settings: TransferSettings) -> None:
        self.ranks, self.receivers, self.settings = ranks, receivers, settings

    @abc.abstractmethod
    def prepare(self, version: int) -> None:
        """Make a version ready on the trainer's side."""

    @abc.abstractmethod
    def transfer(self, version: int, workers: Sequence[str]) -> list[str]:
        """Bring the prepared version to ``workers``, who keep it aside; returns those that have it.

        Raises:
            WeightSyncError: a worker that lives did not get what was sent; names the parameter.
        """

    @abc.abstractmethod
    def restore(self, worker: str) -> bool:
        """Bring the version in service to one worker, who keeps it aside; False if it cannot be had any more."""

    @abc.abstractmethod
    def in_service(self) -> None:
        """The prepared version is the one in service now."""

    @abc.abstractmethod
    def given_up(self) -> None:
        """The prepared version will not be."""

    def close(self) -> None:  # noqa: B027 - most have nothing to give back
        """No transfer will follow."""


class _FixedSource(Route):
    """A version that stays readable for as long as it is in service."""

    def __init__(self, ranks: Ranks, receivers: Receivers, settings: TransferSettings) -> None:
        super().__init__(ranks, receivers, settings)
        self._prepared: tuple[WeightSource, list[ParamRecord]] | None = None
        self._served: tuple[WeightSource, list[ParamRecord]] | None = None

    def transfer(self, version: int, workers: Sequence[str]) -> list[str]:
        assert self._prepared is not None
        return self._read(self._prepared, workers)

    def restore(self, worker: str) -> bool:
        if self._served is None:
            return False
        if not self._read(self._served, [worker]):
            raise WeightSyncError(f"{worker} was lost again")
        return True

    def in_service(self) -> None:
        self._served, self._prepared = self._prepared, None

    def given_up(self) -> None:
        self._prepared = None

    def _read(self, offer: tuple[WeightSource, list[ParamRecord]], workers: Sequence[str]) -> list[str]:
        source, sent = offer
        found = self.receivers.call(workers, "read_weights", source, source.version)
        for worker, received in found.items():
            compare_ranks(sent, received, source.version, worker)
        return list(found)


class SharedMemoryRoute(_FixedSource):
    """Two buffers of the first rank: the one in service is not touched before it is not any more."""

    def prepare(self, version: int) -> None:
        served = self._served[0] if self._served is not None else None
        keep = served.fd if isinstance(served, WeightManifest) else None
        manifest: WeightManifest = any_rank(self.ranks.call("publish_weights", version, keep))
        manifest = replace(manifest, timeout_s=self.settings.timeout_s)
        self._prepared = manifest, [param.record() for param in manifest.params]


class DirectoryRoute(_FixedSource):
    """A Hugging Face directory per version; the newest one in service stays."""

    def prepare(self, version: int) -> None:
        path = os.path.join(self.settings.directory or "", f"weight_update_v{version}")
        records = self.ranks.call("save_weights", path)[0]
        name = self.settings.lora_name
        adapter = get_versioned_lora_name(name, version) if name else ""
        self._prepared = DiskSource(version, path, records, self.settings.timeout_s, adapter), records

    def in_service(self) -> None:
        super().in_service()
        assert isinstance(self._served, tuple)
        source = self._served[0]
        assert isinstance(source, DiskSource)
        self.ranks.call_one(0, "keep_only_weights", source.path)

    def given_up(self) -> None:
        prepared, served = self._prepared, self._served
        super().given_up()
        if prepared is not None and (served is None or served[0] != prepared[0]):
            assert isinstance(prepared[0], DiskSource)
            self.ranks.call_one(0, "remove_weights", prepared[0].path)


class BroadcastRoute(Route):
    """Buckets through a collective group, which is built again whenever its members change."""

    def __init__(self, ranks: Ranks, receivers: Receivers, settings: TransferSettings) -> None:
        super().__init__(ranks, receivers, settings)
        self._buckets: list[list[ParamSpec]] = []
        self._group: WeightGroup | None = None
        self._places: dict[str, WeightGroup] = {}
        self._members: dict[str, int] = {}  # worker -> its life
        self._sent: list[ParamRecord] = []
        self._served: tuple[int, list[ParamRecord]] | None = None
        self._version = 0
        self._numbers = itertools.count(1)
        self._run_name = secrets.token_hex(4)

    def prepare(self, version: int) -> None:
        self._version = version
        if not self._buckets:
            specs = self.ranks.call("weight_specs")[0]
            self._buckets = make_buckets(specs, self.settings.bucket_bytes)

    def transfer(self, version: int, workers: Sequence[str]) -> list[str]:
        left = list(workers)
        while left:
            failure = self._try(version, left)
            if failure is None:
                return left
            lives, before = self.receivers.lives(), left
            left = [worker for worker in self.receivers.well(left) if self._members.get(worker) == lives[worker]]
            if left == before:
                raise failure
            logger.warning(f"weights v{version} are sent again, to {len(left)} of {len(before)}: {failure}")
        self._sent = self.ranks.call("weight_records")[0]  # nobody there: what those who come back must get
        return []

    def restore(self, worker: str) -> bool:
        if self._served is None:
            return False
        version, sent = self._served
        if self.ranks.call("weight_records")[0] != sent:
            return False  # an optimizer step ran since
        if not self._buckets:
            self.prepare(version)
        if not self.transfer(version, [worker]):
            raise WeightSyncError(f"{worker} was lost again")
        return True

    def in_service(self) -> None:
        self._served = self._version, self._sent

    def given_up(self) -> None:
        self._sent, self._buckets = [], []  # described again: they may be what was wrong

    def close(self) -> None:
        self._leave()

    def _try(self, version: int, workers: Sequence[str]) -> Exception | None:
        """One attempt; None if everybody got it."""
        try:
            lives = self.receivers.lives()
            members = {worker: lives[worker] for worker in workers}
            if self._group is None or members != self._members:
                self._members = members
                self._build(workers)
            self._send(version, workers)
        except Exception as exc:  # noqa: BLE001 - the caller decides whether it is tried again
            self._leave()
            return exc
        return None

    def _build(self, workers: Sequence[str]) -> None:
        """A group of the first rank and ``workers``."""
        self._leave()
        counts = self.receivers.call(workers, "weight_ranks")
        lost = [worker for worker in workers if worker not in counts]
        if lost:
            raise WeightSyncError(f"{', '.join(lost)} cannot join a weight group: not there any more")
        settings = self.settings
        host, port, backend = self.ranks.call_one(0, "open_weight_store", settings.host, settings.timeout_s)
        group = WeightGroup(
            f"weights-{self._run_name}-{next(self._numbers)}",
            host,
            port,
            1 + sum(counts.values()),
            backend=backend,
            torch_helper=settings.torch_helper,
            timeout_s=settings.timeout_s,
        )
        ranks = itertools.accumulate((counts[worker] for worker in workers), initial=1)
        self._group = group
        self._places = {worker: replace(group, rank=rank) for worker, rank in zip(workers, ranks, strict=False)}
        self._both_sides(
            lambda: self.ranks.call_one(0, "join_weight_group", group),
            {worker: ("join_weight_group", place) for worker, place in self._places.items()},
        )

    def _send(self, version: int, workers: Sequence[str]) -> None:
        assert self._group is not None
        name = self._group.name
        sent, received = self._both_sides(
            lambda: self.ranks.call("send_weights", name, self._buckets)[0],
            {
                worker: ("receive_weights", XcclSource(version, self._places[worker], self._buckets), version)
                for worker in workers
            },
        )
        self._sent = sent
        for worker, records in received.items():
            compare_ranks(sent, records, version, worker)

    def _both_sides(self, ours: Any, theirs: Mapping[str, tuple[Any, ...]]) -> tuple[Any, dict[str, Any]]:
        """Run both halves of a collective; the first failure anywhere ends it everywhere.

        Args:
            ours: call of the train ranks.
            theirs: worker -> method and arguments.
        """

        def one(worker: str, call: tuple[Any, ...]) -> Any:
            found = self.receivers.call([worker], *call)
            if worker not in found:
                raise WeightSyncError(f"{worker} was lost")
            return found[worker]

        with ThreadPoolExecutor(1 + len(theirs), thread_name_prefix="weights") as threads:
            mine = threads.submit(ours)
            peers = {worker: threads.submit(one, worker, call) for worker, call in theirs.items()}
            futures: list[Future[Any]] = [mine, *peers.values()]
            wait(futures, return_when=FIRST_EXCEPTION)
            if any(future.done() and future.exception() is not None for future in futures):
                self._leave()  # those that still wait fail now
            wait(futures)
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, WeightGroupLostError)):
            raise error  # the reason before its echoes
        return mine.result(), {worker: future.result() for worker, future in peers.items()}

    def _leave(self) -> None:
        """Have everybody leave the group; whoever does not answer has left anyway."""
        group, places = self._group, self._places
        self._group, self._places = None, {}
        if group is None:
            return
        calls: list[tuple[Any, ...]] = [(self.ranks.call_one, 0, "leave_weight_group", group.name)]
        calls += [(self.receivers.call, [worker], "leave_weight_group", place) for worker, place in places.items()]
        with ThreadPoolExecutor(len(calls), thread_name_prefix="weights") as threads:
            for call, future in [(call, threads.submit(*call)) for call in calls]:
                if (error := future.exception()) is not None:
                    logger.warning(f"{call[1]} did not leave weight group {group.name}: {error}")


def compare_ranks(sent: Sequence[ParamRecord], received: Received, version: int, worker: str) -> None:
    """Compare with what each rank of a worker recorded, or what each of its servers holds.

    Raises:
        WeightSyncError: names worker, rank and parameter.
    """
    for rank, records in enumerate(received or ()):
        try:
            if isinstance(records, ServerHeads):
                compare_heads(sent, records, version)
            else:
                compare_records(sent, records, version)
        except WeightSyncError as exc:
            raise WeightSyncError(f"{worker}, rank {rank}: {exc}") from exc


def open_route(mode: str, ranks: Ranks, receivers: Receivers, settings: TransferSettings) -> Route:
    """The way called ``mode``: ``shm``, ``xccl`` or ``disk``."""
    if mode == "shm":
        return SharedMemoryRoute(ranks, receivers, settings)
    if mode == "xccl":
        return BroadcastRoute(ranks, receivers, settings)
    if mode != "disk":
        raise ConfigError(f"weight_update_mode={mode!r} must be shm, xccl or disk here")
    if settings.directory is None:
        raise ConfigError("weight_update_mode=disk needs a directory that trainer and samplers share")
    return DirectoryRoute(ranks, receivers, settings)
