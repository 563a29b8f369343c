"""Trajectories that stay with their maker (fetched when read, dropped when nobody holds them), and workflow recipes."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from areal.api.workflow_api import RolloutWorkflow
from areal.infra.controller.tables import RemoteTable, load_tables, store_table
from areal.infra.rollout.recipe import RecipeResolver, workflow_recipe
from areal.infra.rpc.rtensor import RTensor, local_store
from areal.infra.rpc.serialization import decode, encode
from areal.utils.seqpack import balanced_partition


def table(n: int = 2) -> dict[str, Any]:
    """A trajectory with tensors of several types and a list."""
    return {
        "input_ids": torch.arange(n * 3, dtype=torch.int32).view(n, 3),
        "attention_mask": torch.ones(n, 3, dtype=torch.bool),
        "rewards": torch.tensor([0.5] * n),
        "multi_modal_input": [{"pixel_values": torch.zeros(2)} for _ in range(n)],
    }


def test_remote_table_reads_like_the_table_it_stands_for() -> None:
    original = table()
    remote = RemoteTable(store_table(original), ("rollout/0", 0), lambda shard: None, tokens=6)
    assert set(remote) == set(original)
    assert torch.equal(remote["input_ids"], original["input_ids"])
    assert remote["attention_mask"].dtype == torch.bool
    assert torch.equal(remote["multi_modal_input"][1]["pixel_values"], torch.zeros(2))


def test_remote_table_columns_of_another_worker_are_added() -> None:
    remote = RemoteTable(store_table(table()), ("rollout/0", 0), lambda shard: None, tokens=6)
    remote.add_columns(store_table({"ref_logp": torch.full((2, 3), -1.0)}), lambda shard: None)
    (loaded,) = load_tables([remote.handle])
    assert torch.equal(loaded["ref_logp"], torch.full((2, 3), -1.0))
    assert torch.equal(loaded["rewards"], torch.tensor([0.5, 0.5]))


def test_remote_table_nobody_holds_releases_every_shard_once() -> None:
    released: list[RTensor] = []
    shard, column = store_table(table()), store_table({"ref_logp": torch.zeros(2, 3)})
    remote = RemoteTable(shard, ("rollout/0", 0), released.append, tokens=6)
    remote.add_columns(column, released.append)
    assert released == []
    del remote
    gc.collect()
    assert sorted(s.shard_id for s in released) == sorted([shard.shard_id, column.shard_id])
    local_store().free([shard.shard_id, column.shard_id])


class Greeter(RolloutWorkflow):
    """Remembers what it was made with."""

    def __init__(self, word: str, *, times: int = 1) -> None:
        self.word, self.times = word, times

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> None:
        return None


class Duck:
    """A workflow by its method only."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> None:
        return None


@pytest.mark.parametrize(
    ("workflow", "kwargs"),
    [
        (Greeter("hi", times=3), None),
        (Greeter, {"word": "hi", "times": 3}),
        ("tests.controller.test_tables.Greeter", {"word": "hi", "times": 3}),
    ],
)
def test_workflow_recipe_travels_and_builds_the_same_workflow(workflow: Any, kwargs: Any) -> None:
    recipe = decode(bytes(encode(workflow_recipe(workflow, kwargs))))
    built = recipe.build()
    assert isinstance(built, Greeter)
    assert (built.word, built.times) == ("hi", 3)


def test_workflow_recipe_object_of_a_foreign_class_names_the_remedy() -> None:
    with pytest.raises(ValueError, match="derive its class from RolloutWorkflow"):
        workflow_recipe(Duck())


def test_recipe_resolver_same_workflow_gives_the_same_recipe() -> None:
    resolve, kwargs = RecipeResolver(), {"word": "hi"}
    assert resolve(Greeter, kwargs) is resolve(Greeter, kwargs)
    assert resolve(Greeter, {"word": "hi"}) is not None


@pytest.mark.parametrize(("lengths", "k"), [([5, 1, 4, 2], 2), ([9, 1, 1, 1, 1], 2), ([3], 2), ([], 3)])
def test_balanced_partition_counts_differ_by_at_most_one(lengths: list[int], k: int) -> None:
    parts = balanced_partition(lengths, k)
    counts = [len(part) for part in parts]
    assert max(counts) - min(counts) <= 1
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))


def test_balanced_partition_evens_out_the_sums() -> None:
    assert sorted(sum([5, 1, 4, 2][i] for i in part) for part in balanced_partition([5, 1, 4, 2], 2)) == [6, 6]
