"""Rows: where they come from, and how each of them ends.

    source ─dispense─► outstanding (waiting, running, ready, in step) ─► trained | filtered | failed
                          ▲
                          └ resume: rows without an end come first

:class:`RowLedger` is the only place that counts rows. Every dispensed row ends exactly once. A filtered or failed row
is replaced simply because dispensing goes on until ``trained + outstanding`` reaches the run's total. Its state is one
cursor and the ordered rows without an end; trajectories are not part of it, those rows are generated again.

:meth:`RowLedger.dispense` is called by one feeder at a time, in a helper thread because reading a record may be slow;
the other methods may be called from any thread and never wait for it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Protocol

from areal.api.trajectory import Row
from areal.utils.errors import DataError

STATE_FORMAT = 1
RowEnd = Literal["trained", "filtered", "failed"]


class RowSource(Protocol):
    """Rows by position in an epoch."""

    def read(self, epoch: int, position: int) -> tuple[int, dict[str, Any]] | None:
        """Dataset index and record at ``position`` of ``epoch``; None behind its last row."""
        ...


class IndexedSource:
    """Rows of our own loader: any row at any time, by the epoch's permutation."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def read(self, epoch: int, position: int) -> tuple[int, dict[str, Any]] | None:
        order = self._loader.order(epoch)
        if position >= len(order):
            return None
        index = int(order[position])
        return index, self._loader.record(index)


class IterableSource:
    """Rows of a foreign loader (an iterable of lists of records), read front to back once per epoch.

    The index of a row is its place in the epoch: such a loader does not tell more. Going back within an epoch reads it
    again from the start, which happens after a resume only.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._epoch = -1
        self._next = 0
        self._rows: Iterator[dict[str, Any]] = iter(())

    def read(self, epoch: int, position: int) -> tuple[int, dict[str, Any]] | None:
        if epoch != self._epoch or position < self._next:
            self._open(epoch)
        for record in self._rows:
            self._next += 1
            if self._next > position:
                return position, record
        return None

    def _open(self, epoch: int) -> None:
        sampler = getattr(self._loader, "sampler", None)
        if sampler is not None and hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        self._epoch, self._next = epoch, 0
        self._rows = (record for batch in self._loader for record in batch)


def row_source(loader: Any) -> RowSource:
    """The source over our loader, or over any iterable of lists of records."""
    if hasattr(loader, "order") and hasattr(loader, "record"):
        return IndexedSource(loader)
    return IterableSource(loader)


class RowLedger:
    """Dispenses rows and keeps the books on them.

    Attributes:
        total: rows that the run trains; dispensing stops when ``trained + outstanding`` reaches it. None means no end.
        counts: how many rows ended, by end.
        replaced: filtered and failed rows are replaced; false (dynamic batch size) lets them count towards ``total``.
    """

    def __init__(self, total: int | None = None) -> None:
        self.total = total
        self.counts: dict[str, int] = {"trained": 0, "filtered": 0, "failed": 0}
        self.replaced = True
        self._source: RowSource | None = None
        self._lock = threading.Lock()
        self._epoch = 0
        self._position = 0
        self._outstanding: dict[tuple[int, int], Row] = {}
        self._resumed: deque[Row] = deque()

    @property
    def attached(self) -> bool:
        """Whether a loader was attached."""
        return self._source is not None

    @property
    def outstanding(self) -> int:
        """Rows dispensed and not ended."""
        return len(self._outstanding)

    @property
    def exhausted(self) -> bool:
        """Whether no further row would be dispensed now."""
        with self._lock:
            return not self._resumed and not self._open()

    def attach(self, loader: Any) -> None:
        """Read rows from ``loader`` from now on."""
        self._source = row_source(loader)

    def dispense(self) -> tuple[Row, dict[str, Any]] | None:
        """The next row and its record, resumed rows first; None when nothing is left to do.

        Raises:
            DataError: an epoch has no rows, or a resumed row is no longer there.
        """
        assert self._source is not None, "attach() comes first"
        with self._lock:
            resumed = self._resumed.popleft() if self._resumed else None
            if resumed is None and not self._open():
                return None
        if resumed is not None:
            return resumed, self._reread(self._source, resumed)
        found = self._source.read(self._epoch, self._position)
        if found is None:
            found = self._next_epoch(self._source)
        with self._lock:
            row = Row(epoch=self._epoch, position=self._position, index=found[0])
            self._position += 1
            self._outstanding[row.epoch, row.position] = row
        return row, found[1]

    def end(self, row: Row, how: RowEnd) -> None:
        """Book the one end of an outstanding row.

        Raises:
            AssertionError: the row has ended already, or was never dispensed.
        """
        with self._lock:
            known = self._outstanding.pop((row.epoch, row.position), None)
            assert known is not None, f"row {row} ended as {how}, but is not outstanding"
            self.counts[how] += 1

    def state_dict(self) -> dict[str, Any]:
        """Cursor, ordered rows without an end, counters; plain numbers, fit for JSON."""
        with self._lock:
            rows = sorted(self._outstanding.values())
            return {
                "format": STATE_FORMAT,
                "cursor": {"epoch": self._epoch, "position": self._position},
                "open_rows": [[row.epoch, row.position, row.index] for row in rows],
                "counts": dict(self.counts),
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state`` was taken; its open rows come first, in order.

        Raises:
            DataError: the state has another format.
        """
        if state.get("format") != STATE_FORMAT:
            raise DataError(f"row state has format {state.get('format')!r}; this version reads {STATE_FORMAT}")
        rows = [Row(epoch=int(e), position=int(p), index=int(i)) for e, p, i in state["open_rows"]]
        with self._lock:
            self._epoch = int(state["cursor"]["epoch"])
            self._position = int(state["cursor"]["position"])
            self.counts = {name: int(state["counts"].get(name, 0)) for name in self.counts}
            self._outstanding = {(row.epoch, row.position): row for row in rows}
            self._resumed = deque(rows)

    def _open(self) -> bool:
        if self.total is None:
            return True
        done = self.counts["trained"] if self.replaced else sum(self.counts.values())
        return done + len(self._outstanding) < self.total

    def _next_epoch(self, source: RowSource) -> tuple[int, dict[str, Any]]:
        found = source.read(self._epoch + 1, 0)
        if found is None or self._position == 0:
            raise DataError(
                f"the data loader gave no rows in epoch {self._epoch + (self._position > 0)}. It may hold fewer rows "
                f"than a "
                "batch with drop_last=true, or be exhausted and unable to start again"
            )
        with self._lock:
            self._epoch, self._position = self._epoch + 1, 0
        return found

    @staticmethod
    def _reread(source: RowSource, row: Row) -> dict[str, Any]:
        found = source.read(row.epoch, row.position)
        if found is None or found[0] != row.index:
            raise DataError(
                f"row {row.index} (epoch {row.epoch}, position {row.position}) of the recover point is not where it "
                f"was: the "
                "dataset, its order or its seed changed. Restore it, or start without recovery"
            )
        return found[1]
