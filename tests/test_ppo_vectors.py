"""Recomputed log-probs, decoupled loss and rejection sampling through ``PPOActor``, from trajectories whose tokens were
drawn by several versions to the loss and its gradient, against the vectors of those topics.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from areal.api.cli_args import PPOActorConfig, RejectionSamplingConfig
from areal.trainer.ppo.actor import PPOActor
from areal.utils import stats_tracker
from areal.utils.batch import PackedBatch
from areal.utils.functional import ppo_actor_loss_fn
from tests.vector_files import assert_equals_vector, load_vector

DECOUPLED = [
    "decoupled_seq_clamp_ratio_mean",
    "decoupled_seq_mask_ratio_max",
    "decoupled_seq_mask_ratio_mean",
    "decoupled_seq_mask_ratio_sum",
    "decoupled_token_clamp_ratio",
    "decoupled_token_mask_k1",
    "decoupled_token_mask_k2",
    "decoupled_token_mask_k3",
    "decoupled_token_mask_ratio",
]
CURRENT = 5


@pytest.fixture(autouse=True)
def _fresh_statistics():
    stats_tracker.export_all()
    yield
    stats_tracker.export_all()


class ScriptedEngine:
    """An engine whose log-probs are given: ``recomputed`` before the update, ``current`` in it, aligned ``[n, S]``."""

    data_parallel_group = None
    context_and_model_parallel_group = None

    def __init__(self, current: Tensor, recomputed: Tensor | None = None) -> None:
        self.current, self.recomputed = current, recomputed
        self.forward_passes = 0
        self.loss: Tensor | None = None
        self.grad: Tensor | None = None
        self.loss_input: dict[str, Any] = {}

    def eval(self) -> None:
        """Nothing to switch."""

    def train(self) -> None:
        """Nothing to switch."""

    def get_version(self) -> int:
        return CURRENT

    result_rank = 0

    def forward_batch(self, data: PackedBatch) -> Tensor:
        self.forward_passes += 1
        assert self.recomputed is not None
        return _packed(self.recomputed, data)

    def train_batch(self, batch: PackedBatch, loss: Any, weight: Any, *, token_mask: str) -> dict[str, float]:
        leaf = _packed(self.current, batch).clone().requires_grad_()
        self.loss_input = batch.as_loss_input()
        self.loss = loss(leaf, leaf.detach().abs(), self.loss_input)
        self.loss.backward()
        self.grad = leaf.grad.view(self.current.shape)
        return {"update_successful": 1.0}


def _packed(aligned: Tensor, batch: PackedBatch) -> Tensor:
    assert batch.lens == [aligned.shape[1]] * aligned.shape[0]
    return aligned.reshape(-1)


def widen(aligned: Any, fill: float = 0.0) -> Tensor:
    """``[n, S]`` of predicting positions -> ``[n, S + 1]``, as a forward pass over one more token gives it."""
    x = torch.tensor(aligned)
    return torch.cat([x, torch.full_like(x[:, :1], fill)], dim=1)


def at_tokens(aligned: Any, fill: float = 0.0) -> Tensor:
    """The same at the tokens themselves, as a workflow returns it: one position later."""
    x = torch.tensor(aligned)
    return torch.cat([torch.full_like(x[:, :1], fill), x], dim=1)


def run_update(
    engine: ScriptedEngine, config: PPOActorConfig, data: dict[str, Tensor], advantages: Any = None
) -> dict[str, float]:
    """One step from a trajectory to the statistics; the vector's ``advantages`` replace those of the rewards."""
    actor = PPOActor(config, engine)
    batch = actor.pack([data])
    if actor.should_compute_prox_logp():
        batch = actor.annotate(batch, "prox_logp")
    batch = actor.compute_advantages(batch)
    if advantages is not None:
        batch = batch.with_tokens(advantages=_packed(widen(advantages), batch))
    actor.ppo_update(batch)
    return stats_tracker.export_all()


def trajectory(old: Any, mask: Any, versions: Tensor) -> dict[str, Tensor]:
    drawn = at_tokens(mask, 0)
    return {
        "input_ids": torch.arange(drawn.numel()).view(drawn.shape),
        "attention_mask": torch.ones_like(drawn, dtype=torch.bool),
        "loss_mask": drawn,
        "logprobs": at_tokens(old),
        "versions": torch.where(drawn != 0, versions, -1),
        "rewards": torch.zeros(drawn.shape[0]),
    }


@pytest.mark.parametrize("name", DECOUPLED)
def test_decoupled_update_with_rejection_matches_vector(name):
    vector = load_vector(name)
    inputs, expected = vector["inputs"], vector["outputs"]
    options = {
        **vector["config"],
        "rejection_sampling": RejectionSamplingConfig(**vector["config"]["rejection_sampling"]),
    }
    config = PPOActorConfig(use_decoupled_loss=True, kl_ctl=0.0, ppo_n_minibatches=1, **options)
    engine = ScriptedEngine(widen(inputs["logprobs"]), widen(inputs["proximal_logprobs"]))
    versions = torch.tensor([[0, 3, 3, 4, 5], [1, 1, 2, 5, 5]])
    data = trajectory(inputs["old_logprobs"], inputs["loss_mask"], versions)

    stats = run_update(engine, config, data, inputs["advantages"])

    assert engine.forward_passes == 1
    assert_equals_vector(engine.loss, expected["loss"])
    assert_equals_vector(engine.grad[:, :-1], expected["grad_logprobs"])
    assert engine.grad[:, -1].tolist() == [0.0, 0.0]
    assert stats["ppo_actor/update/rs_filtered_fraction"] == pytest.approx(expected["filtered_fraction"], abs=2e-6)
    kept = torch.tensor(expected["behave_mask"]) != 0
    weights = torch.tensor(expected["behave_imp_weight"])[kept]
    assert stats["ppo_actor/update/behave_imp_weight/avg"] == pytest.approx(weights.mean().item(), abs=2e-6)
    # The monitor compares behaviour and recomputed log-probs, before anything is rejected, by each token's own version.
    mask = torch.tensor(inputs["loss_mask"]) != 0
    size = (torch.tensor(inputs["old_logprobs"]) - torch.tensor(inputs["proximal_logprobs"])).abs()
    assert stats["ppo_actor/mismatch/abs_diff_mean"] == pytest.approx(size[mask].mean().item(), rel=1e-5)
    for lag in range(4):
        of_lag = mask & (versions[:, 1:] == CURRENT - lag)
        assert stats.get(f"ppo_actor/mismatch/lag_{lag}/n_tokens", 0) == of_lag.sum()
        if of_lag.any():
            found = stats[f"ppo_actor/mismatch/lag_{lag}/abs_diff_max"]
            assert found == pytest.approx(size[of_lag].max().item(), rel=1e-5)


@pytest.mark.parametrize("method", ["loglinear", "metrics"])
def test_decoupled_update_approximated_policy_matches_vector(method):
    vector = load_vector("prox_approximations")
    inputs, expected = vector["inputs"], vector["outputs"]
    assert vector["config"]["current_version"] == CURRENT
    drawn = torch.tensor(inputs["versions"]) >= 0
    config = PPOActorConfig(use_decoupled_loss=True, prox_logp_method=method, kl_ctl=0.0, ppo_n_minibatches=1)
    engine = ScriptedEngine(widen(inputs["logprobs"]), widen(expected["linear"]))
    data = trajectory(inputs["old_logp"], drawn.int().tolist(), at_tokens(inputs["versions"], -1))
    advantages = torch.where(drawn, torch.tensor([[1.0, -1.0, 2.0, 0.5]]), 0.0)

    stats = run_update(engine, config, data, advantages.tolist())

    assert engine.forward_passes == (method == "metrics")
    methods = ("loglinear",) if method == "loglinear" else ("loglinear", "linear", "rollout")
    for name in methods:
        right = torch.tensor(expected[name])[drawn]
        found = [stats[f"ppo_actor/update/compute_logp/{name}/approx_logp/{kind}"] for kind in ("avg", "min", "max")]
        assert found == pytest.approx([right.mean().item(), right.min().item(), right.max().item()], abs=2e-6)
    theta = torch.tensor(inputs["logprobs"])
    prox = torch.tensor(expected["loglinear" if method == "loglinear" else "linear"])
    loss, _ = ppo_actor_loss_fn(theta, prox, torch.tensor(inputs["old_logp"]), advantages, 0.2, drawn)
    assert_equals_vector(engine.loss, loss.item())


@pytest.mark.parametrize("name", ["adv_recompute_replaces_logp", "adv_no_recompute_prox_is_behave"])
def test_update_recomputed_or_behaviour_logprobs_match_vector(name):
    vector = load_vector(name)
    data = {key: torch.tensor(value) for key, value in vector["inputs"].items()}
    recomputed = data.pop("prox_logp", torch.zeros(data["logprobs"].shape))
    data["attention_mask"] = torch.ones_like(data["attention_mask"])  # padding becomes tokens that are not trained
    config = PPOActorConfig(ppo_n_minibatches=1, **vector["config"])
    engine = ScriptedEngine(recomputed - 0.1, recomputed)

    stats = run_update(engine, config, data)

    shape = data["logprobs"].shape
    assert engine.forward_passes == config.recompute_logprob
    for key in ("logprobs", "prox_logp"):
        assert_equals_vector(engine.loss_input[key].view(shape), vector["outputs"]["logprobs"])
    assert_equals_vector(engine.loss_input["loss_mask"].view(shape), vector["outputs"]["loss_mask"])
    mask = torch.tensor(vector["outputs"]["loss_mask"]) != 0
    theirs = recomputed if config.recompute_logprob else engine.current
    size = (torch.roll(torch.tensor(vector["inputs"]["logprobs"]), -1, 1) - theirs).abs()[mask]
    assert stats["ppo_actor/mismatch/abs_diff_mean"] == pytest.approx(size.mean().item(), rel=1e-5)
    assert stats["ppo_actor/mismatch/lag_2/n_tokens"] == mask.sum()  # the vector's tokens are of version 3
