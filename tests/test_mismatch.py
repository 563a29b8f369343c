"""The mismatch monitor: its numbers by hand, its verdict, and what it says on real actors and runs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.api.cli_args import MismatchConfig, PPOActorConfig
from areal.trainer.hooks import shown_metrics
from areal.trainer.ppo.mismatch import BOUND_NATS, MismatchError, MismatchMeter, judge, judge_stats, record_mismatch
from areal.utils import stats_tracker
from areal.utils.stats_tracker import DistributedStatsTracker
from tests.test_ppo_actor import build_actor, model_dir, run_step, trajectories  # noqa: F401 - a fixture
from tests.trainer_runs import rl_config, run_rl, stats_of, tiny_policy

GARBAGE = [math.nan, math.inf, -math.inf, 1e30, -1e30, 0.0, 7.5]
PREFIX = "ppo_actor/mismatch/"


@pytest.fixture(autouse=True)
def _fresh_statistics():
    stats_tracker.export_all()
    yield
    stats_tracker.export_all()


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_policy(tmp_path_factory.mktemp("policy"))


def actor_config(dtype: str = "float32", **mismatch: Any) -> PPOActorConfig:
    return PPOActorConfig(dtype=dtype, mismatch=MismatchConfig(**mismatch))


def measure(sampler: list[float], trainer: list[float], versions: list[int] | None = None, current: int = 5, **options):
    meter = MismatchMeter(options.get("token_bound", 0.5), current)
    mask = torch.tensor(options.get("mask", [True] * len(sampler)))
    meter.add(torch.tensor(sampler), torch.tensor(trainer), mask, None if versions is None else torch.tensor(versions))
    return meter.reduce()


# ------------------------------------------------------------------------------------------------------------- numbers
def test_meter_two_tokens_numbers_by_hand():
    numbers = measure([-1.0, -2.0, -9.0], [-1.5, -1.0, -1.0], mask=[True, True, False])

    # d = [0.5, -1]: k1 = -0.25; k3 = (e^-0.5 - 1 + 0.5 + e^1 - 1 - 1) / 2; 0.5 is not over the bound of 0.5
    assert numbers == pytest.approx(
        {
            "n_tokens": 2,
            "abs_diff_mean": 0.75,
            "abs_diff_max": 1.0,
            "kl_k1": -0.25,
            "kl_k3": (math.exp(-0.5) - 0.5 + math.e - 2) / 2,
            "over_bound": 0.5,
            "n_nonfinite": 0,
        }
    )


def test_meter_by_version_lag_buckets_end_at_the_cap():
    # current 5: lags 0, 1, 4, 5, "ahead" (counts as 0), and one token without a version
    numbers = measure([-1.0] * 6, [-1.1, -1.2, -1.4, -1.8, -1.3, -11.0], [5, 4, 1, 0, 6, -1])

    assert {key: value for key, value in numbers.items() if key.endswith("n_tokens")} == {
        "n_tokens": 6,
        "lag_0/n_tokens": 2,
        "lag_1/n_tokens": 1,
        "lag_4_or_more/n_tokens": 2,
    }
    assert numbers["lag_0/abs_diff_mean"] == pytest.approx(0.2)
    assert numbers["lag_1/kl_k1"] == pytest.approx(0.2)
    assert numbers["lag_4_or_more/abs_diff_max"] == pytest.approx(0.8)
    assert numbers["lag_4_or_more/over_bound"] == 0.5
    assert numbers["abs_diff_max"] == pytest.approx(10.0)


def test_meter_truncated_sampler_shows_the_mass_it_cut():
    # Pitfall 10: p = [.644, .237, .087, .032], two tokens kept: the sampler renormalises over .881 of the mass.
    p = torch.tensor([0.644, 0.237, 0.087, 0.032])
    kept = (p[:2] / p[:2].sum()).log()

    numbers = measure(kept.tolist(), p[:2].log().tolist())

    assert numbers["abs_diff_mean"] == pytest.approx(-math.log(0.881), abs=1e-6)
    assert numbers["kl_k1"] == pytest.approx(0.1267, abs=1e-4)


def test_meter_exact_kl_is_the_mean_of_k1_and_of_k3():
    # Under q = [3/4, 1/4] four samples in proportion estimate KL(q || p) exactly with both estimators.
    q, p = torch.tensor([0.75, 0.25]), torch.tensor([0.5, 0.5])
    exact = float((q * (q / p).log()).sum())
    drawn = torch.tensor([0, 0, 0, 1])

    numbers = measure(q.log()[drawn].tolist(), p.log()[drawn].tolist())

    assert numbers["kl_k1"] == pytest.approx(exact, abs=1e-6)
    assert numbers["kl_k3"] == pytest.approx(exact, abs=1e-6)


def test_meter_numbers_that_are_none_stay_finite_and_are_counted():
    numbers = measure([-1.0, math.nan, -1.0, -1.0], [-1.0, -1.0, -math.inf, 1e30])

    assert numbers["n_nonfinite"] == 2
    assert numbers["abs_diff_max"] == BOUND_NATS
    assert numbers["over_bound"] == 0.75
    assert all(math.isfinite(value) for value in numbers.values())


def test_meter_without_tokens_counts_none():
    assert measure([-1.0], [-9.0], mask=[False]) == {"n_tokens": 0}
    assert MismatchMeter(0.5, 0).reduce() == {"n_tokens": 0}


def test_meter_micro_batches_add_up_to_the_whole():
    generator = torch.Generator().manual_seed(0)
    sampler, trainer = (-torch.rand(40, generator=generator) for _ in range(2))
    versions, mask = torch.randint(-1, 6, (40,), generator=generator), torch.rand(40, generator=generator) < 0.7
    whole, parts = MismatchMeter(0.3, 5), MismatchMeter(0.3, 5)
    whole.add(sampler, trainer, mask, versions)

    for piece in torch.arange(40).split(7):
        parts.add(sampler[piece], trainer[piece], mask[piece], versions[piece])

    assert parts.reduce() == pytest.approx(whole.reduce())


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**31 - 1))
def test_meter_values_off_the_mask_change_nothing(seed):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(15, generator=generator) < 0.5
    sampler, trainer = (-torch.rand(15, generator=generator) for _ in range(2))
    versions = torch.randint(-1, 4, (15,), generator=generator)

    def spoil(x):
        return torch.where(mask, x, torch.tensor(GARBAGE)[torch.randint(len(GARBAGE), x.shape, generator=generator)])

    def run(a, b, v):
        meter = MismatchMeter(0.3, 3)
        meter.add(a, b, mask, v)
        return meter.reduce()

    other_versions = torch.where(mask, versions, torch.randint(-3, 9, (15,), generator=generator))
    assert run(sampler, trainer, versions) == run(spoil(sampler), spoil(trainer), other_versions)


# ------------------------------------------------------------------------------------------------------------- verdict
@pytest.mark.parametrize(
    ("dtype", "lag", "difference", "bad"),
    [
        ("float32", 0, 1e-4, False),
        ("float32", 0, 0.03, True),
        ("float32", 1, 0.03, False),  # the policy itself may have changed that much
        ("float32", 1, 0.4, True),
        ("bfloat16", 0, 0.05, False),
        ("bfloat16", 0, 0.4, True),
    ],
)
def test_judge_default_limit_is_tight_only_for_float32_at_lag_zero(dtype, lag, difference, bad):
    numbers = measure([-1.0] * 4, [-1.0 - difference] * 4, [5 - lag] * 4)

    problem = judge(numbers, actor_config(dtype), 5)

    assert (problem is not None) == bad


def test_judge_message_names_metric_value_limit_lag_and_causes():
    numbers = measure([-1.0, -1.0], [-1.25, -3.0], [5, 4])

    problem = judge(numbers, actor_config(limit=0.1), 5)

    for part in (
        "v5",
        "abs_diff_mean",
        "is 0.25",
        "limit 0.1",
        "on 1 tokens of version lag 0",
        "weight_probe_interval",
    ):
        assert part in problem
    for part in ("temperature", "top_p", "top_k", "dtype", "actor.mismatch.limit"):
        assert part in problem


def test_judge_takes_the_smallest_lag_there_is_and_says_so():
    numbers = measure([-1.0, -1.0], [-1.2, -9.0], [3, 2])

    assert judge(numbers, actor_config(limit=0.3), 5) is None
    problem = judge(numbers, actor_config(limit=0.1), 5)
    assert "version lag 2 (the smallest; a part of it is the change of the policy since)" in problem


def test_judge_without_versions_takes_all_tokens():
    assert "2 tokens without a version" in judge(measure([-1.0, -1.0], [-1.0, -9.0]), actor_config(), 5)


@pytest.mark.parametrize(
    ("metric", "limit"),
    [("abs_diff_mean", 0.7), ("abs_diff_max", 0.9), ("kl_k1", 0.2), ("kl_k3", 0.3), ("over_bound", 0.4)],
)
def test_judge_every_metric_can_be_limited(metric, limit):
    numbers = measure([-1.0, -2.0], [-1.5, -1.0])  # mean .75, max 1, k1 -.25, k3 .41, over .5

    assert judge(numbers, actor_config(metric=metric, limit=limit), 5) is not None
    assert judge(numbers, actor_config(metric=metric, limit=limit + 0.2), 5) is None
    assert judge(numbers, actor_config(metric=metric, limit=limit, action="off"), 5) is None


def test_judge_stats_reads_what_was_exported():
    numbers = measure([-1.0], [-2.0], [5])
    tracker = DistributedStatsTracker("ppo_actor")
    record_mismatch(tracker, numbers, 5)
    stats = tracker.export()

    assert judge_stats(stats, actor_config()) == judge(numbers, actor_config(), 5)
    assert judge_stats({}, actor_config()) is None
    assert shown_metrics(stats) == {"mismatch": 1.0}


# --------------------------------------------------------------------------------------------------------- real actors
def sampled(actor, version: int = 0, error: float = 0.0) -> list[dict[str, Any]]:
    """Trajectories whose log-probs are the actor's own, plus an error."""
    data = trajectories(version=version)
    for t, aligned in zip(data, actor.compute_logp(data), strict=True):
        t["logprobs"] = torch.where(t["loss_mask"] != 0, torch.roll(aligned, 1, dims=1) + error, 0.0)
    return data


MODES = {
    "first_mini_batch": {"ppo_n_minibatches": 2},
    "recompute": {"recompute_logprob": True},
    "decoupled": {"use_decoupled_loss": True},
    "loglinear": {"ppo_n_minibatches": 2, "use_decoupled_loss": True, "prox_logp_method": "loglinear"},
}


@pytest.mark.parametrize("mode", MODES)
def test_actor_same_weights_measures_zero_and_an_offset_exactly(model_dir, mode):  # noqa: F811
    actor = build_actor(model_dir, **MODES[mode])

    clean = run_step(actor, sampled(actor))
    offset = run_step(actor, sampled(actor, error=0.25))

    for stats in (clean, offset):  # one of two mini-batches, or all that was recomputed
        share = stats[f"{PREFIX}n_tokens"] / stats["ppo_actor/n_valid_tokens"]
        assert share == 1.0 if mode in ("recompute", "decoupled") else 0.2 < share < 0.8
    assert clean[f"{PREFIX}abs_diff_max"] < 1e-5
    assert offset[f"{PREFIX}abs_diff_mean"] == pytest.approx(0.25, abs=1e-5)
    assert offset[f"{PREFIX}kl_k1"] == pytest.approx(0.25, abs=1e-5)
    assert offset[f"{PREFIX}kl_k3"] == pytest.approx(math.exp(-0.25) - 0.75, abs=1e-5)
    assert offset[f"{PREFIX}lag_0/over_bound"] == 0.0


def test_actor_versions_of_a_step_are_told_apart(model_dir):  # noqa: F811
    actor = build_actor(model_dir, recompute_logprob=True)
    actor.engine.set_version(7)
    data = sampled(actor, version=7)
    for t, lag in zip(data, (0, 2, 6), strict=True):
        t["versions"] = torch.where(t["loss_mask"] != 0, 7 - lag, -1)
        t["logprobs"] = torch.where(t["loss_mask"] != 0, t["logprobs"] + 0.1 * lag, 0.0)

    stats = run_step(actor, data)

    found = {key: stats[f"{PREFIX}{key}/abs_diff_mean"] for key in ("lag_0", "lag_2", "lag_4_or_more")}
    assert found == pytest.approx({"lag_0": 0.0, "lag_2": 0.2, "lag_4_or_more": 0.6}, abs=1e-5)
    assert f"{PREFIX}lag_1/n_tokens" not in stats


@pytest.mark.parametrize("mode", ["first_mini_batch", "recompute"])
def test_actor_beyond_the_limit_warns_once_or_stops(model_dir, caplog, mode):  # noqa: F811
    warning = build_actor(model_dir, **MODES[mode])
    run_step(warning, sampled(warning, error=0.25))
    stopping = build_actor(model_dir, **MODES[mode], mismatch=MismatchConfig(action="stop", metric="kl_k1", limit=0.2))
    run_step(stopping, sampled(stopping, error=0.15))
    before = [p.detach().clone() for p in stopping.engine.module.parameters()]

    with pytest.raises(MismatchError, match=r"kl_k1\) is 0.25, over the limit 0.2, on \d+ tokens of version lag 0"):
        run_step(stopping, sampled(stopping, error=0.25))

    messages = [r.getMessage() for r in caplog.records if "sampler and trainer" in r.getMessage()]
    assert len(messages) == 1
    assert "abs_diff_mean" in messages[0]
    if mode == "recompute":  # known before the update, which is then left out
        assert all(torch.equal(a, b) for a, b in zip(before, stopping.engine.module.parameters(), strict=True))


# ----------------------------------------------------------------------------------------------------------- real runs
@pytest.mark.parametrize("recompute", ["true", "false"])
def test_run_healthy_float32_is_silent_and_recorded(policy, tmp_path, caplog, recompute):
    config = rl_config(tmp_path, policy, f"actor.recompute_logprob={recompute}", "total_train_steps=2")
    config.stats_logger.tensorboard.path = str(tmp_path / "tb")

    run_rl(config)

    for stats in stats_of(config):
        assert stats[f"{PREFIX}abs_diff_max"] < 1e-3
        assert stats[f"{PREFIX}lag_0/n_tokens"] == stats[f"{PREFIX}n_tokens"] > 0
    assert "sampler and trainer" not in caplog.text
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert {f"{PREFIX}kl_k3", f"{PREFIX}lag_0/abs_diff_mean"} <= set(events.Tags()["scalars"])


def test_run_other_temperature_stops_with_the_reason(policy, tmp_path):
    config = rl_config(
        tmp_path, policy, "gconfig.temperature=0.7", "actor.temperature=1.0", "actor.mismatch.action=stop"
    )

    with pytest.raises(MismatchError, match=r"abs_diff_mean.*version lag 0.*actor\.temperature"):
        run_rl(config)


def test_run_weights_that_never_arrive_are_found(policy, tmp_path, caplog, monkeypatch):
    from areal.engine.native.engine import NativeEngine

    def renamed(self: NativeEngine, version: int) -> None:  # says that it is of the new version, and is not
        self._staged = None
        self.set_version(version)

    monkeypatch.setattr(NativeEngine, "commit_weights", renamed)
    config = rl_config(
        tmp_path, policy, "actor.optimizer.lr=0.02", "actor.mismatch.action=stop", "actor.optimizer.weight_decay=0.0"
    )

    with pytest.raises(MismatchError, match="the sampler never got the weights"):
        run_rl(config)

    assert len(stats_of(config)) == 1  # the first step was trained on the weights that were loaded


@pytest.mark.slow
@pytest.mark.ci
def test_run_in_worker_processes_stops_with_the_original_error(policy, tmp_path):
    from tests.controller.runs import worker_config

    config = worker_config(
        tmp_path, policy, "gconfig.temperature=0.7", "actor.temperature=1.0", "actor.mismatch.action=stop"
    )

    with pytest.raises(MismatchError, match=r"abs_diff_mean.*version lag 0.*actor\.temperature") as caught:
        run_rl(config)

    assert any("actor/0" in note for note in caught.value.__notes__)


@pytest.mark.slow
@pytest.mark.ci
def test_run_in_worker_processes_warns_in_the_controller_once_per_step(policy, tmp_path, caplog):
    from tests.controller.runs import worker_config

    config = worker_config(tmp_path, policy, "gconfig.temperature=0.7", "actor.temperature=1.0", "total_train_steps=2")

    run_rl(config)

    messages = [r.getMessage() for r in caplog.records if "sampler and trainer" in r.getMessage()]
    assert len(messages) == 2
    assert all(stats[f"{PREFIX}abs_diff_mean"] > 0.02 for stats in stats_of(config))
