"""RLHF end to end: a preference is planted in pairs, a reward model learns it, PPO learns it from the reward model."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from areal.dataset.char_tokenizer import VOCAB_SIZE
from areal.reward.reward_model import RewardModel
from tests.controller.runs import worker_config
from tests.fakes import char_tokenizer
from tests.pair_runs import run_pairs, rw_config
from tests.trainer_runs import checkpoints, record_rl, rl_config, rl_rows, run_rl

EVEN = (4, 6, 8, 10, 12)  # tokens of the even digits
OTHERS = tuple(token for token in range(2, VOCAB_SIZE) if token not in EVEN)
LONGEST = 6  # tokens of an answer


def planted_answers(prompts: list[list[int]], n: int, seed: int) -> list[dict[str, list[int]]]:
    """Pairs of answers to the policy's own prompts; the one with more even digits among its tokens is preferred."""
    draw = random.Random(seed)
    pairs: list[dict[str, list[int]]] = []
    while len(pairs) < n:
        answers = []
        for _ in range(2):
            rate = draw.random()
            answer = [draw.choice(EVEN if draw.random() < rate else OTHERS) for _ in range(draw.randint(1, LONGEST))]
            answers.append(answer + [1] * draw.randint(0, 1))  # as the policy's, some are not ended
        worse, better = sorted(answers, key=even_share)
        if even_share(better) > even_share(worse):
            prompt = draw.choice(prompts)
            pairs.append({"chosen_ids": [*prompt, *better], "rejected_ids": [*prompt, *worse]})
    return pairs


def even_share(answer: list[int]) -> float:
    """What is planted: the share of even digits among the tokens before the end."""
    said = [token for token in answer if token != 1]
    return sum(token in EVEN for token in said) / max(1, len(said))


@pytest.fixture(scope="module")
def reward_model(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A reward model that has learnt the planted preference."""
    root = tmp_path_factory.mktemp("reward")
    prompts = [char_tokenizer().encode(row["messages"][0]["content"]) for row in rl_rows(rl_config(root, model))]
    config = rw_config(
        root,
        model,
        "train_dataset.batch_size=16",
        "total_train_epochs=4",
        "total_train_steps=120",
        "saver.freq_steps=120",
        "evaluator.freq_steps=120",
        "valid_dataset={path: pairs, type: rw, batch_size: 16}",
    )
    stats = run_pairs(config, planted_answers(prompts, 480, seed=0), valid=planted_answers(prompts, 64, seed=1))
    assert stats[-1]["rw-eval/correct_ratio/avg"] >= 0.8  # 0.91; a coin has 0.5
    return str(checkpoints(config)[-1])


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.timeout(300)
@pytest.mark.parametrize("critic", [False, True], ids=["grpo", "ppo"])
def test_policy_learns_the_planted_preference_from_the_reward_model(
    critic: bool, model: str, reward_model: str, tmp_path: Path
) -> None:
    settings = ("total_train_steps=40", "total_train_epochs=5", "gconfig.n_samples=8", "actor.optimizer.lr=5.0e-3")
    normal = "actor.adv_norm={mean_level: batch, std_level: batch}"
    objective: tuple[str, ...] = (normal, "actor.reward_norm.group_size=8")
    if critic:
        objective = (
            normal,
            "actor.reward_norm=null",
            "critic={optimizer: {lr: 1.0e-2, weight_decay: 0.0}, ppo_n_minibatches: 1}",
        )
    config = rl_config(tmp_path, model, *settings, *objective, f"gconfig.max_new_tokens={LONGEST}")

    trainer = record_rl(config, reward_fn=RewardModel(reward_model, device="cpu"))

    share: dict[int, list[float]] = {}
    scores: dict[int, list[float]] = {}
    for step, ref in trainer.groups:
        for ids, mask, reward in zip(*(ref.data[key] for key in ("input_ids", "loss_mask", "rewards")), strict=True):
            share.setdefault(step, []).append(even_share(ids[mask.bool()].tolist()))
            scores.setdefault(step, []).append(float(reward))
    # With three seeds each: 0.14 to 0.15, then 0.98 to 1.0; scores from -3.7 to -3.3, then 4.0 to 6.6.
    assert mean(share, range(1)) < 0.25
    assert mean(share, range(35, 40)) > 0.9
    assert mean(scores, range(35, 40)) > mean(scores, range(1)) + 5


def mean(values: dict[int, list[float]], steps: range) -> float:
    """Mean over all answers of the steps."""
    chosen = [value for step in steps for value in values[step]]
    return sum(chosen) / len(chosen)


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.timeout(300)
def test_reward_model_in_a_rollout_worker_gives_the_same_rewards_as_inline(
    model: str, reward_model: str, tmp_path: Path
) -> None:
    reward = RewardModel(reward_model, device="cpu")
    inline: Any = rl_config(tmp_path / "inline", model, "total_train_steps=2")
    workers: Any = worker_config(tmp_path / "workers", model, "total_train_steps=2")

    expected, found = (run_rl(config, reward_fn=reward) for config in (inline, workers))

    for one, other in zip(expected, found, strict=True):
        for key in ("ppo_actor/task_reward/avg", "ppo_actor/task_reward/max", "ppo_actor/task_reward/min"):
            assert other[key] == pytest.approx(one[key], abs=1e-3), key
