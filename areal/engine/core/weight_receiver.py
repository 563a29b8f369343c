"""Receiving one version from wherever it is: shared memory, a directory, or a broadcast.

In: a :class:`WeightSource` that a publisher made. Out: ``(checkpoint name, tensor)`` pairs, and through
:class:`SourceReceiver` staged weights. Inherited by the native engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor

from areal.engine.core.hf_checkpoint import HfDirectory
from areal.engine.core.lora_layout import adapter_pairs
from areal.engine.core.shared_weights import WeightManifest, read_weights
from areal.engine.core.weight_groups import Memberships
from areal.engine.core.weight_sources import DiskSource, WeightGroup, WeightSource, XcclSource
from areal.engine.core.weight_wire import receive_buckets
from areal.utils.errors import CheckpointError, WeightSyncError
from areal.utils.hf_utils import holds_adapter

if TYPE_CHECKING:
    from areal.engine.core.weight_sync import ParamRecord


@contextmanager
def open_source(
    source: WeightSource, groups: Memberships, lasting: bool = False
) -> Iterator[Iterable[tuple[str, Tensor]]]:
    """``(name, tensor)`` pairs of a version; a tensor is valid until the next one is asked for.

    Args:
        source: where it is.
        groups: those that this receiver is in.
        lasting: every tensor is valid until the next version is received.

    Raises:
        WeightSyncError: the source is gone, damaged, or ends early; a group is left then.
    """
    if isinstance(source, WeightManifest):
        with read_weights(source) as pairs:
            yield pairs
    elif isinstance(source, XcclSource):
        member = groups.get(source.group.name)
        arriving = receive_buckets(member, source.buckets, lasting)
        try:
            yield arriving
        except BaseException:
            groups.leave(source.group.name)  # the sender waits for this rank otherwise
            raise
        finally:
            arriving.close()  # type: ignore[attr-defined]  # a generator
    else:
        yield _read_directory(source)


def _read_directory(source: DiskSource) -> Iterator[tuple[str, Tensor]]:
    try:
        yield from adapter_pairs(source.path) if holds_adapter(source.path) else HfDirectory(source.path).tensors()
    except (CheckpointError, OSError) as exc:
        raise WeightSyncError(f"weights v{source.version}: {exc}") from exc


class SourceReceiver:
    """Gives a ``WeightReceiver`` the calls of a publisher in another process; it takes one rank of a group.

    Attributes:
        keeps_sources: it may read a staged tensor until it is given the next version.
    """

    group_ranks = 1
    keeps_sources = False

    def __init__(self) -> None:
        self._groups = Memberships()

    def stage_weights(
        self, pairs: Iterable[tuple[str, Tensor]], version: int, lasting: bool = False
    ) -> list[ParamRecord]:
        """See :class:`areal.api.engine_api.WeightReceiver`; ``lasting`` tensors are as ``keeps_sources`` says."""
        raise NotImplementedError

    def stage_source(self, source: WeightSource, version: int) -> list[list[ParamRecord]]:
        """Copy a version aside while the current one serves; returns the records of each rank (one).

        Raises:
            WeightSyncError: something is missing, unknown, of a wrong shape, or the sender is gone.
        """
        lasting = self.keeps_sources
        with open_source(source, self._groups, lasting) as pairs:
            return [self.stage_weights(pairs, version, lasting)]

    def join_group(self, group: WeightGroup) -> None:
        """Take the place ``group.rank``; returns when every rank has."""
        self._groups.join(group)

    def leave_group(self, group: WeightGroup) -> None:
        """Leave it, from any thread; a receive under way fails. An unknown group is no error."""
        self._groups.leave(group.name)
