"""Blocks of slots: what attention reads together."""

from __future__ import annotations

import random

import pytest

from areal.engine.native.model import Block
from areal.engine.native.slots import cut


def read(blocks: list[Block]) -> int:
    """Positions that attention reads."""
    return sum((block.end - block.begin) * block.length for block in blocks)


def test_cut_equal_lengths_stay_one_block() -> None:
    assert cut([7] * 5, 0) == [Block(0, 5, 7)]


def test_cut_single_slot_is_a_block() -> None:
    assert cut([9], 0) == [Block(0, 1, 9)]


def test_cut_long_ones_are_read_apart() -> None:
    assert cut([400, 390, 30, 20, 25], 100) == [Block(0, 2, 400), Block(2, 5, 30)]


def test_cut_saving_below_the_cost_is_not_worth_a_block() -> None:
    assert cut([400, 390, 30, 20, 25], 3 * 370) == [Block(0, 5, 400)]
    assert len(cut([400, 390, 30, 20, 25], 3 * 370 - 1)) == 2


@pytest.mark.parametrize("seed", range(20))
def test_cut_blocks_cover_every_slot_and_each_pays(seed: int) -> None:
    draw = random.Random(seed)
    lengths = [round(draw.lognormvariate(4, 1)) + 1 for _ in range(draw.randrange(1, 80))]
    cost = draw.randrange(0, 2000)

    blocks = cut(lengths, cost)

    assert [block.begin for block in blocks] == [0, *(block.end for block in blocks[:-1])]
    assert blocks[-1].end == len(lengths)
    assert all(block.length == max(lengths[block.begin : block.end]) for block in blocks)
    assert read(blocks) + cost * (len(blocks) - 1) <= len(lengths) * max(lengths)
