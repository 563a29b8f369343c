"""A scoring role whose ranks share rows: every column that a rank stored is used or freed."""

from __future__ import annotations

import itertools
from typing import Any

from areal.infra.controller.tables import RemoteTable
from areal.infra.controller.train_controller import ScoringController
from areal.infra.rpc.rtensor import RTensor


def shard(name: str) -> RTensor:
    """A reference to nothing."""
    return RTensor(name, "127.0.0.1:1", "uint8", (1,))


class FourRanks:
    """Two data-parallel ranks of two model-parallel ranks each; notes what is freed."""

    def __init__(self) -> None:
        self.freed: list[tuple[int, list[str]]] = []

    def call(self, method: str, *args: Any) -> list[Any]:
        return [[shard(f"column-of-rank-{rank}")] if method == "score" else None for rank in range(4)]

    def each(self, function: Any) -> None:
        """Loading moves nothing here."""

    def in_background(self, rank: int, method: str, ids: list[str]) -> None:
        self.freed.append((rank, ids))


def test_annotate_ranks_that_share_rows_free_the_columns_nobody_uses() -> None:
    scorer = ScoringController.__new__(ScoringController)
    scorer.ranks = FourRanks()  # type: ignore[assignment]
    scorer._numbers, scorer._loaded, scorer._dealt = itertools.count(1), {}, {}
    scorer._data_ranks, scorer._data_size = [0, 0, 1, 1], 2
    tables = [RemoteTable(shard(f"table-{i}"), ("rollout/0", 0), lambda gone: None, tokens=3) for i in range(2)]

    scorer.annotate(scorer.pack(tables), "ref_logp")

    used = [table.handle.shards[-1].shard_id for table in tables]
    assert used == ["column-of-rank-0", "column-of-rank-2"]
    assert scorer.ranks.freed == [(1, ["column-of-rank-1"]), (3, ["column-of-rank-3"])]
    tables.clear()
    assert sorted(scorer.ranks.freed) == [(rank, [f"column-of-rank-{rank}"]) for rank in range(4)]
