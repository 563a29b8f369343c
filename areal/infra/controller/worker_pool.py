"""The rollout workers as one: routes groups, brings reports back, replaces workers that die.

    submit ─► least loaded worker (its row's favourite, if that costs no balance) ─► outbox ─► worker
    future ◄─ report ◄─ collect (one long poll per worker)
    worker dead or silent ─► its groups end as lost ─► started again, weights of the current version, back in service

Everything runs in the loop of one thread; :meth:`WorkerPool.submit` may be called from any. While no worker is in
service, orders wait. Used by ``RolloutController``.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

from areal.infra.controller.member import Member, choose
from areal.infra.rollout.orders import GroupOrder, GroupReport, WorkerLostError
from areal.infra.rollout.task_runner import AsyncTaskRunner
from areal.infra.rpc.rtensor import RTensor
from areal.utils import logging
from areal.utils.errors import InfrastructureError

if TYPE_CHECKING:
    from areal.infra.rpc.client import WorkerClient

logger = logging.getLogger("RolloutController")

_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 0.5, 15.0


class Crew(Protocol):
    """Who hosts the workers and knows how to bring one (back) into service."""

    def client(self, worker_id: str) -> WorkerClient:
        """The connection to a worker."""
        ...

    def failure(self, worker_id: str) -> str | None:
        """How a worker ended; None while it lives."""
        ...

    def revive(self, worker_id: str) -> None:
        """Start a dead worker again, with its objects and the current weights; blocks."""
        ...


class WorkerPool:
    """Runs groups on workers.

    Args:
        crew: hosts them.
        worker_ids: of the workers, all in service once :meth:`start` is called.
        max_deaths: deaths of one worker in a row, without a finished group between, that end the run.
        on_lost: told ``(worker id, life)`` whose finished groups are gone with it.
        on_failure: told the error that ends the run.
    """

    def __init__(
        self,
        crew: Crew,
        worker_ids: list[str],
        *,
        max_deaths: int,
        on_lost: Callable[[tuple[str, int]], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._crew = crew
        self._max_deaths = max_deaths
        self._on_lost, self._on_failure = on_lost, on_failure
        self._members = [Member(worker_id, self._lose, on_failure) for worker_id in worker_ids]
        self._recipes: list[tuple[Any, Any]] = []
        self._recipes_lock = threading.Lock()
        self._held = 0  # > 0: orders are kept and then sent to be admitted together
        self._waiting: list[tuple[GroupOrder, Future[Any]]] = []
        self._keys = itertools.count(1)
        self._deal_soon = False
        self._polls: dict[str, asyncio.Task[Any]] = {}
        self._closing = False
        self._runner = AsyncTaskRunner("worker-pool", on_failure)

    @property
    def members(self) -> list[Member]:
        """The workers, for people and statistics."""
        return self._members

    def start(self) -> None:
        """Begin to send orders and listen for reports; every worker hosts its object."""
        for member in self._members:
            member.begin(self._crew.client(member.worker_id))
        self._runner.initialize()
        for member in self._members:
            self._runner.call(self._listen, member)

    def close(self) -> None:
        """Stop listening; futures without a report fail. Safe to call twice."""
        self._closing = True
        self._runner.destroy(timeout_s=5.0)
        for member in self._members:
            member.fail_orders(InfrastructureError("the rollout controller was closed"))

    # -- called from any thread ----------------------------------------------------------------------------------------

    def recipe_number(self, workflow: Any, accept: Any) -> int:
        """Number under which workers know this workflow and filter."""
        with self._recipes_lock:
            for number, known in enumerate(self._recipes):
                if known[0] is workflow and known[1] is accept:
                    return number
            self._recipes.append((workflow, accept))
            return len(self._recipes) - 1

    def new_key(self) -> int:
        """A fresh order key."""
        return next(self._keys)

    def submit(self, order: GroupOrder) -> Future[tuple[GroupReport, tuple[str, int]]]:
        """Run a group; the future gives its report and who made it, or InfrastructureError if the worker was lost."""
        future: Future[tuple[GroupReport, tuple[str, int]]] = Future()
        self._runner.call(self._accept, order, future)
        return future

    def hold(self) -> None:
        """Keep orders until :meth:`release`, which sends them to be admitted together."""
        self._runner.call(self._change_hold, 1)

    def release(self) -> None:
        """Undo one :meth:`hold`."""
        self._runner.call(self._change_hold, -1)

    def free(self, owner: tuple[str, int], shard: RTensor) -> None:
        """Let a worker drop a shard, soon; never blocks. Nothing to do if that worker's life is over."""
        if self._runner.alive:
            with contextlib.suppress(InfrastructureError, RuntimeError):
                self._runner.call(self._note_freed, owner, shard)

    def worker_failed(self, worker_id: str) -> None:
        """A worker was found dead or silent by someone else."""
        for member in self._members:
            if member.worker_id == worker_id and self._runner.alive:
                self._runner.call(self._lose, member, member.life, InfrastructureError(f"{worker_id} failed"))

    # -- in the pool's loop --------------------------------------------------------------------------------------------

    def _accept(self, order: GroupOrder, future: Future[Any]) -> None:
        self._waiting.append((order, future))
        if not self._held and not self._deal_soon:  # orders of this turn of the loop go together
            self._deal_soon = True
            self._runner.loop.call_soon(self._runner.guarded, self._deal)

    def _change_hold(self, by: int) -> None:
        self._held += by
        if not self._held:
            self._deal(together=True)

    def _deal(self, together: bool = False) -> None:
        """Give waiting orders to workers in service."""
        self._deal_soon = False
        alive = [member for member in self._members if member.alive]
        if not alive or self._held:
            return
        waiting, self._waiting = self._waiting, []
        for order, future in waiting:
            choose(alive, order.index, order.group_size).enqueue(order, future)
        for member in alive:
            if member.outbox and (together or not member.sending):
                member.sending = True
                self._runner.start(member.send(self._recipes, together))

    def _listen(self, member: Member) -> None:
        self._polls[member.worker_id] = self._runner.start(member.collect())

    def _note_freed(self, owner: tuple[str, int], shard: RTensor) -> None:
        for member in self._members:
            if (member.worker_id, member.life) == owner:
                member.freed.append(shard)

    def _lose(self, member: Member, life: int, error: BaseException) -> None:
        """A life of a worker is over: its groups end as lost, and it is started again."""
        if member.life != life or not member.alive or self._closing:
            return
        member.alive = False
        member.deaths_without_result += 1
        how = self._crew.failure(member.worker_id) or f"{type(error).__name__}: {error}"
        logger.warning(f"{member.worker_id} is lost with {len(member.in_flight)} groups under way: {how}")
        self._on_lost((member.worker_id, life))
        member.fail_orders(InfrastructureError(f"rollout worker {member.worker_id} was lost: {how}"))
        if member.deaths_without_result > self._max_deaths:
            stop = WorkerLostError(
                f"rollout worker {member.worker_id} died {member.deaths_without_result} times without finishing a "
                f"group between (recover.retries={self._max_deaths}); the last time: {how}"
            )
            stop.__cause__ = error
            self._on_failure(stop)
            return
        self._runner.start(self._revive(member))

    async def _revive(self, member: Member) -> None:
        if (poll := self._polls.pop(member.worker_id, None)) is not None:
            poll.cancel()
        pause_s = min(_FIRST_BACKOFF_S * 2 ** (member.deaths_without_result - 1), _LONGEST_BACKOFF_S)
        await asyncio.sleep(pause_s)
        member.life += 1
        try:
            await asyncio.to_thread(self._crew.revive, member.worker_id)
            client = self._crew.client(member.worker_id)  # it may have died again already
        except Exception as exc:  # noqa: BLE001 - counted, tried again, and in the end it stops the run
            if not self._closing:
                member.alive = True  # so that it can be lost again
                self._lose(member, member.life, exc)
            return
        member.begin(client)
        logger.info(f"{member.worker_id} is back in service")
        self._listen(member)
        self._deal()
