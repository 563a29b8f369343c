"""What the actor's settings choose: losses and advantages by name or path, aggregation, M2PO, filter, teacher."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from areal.api.cli_args import (
    ConfigError,
    MicroBatchSpec,
    NormConfig,
    OptimizerConfig,
    PPOActorConfig,
    RejectionSamplingConfig,
)
from areal.api.config.ppo import TeacherConfig
from areal.trainer.ppo.actor import ActorLoss, PPOActor
from areal.trainer.ppo.advantages import AdvantageInput, AdvantageOutput, NonFiniteInputError, compute_advantages
from areal.trainer.ppo.losses import LossContractError, LossInput, LossOutput
from areal.utils import stats_tracker
from areal.utils.batch import PackedBatch
from areal.utils.errors import DataError
from areal.utils.functional import LOSS_AGGREGATIONS
from areal.utils.stats_tracker import DistributedStatsTracker
from tests.fakes import tiny_model
from tests.test_ppo_actor import GROUP, _NoGroup, build_actor, parameters, run_step, trajectories

HERE = "tests.test_ppo_objectives"
SGD = OptimizerConfig(type="sgd", lr=1.0, weight_decay=0.0, warmup_steps_proportion=0.0, gradient_clipping=1e9)
seen: list[Any] = []


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(path)
    return str(path)


@pytest.fixture(autouse=True)
def _fresh():
    seen.clear()
    stats_tracker.export_all()
    yield
    stats_tracker.export_all()


def plain_actor(**settings: Any) -> PPOActor:
    """An actor whose engine computes nothing."""
    config = PPOActorConfig(experiment_name="e", trial_name="t", backend="fsdp:d1", kl_ctl=0.0, **settings)
    return PPOActor(config, _NoGroup())


# --- functions of the user's own --------------------------------------------------------------------------------------
def reinforce(x: LossInput) -> LossOutput:
    """Plain policy gradient, with a statistic of its own and NaN off the mask."""
    seen.append(x)
    losses = torch.where(x.mask, -x.advantages * x.logprobs, torch.nan)
    return LossOutput(losses, {"surprise": torch.where(x.mask, -x.logprobs.detach(), torch.nan)})


def no_output(x: LossInput) -> Any:
    return x.logprobs.sum()


def scalar_output(x: LossInput) -> LossOutput:
    return LossOutput(x.logprobs.sum())


def twice_the_reward(x: AdvantageInput) -> AdvantageOutput:
    """The same advantage for every token of a sequence."""
    seen.append(x)
    advantages = 2 * x.rewards[x.seq_ids]
    return AdvantageOutput(advantages, advantages)


def one_per_sequence(x: AdvantageInput) -> AdvantageOutput:
    return AdvantageOutput(x.rewards, x.rewards)


def no_advantages(x: AdvantageInput) -> Any:
    return x.token_rewards


def not_a_number(x: AdvantageInput) -> AdvantageOutput:
    return AdvantageOutput(torch.full_like(x.token_rewards, torch.nan), x.token_rewards)


def test_loss_fn_by_import_path_trains_and_logs_its_statistic(model_dir):
    own = build_actor(model_dir, loss_fn=f"{HERE}.reinforce", ppo_n_minibatches=1, reward_norm=GROUP)
    usual = build_actor(model_dir, ppo_n_minibatches=1, reward_norm=GROUP)
    before = parameters(own)

    stats = run_step(own, trajectories())
    run_step(usual, trajectories())

    assert not torch.equal(parameters(own), before)
    assert not torch.equal(parameters(own), parameters(usual))
    assert stats["ppo_actor/update/surprise/avg"] == pytest.approx(-stats["ppo_actor/update/new_logp/avg"], rel=1e-6)
    assert stats["ppo_actor/update/clip_ratio/avg"] == 0
    x = seen[0]
    assert isinstance(x, LossInput)
    for value in (x.logprobs, x.proximal_logprobs, x.old_logprobs, x.advantages, x.entropy):
        assert value.shape == x.mask.shape
        assert (value[~x.mask] == 0).all()
    assert x.config is own.config
    assert x.fields["cu_seqlens"] is x.cu_seqlens


def test_loss_fn_of_the_user_equal_to_a_built_in_one_gives_its_bits(model_dir):
    built_in = build_actor(model_dir, reward_norm=GROUP, c_clip=3.0)
    by_path = build_actor(model_dir, reward_norm=GROUP, c_clip=3.0, loss_fn="areal.trainer.ppo.losses:ppo_loss")

    first, second = run_step(built_in, trajectories()), run_step(by_path, trajectories())

    assert torch.equal(parameters(built_in), parameters(by_path))
    for key, value in first.items():
        assert key.startswith(("memory/", "timeperf/")) or second[key] == value


@pytest.mark.parametrize(
    ("path", "message"),
    [("no_output", "returned a Tensor; it must return a LossOutput"), ("scalar_output", r"losses has shape \(\)")],
)
def test_loss_fn_wrong_result_is_named(model_dir, path, message):
    actor = build_actor(model_dir, loss_fn=f"{HERE}.{path}")

    with pytest.raises(LossContractError, match=f"actor.loss_fn={HERE}.{path}.*{message}"):
        run_step(actor, trajectories())


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("sappo", "did you mean 'sapo'"),
        ("no.such.module", "No module named 'no'"),
        (f"{HERE}.nothing", "no attribute 'nothing'"),
        (f"{HERE}.HERE", "names a str; it must be a function"),
    ],
)
def test_loss_fn_unknown_name_fails_when_the_actor_is_built(path, message):
    with pytest.raises(ConfigError, match=rf"actor.loss_fn={path}.*{message}"):
        plain_actor(loss_fn=path)


def test_advantage_fn_by_import_path_is_used_as_it_is():
    actor = plain_actor(advantage_fn=f"{HERE}.twice_the_reward", reward_norm=GROUP)
    data = trajectories(n_groups=2)

    batch = actor.compute_advantages(actor.pack(data))

    x = seen[0]
    assert torch.equal(batch.tokens["advantages"], 2 * x.rewards[x.seq_ids])
    assert x.group_id.tolist() == [10] * 4 + [11] * 4
    assert x.token_rewards.shape == x.mask.shape == x.seq_ids.shape
    assert x.max_seqlen == max(batch.lens)


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("one_per_sequence", LossContractError, r"advantages has shape \(12,\)"),
        ("not_a_number", NonFiniteInputError, "advantages of a trained token is NaN"),
        ("no_advantages", LossContractError, "returned a Tensor; it must return an AdvantageOutput"),
    ],
)
def test_advantage_fn_wrong_result_is_named(path, error, message):
    actor = plain_actor(advantage_fn=f"{HERE}.{path}")

    with pytest.raises(error, match=message):
        actor.compute_advantages(trajectories())


def test_advantage_fn_unknown_name_fails_when_the_actor_is_built():
    with pytest.raises(ConfigError, match="actor.advantage_fn=gea.*did you mean 'gae'"):
        plain_actor(advantage_fn="gea")


# --- aggregation ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("loss_agg", LOSS_AGGREGATIONS)
def test_loss_agg_on_an_engine_does_not_depend_on_the_micro_batch_cut(model_dir, loss_agg):
    results = []
    for spec in ({}, {"n_mbs": 5}, {"max_tokens_per_mb": 24}):
        actor = build_actor(
            model_dir,
            ppo_n_minibatches=1,
            loss_agg=loss_agg,
            reward_norm=GROUP,
            mb_spec=MicroBatchSpec(**spec),
            optimizer=SGD,
            max_new_tokens=8,
        )
        run_step(actor, trajectories())
        results.append(parameters(actor))

    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-6, atol=1e-6)


def test_loss_agg_each_choice_and_constant_gives_another_step(model_dir):
    choices: list[dict[str, Any]] = [{"loss_agg": kind, "max_new_tokens": 8} for kind in LOSS_AGGREGATIONS]
    choices.append({"loss_agg": "seq-mean-token-sum-norm", "loss_agg_constant": 4, "max_new_tokens": 8})
    moved = []
    for settings in choices:
        actor = build_actor(model_dir, ppo_n_minibatches=1, reward_norm=GROUP, optimizer=SGD, **settings)
        before = parameters(actor)
        run_step(actor, trajectories())
        moved.append(parameters(actor) - before)

    for i, one in enumerate(moved):
        assert all(not torch.allclose(one, other, rtol=1e-3) for other in moved[:i])
    torch.testing.assert_close(moved[3], 2 * moved[2], rtol=1e-3, atol=1e-6)


# --- M2PO -------------------------------------------------------------------------------------------------------------
class RecordingEngine(_NoGroup):
    """Keeps the mini-batches it is given."""

    context_and_model_parallel_group = None

    def __init__(self) -> None:
        self.batches: list[PackedBatch] = []

    def train(self) -> None:
        """Nothing to switch."""

    def get_version(self) -> int:
        return 3

    result_rank = 0

    def train_batch(self, batch: PackedBatch, loss: Any, weight: Any, *, token_mask: str) -> dict[str, float]:
        self.batches.append(batch)
        return {"update_successful": 1.0}


@pytest.mark.parametrize("minibatches", [1, 3])
def test_m2po_judges_the_whole_step_whatever_the_mini_batches(minibatches):
    config = PPOActorConfig(
        experiment_name="e",
        trial_name="t",
        backend="fsdp:d1",
        kl_ctl=0.0,
        use_decoupled_loss=True,
        m2_threshold=0.02,
        ppo_n_minibatches=minibatches,
    )
    config.mismatch.action = "off"
    actor = PPOActor(config, RecordingEngine())
    batch = actor.pack(trajectories())
    noise = torch.randn(batch.n_tokens, generator=torch.Generator().manual_seed(3)) * 0.3
    rolled = torch.cat([batch.tokens["logprobs"][1:], torch.zeros(1)])
    batch = actor.compute_advantages(batch.with_tokens(prox_logp=rolled + noise))

    actor.ppo_update(batch)

    stats = stats_tracker.export_all()
    trained = batch.tokens["loss_mask"] != 0
    moments = noise[trained].square().sort().values
    expected = int((moments.cumsum(0) / torch.arange(1, len(moments) + 1) < 0.02).sum())
    assert len(actor.engine.batches) == minibatches
    assert 0 < expected < trained.sum()
    assert sum(int(b.tokens["loss_mask"].sum()) for b in actor.engine.batches) == expected
    assert stats["ppo_actor/m2po_kept_fraction/avg"] == pytest.approx(expected / int(trained.sum()))


# --- overlong filter --------------------------------------------------------------------------------------------------
def cut_off(*rows: int) -> list[dict[str, Any]]:
    """One group of four of which ``rows`` were cut off by a length limit."""
    data = trajectories(n_groups=1, rewards=[[1.0, 0.0, 0.0, 1.0]])
    data[0]["truncated"][list(rows)] = True
    return data


def test_overlong_filter_takes_cut_off_sequences_out_of_the_loss_only():
    on, off = plain_actor(overlong_filter=True, reward_norm=GROUP), plain_actor(reward_norm=GROUP)

    filtered, whole = (actor.compute_advantages(actor.pack(cut_off(1))) for actor in (on, off))

    row = filtered.seq_ids == 1
    assert whole.tokens["loss_mask"][row].sum() > 0
    assert filtered.tokens["loss_mask"][row].sum() == 0
    # Its reward still counts in the group's statistics, and its length in the logs.
    for key in ("loss_mask", "advantages"):
        assert torch.equal(filtered.tokens[key][~row], whole.tokens[key][~row])
    assert torch.equal(filtered.sequences["response_len"], whole.sequences["response_len"])


def test_overlong_filter_all_cut_off_skips_the_step(model_dir):
    actor = build_actor(model_dir, overlong_filter=True, reward_norm=GROUP, adv_norm=GROUP, ppo_n_minibatches=1)
    before = parameters(actor)

    stats = run_step(actor, cut_off(0, 1, 2, 3))

    assert torch.equal(parameters(actor), before)
    assert stats["ppo_actor/update/update_successful"] == 0
    assert stats["ppo_actor/response_len/avg"] > 0
    assert all(value == value for value in stats.values())


@pytest.mark.parametrize("settings", [{"reward_norm": GROUP}, {"adv_norm": NormConfig()}, {"loss_fn": "cispo"}])
def test_mask_no_eos_with_zero_all_cut_off_changes_nothing(model_dir, settings):
    actor = build_actor(model_dir, mask_no_eos_with_zero=True, ppo_n_minibatches=1, **settings)
    before = parameters(actor)

    stats = run_step(actor, cut_off(0, 1, 2, 3))

    assert torch.equal(parameters(actor), before)  # nobody earned anything, hence nobody is better than another
    assert stats["ppo_actor/no_eos_ratios/avg"] == 1
    assert stats["ppo_actor/final_reward/max"] == 0
    assert all(value == value for value in stats.values())


def test_overlong_filter_without_the_field_names_it():
    actor = plain_actor(overlong_filter=True)
    data = trajectories(n_groups=1)
    del data[0]["truncated"]

    with pytest.raises(DataError, match="actor.overlong_filter=true needs 'truncated'"):
        actor.compute_advantages(data)


# --- teacher ----------------------------------------------------------------------------------------------------------
def taught(teacher: float, **scalars: Any) -> list[dict[str, Any]]:
    data = trajectories(n_groups=1)
    return [{**t, "teacher_logp": torch.full(t["input_ids"].shape, teacher), **scalars} for t in data]


@pytest.mark.parametrize("scalars", [{}, {"rl_loss_weight": 0.0, "distill_loss_weight": 1.0}])
def test_teacher_changes_the_step_and_logs_the_reverse_kl(model_dir, scalars):
    alone, pupil = (build_actor(model_dir, reward_norm=GROUP, optimizer=SGD, ppo_n_minibatches=1) for _ in range(2))

    run_step(alone, trajectories(n_groups=1))
    stats = run_step(pupil, taught(-1.5, **scalars))

    assert not torch.equal(parameters(alone), parameters(pupil))
    assert stats["ppo_actor/update/rkl_loss/avg"] == pytest.approx(
        stats["ppo_actor/update/new_logp/avg"] + 1.5, rel=1e-5
    )


def test_pure_distillation_does_not_read_rewards(model_dir):
    pupils = [build_actor(model_dir, optimizer=SGD, ppo_n_minibatches=1) for _ in range(2)]
    scalars = {"rl_loss_weight": 0.0, "distill_loss_weight": 1.0}

    for pupil, reward in zip(pupils, (0.0, 1.0), strict=True):
        data = taught(-1.5, **scalars)
        data[0]["rewards"][:] = reward
        run_step(pupil, data)

    assert torch.equal(parameters(pupils[0]), parameters(pupils[1]))


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_teacher_without_a_finite_logprob_is_an_error(bad):
    actor = plain_actor()

    with pytest.raises(NonFiniteInputError, match="NaN or infinite"):
        actor.compute_advantages(taught(bad))


@pytest.mark.parametrize("key", ["values", "ref_logp"])
@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_critic_or_reference_without_a_finite_result_is_an_error(key, bad):
    data = taught(-1.0)
    for trajectory in data:
        trajectory[key] = torch.full(trajectory["input_ids"].shape, bad)

    with pytest.raises(NonFiniteInputError, match="weights of ref and critic"):
        plain_actor().compute_advantages(data)


# --- settings ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rejection_sampling": RejectionSamplingConfig()}, "actor.rejection_sampling has no effect"),
        ({"m2_threshold": 0.04}, "actor.m2_threshold has no effect without use_decoupled_loss"),
        ({"use_sapo_loss": True, "c_clip": 3.0}, "actor.c_clip has no effect with the sapo loss"),
        ({"loss_fn": "sapo", "eps_clip_higher": 0.3}, "actor.eps_clip_higher has no effect with the sapo loss"),
        ({"loss_fn": "cispo", "c_clip": 3.0}, "actor.c_clip has no effect with the cispo loss"),
    ],
)
def test_actor_setting_without_effect_is_named(settings, message, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("PPOActor"), "propagate", True)

    with caplog.at_level("WARNING"):
        plain_actor(**settings)

    assert message in caplog.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_sapo_loss": True, "loss_fn": "ppo"}, "loss_fn='ppo'"),
        ({"loss_fn": "sapo", "use_decoupled_loss": True}, "use_decoupled_loss=True"),
        ({"loss_fn": "cispo", "importance_sampling_level": "sequence"}, "importance_sampling_level='sequence'"),
        ({"m2_threshold": 0.0}, "m2_threshold=0.0"),
        ({"m2_threshold": 0.1, "use_decoupled_loss": True, "prox_logp_method": "loglinear"}, "'loglinear'"),
        ({"loss_agg": "mean"}, "loss_agg='mean'"),
        ({"loss_agg_constant": 8}, "loss_agg_constant=8"),
        ({"loss_agg": "seq-mean-token-sum-norm", "loss_agg_constant": 0}, "loss_agg_constant=0"),
    ],
)
def test_actor_settings_that_contradict_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        PPOActorConfig(**settings)


def test_teacher_without_any_loss_is_refused():
    with pytest.raises(ConfigError, match="distill_loss_weight"):
        TeacherConfig(rl_loss_weight=0.0, distill_loss_weight=0.0)


def test_lone_or_equal_rewards_with_every_objective_change_nothing():
    for settings in ({}, {"use_sapo_loss": True}, {"loss_fn": "cispo"}, {"importance_sampling_level": "sequence"}):
        for data in (trajectories(n_groups=2, size=1), trajectories(n_groups=1, rewards=[[0.5] * 4])):
            config = PPOActorConfig(
                kl_ctl=0.0, reward_norm=GROUP.__class__(mean_level="group", group_size=4), **settings
            )
            actor = PPOActor(config, _NoGroup())
            batch = compute_advantages(actor.pack(data), config)
            theta = torch.full((batch.n_tokens,), -0.5, requires_grad=True)
            ActorLoss(config, DistributedStatsTracker(), 3)(theta, theta.detach(), batch.as_loss_input()).backward()

            assert theta.grad.abs().max() == 0
