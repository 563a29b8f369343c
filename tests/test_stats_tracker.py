"""stats_tracker: recording rules, reductions, scopes, and a real two-process export."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from areal.utils import stats_tracker
from areal.utils.stats_tracker import DistributedStatsTracker, ReduceType


@pytest.fixture
def tracker() -> DistributedStatsTracker:
    return DistributedStatsTracker()


def _vector() -> dict:
    path = Path(__file__).parent / "vectors" / "stats_tracker_export.json"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    return json.loads(path.read_text())


def test_export_vector_matches_reference_values(tracker):
    vector = _vector()
    inputs, outputs = vector["inputs"], vector["outputs"]

    with tracker.scope("a"):
        for v, n, s in zip(inputs["v"], inputs["n"], inputs["s"], strict=True):
            tracker.denominator(n=torch.tensor(n, dtype=torch.bool))
            tracker.stat(denominator="n", v=torch.tensor(v))
            tracker.scalar(s=s)

    assert tracker.export() == pytest.approx(outputs, abs=1e-6)


def test_export_each_reduce_type_matches_hand_values(tracker):
    mask, values = torch.tensor([True, True, False]), torch.tensor([1.0, 3.0, 100.0])

    tracker.denominator(n=mask)
    tracker.stat("n", loss=values)
    tracker.stat("n", ReduceType.SUM, total=values)
    tracker.stat("n", ReduceType.AVG, mean=values)
    tracker.stat("n", ReduceType.MIN, low=values)
    tracker.stat("n", ReduceType.MAX, high=values)

    assert tracker.export() == {
        "n": 2.0,
        "loss/avg": 2.0,
        "loss/min": 1.0,
        "loss/max": 3.0,
        "total": 4.0,
        "mean": 2.0,
        "low": 1.0,
        "high": 3.0,
    }


def test_scalar_in_scope_exports_mean_and_count(tracker):
    with tracker.scope("x"):
        tracker.scalar(lr=1)
        tracker.scalar(lr=torch.tensor(3.0))

    assert tracker.export() == {"x/lr": 2.0, "x/lr__count": 2}


def test_named_tracker_uses_its_name_as_first_scope():
    rollout = stats_tracker.get("rollout-named-test")
    rollout.scalar(reward=0)
    rollout.scalar(reward=1)

    exported = stats_tracker.export_all()

    assert exported["rollout-named-test/reward"] == 0.5
    assert stats_tracker.get("") is stats_tracker.DEFAULT_TRACKER
    assert stats_tracker.get("rollout-named-test") is rollout


def test_export_zero_denominator_leaves_averages_out(tracker):
    tracker.denominator(n=torch.zeros(3, dtype=torch.bool))
    tracker.stat("n", loss=torch.tensor([float("nan"), 1.0, 2.0]))

    assert tracker.export() == {"n": 0.0}


def test_export_nan_outside_mask_changes_nothing(tracker):
    tracker.denominator(n=torch.tensor([True, False]))
    tracker.stat("n", loss=torch.tensor([2.0, float("nan")]))

    assert tracker.export()["loss/avg"] == 2.0


def test_records_of_different_length_pair_by_index(tracker):
    tracker.denominator(n=torch.tensor([True]))
    tracker.denominator(n=torch.tensor([False, True]))
    tracker.stat("n", v=torch.tensor([1.0]))
    tracker.stat("n", v=torch.tensor([9.0, 5.0]))

    assert tracker.export()["v/avg"] == 3.0


@pytest.mark.parametrize(
    "mask", [torch.tensor([1.0]), torch.zeros(0, dtype=torch.bool), [True]], ids=["float", "empty", "list"]
)
def test_denominator_not_a_bool_tensor_is_refused(tracker, mask):
    with pytest.raises(ValueError, match="non-empty bool tensor"):
        tracker.denominator(n=mask)


def test_stat_wrong_value_is_refused(tracker):
    tracker.denominator(n=torch.tensor([True, True]))
    with pytest.raises(AssertionError, match="shape"):
        tracker.stat("n", v=torch.tensor([1.0]))
    with pytest.raises(AssertionError, match="float32"):
        tracker.stat("n", v=torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="SCALAR"):
        tracker.stat("n", ReduceType.SCALAR, v=torch.tensor([1.0, 2.0]))


def test_stat_without_denominator_in_scope_is_refused(tracker):
    tracker.denominator(n=torch.tensor([True]))
    with tracker.scope("inner"), pytest.raises(ValueError, match="inner/n"):
        tracker.stat("n", v=torch.tensor([1.0]))


def test_stat_more_often_than_denominator_is_refused(tracker):
    tracker.denominator(n=torch.tensor([True]))
    tracker.stat("n", v=torch.tensor([1.0]))
    with pytest.raises(ValueError, match="more often"):
        tracker.stat("n", v=torch.tensor([1.0]))


def test_recording_keeps_no_autograd_graph(tracker):
    value = torch.ones(2, requires_grad=True) * 2
    tracker.denominator(n=torch.tensor([True, True]))
    tracker.stat("n", v=value)
    assert not tracker.take(reset=False)["v"].values[0].requires_grad


def test_record_timing_ignores_scope_and_survives_exception(tracker):
    def run() -> None:
        with tracker.scope("deep"), tracker.record_timing("work"):
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        run()

    exported = tracker.export()
    assert exported["timeperf/work"] >= 0
    assert exported["timeperf/work__count"] == 1


def test_export_one_key_resets_only_that_key(tracker):
    tracker.denominator(n=torch.tensor([True]))
    tracker.stat("n", v=torch.tensor([1.0]))
    tracker.scalar(s=7)

    assert tracker.export(key="v") == {"v/avg": 1.0, "v/min": 1.0, "v/max": 1.0}
    tracker.denominator(n=torch.tensor([True]))
    tracker.stat("n", v=torch.tensor([4.0]))

    assert tracker.export() == {"n": 2.0, "v/avg": 4.0, "v/min": 4.0, "v/max": 4.0, "s": 7.0, "s__count": 1}


def test_export_without_reset_keeps_records(tracker):
    tracker.scalar(s=1)
    assert tracker.export(reset=False) == tracker.export()
    assert tracker.export() == {}


def test_scopes_of_two_threads_stay_apart(tracker):
    inside, done = threading.Event(), threading.Event()

    def other() -> None:
        with tracker.scope("other"):
            inside.set()
            done.wait(5)
            tracker.scalar(b=1)

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait(5)
    tracker.scalar(a=1)
    done.set()
    thread.join()

    assert set(tracker.export()) == {"a", "a__count", "other/b", "other/b__count"}


def test_disable_scope_and_decorator_name_keys(tracker):
    @tracker.scope_func_wrapper("fn")
    def work() -> None:
        tracker.scalar(a=1)
        with tracker.disable_scope():
            tracker.scalar(b=1)

    work()

    assert set(tracker.export()) == {"fn/a", "fn/a__count", "b", "b__count"}


@pytest.mark.asyncio
async def test_scope_func_wrapper_coroutine_keeps_scope_over_await(tracker):
    import asyncio

    @tracker.scope_func_wrapper("co")
    async def work() -> None:
        await asyncio.sleep(0)
        tracker.scalar(a=1)

    await asyncio.gather(work(), work())

    assert tracker.export() == {"co/a": 1.0, "co/a__count": 2}


def test_same_key_with_other_reduce_type_is_refused(tracker):
    tracker.scalar(k=1)
    tracker.denominator(n=torch.tensor([True]))
    with pytest.raises(ValueError, match="SCALAR"):
        tracker.stat("n", k=torch.tensor([1.0]))


def test_merge_exports_weighs_scalars_by_count():
    first, second = {"r": 1.0, "r__count": 1, "only": 3.0}, {"r": 4.0, "r__count": 3, "only": 9.0}

    merged = stats_tracker.merge_exports([first, second])

    assert merged == {"r": 3.25, "r__count": 4, "only": 3.0}


def _rank_main(rank: int, port_file: str, out_dir: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{port_file}", rank=rank, world_size=2)
    try:
        tracker = stats_tracker.get("actor")
        # rank 0 has three valid tokens, rank 1 one: the mean must weigh tokens, not ranks
        mask = torch.tensor([True, True, True, False]) if rank == 0 else torch.tensor([True, False, False, False])
        tracker.denominator(n=mask)
        tracker.stat("n", loss=torch.tensor([1.0, 2.0, 3.0, 50.0]) * (1 if rank == 0 else 10))
        if rank == 1:
            tracker.denominator(extra=torch.tensor([True, True]))
            tracker.stat("extra", ReduceType.AVG, only_one=torch.tensor([2.0, 4.0]))
        tracker.scalar(lr=rank + 1)
        result = stats_tracker.export_all(reduce_group=torch.distributed.group.WORLD)
        Path(out_dir, f"{rank}.json").write_text(json.dumps(result))
    finally:
        torch.distributed.destroy_process_group()


def test_export_two_ranks_different_keys_token_weighted(tmp_path):
    mp.spawn(_rank_main, args=(str(tmp_path / "store"), str(tmp_path)), nprocs=2)

    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]

    assert results[0] == results[1]
    assert results[0] == pytest.approx(
        {
            "actor/n": 4.0,
            "actor/loss/avg": 4.0,
            "actor/loss/min": 1.0,
            "actor/loss/max": 10.0,
            "actor/extra": 2.0,
            "actor/only_one": 3.0,
            "actor/lr": 1.5,
            "actor/lr__count": 2,
        }
    )
