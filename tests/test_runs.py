"""Runs of neighbours."""

from __future__ import annotations

from areal.utils.runs import in_runs


def sizes(items: list[int], limit: int) -> list[list[int]]:
    return list(in_runs(items, lambda item: item, limit))


def test_in_runs_fills_up_to_the_limit_in_order() -> None:
    assert sizes([3, 2, 5, 1, 4], 5) == [[3, 2], [5], [1, 4]]


def test_in_runs_larger_item_is_a_run_of_its_own() -> None:
    assert sizes([1, 9, 0, 1], 5) == [[1], [9], [0, 1]]


def test_in_runs_of_nothing_are_none() -> None:
    assert sizes([], 5) == []
