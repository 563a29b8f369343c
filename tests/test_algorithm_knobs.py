"""Every setting of the algorithms acts: two steps that differ in it alone differ. None may be forgotten here."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from areal.api.cli_args import (
    DPOEngineConfig,
    NormConfig,
    PPOActorConfig,
    PPOCriticConfig,
    RejectionSamplingConfig,
    TrainEngineConfig,
)
from areal.trainer.dpo.learner import DPOLoss
from areal.trainer.ppo.actor import PPOActor
from areal.trainer.ppo.advantages import AdvantageInput, AdvantageOutput
from areal.trainer.ppo.critic import PPOCritic
from areal.utils import stats_tracker
from areal.utils.batch import PackedBatch, pack
from areal.utils.stats_tracker import DistributedStatsTracker
from tests.test_ppo_actor import trajectories

PLACES = 200  # more than there are tokens in any of these batches
noise = torch.Generator().manual_seed(11)
CURRENT, RECOMPUTED, REFERENCE = (-torch.rand(PLACES, generator=noise) for _ in range(3))


@pytest.fixture(autouse=True)
def _fresh_statistics():
    stats_tracker.export_all()
    yield
    stats_tracker.export_all()


class GradientEngine:
    """Gives every place of the data fixed results, and keeps what each optimizer step would do to them."""

    data_parallel_group = None
    context_and_model_parallel_group = None
    result_rank = 0

    def __init__(self) -> None:
        self.steps: list[Tensor] = []

    def eval(self) -> None:
        """Nothing to switch."""

    def train(self) -> None:
        """Nothing to switch."""

    def get_version(self) -> int:
        return 3

    def forward_batch(self, data: PackedBatch) -> Tensor:
        return RECOMPUTED[data.tokens["input_ids"]]

    def train_batch(self, batch: PackedBatch, loss: Any, weight: Any, **options: Any) -> dict[str, float]:
        places = batch.tokens["input_ids"]
        results = CURRENT[places].requires_grad_()
        others = (results.detach().abs(),) if options else ()  # of a language model: the entropy
        loss(results, *others, batch.as_loss_input()).backward()
        self.steps.append(torch.zeros(PLACES).index_copy(0, places, results.grad))
        return {"update_successful": 1.0}


def data(size: int = 4) -> list[dict[str, Any]]:
    """Trajectories whose token ids number their places; one answer was cut off."""
    result, start = trajectories(size=size), 0
    for t in result:
        t["input_ids"] = torch.arange(start, start + t["input_ids"].numel()).view_as(t["input_ids"])
        t["ref_logp"] = REFERENCE[t["input_ids"]]
        start += t["input_ids"].numel()
    result[0]["truncated"][0] = True
    return result


def actor_steps(size: int = 4, **settings: Any) -> Tensor:
    """Gradients of a policy's update, ``[optimizer steps, PLACES]``."""
    config = PPOActorConfig(**{"kl_ctl": 0.0, "ppo_n_minibatches": 1, **settings})
    config.mismatch.action = "off"
    actor = PPOActor(config, GradientEngine())
    batch = actor.pack(data(size))
    if actor.should_compute_prox_logp():
        batch = actor.annotate(batch, "prox_logp")
    actor.ppo_update(actor.compute_advantages(batch))
    return torch.stack(actor.engine.steps)


def assert_differ(one: Tensor, other: Tensor) -> None:
    assert one.isfinite().all()
    assert other.isfinite().all()
    assert one.shape != other.shape or not torch.allclose(one, other, rtol=1e-3, atol=1e-6)


def own_fields(cls: type[Any], base: type[Any] | None = None) -> set[str]:
    inherited = set() if base is None else {spec.name for spec in dataclasses.fields(base)}
    return {spec.name for spec in dataclasses.fields(cls)} - inherited


# --- policy -----------------------------------------------------------------------------------------------------------
def shorter_is_better(x: AdvantageInput) -> AdvantageOutput:
    """An advantage function of the user's own."""
    advantages = -x.cu_seqlens.diff()[x.seq_ids].float()
    return AdvantageOutput(advantages, advantages)


DECOUPLED: dict[str, Any] = {"use_decoupled_loss": True}
OVERLONG = {"overlong_reward_penalty": True, "overlong_tokens": 4, "overlong_penalty_factor": 1.0, "max_new_tokens": 8}
SAPO: dict[str, Any] = {"use_sapo_loss": True, "adv_norm": NormConfig()}
# Setting -> the other settings of both steps, and its value in the second.
ACTOR: dict[str, tuple[dict[str, Any], Any]] = {
    "ppo_n_minibatches": ({}, 2),
    "eps_clip": ({}, 0.05),
    "eps_clip_higher": ({}, 3.0),
    "c_clip": ({"adv_norm": NormConfig()}, 1.1),
    "reward_norm": ({}, NormConfig(mean_level="group", std_level="group")),
    "reward_scaling": ({}, 2.0),
    "reward_bias": ({}, -0.5),
    "reward_clip": ({}, 0.3),
    "discount": ({}, 0.9),
    "gae_lambda": ({}, 0.5),
    "adv_norm": ({}, NormConfig()),
    "kl_ctl": ({}, 0.3),
    "kl_estimator": ({"kl_ctl": 0.3}, "k3"),
    "recompute_logprob": ({}, True),
    "use_decoupled_loss": ({}, True),
    "rejection_sampling": (DECOUPLED, RejectionSamplingConfig(upper=1.2)),
    "importance_sampling_level": ({}, "sequence"),
    "max_new_tokens": (OVERLONG, 9),
    "m2_threshold": (DECOUPLED, 0.05),
    "overlong_reward_penalty": ({**OVERLONG, "overlong_reward_penalty": False}, True),
    "overlong_tokens": (OVERLONG, 6),
    "overlong_penalty_factor": (OVERLONG, 0.5),
    "mask_no_eos_with_zero": ({}, True),
    "use_sapo_loss": ({}, True),
    "sapo_tau_pos": (SAPO, 2.0),
    "sapo_tau_neg": (SAPO, 2.0),
    "prox_logp_method": (DECOUPLED, "loglinear"),
    "loss_agg": ({}, "seq-mean-token-mean"),
    "loss_agg_constant": ({"loss_agg": "seq-mean-token-sum-norm"}, 3),
    "overlong_filter": ({}, True),
    "loss_fn": ({}, "cispo"),
    "advantage_fn": ({}, f"{__name__}.shorter_is_better"),
}
# Settings that act on something else than the gradient, and the test of it.
ELSEWHERE = {
    "mismatch": "test_mismatch.py::test_judge_every_metric_can_be_limited",
    "log_agent_stats": "test_ppo_actor.py::test_log_agent_stats_averages_over_first_sequences",
    "log_agent_stats_keys": "test_ppo_actor.py::test_log_agent_stats_averages_over_first_sequences",
}


@pytest.mark.parametrize("name", ACTOR)
def test_actor_setting_changes_the_step(name):
    common, value = ACTOR[name]

    assert_differ(actor_steps(**common), actor_steps(**{**common, name: value}))


def test_every_actor_setting_has_a_test():
    here = Path(__file__).parent

    assert own_fields(PPOActorConfig, TrainEngineConfig) == ACTOR.keys() | ELSEWHERE.keys()
    for place in ELSEWHERE.values():
        file, _, test = place.partition("::")
        assert f"def {test}(" in (here / file).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "setting", [*(("loss_fn", name) for name in ("sapo", "cispo")), ("prox_logp_method", "metrics")]
)
def test_every_other_choice_of_the_actor_changes_the_step_or_its_statistics(setting):
    name, value = setting
    common = DECOUPLED if name == "prox_logp_method" else {}

    one, first = actor_steps(**common), stats_tracker.export_all()
    other, second = actor_steps(**common, **{name: value}), stats_tracker.export_all()

    assert first.keys() != second.keys() or not torch.allclose(one, other, rtol=1e-3, atol=1e-6)


BATCH = NormConfig()
NORM: dict[str, tuple[NormConfig, Any]] = {
    "mean_level": (BATCH, "group"),
    "std_level": (BATCH, "group"),
    "std_unbiased": (BATCH, False),
    "eps": (BATCH, 0.5),
    "mean_leave1out": (NormConfig(std_level=None), True),  # a std would take the factor n / (n - 1) out again
}


@pytest.mark.parametrize("place", ["reward_norm", "adv_norm"])
@pytest.mark.parametrize("name", NORM)
def test_normalisation_setting_changes_the_step(name, place):
    config, value = NORM[name]

    assert_differ(actor_steps(**{place: config}), actor_steps(**{place: replace(config, **{name: value})}))


def test_normalisation_group_size_of_one_keeps_the_rewards_of_groups_of_one():
    lone = NormConfig(mean_level="group", mean_leave1out=True, std_level=None)

    by_design, survivors = (actor_steps(1, reward_norm=replace(lone, group_size=n)) for n in (1, 4))

    assert_differ(by_design, survivors)
    assert survivors.abs().max() == 0
    assert NORM.keys() | {"group_size"} == own_fields(NormConfig)


BY_TOKEN = RejectionSamplingConfig(upper=1.2)
BY_SEQUENCE = RejectionSamplingConfig(level="sequence", upper=1.2)
REJECTION: dict[str, tuple[RejectionSamplingConfig, Any]] = {
    "level": (BY_TOKEN, "sequence"),
    "action": (BY_TOKEN, "clamp"),
    "metric": (BY_TOKEN, "kl_k2"),
    "upper": (BY_TOKEN, 1.6),
    "lower": (BY_TOKEN, 0.9),
    "agg": (BY_SEQUENCE, "max"),
}


@pytest.mark.parametrize("name", REJECTION)
def test_rejection_setting_changes_the_step(name):
    config, value = REJECTION[name]
    changed = replace(config, **{name: value})

    assert_differ(
        actor_steps(**DECOUPLED, rejection_sampling=config), actor_steps(**DECOUPLED, rejection_sampling=changed)
    )
    assert REJECTION.keys() == own_fields(RejectionSamplingConfig)


# --- value model ------------------------------------------------------------------------------------------------------
def critic_steps(**settings: Any) -> Tensor:
    """Gradients of a value model's update, ``[optimizer steps, PLACES]``."""
    critic = PPOCritic(PPOCriticConfig(**{"ppo_n_minibatches": 1, **settings}), GradientEngine())
    actor = PPOActor(PPOActorConfig(kl_ctl=0.0), GradientEngine())
    critic.ppo_update(actor.compute_advantages(critic.annotate(actor.pack(data()))))
    return torch.stack(critic.engine.steps)


HUBER = {"value_loss": "huber", "huber_delta": 0.1}
CRITIC: dict[str, tuple[dict[str, Any], Any]] = {
    "eps_clip": ({}, 0.05),
    "ppo_n_minibatches": ({}, 2),
    "value_loss": ({"huber_delta": 0.1}, "huber"),
    "huber_delta": (HUBER, 0.2),
}


@pytest.mark.parametrize("name", CRITIC)
def test_critic_setting_changes_the_step(name):
    base, value = CRITIC[name]

    assert_differ(critic_steps(**base), critic_steps(**{**base, name: value}))
    # The last one is refused unless the actor, which makes the returns, has it too.
    assert own_fields(PPOCriticConfig, TrainEngineConfig) == CRITIC.keys() | {"mask_no_eos_with_zero"}


# --- preference -------------------------------------------------------------------------------------------------------
def dpo_gradient(**settings: Any) -> Tensor:
    """Gradient of the loss of three pairs to the log-probs of their tokens."""
    batch = pack(data(2))
    reference = REFERENCE[batch.tokens["input_ids"]]
    logprobs = CURRENT[batch.tokens["input_ids"]].requires_grad_()
    loss = DPOLoss(DPOEngineConfig(**settings), DistributedStatsTracker())
    fields = batch.with_tokens(ref_logprobs=reference).as_loss_input()
    loss(logprobs, logprobs.detach().abs(), fields).backward()
    assert logprobs.grad is not None
    return logprobs.grad


DPO: dict[str, Any] = {"beta": 0.4, "loss_type": "ipo", "label_smoothing": 0.2, "reference_free": True}


@pytest.mark.parametrize("name", DPO)
def test_dpo_setting_changes_the_step(name):
    assert_differ(dpo_gradient(), dpo_gradient(**{name: DPO[name]}))
    assert DPO.keys() == own_fields(DPOEngineConfig, TrainEngineConfig)
