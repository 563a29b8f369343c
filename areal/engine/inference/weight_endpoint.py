"""What a rollout worker does in a weight update: it hands the calls of the publisher to its sampler.

In: calls of ``areal.engine.core.remote_weights`` by name. Out: calls of the sampler (the embedded engine, or a client
of inference servers). Inherited by ``RolloutWorker``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from areal.api.remote import remote

if TYPE_CHECKING:
    from areal.engine.core.weight_sources import WeightGroup, WeightSource, XcclSource
    from areal.engine.core.weight_sync import Received


class WeightEndpoint:
    """Receives weights into ``sampler``, aside, and exchanges them between two decode steps."""

    sampler: Any

    @remote(idempotent=True)
    def read_weights(self, source: WeightSource, version: int) -> Received:
        """Copy the weights at ``source`` aside; returns what the sampler tells of what it received."""
        found: Received = self.sampler.stage_source(source, version)
        return found

    @remote
    def receive_weights(self, source: XcclSource, version: int) -> Received:
        """The same from a broadcast, which happens once."""
        return self.read_weights(source, version)

    @remote
    def commit_weights(self, version: int) -> None:
        """Exchange the staged weights between two decode steps."""
        self.sampler.commit_weights(version)

    @remote(idempotent=True)
    def discard_weights(self) -> None:
        """Forget what was staged."""
        self.sampler.discard_weights()

    @remote(concurrent=True, idempotent=True)
    def weight_ranks(self) -> int:
        """Ranks that the sampler takes in a weight group."""
        return int(self.sampler.group_ranks)

    @remote
    def join_weight_group(self, group: WeightGroup) -> None:
        """Take the places from ``group.rank`` on; returns when everybody has joined."""
        self.sampler.join_group(group)

    @remote(concurrent=True, idempotent=True)
    def leave_weight_group(self, group: WeightGroup) -> None:
        """Leave a group; a receive under way fails. An unknown one is no error."""
        self.sampler.leave_group(group)
