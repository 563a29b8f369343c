"""Runs on adapters in worker processes: each token is of the adapter whose version it bears, by every way there is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.controller.runs import record_tables, worker_config
from tests.controller.test_faults import assert_every_row_trained_once, assert_no_children
from tests.controller.test_server_runs import assert_logprobs_are_of_their_version, forward_logprobs, settings
from tests.fakes import save_tiny_model
from tests.trainer_runs import VOCAB_SIZE, checkpoints, stats_of

STEPS = 3
LORA = ("actor.use_lora=true", "actor.lora_rank=8", "actor.lora_alpha=16", "actor.optimizer.lr=1.0e-2")
# Adapters are merged where samplers get whole weights (the first), else sent alone.
WAYS = ("merged-native-shm", "native-shm", "native-xccl", "native-disk", "vllm-disk", "sglang-disk")


def ways() -> list[Any]:
    """SGLang's environment is built for the nightly tier only."""
    nightly, ci = [pytest.mark.slow], [pytest.mark.slow, pytest.mark.ci]
    return [pytest.param(way, marks=nightly if way.startswith("sglang") else ci) for way in WAYS]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Hugging Face directory of the initial policy; its heads are as wide as vLLM needs them on a CPU."""
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    return save_tiny_model(tmp_path_factory.mktemp("policy"), vocab_size=VOCAB_SIZE, **sizes)


@pytest.mark.parametrize("way", ways())
def test_lora_run_by_every_way_trains_on_logprobs_of_the_version_that_drew_each_token(
    way: str, policy: str, tmp_path: Path
) -> None:
    alone = not way.startswith("merged-")
    kind, _, mode = way.removeprefix("merged-").partition("-")
    overrides = [f"total_train_steps={STEPS}", "rollout.max_head_offpolicyness=1", "saver.freq_steps=1"]
    overrides += [*LORA, f"rollout.use_lora={str(alone).lower()}"]
    config = worker_config(tmp_path, policy, *settings(kind, mode), *overrides)

    trainer = record_tables(config)

    assert_every_row_trained_once(trainer, steps=STEPS, batch=4)
    assert max(assert_logprobs_are_of_their_version(trainer, config, policy)) >= 1
    ids = trainer.groups[0][1][1]["input_ids"].long()
    moved = forward_logprobs(str(checkpoints(config)[-1]), ids) - forward_logprobs(policy, ids)
    assert moved.abs().max() > 1e-2  # ten times what is taken for equal above
    assert len(stats_of(config)) == STEPS
    assert_no_children()
