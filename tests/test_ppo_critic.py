"""The PPO critic on a real engine with a tiny model."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from areal.api.cli_args import MicroBatchSpec, NormConfig, OptimizerConfig, PPOActorConfig, PPOCriticConfig
from areal.engine.fsdp_engine import FSDPEngine
from areal.infra.controller.tables import RemoteTable
from areal.trainer.ppo.advantages import NonFiniteInputError, compute_advantages
from areal.trainer.ppo.critic import CriticLoss, PPOCritic, value_tokens
from areal.trainer.ppo.validation import ValidationAnswers
from areal.utils import stats_tracker
from areal.utils.errors import DataError
from areal.utils.functional import explained_variance
from areal.utils.stats_tracker import DistributedStatsTracker
from tests.fakes import tiny_model
from tests.test_ppo_actor import trajectories
from tests.vector_files import load_vector

SGD = OptimizerConfig(type="sgd", lr=0.05, weight_decay=0.0, warmup_steps_proportion=0.0, gradient_clipping=1e9)


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


def build_critic(path: str, **settings: Any) -> PPOCritic:
    defaults: dict[str, Any] = {"dtype": "float32", "ppo_n_minibatches": 2, "optimizer": SGD, "is_critic": True}
    config = PPOCriticConfig(
        experiment_name="e", trial_name="t", backend="fsdp:d1", path=path, **{**defaults, **settings}
    )
    engine = FSDPEngine(config)
    engine.create_process_group()
    engine.initialize(None, None)
    return PPOCritic(config, engine)


def with_advantages(critic: PPOCritic, data: list[dict[str, Any]], **settings: Any) -> Any:
    """A packed batch after the actor's part of the step."""
    settings = {"kl_ctl": 0.0, "discount": 0.9, "gae_lambda": 0.8, **settings}
    actor = PPOActorConfig(experiment_name="e", trial_name="t", backend="fsdp:d1", path="x", **settings)
    return compute_advantages(critic.annotate(critic.pack(data)), actor)


def parameters(critic: PPOCritic) -> Tensor:
    return torch.cat([p.detach().flatten().clone() for p in critic.engine.module.parameters()])


def test_compute_values_list_and_packed_forms_agree(model_dir: str) -> None:
    critic, data = build_critic(model_dir), trajectories()

    listed = critic.compute_values(data)
    packed = critic.annotate(critic.pack(data)).tokens["values"]

    assert [v.shape for v in listed] == [t["input_ids"].shape for t in data]
    real = torch.cat([v[t["attention_mask"]] for v, t in zip(listed, data, strict=True)])
    torch.testing.assert_close(real, packed, rtol=1e-5, atol=1e-6)
    assert not packed.requires_grad


def test_values_change_advantages_and_returns_are_their_sum(model_dir: str) -> None:
    critic, data = build_critic(model_dir), trajectories()

    batch = with_advantages(critic, data)

    plain = compute_advantages(
        critic.pack(data),
        PPOActorConfig(
            experiment_name="e", trial_name="t", backend="fsdp:d1", path="x", kl_ctl=0, discount=0.9, gae_lambda=0.8
        ),
    )
    mask = batch.tokens["loss_mask"] != 0
    assert not torch.allclose(batch.tokens["advantages"][mask], plain.tokens["advantages"][mask])
    total = batch.tokens["advantages"] + batch.tokens["values"]
    torch.testing.assert_close(batch.tokens["returns"][mask], total[mask], rtol=1e-5, atol=1e-6)


def test_ppo_update_one_mini_batch_is_one_plain_step_on_the_clipped_loss(model_dir: str) -> None:
    critic = build_critic(model_dir, ppo_n_minibatches=1, eps_clip=0.1)
    batch = with_advantages(critic, trajectories())
    before = parameters(critic)
    module, tokens = critic.engine.module, batch.tokens
    mask = tokens["loss_mask"] != 0
    # An update from other old values, so that the clip acts.
    old = tokens["values"] + 0.3 * torch.sin(torch.arange(mask.shape[0]))
    batch = batch.with_tokens(values=old)
    losses = []
    for start, stop in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
        rows = slice(start, stop)
        hidden = module.base_model(tokens["input_ids"][None, rows]).last_hidden_state[0]
        value = module.score(hidden)[:, 0]
        clipped = old[rows] + (value - old[rows]).clamp(-0.1, 0.1)
        worse = torch.maximum((value - tokens["returns"][rows]) ** 2, (clipped - tokens["returns"][rows]) ** 2) / 2
        losses.append(worse[mask[rows]])
    loss = torch.cat(losses).mean()
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()))])

    critic.ppo_update(batch)

    torch.testing.assert_close(parameters(critic), before - 0.05 * gradient, rtol=1e-4, atol=1e-5)
    stats = stats_tracker.export_all()
    assert stats["ppo_critic/critic_loss/avg"] == pytest.approx(loss.item(), rel=1e-4)
    assert 0 < stats["ppo_critic/clip_ratio/avg"] < 1


def test_ppo_update_records_every_statistic(model_dir: str) -> None:
    critic = build_critic(model_dir, mask_no_eos_with_zero=True)
    batch = with_advantages(critic, trajectories())

    critic.ppo_update(batch)

    stats = stats_tracker.export_all()
    for name in ("new_value", "old_value", "target_value", "critic_loss", "clip_ratio"):
        assert stats.keys() >= {f"ppo_critic/{name}/{kind}" for kind in ("avg", "min", "max")}
    assert stats.keys() >= {"ppo_critic/clipped_new_value/avg", "ppo_critic/clipped_old_value/avg"}
    mask = batch.tokens["loss_mask"] != 0
    assert stats["ppo_critic/n_valid_tokens"] == mask.sum()
    assert stats["ppo_critic/old_value/avg"] == pytest.approx(batch.tokens["values"][mask].mean().item(), abs=1e-5)
    assert stats["ppo_critic/target_value/max"] == pytest.approx(batch.tokens["returns"][mask].max().item(), abs=1e-5)
    assert stats["ppo_critic/mask_no_eos_with_zero"] == 1
    assert stats["ppo_critic/eps_clip"] == 0.5
    assert stats["ppo_critic/update_successful"] == 1
    assert stats["ppo_critic/lr"] == pytest.approx(0.05)
    assert stats["ppo_critic/grad_norm"] > 0
    assert all(torch.tensor(value).isfinite() for value in stats.values())


@pytest.mark.parametrize("spec", [{"n_mbs": 3}, {"max_tokens_per_mb": 24}])
def test_ppo_update_cut_into_micro_batches_changes_nothing(model_dir: str, spec: dict[str, int]) -> None:
    whole = build_critic(model_dir, ppo_n_minibatches=1)
    cut = build_critic(model_dir, ppo_n_minibatches=1, mb_spec=MicroBatchSpec(**spec))

    for critic in (whole, cut):
        critic.ppo_update(with_advantages(critic, trajectories()))

    torch.testing.assert_close(parameters(whole), parameters(cut), rtol=1e-5, atol=1e-6)


def test_ppo_update_values_off_the_mask_change_nothing(model_dir: str) -> None:
    clean, dirty = build_critic(model_dir), build_critic(model_dir)
    batch = with_advantages(clean, trajectories())
    mask = batch.tokens["loss_mask"] != 0
    spoiled = {key: torch.where(mask, batch.tokens[key], torch.nan) for key in ("values", "returns")}

    clean.ppo_update(batch)
    expected = stats_tracker.export_all()
    dirty.ppo_update(batch.with_tokens(**spoiled))
    found = stats_tracker.export_all()

    assert torch.equal(parameters(clean), parameters(dirty))
    for key in (key for key in expected if key.startswith("ppo_critic/")):
        assert found[key] == expected[key], key


def test_ppo_update_no_trained_token_leaves_the_weights(model_dir: str) -> None:
    critic = build_critic(model_dir)
    batch = with_advantages(critic, trajectories())
    before = parameters(critic)

    critic.ppo_update(batch.with_tokens(loss_mask=torch.zeros_like(batch.tokens["loss_mask"])))

    assert torch.equal(parameters(critic), before)
    assert stats_tracker.export_all()["ppo_critic/update_successful"] == 0


def test_ppo_update_repeated_learns_the_returns(model_dir: str) -> None:
    critic = build_critic(model_dir, eps_clip=10.0, optimizer=OptimizerConfig(lr=3e-3, warmup_steps_proportion=0.0))
    batch = with_advantages(critic, trajectories())
    losses = []

    for _ in range(40):
        critic.ppo_update(batch)
        losses.append(stats_tracker.export_all()["ppo_critic/critic_loss/avg"])

    assert losses[-1] < 0.2 * losses[0]


@pytest.mark.parametrize("missing", ["values", "returns"])
def test_ppo_update_missing_field_names_it(model_dir: str, missing: str) -> None:
    critic = build_critic(model_dir)
    batch = with_advantages(critic, trajectories())

    with pytest.raises(DataError, match=missing):
        critic.ppo_update(batch.without(missing))


def test_evaluate_compares_values_with_the_shaped_reward_to_come(model_dir: str) -> None:
    critic, data = build_critic(model_dir), trajectories()
    before = parameters(critic)
    # Everything of the policy's objective that is no reward must not count.
    policy = PPOActorConfig(
        experiment_name="e", trial_name="t", backend="fsdp:d1", path="x", discount=0.9, gae_lambda=0.3, kl_ctl=0.5,
        reward_bias=-0.5, reward_scaling=10.0, use_decoupled_loss=True, adv_norm=NormConfig(),
    )  # fmt: skip

    critic.evaluate(data, policy)

    stats = stats_tracker.export_all()
    values, targets = [], []
    for scored, t in zip(critic.compute_values(data), data, strict=True):
        for row, reward in enumerate(t["rewards"].tolist()):
            drawn = t["loss_mask"][row].nonzero()[:, 0]  # the position before each drawn token is trained
            values.append(scored[row, drawn - 1])
            targets.append(10 * (reward - 0.5) * 0.9 ** torch.arange(len(drawn) - 1, -1, -1))
    value, target = torch.cat(values), torch.cat(targets)
    explained = 1 - (target - value).var(correction=0) / target.var(correction=0)
    assert stats["ppo_critic-eval/n_valid_tokens"] == len(value)
    assert stats["ppo_critic-eval/value/avg"] == pytest.approx(value.mean().item(), abs=1e-5)
    assert stats["ppo_critic-eval/target_value/max"] == pytest.approx(target.max().item(), rel=1e-5)
    assert stats["ppo_critic-eval/critic_loss/avg"] == pytest.approx(
        ((value - target) ** 2 / 2).mean().item(), rel=1e-4
    )
    assert stats["ppo_critic-eval/explained_variance"] == pytest.approx(explained.item(), abs=1e-4)
    assert torch.equal(parameters(critic), before)
    assert not any(key.startswith("ppo_critic/") for key in stats)


def test_evaluate_nothing_trained_is_zero_and_finite(model_dir: str) -> None:
    critic, data = build_critic(model_dir), trajectories(n_groups=1)
    data[0]["loss_mask"].zero_()

    critic.evaluate(data, PPOActorConfig(experiment_name="e", trial_name="t", backend="fsdp:d1", path="x"))

    stats = stats_tracker.export_all()
    assert stats["ppo_critic-eval/explained_variance"] == 0
    assert all(torch.tensor(value).isfinite() for value in stats.values())


def plain_policy(**settings: Any) -> PPOActorConfig:
    """The policy's settings, as an evaluation reads them."""
    return PPOActorConfig(experiment_name="e", trial_name="t", backend="fsdp:d1", path="x", **settings)


def test_evaluate_answer_that_was_cut_off_earns_its_reward_and_no_value(model_dir: str) -> None:
    critic = build_critic(model_dir)
    data = trajectories(rewards=[[1.0] * 4] * 3)
    for table in data:
        table["truncated"] = torch.ones(4, dtype=torch.bool)
    scored = [{**table, "values": value} for table, value in zip(data, critic.compute_values(data), strict=True)]

    for tables in (data, critic.pack(scored)):
        critic.evaluate(tables, plain_policy(discount=1.0))

        stats = stats_tracker.export_all()
        assert [stats[f"ppo_critic-eval/target_value/{kind}"] for kind in ("min", "max")] == [1.0, 1.0]


def critic_statistics() -> dict[str, float]:
    """What the critic recorded; the memory of the process differs from call to call."""
    stats = {k: v for k, v in stats_tracker.export_all().items() if k.startswith("ppo_critic-eval/")}
    assert stats
    return stats


def test_evaluate_reads_no_logprobs_and_no_column_of_a_users_workflow(model_dir: str) -> None:
    critic, data = build_critic(model_dir), trajectories()
    critic.evaluate(data, plain_policy())
    expected = critic_statistics()
    bare = [{key: value for key, value in t.items() if key not in ("logprobs", "versions")} for t in data]
    bare[1]["note"] = torch.full((4,), math.nan)

    critic.evaluate(bare, plain_policy())

    assert critic_statistics() == expected


def test_evaluate_value_that_is_not_finite_is_named(model_dir: str) -> None:
    critic = build_critic(model_dir)
    with torch.no_grad():
        critic.engine.module.score.weight.fill_(math.inf)

    with pytest.raises(NonFiniteInputError, match="value of a trained token"):
        critic.evaluate(trajectories(), plain_policy())


GROUPS_OF_FOUR = NormConfig(mean_level="group", std_level=None, group_size=4)


@pytest.mark.parametrize(
    ("norm", "sizes", "measured"),
    [
        (GROUPS_OF_FOUR, (1, 1), False),
        (NormConfig(mean_level=None, std_level="group", group_size=4), (1, 1), False),
        (GROUPS_OF_FOUR, (1, 2), True),
        (NormConfig(mean_level="group", group_size=1), (1, 1), True),  # groups of one by design
        (NormConfig(mean_level="batch", group_size=4), (1, 1), True),
        (None, (1, 1), True),
    ],
)
def test_validation_groups_of_one_without_a_baseline_are_refused_once(
    norm: NormConfig | None, sizes: tuple[int, int], measured: bool, caplog: pytest.LogCaptureFixture
) -> None:
    tables: list[Any] = [trajectories(n_groups=1, size=size)[0] for size in sizes]
    remote = [
        RemoteTable(None, ("rollout/0", 0), lambda gone: None, 9, size, tuple(tables[0]))  # type: ignore[arg-type]
        for size in sizes
    ]
    answers = ValidationAnswers(norm)

    chosen = [len(answers.choose(each, 1)) for each in (tables, remote)]

    assert chosen == ([2, 2] if measured else [0, 0])
    assert caplog.text.count("eval_gconfig.n_samples to 2 or more") == (0 if measured else 1)


def test_validation_tables_that_cannot_be_compared_are_left_out_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    good, *rest = trajectories(n_groups=4)
    for table, column in zip(rest, ("rewards", "loss_mask", "truncated"), strict=True):
        del table[column]

    chosen = ValidationAnswers(None).choose([rest[0], good, *rest[1:], {**good, "note": 1}], 2)

    assert [table["input_ids"] is good["input_ids"] for table in chosen] == [True, True]
    assert "evaluated without 3 of 5 validation groups" in caplog.text


def test_validation_fewer_tables_than_ranks_is_said(caplog: pytest.LogCaptureFixture) -> None:
    assert ValidationAnswers(None).choose(trajectories(n_groups=1), 2) == []
    assert "1 validation groups, and it takes 2" in caplog.text
    assert ValidationAnswers(None).choose([], 1) == []


@pytest.mark.parametrize(
    ("values", "returns", "expected"),
    [
        ([1.0, 3.0, 5.0], [1.0, 3.0, 5.0], 1.0),
        ([0.0, 2.0, 4.0], [1.0, 3.0, 5.0], 1.0),  # off by a constant
        ([7.0, 7.0, 7.0], [1.0, 3.0, 5.0], 0.0),
        ([5.0, 3.0, 1.0], [1.0, 3.0, 5.0], -3.0),  # R - V = -4, 0, 4: four times the variance
        ([1.0, 2.0, 9.0], [4.1, 4.1, 4.1], 0.0),  # nothing to explain
    ],
)
def test_explained_variance_hand_values(values: list[float], returns: list[float], expected: float) -> None:
    mask = torch.tensor([1, 1, 0, 1])
    v, r = (torch.tensor([*x[:2], math.nan, x[2]]) for x in (values, returns))

    assert explained_variance(v, r, mask).item() == pytest.approx(expected, abs=1e-6)
    assert explained_variance(v, r, torch.zeros(4)).item() == 0


def test_critic_loss_callback_equals_the_vector() -> None:
    vector = load_vector("critic_mse")
    inputs = {name: torch.tensor(value) for name, value in vector["inputs"].items()}
    config = PPOCriticConfig(
        experiment_name="e", trial_name="t", backend="fsdp:d1", path="x", eps_clip=vector["config"]["value_eps_clip"]
    )
    loss = CriticLoss(config, DistributedStatsTracker("vector"))
    values = inputs["value"].clone().requires_grad_()
    packed = {"values": inputs["old_value"], "returns": inputs["target_value"], "loss_mask": inputs["loss_mask"]}

    found = loss(values, packed)
    found.backward()

    assert found.item() == pytest.approx(vector["outputs"]["loss"], abs=1e-5)
    assert value_tokens(packed) == inputs["loss_mask"].sum()
    assert values.grad[inputs["loss_mask"] == 0].abs().sum() == 0
