"""One rollout worker as the pool sees it: what is on its way there, what is expected back, and the talk with it.

    enqueue ─► outbox ─send─► in flight ─collect─► finished
                              └─ the life ends ─► every order in flight fails, the pool decides what comes next

Everything runs in the pool's loop.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from areal.infra.rpc.rtensor import RTensor, clear_node
from areal.utils.errors import InfrastructureError

if TYPE_CHECKING:
    from areal.infra.rollout.orders import GroupOrder, GroupReport

COLLECT_S = 20.0  # one long poll


class Member:
    """One worker.

    Args:
        worker_id: of the worker, and name of the object it hosts.
        on_broken: told ``(member, life, error)`` when the talk breaks.
        on_failure: told an error that is not the worker's but the user's.

    Attributes:
        life: how often it was started again.
        alive: in service.
        load: samples under way.
        deaths_without_result: how often it died since it last finished a group.
        freed: shards it may drop, told with the next poll.
    """

    def __init__(
        self,
        worker_id: str,
        on_broken: Callable[[Member, int, BaseException], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self.worker_id = worker_id
        self.life = self.load = self.deaths_without_result = 0
        self.alive = True
        self.sending = False
        self.outbox: list[GroupOrder] = []
        self.in_flight: dict[int, tuple[GroupOrder, Future[Any]]] = {}
        self.freed: list[RTensor] = []
        self._client: Any = None
        self._told: set[int] = set()
        self._acknowledged = 0
        self._on_broken, self._on_failure = on_broken, on_failure

    def begin(self, client: Any) -> None:
        """A (new) life: the worker hosts its object and knows nothing yet."""
        self._client = client
        self._told, self.freed, self._acknowledged = set(), [], 0
        self.alive = True

    def enqueue(self, order: GroupOrder, future: Future[Any]) -> None:
        """Take an order; :meth:`send` delivers it."""
        self.outbox.append(order)
        self.in_flight[order.key] = (order, future)
        self.load += order.group_size

    async def send(self, recipes: Sequence[tuple[Any, Any]], together: bool) -> None:
        """Send what is in the outbox, until it is empty; ``recipes`` by number are told first.

        Whoever starts this sets ``sending``.
        """
        life = self.life
        try:
            while self.outbox and self.alive:
                orders, self.outbox = self.outbox, []
                for number in {order.recipe for order in orders} - self._told:
                    recipe, accept = recipes[number]
                    await self._client.acall(self.worker_id, "define", number, recipe, accept)
                    self._told.add(number)
                await self._client.acall(self.worker_id, "submit", orders, together)
        except InfrastructureError as exc:
            self._on_broken(self, life, exc)
        except Exception as exc:  # noqa: BLE001 - the workflow cannot be built: that is the user's error, and final
            self._on_failure(exc)
        finally:
            self.sending = False

    async def collect(self) -> None:
        """Fetch reports for as long as this life lasts."""
        life = self.life
        while self.life == life:
            try:
                if self.freed:
                    freed, self.freed = self.freed, []
                    await asyncio.to_thread(clear_node, freed[0].address, [shard.shard_id for shard in freed])
                last, reports = await self._client.acall(
                    self.worker_id, "collect", self._acknowledged, COLLECT_S, timeout_s=COLLECT_S + 60.0
                )
            except Exception as exc:  # noqa: BLE001 - whatever ends the poll ends this life of the worker
                self._on_broken(self, life, exc)
                return
            if self.life == life:
                self._acknowledged = last
                for report in reports:
                    self._finish(report)

    def fail_orders(self, error: InfrastructureError) -> None:
        """Nothing that is under way will come back."""
        lost, self.in_flight = self.in_flight, {}
        self.outbox, self.load = [], 0
        for _, future in lost.values():
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

    def _finish(self, report: GroupReport) -> None:
        order, future = self.in_flight.pop(report.key, (None, None))
        if order is None or future is None:
            return  # reported twice
        self.load -= order.group_size
        self.deaths_without_result = 0
        if future.set_running_or_notify_cancel():
            future.set_result((report, (self.worker_id, self.life)))


def choose(members: Sequence[Member], affinity: int, samples: int) -> Member:
    """The worker of a group: its row's favourite, unless another has less to do by more than this group.

    A row's favourite is the same each time it runs (highest hash of row and worker), so that a prefix cache helps.

    Args:
        members: workers in service.
        affinity: the row.
        samples: of the group.
    """
    least = min(member.load for member in members)
    favourite = max(members, key=lambda member: zlib.crc32(f"{affinity}/{member.worker_id}".encode()))
    if favourite.load <= least + samples:
        return favourite
    return min(members, key=lambda member: member.load)
