"""Allocation of sequences to groups."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.utils.seqpack import (
    PackingError,
    balanced_greedy_partition,
    ffd_allocate,
    get_allocate_fn,
    kk_allocate,
    min_abs_diff_partition,
    partition_balanced_tuples,
    reorder_to_balanced_batches,
)

# values, capacity, min_groups, divisor, ffd, kk: published allocations
PUBLISHED = [
    ([100, 200, 300, 150, 250], 500, 2, 1, [[2, 3], [4, 1], [0]], [[0, 4, 3], [2, 1]]),
    ([10, 20, 30, 40], 1000, 1, 1, [[3, 2, 1, 0]], [[3, 2, 1, 0]]),
    ([10, 20, 30, 40], 1000, 3, 1, [[3], [2], [1, 0]], [[3], [1, 0], [2]]),
    ([900, 100, 100, 100, 100], 1000, 2, 1, [[0, 3], [1, 2, 4]], [[0], [4, 3, 2, 1]]),
    ([5] * 6, 10, 1, 1, [[0, 1], [2, 3], [4, 5]], [[5, 0], [4, 1], [3, 2]]),
    ([10, 20, 30, 40, 50], 60, 1, 2, [[4], [3], [2], [1, 0]], [[4], [3], [1, 0], [2]]),
]


@pytest.mark.parametrize(("values", "capacity", "minimum", "divisor", "ffd", "kk"), PUBLISHED)
def test_allocate_published_examples_match(values, capacity, minimum, divisor, ffd, kk):
    assert ffd_allocate(values, capacity, minimum, divisor) == ffd
    assert kk_allocate(values, capacity, minimum, divisor) == kk


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.integers(1, 50), min_size=4, max_size=24),
    capacity=st.integers(50, 200),
    minimum=st.integers(1, 4),
    algorithm=st.sampled_from(["ffd", "kk"]),
)
def test_allocate_any_input_covers_rows_once_within_capacity(values, capacity, minimum, algorithm):
    groups = get_allocate_fn(algorithm)(values, capacity, minimum)

    assert sorted(i for g in groups for i in g) == list(range(len(values)))
    assert all(0 < sum(values[i] for i in g) <= capacity for g in groups)
    assert len(groups) >= minimum


def ffd_as_defined(values: list[int], capacity: int, minimum: int) -> list[list[int]]:
    """Longest first, as a selection sort takes them; among the groups with room the one with the fewest members, then
    the smallest sum, then the one that was opened first."""
    order = list(range(len(values)))
    for front in range(len(values)):
        place = max(range(front, len(values)), key=lambda p: (values[order[p]], -p))
        order[front], order[place] = order[place], order[front]
    groups: list[list[int]] = []
    for index in order:
        sums = [sum(values[i] for i in group) for group in groups]
        room = [g for g, total in enumerate(sums) if total + values[index] <= capacity]
        if len(groups) < minimum or not room:
            groups.append([index])
        else:
            groups[min(room, key=lambda g: (len(groups[g]), sums[g], g))].append(index)
    return groups


@settings(max_examples=100, deadline=None)
@given(
    values=st.lists(st.integers(0, 12), min_size=3, max_size=40),  # few values: many ties
    capacity=st.integers(12, 60),
    minimum=st.integers(1, 3),
)
def test_ffd_allocate_any_input_equals_its_definition(values, capacity, minimum):
    assert ffd_allocate(values, capacity, minimum) == ffd_as_defined(values, capacity, minimum)


def test_ffd_allocate_log_normal_lengths_waste_little():
    draw = random.Random(3)
    lengths = [min(max(round(draw.lognormvariate(6.9, 1.0)), 1), 8192) for _ in range(20_000)]

    groups = ffd_allocate(lengths, 8192, 1)

    assert sum(map(len, groups)) == len(lengths)
    assert sum(lengths) >= 0.98 * 8192 * len(groups)


@pytest.mark.parametrize("algorithm", ["ffd", "kk"])
def test_allocate_impossible_input_raises(algorithm):
    allocate = get_allocate_fn(algorithm)

    with pytest.raises(PackingError, match="max_tokens_per_mb=10"):
        allocate([11], 10, 1)
    with pytest.raises(RuntimeError, match="cannot make 3 groups of 2"):
        allocate([1, 1], 10, 3)
    with pytest.raises(ValueError, match="'ffd', 'kk'"):
        get_allocate_fn("best")


def test_balanced_greedy_partition_examples_match():
    assert balanced_greedy_partition([5, 1, 9, 3, 7, 2], 3) == [[2, 1], [4, 5], [0, 3]]
    assert balanced_greedy_partition([1, 1, 1, 100], 2) == [[3, 2], [0, 1]]
    with pytest.raises(ValueError, match="do not divide"):
        balanced_greedy_partition([1, 2, 3], 2)


def test_partition_balanced_tuples_cuts_contiguous_ranges():
    assert partition_balanced_tuples([1, 2, 3, 4, 5, 5], 3) == [(0, 3), (3, 5), (5, 6)]
    assert min_abs_diff_partition([4, 4, 4, 4], 2) == [(0, 2), (2, 4)]
    with pytest.raises(ValueError, match="min_size=2"):
        partition_balanced_tuples([1, 2, 3], 2, min_size=2)


def test_reorder_to_balanced_batches_reports_largest_difference():
    order, difference = reorder_to_balanced_batches([1, 2, 3, 4], 2)

    assert sorted(order) == [0, 1, 2, 3]
    assert difference == 0
