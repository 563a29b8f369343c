"""Publishes weights from train ranks to rollout workers in other processes.

    stage: one version to every worker, who keeps it aside ─► records of every rank compared
    commit: every worker goes on with it

Where servers must be frozen to receive, the bytes travel in ``commit``. A worker that dies in between is left to the
pool, which brings the new one up to date with the version in service. Called by ``areal.infra.weight_update``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from areal.engine.core.weight_transfer import Ranks, TransferSettings, open_route
from areal.utils import logging
from areal.utils.errors import InfrastructureError, WeightSyncError

if TYPE_CHECKING:
    from areal.infra.controller.rollout_controller import RolloutController

logger = logging.getLogger("WeightUpdate")

_POLL_S = 0.5


class RolloutReceivers:
    """The rollout workers, as :class:`areal.engine.core.weight_transfer.Receivers`."""

    def __init__(self, rollout: RolloutController) -> None:
        self._rollout = rollout

    def lives(self) -> Mapping[str, int]:
        """Worker -> how often it was started again."""
        return {member.worker_id: member.life for member in self._rollout.pool.members}

    def call(self, names: Iterable[str], method: str, *args: Any) -> dict[str, Any]:
        """Call workers at once; those that are lost, or whose sampler is, are missing in the result."""
        names = list(names)
        if not names:
            return {}
        with ThreadPoolExecutor(len(names), thread_name_prefix="weights") as threads:
            futures = [threads.submit(self._call_one, name, method, *args) for name in names]
        return {name: value for future in futures for name, value in future.result().items()}

    def well(self, names: Iterable[str]) -> list[str]:
        """Those of ``names`` that can go on; the pool is told of the others."""
        found = self._rollout.call(names, "is_well")
        for name, well in found.items():
            if not well:
                self._rollout.pool.worker_failed(name)
        return [name for name, well in found.items() if well]

    def _call_one(self, name: str, method: str, *args: Any) -> dict[str, Any]:
        try:
            return self._rollout.call([name], method, *args)
        except InfrastructureError:
            if self.well([name]):
                raise
            return {}


class RemotePublisher:
    """Moves versions from the ranks of a train role to rollout workers.

    Args:
        ranks: of the role that learns.
        rollout: the workers.
        mode: ``shm``, ``xccl`` or ``disk``.
        transfer_while_paused: workers receive only while they are frozen.
        settings: limits and places.
    """

    def __init__(
        self,
        ranks: Ranks,
        rollout: RolloutController,
        *,
        mode: str = "shm",
        transfer_while_paused: bool = False,
        settings: TransferSettings | None = None,
    ) -> None:
        self._rollout, self._late = rollout, transfer_while_paused
        self._workers = RolloutReceivers(rollout)
        self._route = open_route(mode, ranks, self._workers, settings or TransferSettings())
        self._receivers: list[str] = []
        self._committed: list[str] = []
        self._paused: list[str] = []
        self._returning: set[str] = set()  # up to date, but not known to be in service yet
        self._waiting: set[str] = set()  # can only be brought up to date by the next update
        self._turn = threading.Condition()  # a worker that returns and an update take turns
        self._busy = self._updating = self._closed = False
        self._in_service: int | None = None
        rollout.bring_up_to_date = self.bring_up_to_date

    def stage(self, version: int) -> None:
        """See :class:`areal.api.engine_api.WeightPublisher`."""
        self._take_turn()
        self._updating = True
        self._receivers, self._committed = [], []
        self._route.prepare(version)
        if not self._late:
            self._transfer(version)

    def commit(self, version: int) -> None:
        """See :class:`areal.api.engine_api.WeightPublisher`."""
        if self._late:
            self._transfer(version)
        try:
            self._committed = list(self._workers.call(self._receivers, "commit_weights", version))
        except Exception:
            versions = self._workers.call(self._receivers, "get_version")
            self._committed = [worker for worker, found in versions.items() if found == version]
            raise
        self._route.in_service()
        self._in_service = version
        self._waiting -= set(self._committed)
        self._end_update()

    def discard(self) -> None:
        """See :class:`areal.api.engine_api.WeightPublisher`; a worker that cannot go back is started again."""
        if not self._updating:
            return
        try:
            for worker in self._receivers:
                self._take_back(worker)
            self._route.given_up()
        finally:
            self._end_update()

    def bring_up_to_date(self, worker_id: str) -> None:
        """Give a worker that was started again the version in service; if that cannot be had, the next one.

        Raises:
            InfrastructureError: it was lost again.
        """
        self._take_turn()
        try:
            if self._in_service is None or self._restore(worker_id):
                self._returning.add(worker_id)
                return
            self._waiting.add(worker_id)
            logger.warning(f"{worker_id} waits for the next weight update: v{self._in_service} cannot be had any more")
        finally:
            self._end_turn()
        with self._turn:
            while worker_id in self._waiting and not self._closed:
                self._turn.wait(_POLL_S)
                if worker_id in self._waiting and not self._busy and not self._workers.well([worker_id]):
                    self._waiting.discard(worker_id)
                    raise WeightSyncError(f"{worker_id} was lost before a weight update reached it")
            self._returning.add(worker_id)

    def close(self) -> None:
        """No update will come any more: groups are left, workers that wait stop waiting. Safe to call twice."""
        with self._turn:
            self._closed = True
            self._turn.notify_all()
        self._route.close()

    def _take_turn(self) -> None:
        with self._turn:
            self._turn.wait_for(lambda: not self._busy or self._closed)
            if self._closed:
                raise WeightSyncError("the publisher was closed: no weights are sent any more")
            self._busy = True

    def _end_turn(self) -> None:
        with self._turn:
            self._busy = False
            self._turn.notify_all()

    def _end_update(self) -> None:
        paused, self._paused, self._updating = self._paused, [], False
        try:
            self._workers.call(paused, "resume")
        finally:
            self._end_turn()

    def _transfer(self, version: int) -> None:
        alive = self._rollout.alive()
        self._returning -= set(alive)
        self._receivers = list(dict.fromkeys([*alive, *sorted(self._returning | self._waiting)]))
        if self._late:  # also those that came back after the others were paused
            self._paused = self._receivers = list(self._workers.call(self._receivers, "pause"))
        self._receivers = self._route.transfer(version, self._receivers)

    def _take_back(self, worker: str) -> None:
        """Have a worker forget the version that was given up, even if it has switched to it already."""
        try:
            self._workers.call([worker], "discard_weights")
            if worker not in self._committed or self._in_service is None or self._restore(worker):
                return
            error: Exception = WeightSyncError(f"v{self._in_service} cannot be had any more")
        except Exception as exc:  # noqa: BLE001 - the others are taken back all the same
            error = exc
        logger.warning(f"{worker} is started again, as it cannot go back to the weights in service: {error}")
        self._rollout.pool.worker_failed(worker)

    def _restore(self, worker: str) -> bool:
        """Put the version in service into service at one worker."""
        self._rollout.call_one(worker, "pause")
        try:
            if not self._route.restore(worker):
                return False
            self._rollout.call_one(worker, "commit_weights", self._in_service)
            return True
        finally:
            self._rollout.call_one(worker, "resume")
