"""Which rows make up which step: sizes, epochs, drop_last, ranks, resuming."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from areal.utils.dataloader import EvalLoader, RowLoader, create_dataloader, create_eval_dataloader
from areal.utils.errors import DataError
from areal.utils.seeding import derive_named_seed, derive_seed, get_seed, set_random_seed


def rows(n: int) -> list[dict[str, int]]:
    return [{"i": i} for i in range(n)]


def ids(batch: list[dict[str, int]]) -> list[int]:
    return [row["i"] for row in batch]


def section(**changes: object) -> SimpleNamespace:
    return SimpleNamespace(**{"batch_size": 4, "shuffle": True, "drop_last": True, "num_workers": 0, **changes})


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("batch", [4, 16])
@pytest.mark.parametrize("size", [3, 4, 5, 30])
def test_row_loader_every_corner_has_documented_steps_and_uses(size, batch, epochs, drop_last):
    if drop_last and size < batch:
        with pytest.raises(DataError, match=f"{size} rows, fewer than batch_size={batch}"):
            RowLoader(rows(size), batch, drop_last=drop_last)
        return
    loader = RowLoader(rows(size), batch, drop_last=drop_last)
    steps = size // batch if drop_last else (size + batch - 1) // batch

    batches = []
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        batches += [ids(b) for b in loader]

    assert len(loader) == steps
    assert len(batches) == steps * epochs
    assert [len(b) for b in batches] == [loader.step_size(s) for s in range(steps * epochs)]
    for epoch in range(epochs):
        uses = Counter(i for b in batches[epoch * steps : (epoch + 1) * steps] for i in b)
        assert set(uses.values()) == {1}  # no prompt twice in an epoch
        assert len(uses) == (steps * batch if drop_last else size)


def test_row_loader_shuffled_epochs_differ_and_eventually_use_every_row():
    loader = RowLoader(rows(30), 16)
    orders = [loader.order(e) for e in range(12)]
    assert len({tuple(o) for o in orders}) == 12
    assert {i for o in orders for i in o} == set(range(30))  # not the same 16 rows for ever


def test_row_loader_order_same_seed_and_epoch_is_equal_in_another_process():
    code = "from areal.utils.dataloader import RowLoader; print(RowLoader(list(range(20)), 4, seed=7).order(3))"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "PYTHONHASHSEED": "5"}
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env).stdout
    assert json.loads(other) == RowLoader(rows(20), 4, seed=7).order(3)
    assert RowLoader(rows(20), 4, seed=8).order(3) != RowLoader(rows(20), 4, seed=7).order(3)


def test_row_loader_without_shuffle_keeps_dataset_order():
    loader = RowLoader(rows(5), 2, shuffle=False, drop_last=False)
    assert [ids(b) for b in loader] == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("drop_last", [True, False])
def test_row_loader_ranks_share_each_global_batch_without_overlap(drop_last):
    whole = RowLoader(rows(11), 4, drop_last=drop_last, seed=3)
    ranks = [RowLoader(rows(11), 4, drop_last=drop_last, seed=3, rank=r, world_size=2) for r in range(2)]
    assert all(len(r) == len(whole) and r.batch_size == 2 for r in ranks)
    for step, batch in enumerate(whole):
        parts = [r.order(0)[step * 2 :][: r.step_size(step)] for r in ranks]
        assert sorted(parts[0] + parts[1]) == sorted(ids(batch))
        assert abs(len(parts[0]) - len(parts[1])) <= 1


def test_row_loader_batch_not_divisible_by_ranks_raises():
    with pytest.raises(ValueError, match="batch_size=5 must be a positive multiple of the data-parallel size 2"):
        RowLoader(rows(10), 5, world_size=2)


@pytest.mark.parametrize("taken", [0, 1, 2, 3, 5])
def test_row_loader_resumed_cursor_continues_the_same_stream(taken):
    def stream(loader, n):
        out = []
        while len(out) < n:
            for batch in loader:
                out.append(ids(batch))
                if len(out) == n:
                    break
        return out

    reference = stream(RowLoader(rows(7), 3, drop_last=False), 9)
    first = RowLoader(rows(7), 3, drop_last=False)
    head = stream(first, taken) if taken else []
    state = json.loads(json.dumps(first.state_dict()))

    second = RowLoader(rows(7), 3, drop_last=False)
    second.load_state_dict(state)

    assert head + stream(second, 9 - taken) == reference


def test_row_loader_set_epoch_of_the_cursor_keeps_the_step():
    loader = RowLoader(rows(8), 2)
    loader.seek(6)
    assert (loader.epoch, loader.step) == (1, 2)
    loader.set_epoch(1)
    assert loader.step == 2
    loader.set_epoch(2)
    assert (loader.epoch, loader.step) == (2, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 9}, "format"),
        ({"dataset_size": 9}, "dataset_size=9"),
        ({"seed": 5}, "seed=5"),
        ({"step": 4}, "out of range"),
    ],
)
def test_row_loader_state_of_another_run_is_refused(change, message):
    loader = RowLoader(rows(8), 2)
    with pytest.raises(DataError, match=message):
        loader.load_state_dict({**loader.state_dict(), **change})


def test_row_loader_state_with_only_the_cursor_is_accepted():
    loader = RowLoader(rows(8), 2)
    loader.load_state_dict({"format": 1, "epoch": 1, "step": 3})
    assert (loader.epoch, loader.step) == (1, 3)


def test_row_loader_threads_give_the_same_batches_in_order():
    plain = [ids(b) for b in RowLoader(rows(20), 3, seed=2)]
    threaded = [ids(b) for b in RowLoader(rows(20), 3, seed=2, num_workers=3)]
    assert threaded == plain


def test_row_loader_thread_failure_reaches_the_caller():
    with pytest.raises(DataError, match="row 0 of the dataset is a int"):
        list(RowLoader([0, 1], 1, shuffle=False, num_workers=2))


def test_row_loader_collates_records():
    loader = RowLoader(rows(4), 2, shuffle=False, collate_fn=lambda records: sum(r["i"] for r in records))
    assert list(loader) == [1, 5]


@pytest.mark.parametrize("dataset", [iter([]), [], (x for x in [1])])
def test_row_loader_unusable_dataset_is_refused(dataset):
    with pytest.raises(DataError):
        RowLoader(dataset, 1)


def test_create_dataloader_reads_the_section():
    loader = create_dataloader(rows(9), 1, 2, section(shuffle=False), seed=4)
    assert (loader.batch_size, len(loader), loader.seed) == (2, 2, 4)
    assert loader.order(0) == [1, 3, 5, 7]
    with pytest.raises(DataError, match="fewer than batch_size"):
        create_dataloader(rows(3), 0, 1, section())


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_eval_loader_scores_each_row_once_every_time(world_size):
    loaders = [
        create_eval_dataloader(rows(7), r, world_size, section(shuffle=False, drop_last=False))
        for r in range(world_size)
    ]
    assert all(isinstance(x, EvalLoader) for x in loaders)
    for _ in range(2):
        seen = sorted(i for loader in loaders for batch in loader for i in ids(batch))
        assert seen == list(range(7))


def test_eval_loader_smaller_than_batch_is_one_short_step():
    loader = create_eval_dataloader(rows(3), 0, 1, section(batch_size=16, drop_last=True))
    next(iter(loader))  # a broken-off pass leaves no trace
    assert [ids(b) for b in loader] == [[0, 1, 2]]


def test_derive_seed_is_stable_distinct_and_63_bit():
    seeds = {derive_seed(1, e, r, s, t) for e in range(2) for r in range(20) for s in range(4) for t in range(2)}
    assert len(seeds) == 320
    assert all(0 <= s < 2**63 for s in seeds)
    assert derive_seed(1, 0, 11, 1, 0) != derive_seed(1, 0, 1, 11, 0)
    assert derive_seed(1, 2, 3, 4, 5) == 7595357559816603545  # first 63 bits of sha256('1/2/3/4/5')
    assert derive_named_seed(1, "order", 0) != derive_named_seed(1, "order", 1)


def test_set_random_seed_repeats_the_global_generators(monkeypatch):
    import random

    import numpy as np
    import torch

    from areal.utils import seeding

    monkeypatch.setattr(seeding, "_base_seed", None)
    with pytest.raises(ValueError, match="set_random_seed"):
        get_seed()

    def draw(key):
        set_random_seed(3, key)
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    assert draw("trainer0") == draw("trainer0")
    assert draw("trainer0") != draw("trainer1")
    assert get_seed() == 3
