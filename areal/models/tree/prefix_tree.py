"""A tree of the sequences of a packed batch, in which every common beginning stands once.

In: token ids ``[T]`` of n sequences, laid end to end. Out: ``PrefixTree``, whose U <= T rows are the distinct pairs of
a token and all that precedes it, and how the T tokens are made from them; or the sequences of a batch, dealt out to
trees of a limited size. A causal model's hidden state depends on a token and what precedes it, so equal tokens have
equal states in forward, and a row has the sum of their gradients in backward: no approximation. Called by
``engine/core/shared_prefix.py``.

Everything follows from the sequences in sorted order, where each shares most with its neighbours: the walk through them
is the depth-first walk through the tree. Rows, however, are numbered as the tokens come in the batch::

    batch      sorted           tree, row numbers          rows     1 2 3 4 5 9 8
    1 2 3 4    1 2 3 4          0 ── 1 ─┬─ 2 ─┬─ 3          parent  -1 0 1 2 1 2 5
    1 2 5      1 2 3 9 8                │     └─ 5 ── 6     depth    0 1 2 3 2 3 4
    1 2 3 9 8  1 2 5                    └─ 4                enter    0 1 2 3 6 4 5
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from areal.utils.errors import DataError

Ints = npt.NDArray[np.int64]


@dataclass
class PrefixTree:
    """Two layouts of a batch: ``T`` tokens of its sequences, and ``U`` distinct ones, each behind its parent.

    Attributes:
        source: int64 ``[T]``, row that each token equals.
        keep: int64 ``[U]``, ascending, first token that each row is.
        parent: int64 ``[U]``, row before each row in its sequences; -1 at the start.
        depth: int64 ``[U]``, position of each row.
        enter: int64 ``[U]``, place of each row in the depth-first walk.
        leave: int64 ``[U]``: row j precedes row i, or is it, exactly if ``enter[j] <= enter[i] < leave[j]``.
        chains: int64 ``[C + 1]``, ascending from 0 to U: rows of a chain are consecutive and in the same sequences; a
            chain ends where sequences part or one of them ends.
    """

    source: Tensor
    keep: Tensor
    parent: Tensor
    depth: Tensor
    enter: Tensor
    leave: Tensor
    chains: Tensor

    @property
    def n_rows(self) -> int:
        """Distinct tokens U."""
        return self.keep.shape[0]

    @property
    def n_tokens(self) -> int:
        """Tokens of the sequences T."""
        return self.source.shape[0]

    def to(self, device: torch.device | str) -> PrefixTree:
        """The same tree with its tensors on ``device``."""
        return PrefixTree(**{f.name: getattr(self, f.name).to(device, non_blocking=True) for f in fields(self)})


def build_prefix_tree(input_ids: Tensor, lens: Sequence[int]) -> PrefixTree:
    """The tree of sequences laid end to end; a copy to the host, then linear in T but for the sort of n sequences.

    Args:
        input_ids: integer ``[T]``, on any device.
        lens: tokens of each sequence; 0 is allowed.
    """
    walk = _walk(input_ids, lens)
    total, bounds = walk.ids.shape[0], walk.bounds
    node = np.empty(total, np.int64)  # place in the walk of each token
    parent = np.empty(total, np.int64)
    leave = np.empty(total, np.int64)
    count, open_path = 0, np.empty(0, np.int64)
    for sequence, common in zip(walk.order, walk.common, strict=True):
        begin, end = bounds[sequence], bounds[sequence + 1]
        leave[open_path[common:]] = count  # what the walk leaves here
        path = node[begin:end]
        path[:common] = open_path[:common]
        new = path[common:]
        new[:] = np.arange(count, count + len(new))
        if len(new):
            parent[new] = new - 1
            parent[count] = path[common - 1] if common else -1
        count, open_path = count + len(new), path
    leave[open_path] = count
    _, first = np.unique(node, return_index=True)  # by place in the walk: the first token there
    enter = np.argsort(first)
    row_of = np.empty(count, np.int64)
    row_of[enter] = np.arange(count)
    above = parent[:count][enter]
    keep = first[enter]
    arrays: dict[str, Any] = {
        "source": row_of[node],
        "keep": keep,
        "parent": np.where(above < 0, -1, row_of[above]) if count else above,
        "depth": keep - np.repeat(bounds[:-1], np.diff(bounds))[keep],
        "enter": enter,
        "leave": leave[:count][enter],
    }
    ends = arrays["source"][bounds[1:][np.diff(bounds) > 0] - 1]
    arrays["chains"] = _chains(arrays["parent"], ends)
    return PrefixTree(**{name: torch.from_numpy(array) for name, array in arrays.items()})


def shared_tokens(input_ids: Tensor, lens: Sequence[int]) -> int:
    """Tokens that one tree of all sequences would save."""
    return int(sum(_walk(input_ids, lens).common))


def allocate_trees(input_ids: Tensor, lens: Sequence[int], limit: int, granularity: int = 1) -> list[list[int]]:
    """Deal sequences out to trees, in their order: each goes to the first tree where its new rows fit, or opens one.

    Args:
        input_ids: integer ``[T]``.
        lens: tokens of each sequence.
        limit: most rows of a tree.
        granularity: so many consecutive sequences stay together.

    Returns: the sequences of each tree, ascending.

    Raises:
        DataError: a sequence (or what must stay with it) has more distinct tokens than ``limit``; granularity does not
            divide the sequences.
    """
    if len(lens) % granularity:
        raise DataError(f"{len(lens)} sequences do not divide into blocks of granularity={granularity}")
    walk = _walk(input_ids, lens)
    place = np.empty(len(lens), np.int64)
    place[walk.order] = np.arange(len(lens))
    trees: list[_Growing] = []
    for start in range(0, len(lens), granularity):
        block = range(start, start + granularity)
        common = [walk.common_with_all(int(place[row])) for row in block]
        for tree in trees:
            if tree.take(block, place, common, lens, limit):
                break
        else:
            trees.append(_Growing())
            if not trees[-1].take(block, place, common, lens, limit):
                many = f"sequences {start} to {block[-1]} together have"
                what = f"sequence {start} has" if granularity == 1 else many
                raise DataError(
                    f"{what} {trees[-1].cost(block, place, common, lens)} distinct tokens, more than "
                    f"mb_spec.max_tokens_per_mb={limit}; raise it or drop longer sequences"
                )
    return [tree.rows for tree in trees]


class _Growing:
    """A tree that sequences are still added to."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.size = 0

    def cost(self, block: range, place: Ints, common: list[Ints], lens: Sequence[int]) -> int:
        """Rows that the sequences of ``block`` would add."""
        members, cost = self.rows + list(block), 0
        for i, row in enumerate(block):
            known = place[members[: len(self.rows) + i]]
            cost += lens[row] - (int(common[i][known].max()) if len(known) else 0)
        return cost

    def take(self, block: range, place: Ints, common: list[Ints], lens: Sequence[int], limit: int) -> bool:
        """Add the sequences of ``block``, if they fit."""
        cost = self.cost(block, place, common, lens)
        if self.size + cost > limit:
            return False
        self.rows += block
        self.size += cost
        return True


@dataclass
class _Walk:
    """Sequences in sorted order.

    Attributes:
        ids: ``[T]``; bounds: ``[n + 1]``.
        order: ``[n]`` sequences, sorted by their tokens.
        common: ``[n]`` tokens that each shares with the one before it in that order.
    """

    ids: Ints
    bounds: Ints
    order: list[int]
    common: list[int]

    def common_with_all(self, place: int) -> Ints:
        """``[n]`` tokens that the sequence at ``place`` shares with every other, by their places."""
        common = np.asarray(self.common, np.int64)
        shared = np.empty(len(common), np.int64)
        shared[place] = self.bounds[self.order[place] + 1] - self.bounds[self.order[place]]
        shared[place + 1 :] = np.minimum.accumulate(common[place + 1 :])
        shared[:place] = np.minimum.accumulate(common[place:0:-1])[::-1]
        return shared


def _walk(input_ids: Tensor, lens: Sequence[int]) -> _Walk:
    ids = input_ids.detach().cpu().numpy().astype(np.int64)
    bounds = np.concatenate([[0], np.cumsum(np.asarray(lens, np.int64))]).astype(np.int64)
    raw = (ids ^ np.int64(-(2**63))).astype(">i8").tobytes()  # as bytes they compare as the numbers do
    keys = [raw[8 * begin : 8 * end] for begin, end in _pairs(bounds)]
    order = sorted(range(len(lens)), key=keys.__getitem__)
    common, previous = [], ids[:0]
    for sequence in order:
        own = ids[bounds[sequence] : bounds[sequence + 1]]
        width = min(len(previous), len(own))
        different = previous[:width] != own[:width]
        common.append(int(different.argmax()) if different.any() else width)
        previous = own
    return _Walk(ids, bounds, order, common)


def _pairs(bounds: Ints) -> Iterator[tuple[int, int]]:
    values = bounds.tolist()
    return zip(values[:-1], values[1:], strict=True)


def _chains(parent: Ints, ends: Ints) -> Ints:
    """Bounds of the chains; ``ends`` are the rows that end a sequence."""
    closed = np.bincount(parent[parent >= 0], minlength=len(parent)) > 1
    closed[ends] = True
    starts = (parent < 0) | closed[parent]
    return np.append(np.flatnonzero(starts), len(parent)).astype(np.int64)
