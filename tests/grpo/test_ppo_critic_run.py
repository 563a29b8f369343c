"""PPO with a critic in one process: two real steps, its checkpoints, its recovery, roles that leave the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from areal.workflow.rlvr import RLVRWorkflow
from tests.grpo.test_grpo_recover import interrupted
from tests.trainer_runs import (
    WORKFLOW,
    RecordingTrainer,
    assert_same_weights,
    checkpoints,
    record_rl,
    rl_config,
    rl_rows,
    run_rl,
    seeded,
    stats_of,
    weights,
    workflow_kwargs,
)

CRITIC = (
    "critic={optimizer: {lr: 1.0e-2, weight_decay: 0.0, lr_scheduler_type: linear, warmup_steps_proportion: 0.0}}",
    "critic.ppo_n_minibatches=2",
    "actor.gae_lambda=0.9",
)
TWO_STEPS = ("total_train_steps=2",)


def critics(config: Any) -> list[Path]:
    """Checkpoints of the critic, oldest first."""
    return [path.parent.parent / "critic" / path.name for path in checkpoints(config)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, policy: str) -> Any:
    """Two steps with a critic and a reference model that stay where they are."""
    config = rl_config(
        tmp_path_factory.mktemp("plain"),
        policy,
        *TWO_STEPS,
        *CRITIC,
        "actor.kl_ctl=0.2",
        f"ref.path={policy}",
        "saver.freq_steps=1",
    )
    return config, run_rl(config)


def test_two_steps_train_both_and_record_the_critic(plain: Any) -> None:
    config, stats = plain

    assert len(stats) == 2
    for step in stats:
        assert step["ppo_critic/update_successful"] == 1
        assert step["ppo_actor/update/update_successful"] == 1
        assert step["ppo_critic/n_valid_tokens"] == step["ppo_actor/n_valid_tokens"]
        assert step["timeperf/critic_values"] > 0
        assert step["timeperf/critic_train_step"] > 0
    assert stats[0]["ppo_critic/lr"] > stats[1]["ppo_critic/lr"] > 0  # one step of its own schedule per global step
    first, second = (weights(path) for path in critics(config))
    assert first.keys() == second.keys() >= {"score.weight", "model.norm.weight"}
    assert not (first["score.weight"] == second["score.weight"]).all()


def test_critic_changes_the_policy(plain: Any, policy: str, tmp_path: Path) -> None:
    config, stats = plain
    without = rl_config(tmp_path, policy, *TWO_STEPS, "actor.gae_lambda=0.9", "actor.kl_ctl=0.2", f"ref.path={policy}")

    other = run_rl(without)

    assert stats[0]["ppo_actor/task_reward/avg"] == other[0]["ppo_actor/task_reward/avg"]
    assert stats[0]["ppo_actor/advantages/avg"] != pytest.approx(other[0]["ppo_actor/advantages/avg"], abs=1e-3)
    assert not any(key.startswith("ppo_critic") for key in other[0])


def test_every_role_that_leaves_the_device_changes_no_number(plain: Any, policy: str, tmp_path: Path) -> None:
    expected, stats = plain
    leaving = [f"{role}.offload=true" for role in ("actor", "critic", "ref")]
    config = rl_config(
        tmp_path,
        policy,
        *TWO_STEPS,
        *CRITIC,
        "actor.kl_ctl=0.2",
        f"ref.path={policy}",
        "saver.freq_steps=1",
        "enable_offload=true",
        *leaving,
    )
    residence: list[tuple[bool, bool, bool]] = []

    class Watching(RecordingTrainer):
        def _finish_step(self, *args: Any) -> None:
            super()._finish_step(*args)
            roles = (self.actor, self.critic, self.ref)
            residence.append(tuple(role.engine.is_offload for role in roles))

    record_rl(config, trainer_class=Watching)

    assert residence == [(True, True, True)] * 2
    found = stats_of(config)
    assert [seeded(row) for row in found] == [seeded(row) for row in stats]
    for name in ("critic_onload", "critic_offload", "ref_onload", "ref_offload", "actor_onload"):
        assert found[1][f"timeperf/{name}"] > 0
        assert f"timeperf/{name}" not in stats[1]
    for one, other in zip(
        [*checkpoints(config), *critics(config)], [*checkpoints(expected), *critics(expected)], strict=True
    ):
        assert_same_weights(one, other)


VALID = "valid_dataset={path: arithmetic, type: rl, batch_size: 3, dataset_kwargs: {start: 100, size: 5}}"


def test_critic_is_evaluated_on_validation_answers_and_learns_nothing_from_them(
    plain: Any, policy: str, tmp_path: Path
) -> None:
    settings = (*TWO_STEPS, *CRITIC, "actor.kl_ctl=0.2", f"ref.path={policy}", "saver.freq_steps=1")
    evaluation = (VALID, "evaluator.freq_steps=2", "evaluator.eval_before_train=true", "eval_gconfig.n_samples=2")
    config = rl_config(tmp_path, policy, *settings, *evaluation, "enable_offload=true", "critic.offload=true")
    valid = rl_rows(rl_config(tmp_path, policy, "train_dataset.dataset_kwargs={start: 100, size: 5}"))

    away: list[bool] = []

    class Watching(RecordingTrainer):
        def _evaluate(self, *args: Any) -> None:
            super()._evaluate(*args)
            away.append(self.critic.engine.is_offload)

    evaluated = {"eval_workflow": WORKFLOW, "eval_workflow_kwargs": workflow_kwargs(config)}

    record_rl(config, valid=valid, trainer_class=Watching, **evaluated)

    first, second = stats_of(config)
    for prefix, row in (("before_train/", first), ("", second)):
        assert row[f"{prefix}ppo_critic-eval/critic_loss/avg"] > 0
        assert row[f"{prefix}ppo_critic-eval/explained_variance"] <= 1
        assert row[f"{prefix}ppo_critic-eval/n_valid_tokens"] > 5 * 2
    assert "ppo_critic-eval/critic_loss/avg" not in first  # evaluated after every second step
    assert away == [True, True]
    expected = critics(plain[0])
    for one, other in zip(critics(config), expected, strict=True):
        assert_same_weights(one, other)


class Uneven(RLVRWorkflow):
    """Leaves the rewards of one row out, the log-probs of the others; adds a column to one of these."""

    def __init__(self, unrewarded: str, noted: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.unrewarded, self.noted = unrewarded, noted

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, Any]:
        table = await super().arun_episode(engine, data)
        prompt = data["messages"][0]["content"]
        del table["rewards" if prompt == self.unrewarded else "logprobs"]
        return {**table, "note": torch.zeros(1)} if prompt == self.noted else table


def test_evaluation_of_the_critic_ends_no_run_for_what_a_workflow_returns(
    policy: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = rl_config(
        tmp_path, policy, "total_train_steps=1", *CRITIC, VALID, "evaluator.freq_steps=1", "eval_gconfig.n_samples=2"
    )
    valid = rl_rows(rl_config(tmp_path, policy, "train_dataset.dataset_kwargs={start: 100, size: 5}"))
    prompts = [row["messages"][0]["content"] for row in valid]
    kwargs = {**workflow_kwargs(config), "unrewarded": prompts[0], "noted": prompts[1]}

    record_rl(config, valid=valid, eval_workflow=Uneven, eval_workflow_kwargs=kwargs)

    (stats,) = stats_of(config)
    assert stats["ppo_critic-eval/critic_loss/avg"] > 0
    assert "evaluated without 1 of 5 validation groups" in caplog.text


def test_saver_decides_once_per_step_for_both_engines(policy: str, tmp_path: Path) -> None:
    config = rl_config(tmp_path, policy, "total_train_steps=5", "saver.freq_steps=2", *CRITIC)

    run_rl(config)

    steps = [int(path.name.rpartition("globalstep")[2]) for path in checkpoints(config)]
    assert steps == [1, 3, 4]  # the last one because the run ends
    assert [path.is_dir() for path in critics(config)] == [True] * 3


@pytest.mark.parametrize("crash_step", [2, 3])
def test_resumed_run_with_a_critic_equals_the_uninterrupted_one(crash_step: int, policy: str, tmp_path: Path) -> None:
    base = ("total_train_steps=5", "saver.freq_steps=5", *CRITIC)
    whole = rl_config(tmp_path / "whole", policy, *base)
    run_rl(whole)
    config = rl_config(tmp_path / "cut", policy, *base, "recover.mode=on", "recover.freq_steps=2")
    interrupted(config, crash_step)

    trainer = record_rl(config)

    assert trainer.start_step > 0
    assert [seeded(row) for row in stats_of(config)] == [seeded(row) for row in stats_of(whole)]
    assert_same_weights(critics(config)[-1], critics(whole)[-1])
    assert_same_weights(checkpoints(config)[-1], checkpoints(whole)[-1])


def test_saved_critic_starts_another_run(plain: Any, policy: str, tmp_path: Path) -> None:
    config = rl_config(tmp_path, policy, "total_train_steps=1", *CRITIC, f"critic.path={critics(plain[0])[-1]}")

    (stats,) = run_rl(config)

    fresh = run_rl(rl_config(tmp_path / "fresh", policy, "total_train_steps=1", *CRITIC))[0]
    assert stats["ppo_critic/old_value/avg"] != pytest.approx(fresh["ppo_critic/old_value/avg"], abs=1e-3)


def test_kl_reward_every_estimator_acts_on_both_roles(plain: Any, policy: str, tmp_path: Path) -> None:
    found = {"k1": plain[1]}
    for kind in ("k2", "k3"):
        config = rl_config(
            tmp_path / kind,
            policy,
            *TWO_STEPS,
            *CRITIC,
            "actor.kl_ctl=0.2",
            f"ref.path={policy}",
            f"actor.kl_estimator={kind}",
        )
        found[kind] = run_rl(config)

    first = [stats[0]["ppo_actor/kl_rewards/avg"] for stats in found.values()]
    second = [stats[1]["ppo_actor/kl_rewards/avg"] for stats in found.values()]
    assert first == pytest.approx([0.0] * 3, abs=1e-4)  # the policy is the reference still
    assert len({round(value, 6) for value in second}) == 3
    assert second[1] < 0
    assert second[2] < 0
