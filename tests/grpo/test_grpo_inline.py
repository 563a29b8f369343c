"""A whole GRPO run in one process: synchronous and asynchronous, what it leaves on disk, what a seed fixes."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from areal.trainer.ppo.actor import PPOActor
from tests.trainer_runs import (
    RecordingTrainer,
    assert_same_weights,
    checkpoints,
    log_dir,
    record_rl,
    rl_config,
    run_rl,
    seeded,
    stats_of,
    weights,
)

SYNC = ("rollout.max_head_offpolicyness=0", "saver.freq_steps=3")


def equal_reward(prompt: str, completion: str, prompt_ids: Any, completion_ids: Any, **row: Any) -> float:
    """The same for everyone."""
    return 1.0


equal_reward.areal_inline = True  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def sync_run(tmp_path_factory: pytest.TempPathFactory, policy: str) -> Any:
    """Config and wall time of a synchronous run of three steps."""
    config = rl_config(tmp_path_factory.mktemp("sync"), policy, *SYNC)
    start = time.perf_counter()
    run_rl(config)
    return config, time.perf_counter() - start


@pytest.fixture(scope="module", params=[1, 2])
def async_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, policy: str) -> Any:
    """Bound, config and trainer of an asynchronous run over more than one epoch."""
    overrides = (f"rollout.max_head_offpolicyness={request.param}", "total_train_steps=10", "saver.freq_steps=5")
    config = rl_config(tmp_path_factory.mktemp("async"), policy, *overrides)
    return request.param, config, record_rl(config)


def test_synchronous_run_same_seed_bit_equal(sync_run: Any, policy: str, tmp_path: Path) -> None:
    config, _ = sync_run
    again = rl_config(tmp_path, policy, *SYNC)
    repeated = run_rl(again)
    assert_same_weights(checkpoints(config)[-1], checkpoints(again)[-1])
    assert [seeded(s) for s in repeated] == [seeded(s) for s in stats_of(config)]


def test_synchronous_run_other_seed_differs(sync_run: Any, policy: str, tmp_path: Path) -> None:
    config, _ = sync_run
    other = run_rl(rl_config(tmp_path, policy, *SYNC, "seed=2"))
    assert [seeded(s) for s in other] != [seeded(s) for s in stats_of(config)]


def test_synchronous_run_trains_every_sample_at_its_own_version(sync_run: Any) -> None:
    for stats in stats_of(sync_run[0]):
        assert stats["rollout/staleness/max"] == 0
        assert stats["ppo_actor/update/importance_weight/min"] == pytest.approx(1.0, abs=1e-4)
        assert stats["ppo_actor/update/importance_weight/max"] == pytest.approx(1.0, abs=1e-4)
        assert stats["ppo_actor/n_seqs"] == 16


def test_asynchronous_run_never_exceeds_the_bound(async_run: Any) -> None:
    bound, config, trainer = async_run
    ages = [s["rollout/staleness/max"] for s in stats_of(config)]
    assert max(ages) <= bound
    assert max(ages) > 0, "nothing was generated ahead: the run was not asynchronous"
    for version, group in trainer.groups:
        drawn = group.data["versions"][group.data["loss_mask"].bool()]
        assert version - bound <= int(drawn.min())
        assert int(drawn.max()) <= version


def test_asynchronous_run_trains_each_row_once_per_epoch_in_row_order(async_run: Any) -> None:
    _, _, trainer = async_run
    rows = [(group.row.epoch, group.row.index) for _, group in trainer.groups]
    assert len(rows) == len(set(rows)) == 40
    assert sorted(index for epoch, index in rows if epoch == 0) == list(range(32))
    by_step: dict[int, list[Any]] = {}
    for version, group in trainer.groups:
        by_step.setdefault(version, []).append(group.row)
    assert all(len(rows) == 4 and rows == sorted(rows) for rows in by_step.values())


def test_versions_advance_everywhere_with_each_step(async_run: Any) -> None:
    _, _, trainer = async_run
    assert trainer.versions == [(k, k, k) for k in range(1, 11)]


def test_run_leaves_its_files(sync_run: Any) -> None:
    config, _ = sync_run
    directory = log_dir(config)
    rows = [json.loads(line) for line in (directory / "stats.jsonl").read_text().splitlines()]
    assert [row["global_step"] for row in rows] == [0, 1, 2]
    assert list((directory / "tensorboard").glob("events.out.*"))
    samples = [json.loads(line) for line in (directory / "samples.jsonl").read_text().splitlines()]
    assert [sample["global_step"] for sample in samples] == [0, 1, 2]
    assert all(sample["prompt"].endswith("=") and len(sample["group_rewards"]) == 4 for sample in samples)
    assert (directory / "reward_curve.png").stat().st_size > 1000
    resolved = yaml.safe_load((directory / "config.yaml").read_text())
    assert resolved["actor"]["optimizer"]["lr"] == 1e-3
    manifest = json.loads((directory / "manifest.json").read_text())
    assert manifest["format"]
    assert json.loads((checkpoints(config)[-1] / "manifest.json").read_text())["global_step"] == 2


def test_statistics_are_finite_and_hold_the_documented_keys(sync_run: Any) -> None:
    names = (
        "ppo_actor/task_reward/avg ppo_actor/advantages/avg ppo_actor/final_reward/avg ppo_actor/no_eos_ratios/avg "
        "ppo_actor/update/actor_loss/avg ppo_actor/update/entropy/avg ppo_actor/update/grad_norm ppo_actor/update/lr "
        "ppo_actor/update/update_successful rollout/reward rollout/accepted rollout/rejected timeperf/rollout "
        "timeperf/train_step timeperf/update_weights timeperf/compute_advantage timeperf/save ledger/wall"
    )
    for stats in stats_of(sync_run[0]):
        assert not [key for key in names.split() if key not in stats]
        assert all(math.isfinite(value) for value in stats.values())


def test_checkpoint_loads_in_transformers_and_was_trained(sync_run: Any, policy: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    checkpoint = checkpoints(sync_run[0])[-1]
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    ids = tokenizer("12+34=", return_tensors="pt").input_ids
    assert torch.isfinite(model(ids).logits).all()
    before = weights(policy)
    assert any(not torch.equal(tensor, before[name]) for name, tensor in weights(checkpoint).items())


def test_ledger_shares_sum_to_the_wall_time(sync_run: Any) -> None:
    config, wall_s = sync_run
    booked = 0.0
    for stats in stats_of(config):
        shares = {key: value for key, value in stats.items() if key.startswith("ledger/") and key != "ledger/wall"}
        assert sum(shares.values()) == pytest.approx(stats["ledger/wall"], rel=1e-9)
        assert {"ledger/train_step", "ledger/update_weights", "ledger/rollout"} <= shares.keys()
        booked += stats["ledger/wall"]
    assert 0 < booked <= wall_s


def test_ledger_starts_with_training_not_with_construction(policy: str, tmp_path: Path) -> None:
    config = rl_config(tmp_path, policy, "total_train_steps=1")
    with RecordingTrainer(config, train_dataset=[{"messages": [{"role": "user", "content": "1+1="}]}] * 4) as trainer:
        time.sleep(0.5)
        start = time.perf_counter()
        trainer.train("areal.workflow.rlvr.RLVRWorkflow", workflow_kwargs=_kwargs(config))
        wall_s = time.perf_counter() - start
    assert stats_of(config)[0]["ledger/wall"] <= wall_s


def _kwargs(config: Any) -> dict[str, Any]:
    return {"reward_fn": equal_reward, "gconfig": config.gconfig, "tokenizer": config.tokenizer_path}


def test_temperature_trainer_and_sampler_agree_on_log_probs(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = ("gconfig.temperature=0.7", "actor.use_decoupled_loss=true", "actor.ppo_n_minibatches=2")
    config = rl_config(tmp_path, policy, *SYNC, *overrides)
    differences = _log_prob_differences(config, monkeypatch)
    assert len(differences) == 3
    assert max(differences) < 1e-3


def _log_prob_differences(config: Any, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Run ``config``; the largest |trainer log-prob - sampler log-prob| of each step."""
    differences: list[float] = []
    original = PPOActor.annotate

    def annotate(self: PPOActor, batch: Any, key: str) -> Any:
        result = original(self, batch, key)
        mask = torch.roll(result.tokens["loss_mask"], -1).bool()
        sampled = torch.roll(result.tokens["logprobs"], -1)
        differences.append(float((result.tokens[key] - sampled)[mask].abs().max()))
        return result

    monkeypatch.setattr(PPOActor, "annotate", annotate)
    run_rl(config)
    return differences


def test_equal_rewards_without_kl_and_decay_change_no_parameter(policy: str, tmp_path: Path) -> None:
    config = rl_config(tmp_path, policy, *SYNC)
    stats = run_rl(config, reward_fn=equal_reward)
    assert_same_weights(checkpoints(config)[-1], policy)
    assert all(s["ppo_actor/advantages/max"] == 0 == s["ppo_actor/advantages/min"] for s in stats)
    assert all(s["ppo_actor/update/grad_norm"] == 0 for s in stats)
