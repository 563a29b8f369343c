"""What travels between the controller and rollout workers: rows to run, and how they ended.

A trajectory itself never does: it stays in the worker's tensor store, and the report carries its handle.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field
from typing import Any

from areal.infra.rpc.rtensor import RTensor
from areal.utils.errors import ArealError, WorkflowError


@dataclass(slots=True)
class GroupOrder:
    """One row to run. ``key`` is unique in a run; ``recipe`` is the number of a workflow that the worker was told."""

    key: int
    recipe: int
    task_id: int
    data: dict[str, Any]
    group_size: int
    epoch: int
    position: int
    index: int
    group_id: int
    from_loader: bool
    is_eval: bool


@dataclass(slots=True)
class SampleFailure:
    """An exception of one sample, as text."""

    type: str
    text: str
    trace: str

    @classmethod
    def of(cls, error: BaseException) -> SampleFailure:
        """What can be told about ``error`` in another process."""
        return cls(type(error).__name__, str(error), "".join(traceback.format_exception(error)))


@dataclass(slots=True)
class GroupReport:
    """How one order ended.

    Attributes:
        key: of the order.
        status: accepted, filtered, failed or lost.
        failures: one per sample that failed.
        succeeded: samples that did not.
        dropped: samples dropped, by reason.
        shard: the group's table in the worker's store; None if there is none.
        lengths, rewards, min_version, max_version: as in ``TrajectoryRef``.
        columns: names of the table's.
    """

    key: int
    status: str
    failures: list[SampleFailure] = field(default_factory=list)
    succeeded: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    shard: RTensor | None = None
    lengths: tuple[int, ...] = ()
    rewards: tuple[float, ...] = ()
    min_version: int = -1
    max_version: int = -1
    columns: tuple[str, ...] = ()


class RemoteSampleError(WorkflowError):
    """A sample failed in a rollout worker; the message holds its type and text, a note the original traceback."""

    def __init__(self, failure: SampleFailure) -> None:
        super().__init__(f"{failure.type}: {failure.text}")
        self.add_note(f"raised in a rollout worker:\n{failure.trace}")


class WorkerLostError(ArealError, RuntimeError):
    """A rollout worker could not be kept alive."""
