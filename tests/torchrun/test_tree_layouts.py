"""Prefix trees on two ranks of both engines against one process that computes every token."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from tests.torchrun import tree_cells as cells
from tests.torchrun.live_group import LiveGroup

EVERYTHING = list(range(len(cells.SEQUENCES)))
SHARDS = {1: [EVERYTHING], 2: [EVERYTHING[:36], EVERYTHING[36:]]}


@cache
def _reference(path: str) -> dict[str, object]:
    return cells.steps(path, "fsdp:d1", SHARDS[1])


@pytest.mark.parametrize("backend", ["fsdp:d2", "fsdp:t2", "archon:d2", "archon:t2"])
@pytest.mark.parametrize("model", ["tied", pytest.param("untied", marks=[pytest.mark.slow, pytest.mark.ci])])
def test_two_ranks_with_trees_equal_one_process_without(
    two_ranks: LiveGroup, model_dirs: dict[str, str], backend: str, model: str
) -> None:
    reference = _reference(model_dirs[model])
    d = 2 if "d2" in backend else 1

    answers = two_ranks.run(cells.steps, path=model_dirs[model], backend=backend, shards=SHARDS[d], **cells.TREES)

    logprobs = np.concatenate([answer["logprobs"] for answer in answers[:d]])
    np.testing.assert_allclose(logprobs, reference["logprobs"], rtol=0, atol=1e-5)
    for answer in answers:
        assert answer["losses"] == pytest.approx(reference["losses"], rel=2e-5)
        for ours, theirs in zip(answer["results"], reference["results"], strict=True):
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=2e-5)
            assert ours["tree_token_ratio"] < 0.7
            assert ours["num_micro_batches"] > 1
        for name, tensor in answer["weights"].items():
            np.testing.assert_allclose(tensor, reference["weights"][name], rtol=0, atol=1e-5)
    assert answers[0]["weights"].keys() == reference["weights"].keys()


def test_rank_without_sequences_keeps_step_with_trees(two_ranks: LiveGroup, model_dirs: dict[str, str]) -> None:
    reference = _reference(model_dirs["tied"])
    shards = [EVERYTHING, []]
    answers = two_ranks.run(cells.steps, path=model_dirs["tied"], backend="fsdp:d2", shards=shards, **cells.TREES)
    for answer in answers:
        assert answer["losses"] == pytest.approx(reference["losses"], rel=2e-5)


def test_sequence_above_the_limit_is_an_error_on_every_rank(two_ranks: LiveGroup, model_dirs: dict[str, str]) -> None:
    first, second = two_ranks.run(cells.too_long, path=model_dirs["tied"], backend="fsdp:d2")
    assert first.startswith("DataError: sequence 0 has 174 distinct tokens")
    assert "another rank (rank 0)" in second
