"""Publishers: they move one version's weights from a train engine to samplers, and nothing else.

In: the engine's ``named_full_tensors`` and the receivers. Out: the same bytes on the other side, proven by equal
records. Called by ``areal/infra/weight_update.py``, which owns the order of pausing, publishing and setting versions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from areal.api.engine_api import WeightReceiver
from areal.engine.core.weight_heads import ServerHeads, head_of
from areal.utils.errors import WeightSyncError

NamedTensors = Iterable[tuple[str, Tensor]]
_WORD = 8  # bytes


@dataclass(frozen=True)
class ParamRecord:
    """What was sent or received of one parameter; equal records mean equal bytes (up to a checksum).

    ``head`` has its first values where a sender noted them, for servers that keep no records.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    checksum: int
    head: tuple[float, ...] = field(default=(), compare=False, repr=False)

    @classmethod
    def of(cls, name: str, tensor: Tensor, *, head: bool = False) -> ParamRecord:
        """Record of ``tensor`` under its checkpoint ``name``, with or without its first values."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        return cls(name, tuple(tensor.shape), dtype, checksum(tensor), head_of(tensor) if head else ())


Received = Sequence[Sequence[ParamRecord] | ServerHeads] | None
"""What each receiving rank recorded; or what each server that keeps no records holds; None where it cannot tell."""


class InProcessPublisher:
    """Hands tensors to receivers in the same process; every receiver copies them.

    Args:
        named_full_tensors: makes the ``(checkpoint name, full tensor)`` pairs; a collective on sharded engines.
        receivers: none on ranks that only join that collective.
    """

    def __init__(
        self, named_full_tensors: Callable[[], Iterator[tuple[str, Tensor]]], *receivers: WeightReceiver
    ) -> None:
        self.named_full_tensors = named_full_tensors
        self.receivers = list(receivers)

    def stage(self, version: int) -> list[ParamRecord]:
        """See :class:`areal.api.engine_api.WeightPublisher`."""
        sent: list[ParamRecord] = []
        for receiver in self.receivers:
            sent = []
            received = receiver.stage_weights(self._recorded(sent), version)
            compare_records(sent, received, version)
        if not self.receivers:
            for _ in self._recorded(sent):
                pass
        return sent

    def commit(self, version: int) -> None:
        """See :class:`areal.api.engine_api.WeightPublisher`."""
        for receiver in self.receivers:
            receiver.commit_weights(version)

    def discard(self) -> None:
        """See :class:`areal.api.engine_api.WeightPublisher`."""
        for receiver in self.receivers:
            receiver.discard_weights()

    def publish(self, version: int) -> list[ParamRecord]:
        """Stage and commit; returns the records."""
        records = self.stage(version)
        self.commit(version)
        return records

    def _recorded(self, sent: list[ParamRecord]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.named_full_tensors():
            sent.append(ParamRecord.of(name, tensor))
            yield name, tensor


def checksum(tensor: Tensor) -> int:
    """Sum of the bytes read as integers of 8 (zeros fill the last one), modulo 2**64; one pass over memory."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if data.data_ptr() % _WORD or data.storage_offset() % _WORD:
        data = data.clone()
    whole = data.numel() // _WORD * _WORD
    total = int(data[:whole].view(torch.int64).sum())
    if whole < data.numel():
        total += int.from_bytes(bytes(data[whole:].tolist()).ljust(_WORD, b"\0"), "little")
    return wrap(total)


def wrap(total: int) -> int:
    """The signed 64-bit integer that equals ``total`` modulo 2**64."""
    return (total + 2**63) % 2**64 - 2**63


def compare_records(sent: Sequence[ParamRecord], received: Sequence[ParamRecord], version: int) -> None:
    """Check that both sides hold the same weights; the order of the records does not matter.

    Raises:
        WeightSyncError: names the first parameter that is missing, unexpected or different.
    """
    theirs = {record.name: record for record in received}
    for ours in sent:
        other = theirs.pop(ours.name, None)
        if other is None:
            raise WeightSyncError(f"weights v{version}: the receiver did not record {ours.name}")
        if other != ours:
            raise WeightSyncError(f"weights v{version}: {ours.name} was sent as {ours} and received as {other}")
    if theirs:
        raise WeightSyncError(f"weights v{version}: the receiver recorded {sorted(theirs)}, which was never sent")
