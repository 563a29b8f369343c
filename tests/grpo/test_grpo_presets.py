"""Every preset of the PPO family runs two real steps; a reference model; the shape of a 1.x file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.trainer_runs import RL_BASE, rl_config, run_rl

EXAMPLES = Path(__file__).parents[2] / "examples" / "math"

NO_STD = "actor.reward_norm.std_level=null"
DECOUPLED = ("actor.use_decoupled_loss=true", "rollout.max_head_offpolicyness=1")
PRESETS: dict[str, tuple[str, ...]] = {
    "grpo": ("actor.adv_norm={mean_level: batch, std_level: batch}",),
    "drgrpo": (NO_STD,),
    "liteppo": ("actor.reward_norm.std_level=batch",),
    "rloo": (NO_STD, "actor.reward_norm.mean_leave1out=true"),
    "reinforce_pp": ("actor.reward_norm=null", "actor.adv_norm={mean_level: batch, std_level: batch}"),
    "reinforce_pp_kl": (
        "actor.reward_norm=null",
        "actor.adv_norm={mean_level: batch, std_level: batch}",
        "actor.kl_ctl=0.001",
        "ref={}",
    ),
    "gspo": ("actor.importance_sampling_level=sequence",),
    "dapo": (
        "actor.eps_clip_higher=0.28",
        "actor.overlong_reward_penalty=true",
        "actor.overlong_tokens=2",
        "actor.overlong_penalty_factor=1.0",
        "actor.mask_no_eos_with_zero=true",
    ),
    "overlong_filter": ("actor.overlong_filter=true",),
    "sequence_mean": ("actor.loss_agg=seq-mean-token-mean",),
    "fixed_denominator": (NO_STD, "actor.loss_agg=seq-mean-token-sum-norm", "actor.mb_spec.max_tokens_per_mb=40"),
    "dual_clip_minibatches": ("actor.c_clip=3.0", "actor.ppo_n_minibatches=4"),
    "recomputed_old_logprobs": ("actor.recompute_logprob=true", "actor.ppo_n_minibatches=2"),
    "decoupled_recompute": (*DECOUPLED, "actor.prox_logp_method=recompute"),
    "decoupled_loglinear": (*DECOUPLED, "actor.prox_logp_method=loglinear"),
    "decoupled_metrics": (*DECOUPLED, "actor.prox_logp_method=metrics"),
    "rejection_sampling": (*DECOUPLED, "actor.rejection_sampling={level: sequence, metric: ratio, upper: 2.0}"),
    "bfloat16": ("actor.dtype=bfloat16",),
    "gradient_checkpointing": ("actor.gradient_checkpointing=true",),
    "truncated_sampling": ("gconfig.top_p=0.9", "gconfig.top_k=10"),
    "micro_batches": ("actor.mb_spec.max_tokens_per_mb=40",),
}


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_two_steps_finite_and_learning(preset: str, policy: str, tmp_path: Path) -> None:
    config = rl_config(tmp_path, policy, "total_train_steps=2", *PRESETS[preset])
    stats = run_rl(config)
    assert len(stats) == 2
    for row in stats:
        assert all(math.isfinite(value) for value in row.values())
        assert row["ppo_actor/update/update_successful"] == 1
    assert any(row["ppo_actor/update/grad_norm"] > 0 for row in stats)


# Settings of a file that are about hardware and size, not about the algorithm.
NOT_ALGORITHM = {"backend", "path", "dtype", "gradient_checkpointing", "weight_update_mode", "mb_spec", "optimizer"}
SMALL_EXAMPLE = {"overlong_tokens": 2, "max_new_tokens": 6}  # answers have 6 tokens here


def answers_differ(group: dict[str, Any]) -> bool:
    """DAPO's filter."""
    return bool(group["rewards"].min() < group["rewards"].max())


@pytest.mark.parametrize(
    "name",
    [
        "drgrpo",
        "liteppo",
        "rloo",
        "reinforce_pp",
        "reinforce_pp_baseline",
        "gspo",
        "dapo",
        "sapo",
        "m2po",
        "cispo",
        "grpo",
        "ppo",
        "distill",
    ],
)
def test_example_file_two_steps_finite_and_learning(name: str, policy: str, tmp_path: Path) -> None:
    example = yaml.safe_load((EXAMPLES / f"gsm8k_{name}.yaml").read_text(encoding="utf-8"))
    base = yaml.safe_load(RL_BASE)
    actor = {k: v for k, v in example["actor"].items() if k not in NOT_ALGORITHM | {"scheduling_spec"}}
    base["actor"] |= {key: SMALL_EXAMPLE.get(key, value) for key, value in actor.items()}
    if "reward_norm" not in actor:
        del base["actor"]["reward_norm"]
    if "critic" in example:
        base["critic"] = {"eps_clip": example["critic"]["eps_clip"], "optimizer": base["actor"]["optimizer"]}
    if "ref" in example:
        base["ref"] = {}
    if "teacher" in example:
        loss = {key: value for key, value in example["teacher"].items() if "loss" in key or "estimator" in key}
        base["teacher"] = {"path": policy, **loss}
    base |= {"total_train_steps": 2, "dynamic_bs": example.get("dynamic_bs", False)}
    base["rollout"]["max_head_offpolicyness"] = 1
    config = rl_config(tmp_path, policy, base=yaml.safe_dump(base))

    stats = run_rl(config, dynamic_filter_fn=answers_differ if name == "dapo" else None)

    assert len(stats) == 2
    for row in stats:
        assert all(math.isfinite(value) for value in row.values())
        assert row["ppo_actor/update/update_successful"] == 1
    assert any(row["ppo_actor/update/grad_norm"] > 0 for row in stats)


OWN = ("actor.loss_fn=own_loss.clipped_reinforce", "actor.advantage_fn=own_loss.shorter_is_better")


@pytest.mark.parametrize(
    "scheduler", ["inline", pytest.param("local", marks=[pytest.mark.slow, pytest.mark.ci, pytest.mark.timeout(300)])]
)
def test_example_of_an_own_loss_trains_and_logs_its_statistic(
    scheduler: str, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))  # as the script that lies there
    config = rl_config(tmp_path, policy, "total_train_steps=2", f"scheduler.type={scheduler}", *OWN)

    stats = run_rl(config)

    assert len(stats) == 2
    for row in stats:
        assert all(math.isfinite(value) for value in row.values())
        assert row["ppo_actor/update/weight/avg"] == pytest.approx(1, abs=0.2)
        # Every token of an answer has an equal share, hence the advantages of a step sum to its rewards.
        total = row["ppo_actor/advantages/avg"] * row["ppo_actor/n_valid_tokens"]
        assert total == pytest.approx(row["ppo_actor/final_reward/avg"] * row["ppo_actor/n_seqs"], abs=1e-4)
    assert any(row["ppo_actor/update/grad_norm"] > 0 for row in stats)


CORRECTED = (
    *DECOUPLED,
    "actor.recompute_logprob=true",
    "actor.rejection_sampling={metric: ratio, upper: 5.0}",
)
LEARNERS: dict[str, tuple[str, ...]] = {
    "grpo": CORRECTED,
    "gspo": (*CORRECTED, "actor.importance_sampling_level=sequence"),
    "sapo": ("rollout.max_head_offpolicyness=1", "actor.use_sapo_loss=true"),
    "m2po": (*CORRECTED, "actor.m2_threshold=0.04", "actor.eps_clip=0.0"),
    "cispo": (
        "rollout.max_head_offpolicyness=1",
        "actor.loss_fn=cispo",
        "actor.eps_clip=1.0",
        "actor.eps_clip_higher=0.28",
    ),
    "sequence_mean": (*CORRECTED, "actor.loss_agg=seq-mean-token-mean"),
    "fixed_denominator": (*CORRECTED, "actor.loss_agg=seq-mean-token-sum-norm"),
}


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", LEARNERS)
def test_objective_teaches_an_untrained_policy_to_write_digits(name: str, policy: str, tmp_path: Path) -> None:
    settings = ("total_train_steps=40", "total_train_epochs=5", "gconfig.n_samples=8", "actor.optimizer.lr=5.0e-3")
    groups = ("actor.reward_norm.group_size=8", "actor.adv_norm={mean_level: batch, std_level: batch}")
    stats = run_rl(rl_config(tmp_path, policy, *settings, *groups, *LEARNERS[name]))

    rewards = [row["ppo_actor/task_reward/avg"] for row in stats]
    assert rewards[0] < 0.4
    assert sum(rewards[-5:]) / 5 > 0.9


def test_reference_model_penalises_only_what_changed(policy: str, tmp_path: Path) -> None:
    config = rl_config(tmp_path, policy, "actor.kl_ctl=0.1", "ref={}", "total_train_steps=3")
    stats = run_rl(config)
    assert all("timeperf/ref_logp" in row for row in stats)
    assert stats[0]["ppo_actor/kl_rewards/max"] == pytest.approx(0, abs=1e-5)  # the policy still is the reference
    assert abs(stats[2]["ppo_actor/kl_rewards/avg"]) > 1e-5


def test_reference_model_without_kl_is_not_built(policy: str, tmp_path: Path) -> None:
    stats = run_rl(rl_config(tmp_path, policy, "ref={}", "total_train_steps=1"))
    assert "timeperf/ref_logp" not in stats[0]


def test_learning_rate_moves_once_per_global_step_whatever_the_minibatches(policy: str, tmp_path: Path) -> None:
    overrides = ("actor.ppo_n_minibatches=4", "total_train_steps=4", "actor.optimizer.lr_scheduler_type=linear")
    stats = run_rl(rl_config(tmp_path, policy, *overrides))
    rates = [row["ppo_actor/update/lr"] for row in stats]
    assert rates == pytest.approx([1e-3, 0.75e-3, 0.5e-3, 0.25e-3])


FILE_OF_1X = """
experiment_name: gsm8k-grpo
trial_name: trial0
seed: 1
enable_offload: false
total_train_epochs: 1
tokenizer_path: ${actor.path}
cluster:
  n_nodes: 1
  n_gpus_per_node: 8
  fileroot: outputs
  name_resolve: {type: nfs, nfs_record_root: /tmp/areal/name_resolve}
scheduler: {type: inline}
rollout:
  backend: "native:d1"
  experiment_name: ${experiment_name}
  trial_name: ${trial_name}
  max_concurrent_rollouts: 256
  queue_size: null
  consumer_batch_size: ${train_dataset.batch_size}
  max_head_offpolicyness: 2
  enable_rollout_tracing: false
gconfig: {n_samples: 4, min_new_tokens: 0, max_new_tokens: 6, greedy: false, temperature: 1.0}
actor:
  backend: "fsdp:d1"
  experiment_name: ${experiment_name}
  trial_name: ${trial_name}
  path: somewhere
  init_from_scratch: false
  disable_dropout: true
  gradient_checkpointing: false
  dtype: float32
  mb_spec: {max_tokens_per_mb: 10240}
  optimizer:
    type: adam
    lr: 1.70e-5
    weight_decay: 0.017
    beta1: 0.9
    beta2: 0.999
    eps: 1e-8
    lr_scheduler_type: constant
    gradient_clipping: 1.0
    warmup_steps_proportion: 0.001
  group_size: ${gconfig.n_samples}
  eps_clip: 0.4
  temperature: ${gconfig.temperature}
  reward_scaling: 10.0
  reward_bias: -0.5
  kl_ctl: 0.0
  ppo_n_minibatches: 1
  recompute_logprob: true
  use_decoupled_loss: true
  rejection_sampling: {level: token, action: mask, metric: ratio, upper: 5.0}
  reward_norm: {mean_level: group, std_level: group, group_size: "${gconfig.n_samples}"}
  adv_norm: {mean_level: batch, std_level: batch}
  max_new_tokens: ${gconfig.max_new_tokens}
ref:
  backend: ${actor.backend}
  experiment_name: ${experiment_name}
  trial_name: ${trial_name}
  path: ${actor.path}
  init_from_scratch: false
  disable_dropout: true
  dtype: ${actor.dtype}
  mb_spec: {max_tokens_per_mb: 10240}
  optimizer: null
vllm: {model: "${actor.path}", seed: 1, skip_tokenizer_init: false, dtype: "${actor.dtype}", max_model_len: 32768}
sglang: {model_path: "${actor.path}", random_seed: "${seed}", skip_tokenizer_init: true, context_length: 32768}
train_dataset:
  batch_size: 4
  shuffle: true
  pin_memory: true
  num_workers: 2
  path: arithmetic
  type: rl
  max_length: 1024
  dataset_kwargs: {size: 8}
valid_dataset: {batch_size: 4, pin_memory: true, num_workers: 2, path: arithmetic, type: rl}
saver: {freq_epochs: 1, freq_steps: null, freq_secs: null}
recover: {mode: disabled, freq_epochs: 1, freq_steps: null, freq_secs: 3600}
evaluator: {freq_epochs: 1, freq_steps: null, freq_secs: null}
stats_logger: {wandb: {mode: disabled}}
"""


def test_file_in_the_shape_of_1x_trains(policy: str, tmp_path: Path) -> None:
    text = FILE_OF_1X.replace("  group_size: ${gconfig.n_samples}\n", "", 1)
    stats = run_rl(rl_config(tmp_path, policy, f"cluster.name_resolve.nfs_record_root={tmp_path}", base=text))
    assert len(stats) == 2
