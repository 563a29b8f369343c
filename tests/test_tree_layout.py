"""The layout of prefix trees against a dictionary of all prefixes, and batches dealt out to trees."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.models.tree import allocate_trees, build_prefix_tree, shared_tokens
from areal.utils.errors import DataError
from tests.tree_rows import trie
from tests.vector_files import load_vector

# Few token ids and short rows: most draws share prefixes, repeat rows and have rows that are prefixes of others.
ROWS = st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=8)


def flat(sequences: list[list[int]]) -> tuple[torch.Tensor, list[int]]:
    return torch.tensor(list(itertools.chain.from_iterable(sequences)), dtype=torch.int64), list(map(len, sequences))


def test_build_prefix_tree_vector_gives_its_layout() -> None:
    vector = load_vector("tree_pack")
    lens = vector["inputs"]["lens"]
    ids, _ = flat([row[:n] for row, n in zip(vector["inputs"]["input_ids"], lens, strict=True)])
    outputs, limit = vector["outputs"], vector["config"]["max_tokens_per_mb"]

    tree = build_prefix_tree(ids, lens)

    assert allocate_trees(ids, lens, limit) == [[0, 1, 2, 3]]
    assert [tree.n_rows] == outputs["num_tokens"]
    missing = limit - tree.n_rows
    assert ids[tree.keep].tolist() + [0] * missing == outputs["packed_ids"][0]
    assert tree.depth.tolist() + [0] * missing == outputs["position_ids"][0]
    assert tree.parent.tolist() + [-1] * missing == outputs["parent"][0]
    seen = (tree.enter <= tree.enter[:, None]) & (tree.enter[:, None] < tree.leave)
    assert [row.nonzero().flatten().tolist() for row in seen] == outputs["mask_rows"]
    paths = [path.tolist() for path in tree.source.split(lens)]
    nodes = [
        {
            "start": start,
            "end": stop - 1,
            "tokens": ids[tree.keep[start:stop]].tolist(),
            "seqs": [i for i, path in enumerate(paths) if start in path],
        }
        for start, stop in itertools.pairwise(tree.chains.tolist())
    ]
    assert nodes == sorted(outputs["nodes"], key=lambda node: node["start"])


@settings(deadline=None, max_examples=300)
@given(ROWS)
def test_build_prefix_tree_rows_are_the_distinct_prefixes(sequences: list[list[int]]) -> None:
    prefixes, source = trie(sequences)
    ids, lens = flat(sequences)

    tree = build_prefix_tree(ids, lens)

    assert tree.source.tolist() == source
    assert tree.n_rows == len(prefixes)
    assert tree.keep.tolist() == [source.index(row) for row in range(len(prefixes))]
    assert tree.depth.tolist() == [len(prefix) - 1 for prefix in prefixes]
    number = {prefix: row for row, prefix in enumerate(prefixes)}
    assert tree.parent.tolist() == [number.get(prefix[:-1], -1) for prefix in prefixes]
    assert len(ids) - shared_tokens(ids, lens) == len(prefixes)
    for i, later in enumerate(prefixes):
        for j, earlier in enumerate(prefixes):
            assert bool(tree.enter[j] <= tree.enter[i] < tree.leave[j]) == (later[: len(earlier)] == earlier)
    holders = [{i for i, s in enumerate(sequences) if tuple(s[: len(p)]) == p} for p in prefixes]
    bounds = tree.chains.tolist()
    assert bounds[0] == 0
    assert bounds[-1] == len(prefixes)
    for start, stop in itertools.pairwise(bounds):
        assert tree.parent[start + 1 : stop].tolist() == list(range(start, stop - 1))
        assert all(holders[row] == holders[start] for row in range(start, stop))


@settings(deadline=None, max_examples=300)
@given(ROWS, st.integers(6, 14), st.sampled_from([1, 2]))
def test_allocate_trees_is_first_fit_by_distinct_prefixes(sequences: list[list[int]], limit: int, block: int) -> None:
    sequences = sequences if len(sequences) % block == 0 else [*sequences, []]
    expected: list[tuple[list[int], set[tuple[int, ...]]]] = []
    too_long = False
    for start in range(0, len(sequences), block):
        rows = list(range(start, start + block))
        own = set(trie([sequences[row] for row in rows])[0])
        too_long |= len(own) > limit
        for members, prefixes in expected:
            if len(prefixes | own) <= limit:
                members += rows
                prefixes |= own
                break
        else:
            expected.append((rows, set(own)))

    if too_long:
        with pytest.raises(DataError, match="more than mb_spec.max_tokens_per_mb"):
            allocate_trees(*flat(sequences), limit, block)
    else:
        assert allocate_trees(*flat(sequences), limit, block) == [members for members, _ in expected]


def test_allocate_trees_sequence_above_the_limit_names_it_and_the_limit() -> None:
    with pytest.raises(ValueError, match=r"sequence 1 has 5 distinct tokens, more than mb_spec\.max_tokens_per_mb=4"):
        allocate_trees(*flat([[1, 2], [1, 2, 3, 4, 5]]), 4)


def test_allocate_trees_odd_rows_in_blocks_of_two_are_refused() -> None:
    with pytest.raises(DataError, match="3 sequences do not divide into blocks of granularity=2"):
        allocate_trees(*flat([[1], [2], [3]]), 8, 2)
