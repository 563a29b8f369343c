"""The PPO actor on a real engine with a tiny model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from areal.api.cli_args import (
    MicroBatchSpec,
    NormConfig,
    OptimizerConfig,
    PPOActorConfig,
    RejectionSamplingConfig,
)
from areal.engine.fsdp_engine import FSDPEngine
from areal.trainer.ppo.actor import PPOActor
from areal.trainer.ppo.advantages import NonFiniteInputError
from areal.trainer.ppo.stats import record_batch
from areal.utils import stats_tracker
from areal.utils.batch import pack
from areal.utils.errors import DataError
from areal.utils.stats_tracker import DistributedStatsTracker
from tests.fakes import VOCAB, tiny_model

GROUP = NormConfig(mean_level="group", std_level="group")
PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {"reward_norm": GROUP},
    "dr_grpo": {"reward_norm": NormConfig(mean_level="group", std_level=None)},
    "lite_ppo": {"reward_norm": NormConfig(mean_level="group", std_level="batch")},
    "rloo": {"reward_norm": NormConfig(mean_level="group", mean_leave1out=True, std_level=None)},
    "reinforce_pp": {"kl_ctl": 0.001},
    "gspo": {"reward_norm": GROUP, "importance_sampling_level": "sequence"},
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(path)
    return str(path)


@pytest.fixture(autouse=True)
def _fresh_statistics():
    stats_tracker.export_all()
    yield
    stats_tracker.export_all()


def build_actor(path: str, **settings: Any) -> PPOActor:
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "kl_ctl": 0.0,
        "ppo_n_minibatches": 2,
        "optimizer": OptimizerConfig(lr=1e-3, weight_decay=0.0, warmup_steps_proportion=0.0),
    }
    config = PPOActorConfig(
        experiment_name="e", trial_name="t", backend="fsdp:d1", path=path, **{**defaults, **settings}
    )
    engine = FSDPEngine(config)
    engine.create_process_group()
    engine.initialize(None, None)
    return PPOActor(config, engine)


def trajectories(n_groups=3, size=4, rewards=None, seed=0, version=0):
    """Groups of random sequences whose log-probs are noise; each trajectory has its own width."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for group in range(n_groups):
        lens = torch.randint(5, 12, (size,), generator=generator)
        width = int(lens.max())
        columns = torch.arange(width)[None]
        real = columns < lens[:, None]
        drawn = real & (columns >= 3)
        result.append(
            {
                "input_ids": torch.randint(2, VOCAB, (size, width), generator=generator) * real,
                "attention_mask": real,
                "loss_mask": drawn.int(),
                "logprobs": torch.where(drawn, -torch.rand(size, width, generator=generator), 0.0),
                "versions": torch.where(drawn, version, -1),
                "rewards": torch.rand(size, generator=generator) if rewards is None else torch.tensor(rewards[group]),
                "group_id": torch.full((size,), 10 + group),
                "row_id": torch.full((size,), group),
                "truncated": torch.zeros(size, dtype=torch.bool),
            }
        )
    return result


def parameters(actor: PPOActor) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in actor.engine.module.parameters()])


def run_step(actor: PPOActor, data) -> dict[str, float]:
    batch = actor.pack(data)
    if actor.should_compute_prox_logp():
        batch = actor.annotate(batch, "prox_logp")
    actor.ppo_update(actor.compute_advantages(batch))
    return stats_tracker.export_all()


def test_list_and_packed_forms_give_the_same_update(model_dir):
    packed, listed = (build_actor(model_dir, use_decoupled_loss=True, reward_norm=GROUP) for _ in range(2))
    data = trajectories()
    original = [{k: v.clone() for k, v in t.items()} for t in data]

    run_step(packed, data)
    logp = listed.compute_logp(data)
    scored = [{**t, "prox_logp": p} for t, p in zip(data, logp, strict=True)]
    result = listed.compute_advantages(scored)
    listed.ppo_update(result)

    assert [p.shape for p in logp] == [t["input_ids"].shape for t in data]
    assert all(r["advantages"].shape == t["input_ids"].shape for r, t in zip(result, data, strict=True))
    assert torch.equal(parameters(packed), parameters(listed))
    for before, after in zip(original, data, strict=True):
        assert before.keys() == after.keys()
        assert all(torch.equal(before[k], after[k]) for k in before)


def test_first_mini_batch_with_recomputed_logprobs_has_ratio_one(model_dir):
    actor = build_actor(model_dir, recompute_logprob=True, ppo_n_minibatches=1, reward_norm=GROUP)

    stats = run_step(actor, trajectories())

    assert stats["ppo_actor/update/importance_weight/min"] == pytest.approx(1.0, abs=1e-5)
    assert stats["ppo_actor/update/importance_weight/max"] == pytest.approx(1.0, abs=1e-5)
    assert stats["ppo_actor/update/approx_kl/avg"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_change_the_policy_and_log_finite_statistics(model_dir, preset):
    settings = {
        "reward_bias": -0.5,
        "reward_scaling": 10.0,
        "eps_clip": 0.4,
        "recompute_logprob": True,
        "use_decoupled_loss": True,
        "rejection_sampling": RejectionSamplingConfig(metric="ratio", upper=5.0),
        "adv_norm": NormConfig(),
        "ppo_n_minibatches": 1,
        **PRESETS[preset],
    }
    actor = build_actor(model_dir, **settings)
    before = parameters(actor)

    stats = run_step(actor, trajectories())

    assert not torch.equal(before, parameters(actor))
    assert all(value == value and abs(value) < float("inf") for value in stats.values())
    assert stats["ppo_actor/update/update_successful"] == 1.0
    assert stats["ppo_actor/n_seqs"] == 12


def test_equal_rewards_change_no_parameter(model_dir):
    actor = build_actor(model_dir, reward_norm=GROUP, adv_norm=NormConfig())
    before = parameters(actor)

    run_step(actor, trajectories(rewards=[[1.0] * 4, [0.0] * 4, [0.3] * 4]))

    assert torch.equal(before, parameters(actor))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_update_does_not_depend_on_the_micro_batch_cut(model_dir, level):
    results = []
    # Plain gradient descent: Adam would blow rounding up where a gradient is almost 0.
    sgd = OptimizerConfig(type="sgd", lr=1.0, weight_decay=0.0, warmup_steps_proportion=0.0, gradient_clipping=1e9)
    for spec in ({}, {"n_mbs": 2}, {"n_mbs": 5}, {"max_tokens_per_mb": 24}):
        actor = build_actor(
            model_dir,
            ppo_n_minibatches=1,
            importance_sampling_level=level,
            reward_norm=GROUP,
            mb_spec=MicroBatchSpec(**spec),
            optimizer=sgd,
        )
        run_step(actor, trajectories())
        results.append(parameters(actor))

    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-6, atol=1e-6)


def test_mini_batches_one_optimizer_step_each_over_all_rows(model_dir):
    actor = build_actor(model_dir, ppo_n_minibatches=3)

    stats = run_step(actor, trajectories())

    assert stats["ppo_actor/update/grad_norm__count"] == 3
    assert stats["ppo_actor/update/n_valid_tokens"] == stats["ppo_actor/n_valid_tokens"]


def test_mini_batches_more_than_sequences_takes_what_there_is(model_dir):
    actor = build_actor(model_dir, ppo_n_minibatches=4)

    stats = run_step(actor, trajectories(n_groups=1, size=2))

    assert stats["ppo_actor/update/grad_norm__count"] == 2


def test_loglinear_needs_no_forward_pass_and_metrics_logs_errors(model_dir):
    data = trajectories(version=1)
    loglinear = build_actor(model_dir, use_decoupled_loss=True, prox_logp_method="loglinear")
    metrics = build_actor(model_dir, use_decoupled_loss=True, prox_logp_method="metrics")
    for actor in (loglinear, metrics):
        actor.engine.set_version(3)

    assert not loglinear.should_compute_prox_logp()
    first, second = run_step(loglinear, data), run_step(metrics, data)

    prefix = "ppo_actor/update/compute_logp/"
    assert f"{prefix}loglinear/approx_logp/avg" in first
    assert f"{prefix}prox_logp_gt/avg" not in first
    assert {f"{prefix}{m}/abs_error/avg" for m in ("loglinear", "linear", "rollout")} <= second.keys()
    assert f"{prefix}kl_div_taylor/avg" in second


def test_statistics_staleness_counts_generated_tokens_only(model_dir):
    actor = build_actor(model_dir)
    actor.engine.set_version(5)

    stats = run_step(actor, trajectories(version=3))

    assert stats["ppo_actor/update/version_stats/sample_staleness_theta_avg"] == 2.0
    assert stats["ppo_actor/update/version_stats/sample_staleness_proximal_max"] == 1.0
    assert stats["ppo_actor/update/version_stats/n_valid_generated_tokens"] == stats["ppo_actor/n_valid_tokens"]


def test_statistics_truncation_is_the_field_not_the_width(model_dir):
    # Ends by eos at 4; cut off at the limit of 8; eos exactly at position 8.
    lens = torch.tensor([4, 8, 8])
    columns = torch.arange(10)[None]
    real = columns < (lens + 2)[:, None]
    data = {
        "input_ids": torch.ones(3, 10, dtype=torch.long),
        "attention_mask": real,
        "loss_mask": (real & (columns >= 2)).int(),
        "logprobs": torch.zeros(3, 10),
        "rewards": torch.ones(3),
        "truncated": torch.tensor([False, True, False]),
    }
    for masked in (False, True):
        actor = PPOActor(
            PPOActorConfig(
                experiment_name="e", trial_name="t", backend="fsdp:d1", kl_ctl=0.0, mask_no_eos_with_zero=masked
            ),
            _NoGroup(),
        )
        batch = actor.compute_advantages(actor.pack([data]))
        tracker = DistributedStatsTracker()
        record_batch(tracker, batch, actor.config, 0)
        stats = tracker.export()

        assert stats["no_eos_ratios/avg"] == pytest.approx(1 / 3)
        assert (stats["response_len/min"], stats["response_len/max"]) == (4, 8)
        assert stats["response_len/avg"] == pytest.approx(20 / 3)
        assert batch.tokens["tot_rewards"].sum().item() == (2.0 if masked else 3.0)


class _NoGroup:
    """Stands for an engine of one rank where nothing is computed."""

    data_parallel_group = None


def test_compute_advantages_group_of_changed_size_lone_survivor_gets_zero(model_dir):
    actor = build_actor(model_dir, reward_norm=NormConfig(mean_level="group", mean_leave1out=True, std_level=None))
    data = trajectories(n_groups=1, size=1, rewards=[[1.0]]) + trajectories(n_groups=1, size=2, rewards=[[1.0, 0.0]])
    data[1]["group_id"] += 1

    batch = actor.compute_advantages(actor.pack(data))

    finals = [x.sum().item() for x in batch.tokens["tot_rewards"].split(batch.lens)]
    assert finals == [0.0, 1.0, -1.0]


def test_compute_advantages_trajectories_without_group_id_are_their_own_group(model_dir):
    actor = build_actor(model_dir, reward_norm=NormConfig(mean_level="group", std_level=None))
    data = trajectories(n_groups=2, size=2, rewards=[[1.0, 0.0], [4.0, 2.0]])
    for t in data:
        del t["group_id"]

    result = actor.compute_advantages(data)

    assert [t["tot_rewards"].sum(-1).tolist() for t in result] == [[0.5, -0.5], [1.0, -1.0]]


@pytest.mark.parametrize("key", ["rewards", "logprobs"])
def test_compute_advantages_nan_input_raises(model_dir, key):
    actor = build_actor(model_dir)
    data = trajectories()
    data[0][key] = torch.where(data[0]["loss_mask"][:, -1:] >= 0, torch.nan, 0.0).expand(
        -1, data[0]["input_ids"].shape[1]
    )
    if key == "rewards":
        data[0][key] = torch.full((4,), torch.nan)

    with pytest.raises(NonFiniteInputError, match="NaN or infinite"):
        actor.compute_advantages(data)


def test_compute_advantages_twice_or_without_needed_fields_raises(model_dir):
    actor = build_actor(model_dir)
    batch = actor.pack(trajectories())

    with pytest.raises(DataError, match="own result"):
        actor.compute_advantages(actor.compute_advantages(batch))
    with pytest.raises(DataError, match="'rewards'"):
        actor.compute_advantages(batch.without("rewards"))
    decoupled = build_actor(model_dir, use_decoupled_loss=True)
    with pytest.raises(ValueError, match="compute_logp"):
        decoupled.compute_advantages(batch)
    decoupled.config.prox_logp_method = "loglinear"
    with pytest.raises(ValueError, match="versions"):
        decoupled.compute_advantages(batch.without("versions"))


def test_log_agent_stats_averages_over_first_sequences(model_dir):
    actor = build_actor(model_dir, log_agent_stats=True, log_agent_stats_keys=["turns"])
    data = trajectories(n_groups=1)
    data[0]["begin_of_trajectory"] = torch.tensor([1, 0, 1, 0])
    data[0]["turns"] = torch.tensor([2, 9, 4, 9])

    stats = run_step(actor, data)

    assert stats["ppo_actor/turns/avg"] == 3.0
    assert stats["ppo_actor/agent"] == 2


def test_pack_returns_a_packed_batch_unchanged():
    actor = PPOActor(PPOActorConfig(experiment_name="e", trial_name="t", backend="fsdp:d1"), _NoGroup())
    batch = pack(trajectories())

    assert actor.pack(batch) is batch
