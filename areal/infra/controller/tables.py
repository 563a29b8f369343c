"""Trajectories that stay with the worker that made them.

A group's table is stored as one shard (its columns in wire format). The controller holds a :class:`RemoteTable`: a
mapping that knows where the columns are and fetches them only if somebody in this process reads one. When the last
reference is gone, so is the shard.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from areal.infra.rpc.rtensor import RTensor, local_store, localize
from areal.infra.rpc.serialization import decode, encode

Release = Callable[[RTensor], None]


@dataclass(frozen=True)
class TableHandle:
    """Where a table is: shards of columns, later ones add to (or replace) earlier ones."""

    shards: tuple[RTensor, ...]


class RemoteTable(Mapping[str, Any]):
    """The columns of one group, wherever they are.

    Args:
        shard: the table in its maker's store.
        owner: which worker, and which life of it, made the table.
        release: told the shard once nobody holds this object any more; from any thread.
        tokens: real tokens of all its sequences.
        sequences: how many they are.
        columns: names of those that its maker stored; known without a fetch.
    """

    def __init__(  # noqa: PLR0913 - what is known of a table without a fetch
        self,
        shard: RTensor,
        owner: tuple[str, int],
        release: Release,
        tokens: int,
        sequences: int = 1,
        columns: tuple[str, ...] = (),
    ) -> None:
        self.handle = TableHandle((shard,))
        self.owner = owner
        self.tokens = tokens
        self.sequences = sequences
        self.columns = columns
        self._columns: dict[str, Any] | None = None
        weakref.finalize(self, release, shard).atexit = False

    def add_columns(self, shard: RTensor, release: Release) -> None:
        """Columns that another worker computed for this table."""
        self.handle = TableHandle((*self.handle.shards, shard))
        self._columns = None
        weakref.finalize(self, release, shard).atexit = False

    def __getitem__(self, key: str) -> Any:
        return self._fetched()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fetched())

    def __len__(self) -> int:
        return len(self._fetched())

    def _fetched(self) -> dict[str, Any]:
        if self._columns is None:
            (self._columns,) = load_tables([self.handle])
        return self._columns


def store_table(table: Mapping[str, Any]) -> RTensor:
    """Keep a table's columns in this process's store."""
    import torch

    return local_store().put(torch.frombuffer(bytearray(bytes(encode(dict(table)))), dtype=torch.uint8))


def load_tables(tables: Sequence[TableHandle | Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The columns of each table; handles are fetched together, each shard once.

    Raises:
        TensorLostError: the worker that holds a shard is gone.
    """
    shards = {id(shard): shard for table in tables if isinstance(table, TableHandle) for shard in table.shards}
    fetched = dict(zip(shards, localize(list(shards.values())), strict=True))
    result = []
    for table in tables:
        if isinstance(table, TableHandle):
            columns: dict[str, Any] = {}
            for shard in table.shards:
                columns.update(decode(memoryview(fetched[id(shard)].numpy())))
            result.append(columns)
        else:
            result.append(dict(table))
    return result
