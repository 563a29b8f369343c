"""One training role on all its ranks, behind the methods that a local role offers.

The trainer calls ``pack``, ``annotate``, ``compute_advantages`` and ``ppo_update`` as on a :class:`PPOActor`. Here
``pack`` only remembers which trajectories the step has; the first call that computes deals them out to the
data-parallel ranks (balanced by tokens, equal numbers of rows, whole groups), every rank fetches its share from the
workers that made it, packs it once, and keeps it until the step is over. No trajectory passes through this process.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from areal.api.remote import ObjectRef
from areal.infra.controller.tables import RemoteTable, TableHandle
from areal.infra.rpc.errors import TensorLostError
from areal.utils import logging
from areal.utils.errors import DataError, EngineError, WorkerFailedError
from areal.utils.seqpack import balanced_partition

if TYPE_CHECKING:
    from areal.api.alloc_mode import ParallelStrategy
    from areal.api.config.scheduling import SchedulingSpec, SchedulingStrategy
    from areal.api.io_struct import FinetuneSpec, SaveLoadMeta
    from areal.infra.scheduler.base import BaseScheduler

logger = logging.getLogger("TrainController")

Table = RemoteTable | Mapping[str, Any]

_SETTLE_S = 10.0  # after the error of a rank: so long may the death of another one take to be known


@dataclass(frozen=True)
class RoleSpec:
    """What a role is made of on each rank.

    Attributes:
        role: name of the workers.
        engine: import path of the engine class, built with ``config``.
        worker: import path of the class that wraps it, built with ``(config, engine)``.
        config: section of the role.
        strategy: parallel layout; its world size is the number of ranks.
        specs: one resource spec for all ranks, or one per rank.
        placement: own workers, or those of another role.
        env: environment of every rank.
    """

    role: str
    engine: str
    worker: str
    config: Any
    strategy: ParallelStrategy
    specs: Sequence[SchedulingSpec]
    placement: SchedulingStrategy
    env: Mapping[str, str]


@dataclass(frozen=True)
class RemoteBatch:
    """The trajectories of a step, wherever they are; made by :meth:`TrainController.pack`."""

    number: int
    tables: tuple[Table, ...]
    lengths: tuple[int, ...]


class RankGroup:
    """The worker processes of one role: started together, called together."""

    def __init__(self, scheduler: BaseScheduler, spec: RoleSpec) -> None:
        from areal.api.scheduler_api import Job

        self.scheduler, self.spec = scheduler, spec
        job = Job(spec.role, spec.strategy.world_size, list(spec.specs), spec.placement)
        self.worker_ids = scheduler.create_workers(job)
        self._threads = ThreadPoolExecutor(2 * len(self.worker_ids), thread_name_prefix=f"{spec.role}-calls")
        self._turn = threading.RLock()

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.worker_ids)

    def name(self, rank: int, part: str = "") -> str:
        """Name of the object that a rank hosts: the role, or with ``.engine`` its engine."""
        return f"{self.spec.role}/{rank}{part}"

    def start(self, ft_spec: FinetuneSpec) -> None:
        """Build engine and role on every rank and initialise them."""
        spec = self.spec
        workers = self.scheduler.get_workers(spec.role)
        (port,) = self.scheduler.client(self.worker_ids[0]).alloc_ports(1)
        for rank, worker in enumerate(self.worker_ids):
            self.scheduler.set_env(
                worker,
                {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(self.size),
                    "LOCAL_RANK": "0",
                    "MASTER_ADDR": workers[0].ip,
                    "MASTER_PORT": str(port),
                    **spec.env,
                },
            )
        self.each(lambda rank: self._make(rank, ".engine", spec.engine, spec.config))
        self.each(lambda rank: self._make(rank, "", spec.worker, spec.config, ObjectRef(self.name(rank, ".engine"))))
        self.call("create_process_group", spec.strategy, part=".engine")
        self.call("initialize", None, ft_spec, part=".engine")

    def call(self, method: str, *args: Any, part: str = "", beside: bool = False, **kwargs: Any) -> list[Any]:
        """Call a method on every rank at once; results in rank order. Raises the first rank's error."""
        return self.each(lambda rank: self.call_one(rank, method, *args, part=part, **kwargs), beside=beside)

    def each(self, function: Callable[[int], Any], *, beside: bool = False) -> list[Any]:
        """Run ``function(rank)`` for every rank at once.

        Calls of several threads take turns, so that every rank sees them in one order: ranks that ran two collectives
        in different orders would wait for each other. ``beside``: the call is no collective and runs beside others.

        A dead rank is the reason that others fail, or wait for it in a collective for hours: its error is raised as
        soon as it is known. After another error the rest has ``_SETTLE_S`` to say whether a rank is dead.
        """
        with contextlib.nullcontext() if beside else self._turn:
            return self._each(function)

    def _each(self, function: Callable[[int], Any]) -> list[Any]:
        futures = [self._threads.submit(function, rank) for rank in range(self.size)]
        wait(futures, return_when=FIRST_EXCEPTION)
        deadline = time.monotonic() + _SETTLE_S
        while errors := [error for future in futures if future.done() and (error := future.exception()) is not None]:
            running = [future for future in futures if not future.done()]
            dead = next((error for error in errors if isinstance(error, WorkerFailedError)), None)
            left_s = deadline - time.monotonic()
            if dead is not None or not running or left_s <= 0:
                raise dead or errors[0]
            wait(running, left_s, FIRST_COMPLETED)
        return [future.result() for future in futures]

    def call_one(self, rank: int, method: str, *args: Any, part: str = "", **kwargs: Any) -> Any:
        """Call a method on one rank."""
        name = self.name(rank, part)
        return self.scheduler.call_engine(self.worker_ids[rank], method, *args, engine_name=name, **kwargs)

    def in_background(self, rank: int, method: str, *args: Any) -> None:
        """Call a method on one rank without waiting for it; its failure is of no consequence."""
        with contextlib.suppress(RuntimeError):  # closed
            self._threads.submit(self.call_one, rank, method, *args)

    def close(self) -> None:
        """Stop the calling threads; the scheduler stops the workers."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _make(self, rank: int, part: str, path: str, *args: Any) -> None:
        self.scheduler.make_engine(self.worker_ids[rank], path, *args, engine_name=self.name(rank, part))


class RemoteTrainEngine:
    """The engine methods that a trainer, a saver and a recover handler use, on every rank."""

    data_parallel_group = None  # of the controller's process: it is alone
    data_parallel_rank = 0
    data_parallel_world_size = 1

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks
        self._version = 0

    def save(self, meta: SaveLoadMeta) -> None:
        """See ``TrainEngine.save``."""
        self._ranks.call("save", meta, part=".engine")

    def stage_save(self, meta: SaveLoadMeta) -> Callable[[], None]:
        """See ``TrainEngine.stage_save``: every rank copies now; the returned function has them write."""
        self._ranks.call("stage_save", meta)

        def write() -> None:
            self._ranks.call("write_staged", beside=True)

        return write

    def load(self, meta: SaveLoadMeta) -> None:
        """See ``TrainEngine.load``."""
        self._ranks.call("load", meta, part=".engine")
        self._version = int(self._ranks.call("get_version", part=".engine")[0])

    def offload(self) -> None:
        """Free the device memory of the model on every rank; the next computation brings it back."""
        self._ranks.call("offload", part=".engine")

    def onload(self) -> None:
        """Bring back what :meth:`offload` took out."""
        self._ranks.call("onload", part=".engine")

    def step_lr_scheduler(self) -> None:
        """Advance the learning rate by one global step."""
        self._ranks.call("lr_scheduler_step", part=".engine")

    def set_version(self, version: int) -> None:
        """Record the weight version on every rank."""
        self._ranks.call("set_version", version, part=".engine")
        self._version = version

    def get_version(self) -> int:
        """The weight version."""
        return self._version

    def export_stats(self) -> dict[str, float]:
        """What the ranks recorded since the last call, reduced over them."""
        return dict(self._ranks.call("export_stats")[0])


class TrainController:
    """A role on W ranks.

    Args:
        scheduler: hosts the ranks.
        spec: what they are made of.
    """

    def __init__(self, scheduler: BaseScheduler, spec: RoleSpec) -> None:
        self.config = spec.config
        self.ranks = RankGroup(scheduler, spec)
        self.engine = RemoteTrainEngine(self.ranks)
        self._numbers = itertools.count(1)
        self._loaded: dict[int, int] = {}  # batch -> shards per table that the ranks have
        self._dealt: dict[int, list[list[int]]] = {}  # batch -> tables of each data-parallel rank
        self._data_ranks: list[int] = []
        self._data_size = 1

    def initialize(self, ft_spec: FinetuneSpec) -> None:
        """Start the ranks and build the model on them."""
        self.ranks.start(ft_spec)
        places = self.ranks.call("data_place")
        self._data_ranks = [place[0] for place in places]
        self._data_size = places[0][1]
        layout = f"{self.ranks.size} ranks, {self._data_size} data-parallel"
        logger.info(f"{self.ranks.spec.role}: {self.ranks.spec.engine.rpartition('.')[2]} ready on {layout}")

    # -- the methods of a role -----------------------------------------------------------------------------------------

    def pack(self, tables: Sequence[Table]) -> RemoteBatch:
        """The step's trajectories as one batch; nothing is moved yet."""
        lengths = tuple(table_tokens(table) for table in tables)
        return RemoteBatch(next(self._numbers), tuple(tables), lengths)

    def load(self, batch: RemoteBatch, method: str = "load") -> None:
        """Have every rank fetch and pack its share, unless it has; ``method``: of the worker, which does that.

        Raises:
            TensorLostError: a worker that holds a trajectory is gone.
        """
        loaded = self._loaded.get(batch.number)
        parts = self._dealt.setdefault(batch.number, balanced_partition(batch.lengths, self._data_size))
        if loaded is None:
            self._send_shares(method, batch, parts, 0)
        elif loaded < _columns(batch):
            self._send_shares("extend", batch, parts, loaded)
        self._loaded[batch.number] = _columns(batch)

    def _send_shares(self, method: str, batch: RemoteBatch, parts: list[list[int]], known: int) -> None:
        """Give every rank its part, without the first ``known`` shards of each table."""
        self._deal(method, [_wire(table, known) for table in batch.tables], parts, batch.number)

    def _deal(self, method: str, rows: Sequence[Any], parts: list[list[int]], *first: Any) -> None:
        """Call ``method(*first, share)`` on every rank, with the part of ``rows`` of its data-parallel rank."""
        shares = [[rows[i] for i in sorted(part)] for part in parts]
        self.ranks.each(lambda rank: self.ranks.call_one(rank, method, *first, shares[self._data_ranks[rank]]))

    def annotate(self, batch: RemoteBatch, key: str) -> RemoteBatch:
        """Log-probs under this role's weights as token field ``key`` of the batch, kept on the ranks."""
        self.load(batch)
        self.ranks.call("annotate", batch.number, key)
        return batch

    @property
    def least_rows(self) -> int:
        """Groups that a step needs at least: every data-parallel rank has one."""
        return self._data_size

    def should_compute_prox_logp(self) -> bool:
        """Whether the update needs a forward pass first."""
        return bool(self.config.should_compute_prox_logp())

    def compute_advantages(self, batch: RemoteBatch) -> RemoteBatch:
        """Shape rewards and compute advantages on the ranks."""
        self.load(batch)
        self.ranks.call("compute_advantages", batch.number)
        return batch

    def share_targets(self, batch: RemoteBatch) -> RemoteBatch:
        """Returns and aligned mask, which came with the advantages, as columns of each table for the value model."""
        self._add_columns(batch, self.ranks.call("targets", batch.number))
        self._loaded[batch.number] = _columns(batch)  # the ranks have them
        return batch

    def ppo_update(self, batch: RemoteBatch) -> None:
        """One optimizer step per mini-batch; the ranks then forget the batch."""
        self.load(batch)
        self.ranks.call("ppo_update", batch.number)
        self.drop(batch)

    def drop(self, batch: RemoteBatch, *, even_if_not_loaded: bool = False) -> None:
        """Have the ranks forget a batch; ``even_if_not_loaded``: also one that only some of them have."""
        self._dealt.pop(batch.number, None)
        if self._loaded.pop(batch.number, None) is not None or even_if_not_loaded:
            self.ranks.call("drop", batch.number)

    def destroy(self) -> None:
        """Stop calling; the scheduler stops the workers."""
        self.ranks.close()

    def _add_columns(self, batch: RemoteBatch, results: list[Any]) -> None:
        """Add what every rank stored for the tables of its share."""
        parts = self._dealt[batch.number]
        for rank, data_rank in enumerate(self._data_ranks):
            if self._data_ranks.index(data_rank) != rank:  # it shares its rows with a rank whose columns are used
                self.ranks.in_background(rank, "free", [shard.shard_id for shard in results[rank]])
        for data_rank, part in enumerate(parts):
            rank = self._data_ranks.index(data_rank)

            def release(shard: Any, rank: int = rank) -> None:
                self.ranks.in_background(rank, "free", [shard.shard_id])

            for index, shard in zip(sorted(part), results[rank], strict=True):
                table = batch.tables[index]
                if not isinstance(table, RemoteTable):
                    raise DataError("a role in worker processes can only score trajectories of rollout workers")
                table.add_columns(shard, release)


class ScoringController(TrainController):
    """A role that only scores trajectories for another one, such as the reference model."""

    def annotate(self, batch: RemoteBatch, key: str) -> RemoteBatch:
        """Log-probs under this role's weights as column ``key`` of each table; the other role fetches them."""
        self._score(batch, key)
        self.drop(batch)
        return batch

    def _score(self, batch: RemoteBatch, key: str) -> None:
        if batch.number not in self._loaded:  # columns that were added since are of other roles
            self.load(batch)
        self._add_columns(batch, self.ranks.call("score", batch.number, key))


class CriticController(ScoringController):
    """A value model: it scores trajectories for the policy, and learns from what the policy's ranks made of that."""

    def annotate(self, batch: RemoteBatch, key: str) -> RemoteBatch:
        """Values as column ``key`` of each table; the ranks keep the batch for :meth:`ppo_update`."""
        self._score(batch, key)
        return batch

    def evaluate(self, tables: Sequence[Table], actor: Any) -> None:
        """Compare values with what validation trajectories earned; ``actor`` says how rewards are shaped.

        Raises:
            TensorLostError: a worker that holds a trajectory is gone.
        """
        batch = self.pack(tables)
        try:
            self.load(batch, "load_answers")
        except TensorLostError:
            self.drop(batch, even_if_not_loaded=True)
            raise
        # After an error in a collective no rank is called any more: another one may wait in it for hours.
        self.ranks.call("evaluate", batch.number, actor)
        self.drop(batch)


def table_tokens(table: Table) -> int:
    """Real tokens of all sequences of a table.

    Raises:
        EngineError: it has no ``attention_mask``.
    """
    if isinstance(table, RemoteTable):
        return table.tokens
    mask = table.get("attention_mask")
    if mask is None:
        raise EngineError("a trajectory needs attention_mask to be dealt out to ranks by its tokens")
    return int(mask.sum())


def _columns(batch: RemoteBatch) -> int:
    """Shards of each table."""
    return max((len(table.handle.shards) for table in batch.tables if isinstance(table, RemoteTable)), default=1)


def _wire(table: Table, known: int) -> Any:
    return TableHandle(table.handle.shards[known:]) if isinstance(table, RemoteTable) else dict(table)
