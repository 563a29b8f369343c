"""Publishes weights from train ranks to rollout workers in other processes.

    stage: ranks write one version to shared memory ─► every worker copies it aside ─► records compared
    commit: every worker exchanges its buffers

A worker that dies in between is left to the pool, which brings the new one up to date with the version in service.
Called by ``areal.infra.weight_update``.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from areal.engine.core.shared_weights import WeightManifest, any_rank
from areal.engine.core.weight_sync import compare_records

if TYPE_CHECKING:
    from areal.infra.controller.rollout_controller import RolloutController
    from areal.infra.controller.train_controller import RankGroup


class RemotePublisher:
    """Moves versions from the ranks of a train role to rollout workers.

    Args:
        ranks: of the role that learns.
        rollout: the workers.
    """

    def __init__(self, ranks: RankGroup, rollout: RolloutController) -> None:
        self._ranks, self._rollout = ranks, rollout
        self._in_service: WeightManifest | None = None
        self._staged: WeightManifest | None = None
        self._receivers: list[str] = []
        self._returning: set[str] = set()  # up to date, but not known to be in service yet
        self._exchange = threading.Lock()  # a worker that returns and an update take turns; held from stage to commit
        rollout.bring_up_to_date = self.bring_up_to_date

    def stage(self, version: int) -> None:
        """See :class:`areal.api.engine_api.WeightPublisher`."""
        manifest = any_rank(self._ranks.call("publish_weights", version))
        self._exchange.acquire()
        self._staged = manifest
        alive = self._rollout.alive()
        self._returning -= set(alive)
        self._receivers = [*alive, *self._returning]
        found = self._rollout.call(self._receivers, "stage_weights", manifest, version)
        sent = [param.record() for param in manifest.params]
        for received in found.values():
            compare_records(sent, received, version)
        self._receivers = list(found)

    def commit(self, version: int) -> None:
        """See :class:`areal.api.engine_api.WeightPublisher`."""
        self._rollout.call(self._receivers, "commit_weights", version)
        self._in_service, self._staged = self._staged, None
        self._exchange.release()

    def discard(self) -> None:
        """See :class:`areal.api.engine_api.WeightPublisher`."""
        if self._staged is None:
            return
        self._staged = None
        try:
            self._rollout.call(self._receivers, "discard_weights")
        finally:
            self._exchange.release()

    def bring_up_to_date(self, worker_id: str) -> None:
        """Give a worker that was started again the version in service."""
        with self._exchange:
            if self._in_service is not None:
                version = self._in_service.version
                self._rollout.call_one(worker_id, "stage_weights", self._in_service, version)
                self._rollout.call_one(worker_id, "commit_weights", version)
            self._returning.add(worker_id)
