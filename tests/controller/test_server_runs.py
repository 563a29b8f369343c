"""Whole runs with servers as samplers, and with every way of moving weights: each token is of the version it says.

A run saves every version. Then the log-prob of every trained token must be that of a plain forward pass of the version
that the token is tagged with.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from areal.utils import environ
from tests.controller.runs import TableTrainer, record_tables, worker_config
from tests.controller.test_faults import assert_every_row_trained_once, assert_no_children
from tests.fakes import save_tiny_model
from tests.trainer_runs import VOCAB_SIZE, checkpoints, stats_of

STEPS = 4
WAYS = ("native-shm", "native-xccl", "native-disk", "vllm-shm", "vllm-xccl", "vllm-disk", "sglang-xccl", "sglang-disk")
CI = ("native-xccl", "native-disk", "vllm-shm", "vllm-xccl", "vllm-disk")


def ways() -> list[Any]:
    """Every backend with every way; SGLang's environment is built for the nightly tier only."""
    marks = {True: [pytest.mark.slow, pytest.mark.ci], False: [pytest.mark.slow]}
    return [pytest.param(way, marks=marks[way in CI]) for way in WAYS]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Hugging Face directory of the initial policy; its heads are as wide as vLLM needs them on a CPU."""
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    return save_tiny_model(tmp_path_factory.mktemp("policy"), vocab_size=VOCAB_SIZE, **sizes)


def settings(kind: str, mode: str = "auto") -> list[str]:
    """Overrides of a run with this sampler; skips where its environment is not there."""
    overrides = [f"rollout.backend='{kind}:d1'", f"actor.weight_update_mode={mode}", "rollout.setup_timeout=400"]
    if kind == "native":
        return overrides
    python = environ.get_env(f"AREAL_{kind.upper()}_PYTHON")
    if python is None:
        if environ.get_env("CI") and kind == "vllm":
            pytest.fail("AREAL_VLLM_PYTHON is not set: CI must run vLLM")
        pytest.skip(f"AREAL_{kind.upper()}_PYTHON names no interpreter; see `areal install-server {kind}`")
    return [*overrides, f"{kind}.python={python}", "rollout.wait_timeout_s=400"]


def assert_logprobs_are_of_their_version(trainer: TableTrainer, config: Any, policy: str) -> set[int]:
    """Compare with forward passes of the saved versions; the versions that were seen."""
    places = {0: policy, **{step + 1: str(path) for step, path in enumerate(checkpoints(config))}}
    seen: set[int] = set()
    for _, (row, columns) in trainer.groups:
        ids, mask, versions = columns["input_ids"].long(), columns["loss_mask"] > 0, columns["versions"]
        for version in versions[mask].unique().tolist():
            seen.add(version)
            expected = forward_logprobs(places[version], ids)
            drawn = mask & (versions == version)
            torch.testing.assert_close(columns["logprobs"][drawn], expected[drawn], rtol=0, atol=1e-3, msg=str(row))
    return seen


_models: dict[str, Any] = {}


def forward_logprobs(path: str, ids: torch.Tensor) -> torch.Tensor:
    """Log-prob of each token given those before it, ``[n, S]``; right padding changes nothing before it."""
    if path not in _models:
        _models[path] = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        logprobs = torch.log_softmax(_models[path](ids).logits, -1)
    found = torch.zeros(ids.shape)
    found[:, 1:] = logprobs[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    return found


@pytest.mark.parametrize("way", ways())
def test_run_by_every_way_trains_on_logprobs_of_the_version_that_drew_each_token(
    way: str, policy: str, tmp_path: Path
) -> None:
    kind, _, mode = way.partition("-")
    overrides = [f"total_train_steps={STEPS}", "rollout.max_head_offpolicyness=1", "saver.freq_steps=1"]
    config = worker_config(tmp_path, policy, *settings(kind, mode), *overrides)

    trainer = record_tables(config)

    assert_every_row_trained_once(trainer, steps=STEPS, batch=4)
    seen = assert_logprobs_are_of_their_version(trainer, config, policy)
    assert max(seen) >= 1
    assert len(stats_of(config)) == STEPS
    assert_no_children()


class ServerKiller(TableTrainer):
    """Kills the server of the rollout worker once, at the beginning of a step."""

    marker = ""

    def _train_step(self, step: Any, *args: Any) -> Any:
        if step.global_step == 2 and not getattr(self, "killed", False):
            worker = psutil.Process(self.scheduler.client("rollout/0").health()["pid"])
            servers = [p for p in worker.children(recursive=True) if self.marker in " ".join(p.cmdline())]
            assert servers
            for process in servers:
                process.send_signal(signal.SIGKILL)
            self.killed = True
        return super()._train_step(step, *args)


@pytest.mark.slow
@pytest.mark.ci
def test_run_whose_server_is_killed_goes_on_at_the_version_in_service(policy: str, tmp_path: Path) -> None:
    overrides = [f"total_train_steps={STEPS}", "rollout.max_head_offpolicyness=0", "saver.freq_steps=1"]
    config = worker_config(tmp_path, policy, *settings("vllm", "shm"), *overrides)
    killer = type("Killer", (ServerKiller,), {"marker": "vllm"})

    trainer = record_tables(config, trainer_class=killer)

    assert trainer.killed
    assert_every_row_trained_once(trainer, steps=STEPS, batch=4)
    assert_logprobs_are_of_their_version(trainer, config, policy)
    assert_no_children()
