"""The weight probe: equal weights pass on real engines, anything else is named."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from areal import PPOTrainer
from areal.api.cli_args import MicroBatchSpec
from areal.engine.inference.probe import ProbeReply
from areal.trainer.weight_probe import (
    PROMPT,
    ProbeSettings,
    WeightProbe,
    build_weight_probe,
    probe_tolerance,
    score_tokens,
)
from areal.utils import stats_tracker
from areal.utils.errors import WeightSyncError
from tests.test_ppo_actor import build_actor, model_dir  # noqa: F401 - a fixture
from tests.trainer_runs import rl_config, rl_rows, tiny_policy


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(autouse=True)
def _fresh_statistics():
    stats_tracker.export_all()
    yield
    stats_tracker.export_all()


class Recorder:
    """Samplers and a trainer that answer from tables."""

    def __init__(self, replies: dict[str, ProbeReply], scored: list[list[float]]) -> None:
        self.replies, self.scored = replies, scored
        self.asked: list[tuple[list[int], int]] = []
        self.sequences: list[list[int]] = []

    def generate(self, prompt: list[int], n: int) -> dict[str, ProbeReply]:
        self.asked.append((prompt, n))
        return self.replies

    def score(self, sequences: list[list[int]], prompt_len: int) -> list[list[float]]:
        self.sequences = sequences
        return self.scored

    def probe(self, interval: int = 1, tolerance: float = 0.01) -> WeightProbe:
        return WeightProbe(ProbeSettings(interval, tolerance, [7, 8], tokens=2), self.generate, self.score)


def reply(logprobs: list[float], version: int = 3) -> ProbeReply:
    return ProbeReply([4] * len(logprobs), logprobs, [version] * len(logprobs))


def test_probe_within_tolerance_is_recorded_and_asks_every_sampler():
    world = Recorder({"rollout/0": reply([-1.0, -2.0]), "rollout/1": reply([-1.0])}, [[-1.001, -2.0], [-1.004]])

    world.probe().after_update(3)

    assert world.asked == [([7, 8], 2)]
    assert world.sequences == [[7, 8, 4, 4], [7, 8, 4]]
    assert stats_tracker.export_all()["weight_probe/abs_diff_max"] == pytest.approx(0.004)


def test_probe_first_update_and_then_every_interval():
    world = Recorder({"rollout/0": reply([-1.0])}, [[-1.0]])
    probe = world.probe(interval=3)

    probed = []
    for update in range(7):
        before = len(world.asked)
        probe.after_update(3)
        probed += [update] * (len(world.asked) - before)

    assert probed == [0, 3, 6]


def test_probe_difference_names_worker_version_and_both_numbers():
    world = Recorder(
        {"rollout/0": reply([-1.0, -1.0]), "rollout/1": reply([-1.0, -2.25])}, [[-1.0, -1.0], [-1.2, -1.5]]
    )

    with pytest.raises(WeightSyncError) as caught:
        world.probe().after_update(3)

    message = str(caught.value)
    for part in ("rollout/1", "v3", "token 2 of 2", "-2.25", "-1.5", "difference 0.75", "2 tokens", "tolerance=0.01"):
        assert part in message
    assert "rollout/0" not in message


@pytest.mark.parametrize(("drawn", "own"), [(math.nan, -1.0), (-1.0, math.nan), (-math.inf, -1.0)])
def test_probe_numbers_that_are_none_do_not_pass(drawn, own):
    with pytest.raises(WeightSyncError, match="rollout/0"):
        Recorder({"rollout/0": reply([drawn])}, [[own]]).probe().after_update(3)


def test_probe_other_version_or_no_token_is_an_error_and_no_sampler_is_not():
    with pytest.raises(WeightSyncError, match="rollout/0 draws with v2 after the update to v3"):
        Recorder({"rollout/0": reply([-1.0], version=2)}, []).probe().after_update(3)
    with pytest.raises(WeightSyncError, match="rollout/0 drew no token"):
        Recorder({"rollout/0": reply([])}, []).probe().after_update(3)
    Recorder({}, []).probe().after_update(3)


@pytest.mark.parametrize("spec", [{}, {"n_mbs": 3}, {"granularity": 4}, {"n_mbs": 2, "granularity": 2}])
def test_score_tokens_equals_a_forward_pass_under_any_micro_batch_spec(model_dir, spec):  # noqa: F811
    actor = build_actor(model_dir, mb_spec=MicroBatchSpec(**spec), temperature=0.7)
    sequences = [[5, 6, 7, 8, 9], [5, 6, 10]]

    scored = score_tokens(actor, sequences, 2)

    assert [len(row) for row in scored] == [3, 1]
    for ids, row in zip(sequences, scored, strict=True):
        with torch.no_grad():
            logits = actor.engine.module(torch.tensor([ids])).logits[0] / 0.7
        own = logits.log_softmax(-1)[torch.arange(1, len(ids) - 1), ids[2:]]
        torch.testing.assert_close(torch.tensor(row), own, rtol=0, atol=1e-5)


# ------------------------------------------------------------------------------------------------------------ building
def test_build_only_for_sglang_unless_an_interval_is_set(policy, tmp_path):
    config = rl_config(tmp_path, policy)

    assert build_weight_probe(config, None, _tokenizer) is None
    config.rollout.backend = "vllm:d1"
    assert build_weight_probe(config, None, _tokenizer) is None


@pytest.mark.parametrize(
    ("backend", "overrides", "tolerance"),
    [
        ("native", (), 0.01),
        ("native", ("native.dtype=bfloat16",), 0.5),
        ("native", ("actor.dtype=bfloat16",), 0.5),
        ("vllm", ("vllm.dtype=float32",), 0.01),
        ("sglang", ("sglang.dtype=bfloat16",), 0.5),
        ("sglang", ("rollout.weight_probe_tolerance=0.2",), 0.2),
    ],
)
def test_tolerance_is_tight_only_where_both_compute_in_float32(policy, tmp_path, backend, overrides, tolerance):
    assert probe_tolerance(rl_config(tmp_path, policy, *overrides), backend) == tolerance


def _tokenizer(text: str, **options: Any) -> dict[str, list[int]]:
    assert text == PROMPT
    return {"input_ids": [5, 6, 7]}


# ----------------------------------------------------------------------------------------------------------- real runs
def open_trainer(config: Any) -> PPOTrainer:
    return PPOTrainer(config, train_dataset=rl_rows(config))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_inline_equal_weights_pass_and_changed_ones_are_found(policy, tmp_path, temperature):
    config = rl_config(tmp_path, policy, "rollout.weight_probe_interval=2", f"gconfig.temperature={temperature}")
    with open_trainer(config) as trainer:
        probe = build_weight_probe(config, trainer.parts, trainer.tokenizer)
        assert probe is not None
        assert probe.settings.interval == 2
        assert probe.check(0) < 1e-4

        with torch.no_grad():
            for parameter in trainer.actor.engine.module.parameters():
                parameter += 0.05
        with pytest.raises(WeightSyncError, match=r"^rollout does not sample with the trainer's weights v0"):
            probe.check(0)

        trainer.weights.update(1)
        assert probe.check(1) < 1e-4


@pytest.mark.slow
@pytest.mark.ci
def test_worker_processes_equal_weights_pass_and_a_stale_worker_is_named(policy, tmp_path):
    from tests.controller.runs import worker_config

    config = worker_config(
        tmp_path, policy, "rollout.weight_probe_interval=1", "rollout.backend='native:d2'", "actor.backend='fsdp:d2'"
    )
    with open_trainer(config) as trainer:
        probe = build_weight_probe(config, trainer.parts, trainer.tokenizer)
        assert probe is not None
        assert probe.check(0) < 1e-4
        trainer.weights.update(1)
        assert probe.check(1) < 1e-4

        with pytest.raises(WeightSyncError, match="rollout/0 draws with v1 after the update to v2"):
            probe.check(2)

        config.actor.temperature = 0.5  # of this process only: the trainer's ranks still score at 1
        hot = build_weight_probe(config, trainer.parts, trainer.tokenizer)
        assert hot is not None
        with pytest.raises(WeightSyncError, match="rollout/0 does not sample with the trainer's weights v1"):
            hot.check(1)
