"""Rows: each ends exactly once, replaced when it ends without training, resumable."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.infra.rollout.rows import RowLedger
from areal.utils.errors import DataError
from tests.rollout_fakes import loader, rows


class Foreign:
    """What a torch-style loader offers: lists of records, a batch size, a sampler with epochs."""

    def __init__(self, count: int, batch: int, drop_last: bool) -> None:
        self.batch_size = batch
        self._batches = [rows(count)[i : i + batch] for i in range(0, count, batch)]
        if drop_last and len(self._batches[-1]) < batch:
            del self._batches[-1]
        self.sampler = self
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self):
        return iter(self._batches)


def dispensed(ledger: RowLedger) -> list[tuple[int, int]]:
    found = []
    while (item := ledger.dispense()) is not None:
        found.append((item[0].epoch, item[0].index))
        ledger.end(item[0], "trained")
    return found


def first_row(size: int, batch: int, foreign: bool) -> None:
    ledger = RowLedger()
    ledger.attach(Foreign(size, batch, True) if foreign else loader(size, batch, drop_last=True))
    ledger.dispense()


@pytest.mark.parametrize("size", [3, 4, 5, 30])
@pytest.mark.parametrize("batch", [4, 16])
@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("foreign", [True, False])
def test_each_row_is_used_the_documented_number_of_times(size, batch, epochs, drop_last, foreign):
    if drop_last and size < batch:
        with pytest.raises(DataError):
            first_row(size, batch, foreign)
        return
    per_epoch = size // batch * batch if drop_last else size
    source = Foreign(size, batch, drop_last) if foreign else loader(size, batch, drop_last=drop_last)
    ledger = RowLedger(total=epochs * per_epoch)
    ledger.attach(source)
    assert dispensed(ledger) == [(epoch, i) for epoch in range(epochs) for i in range(per_epoch)]
    assert ledger.counts == {"trained": epochs * per_epoch, "filtered": 0, "failed": 0}


def test_foreign_sampler_is_told_each_epoch():
    source = Foreign(4, 2, True)
    ledger = RowLedger(total=8)
    ledger.attach(source)
    dispensed(ledger)
    assert source.epochs == [0, 1]


def test_a_row_ends_only_once():
    ledger = RowLedger()
    ledger.attach(loader(4, 2))
    row, _ = ledger.dispense()
    ledger.end(row, "failed")
    with pytest.raises(AssertionError, match="not outstanding"):
        ledger.end(row, "trained")


def test_filtered_rows_are_replaced_unless_they_count():
    for replaced, expected in ((True, 3), (False, 2)):
        ledger = RowLedger(total=2)
        ledger.replaced = replaced
        ledger.attach(loader(8, 2))
        first, _ = ledger.dispense()
        ledger.end(first, "filtered")
        seen = 1
        while (item := ledger.dispense()) is not None:
            ledger.end(item[0], "trained")
            seen += 1
        assert seen == expected


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), cuts=st.lists(st.integers(1, 12), min_size=1, max_size=4), total=st.integers(1, 40))
def test_every_row_ends_exactly_once_across_resumes(seed, cuts, total):
    import random

    rng = random.Random(seed)
    ledger, ended = RowLedger(total), []
    ledger.attach(loader(7, 2, shuffle=True, drop_last=False))
    for cut in [*cuts, None]:
        open_rows = []
        steps = 0
        while cut is None or steps < cut:
            steps += 1
            item = ledger.dispense()
            if item is not None:
                open_rows.append(item[0])
            elif not open_rows:
                break
            if open_rows and (item is None or rng.random() < 0.5):
                row = open_rows.pop(rng.randrange(len(open_rows)))
                ledger.end(row, rng.choice(["trained", "trained", "filtered", "failed"]))
                ended.append((row.epoch, row.position, row.index))
        state = json.loads(json.dumps(ledger.state_dict()))
        ledger = RowLedger(total)
        ledger.attach(loader(7, 2, shuffle=True, drop_last=False))
        ledger.load_state_dict(state)
    assert ledger.counts["trained"] == total
    assert ledger.outstanding == 0
    assert len(set(ended)) == len(ended) == sum(ledger.counts.values())
    places = sorted((epoch, position) for epoch, position, _ in ended)
    assert places == [(i // 7, i % 7) for i in range(len(ended))]


def test_resumed_rows_come_first_in_order_then_the_cursor():
    ledger = RowLedger()
    ledger.attach(loader(6, 2, shuffle=True))
    taken = [ledger.dispense()[0] for _ in range(4)]
    ledger.end(taken[1], "trained")
    other = RowLedger()
    other.load_state_dict(ledger.state_dict())
    other.attach(loader(6, 2, shuffle=True))
    again = [other.dispense() for _ in range(5)]
    assert [row for row, _ in again[:3]] == [taken[0], taken[2], taken[3]]
    assert [record["x"] for _, record in again[:3]] == [taken[0].index, taken[2].index, taken[3].index]
    assert (again[3][0].position, again[4][0].position) == (4, 5)


def test_resume_with_other_data_is_an_error():
    ledger = RowLedger()
    ledger.attach(loader(6, 2, shuffle=True, seed=1))
    for _ in range(6):
        ledger.dispense()
    other = RowLedger()
    other.load_state_dict(ledger.state_dict())
    other.attach(loader(6, 2, shuffle=True, seed=5))
    with pytest.raises(DataError, match="not where it was"):
        dispensed(other)
    with pytest.raises(DataError, match="format 9"):
        other.load_state_dict({"format": 9})
