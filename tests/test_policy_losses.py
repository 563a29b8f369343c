"""Policy losses beside PPO, aggregation, M2PO and distillation: right values, gradients in float64, bad input."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from areal.api.cli_args import PPOActorConfig, RejectionSamplingConfig
from areal.trainer.ppo.actor import ActorLoss
from areal.utils.functional import (
    LOSS_AGGREGATIONS,
    aggregate,
    cispo_token_losses,
    completion_logprobs,
    critic_loss,
    denominator,
    distillation_token_losses,
    dpo_loss,
    m2po_mask,
    ppo_token_losses,
    pure_distillation_token_losses,
    rw_loss,
    sapo_token_losses,
    sft_loss,
)
from areal.utils.stats_tracker import DistributedStatsTracker
from tests.vector_files import assert_equals_vector, load_vector

CU = torch.tensor([0, 5, 8, 14, 15], dtype=torch.int32)


# --- SAPO -------------------------------------------------------------------------------------------------------------
def test_sapo_matches_vector():
    vector = load_vector("sapo_token")
    inputs, expected = vector["inputs"], vector["outputs"]
    theta = torch.tensor(inputs["logprobs"], requires_grad=True)
    mask = torch.tensor(inputs["loss_mask"])
    others = (torch.tensor(inputs[key]) for key in ("old_logprobs", "advantages"))

    losses, stats = sapo_token_losses(
        theta, *others, mask, vector["config"]["sapo_tau_pos"], vector["config"]["sapo_tau_neg"]
    )
    loss = aggregate(losses, mask)
    loss.backward()

    assert_equals_vector(loss, expected["loss"])
    assert_equals_vector(theta.grad, expected["grad_logprobs"])
    on = mask != 0
    for name in ("importance_weight", "clip_mask", "dual_clip_mask", "sapo_soft_gate"):
        assert_equals_vector(stats[name][on], torch.tensor(expected[name])[on].tolist())
    assert_equals_vector(losses[on], torch.tensor(expected["per_token_loss"])[on].tolist())


def test_sapo_sequence_level_uses_the_geometric_mean_and_the_mean_advantage():
    # rho = exp(mean(.2, .4)) = e^.3, A = mean(1, 3) = 2: loss of each token -2 * 4 sigmoid(e^.3 - 1).
    theta, mask = torch.tensor([0.2, 0.4, 9.0]), torch.tensor([1, 1, 0])
    bounds = torch.tensor([0, 3], dtype=torch.int32)

    losses, _ = sapo_token_losses(
        theta, torch.zeros(3), torch.tensor([1.0, 3.0, 9.0]), mask, 1.0, 1.05, "sequence", bounds
    )

    expected = -8 / (1 + math.exp(1 - math.exp(0.3)))
    torch.testing.assert_close(losses, torch.tensor([expected, expected, 0.0]), rtol=1e-6, atol=0)


def test_sapo_huge_ratio_stays_finite():
    theta = torch.tensor([200.0, 200.0], requires_grad=True)

    losses, _ = sapo_token_losses(theta, torch.zeros(2), torch.tensor([1.0, -1.0]), torch.ones(2))
    losses.sum().backward()

    torch.testing.assert_close(losses.detach(), torch.tensor([-4.0, 4 / 1.05]), rtol=1e-6, atol=0)
    assert theta.grad.tolist() == [0.0, 0.0]


def test_sapo_zero_advantage_takes_the_negative_gate():
    theta = torch.tensor([0.5])

    _, stats = sapo_token_losses(theta, torch.zeros(1), torch.zeros(1), torch.ones(1), 1.0, 3.0)

    assert (
        stats["sapo_soft_gate"].item() == stats["sapo_scaled_gate_neg"].item() != stats["sapo_scaled_gate_pos"].item()
    )


@pytest.mark.parametrize("taus", [(0.0, 1.0), (1.0, -1.0)])
def test_sapo_temperature_not_positive_is_named(taus):
    x = torch.zeros(2)
    with pytest.raises(ValueError, match="must be > 0"):
        sapo_token_losses(x, x, x, x, *taus)


# --- CISPO ------------------------------------------------------------------------------------------------------------
def test_cispo_clips_the_weight_and_keeps_the_gradient():
    theta = torch.tensor([-1.0, -2.0, -3.0, -4.0], requires_grad=True)
    prox = torch.tensor([-1.0, -3.0, -2.0, 0.0])  # ratios 1, e, 1/e; the last one is masked
    advantages, mask = torch.tensor([1.0, 2.0, -1.0, 5.0]), torch.tensor([1, 1, 1, 0])

    losses, stats = cispo_token_losses(theta, prox, prox, advantages, 1.0, mask, eps_clip_higher=0.5)
    losses.sum().backward()

    low = math.exp(-1)  # eps_clip=1 leaves the weight without a lower bound
    torch.testing.assert_close(
        losses.detach(), torch.tensor([1.0, 1.5 * 2 * 2, low * -1 * 3, 0.0]), rtol=1e-6, atol=1e-7
    )
    torch.testing.assert_close(theta.grad, torch.tensor([-1.0, -1.5 * 2, low, 0.0]), rtol=1e-6, atol=1e-7)
    assert stats["clip_mask"].tolist() == [False, True, False, False]


def test_cispo_rejection_weighs_by_proximal_over_behaviour():
    theta, prox, old = torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -1.0]), torch.tensor([-1.5, -9.0])
    bounds = RejectionSamplingConfig(upper=5.0)

    losses, stats = cispo_token_losses(theta, prox, old, torch.ones(2), 0.2, torch.ones(2), None, bounds)

    torch.testing.assert_close(losses, torch.tensor([math.exp(0.5), 0.0]), rtol=1e-6, atol=0)
    assert stats["filtered_fraction"].item() == 0.5


# --- M2PO -------------------------------------------------------------------------------------------------------------
def test_m2po_mask_matches_vector():
    vector = load_vector("m2po_mask")
    old, prox, mask = (torch.tensor(vector["inputs"][key]) for key in ("old_logp", "prox_logp", "loss_mask"))

    assert_equals_vector(m2po_mask(old, prox, mask, vector["config"]["m2_threshold"]), vector["outputs"]["mask"])
    assert_equals_vector(m2po_mask(old, prox, mask, 2.0), vector["outputs"]["mask_threshold_2"])
    tiny = m2po_mask(torch.zeros(1, 3), torch.tensor([[0.5, 1.0, 2.0]]), torch.ones(1, 3), 1e-4)
    assert_equals_vector(tiny, vector["outputs"]["mask_threshold_tiny_keeps_one"])


def test_m2po_mean_equal_to_the_threshold_drops_one_more():
    # s = [1, 4] -> mean 2.5 and 1: strictly below 2.5 is only the smaller one.
    kept = m2po_mask(torch.zeros(2), torch.tensor([1.0, 2.0]), torch.ones(2), 2.5)

    assert kept.tolist() == [True, False]


def test_m2po_equal_values_are_kept_or_dropped_together():
    # s = [4, 4, 0, 0]: dropping one of the 4 would do for a mean below 2, but which one would depend on the order.
    kept = m2po_mask(torch.zeros(4), torch.tensor([2.0, 0.0, 2.0, 0.0]), torch.ones(4), 1.5)

    assert kept.tolist() == [False, True, False, True]
    assert m2po_mask(torch.zeros(2), torch.ones(2), torch.ones(2), 0.5).tolist() == [True, True]


def test_m2po_nothing_trained_or_no_token_keeps_nothing():
    assert m2po_mask(torch.zeros(2), torch.full((2,), math.nan), torch.zeros(2), 0.1).tolist() == [False, False]
    assert m2po_mask(torch.zeros(0), torch.zeros(0), torch.zeros(0), 0.1).tolist() == []


@pytest.mark.parametrize(
    ("threshold", "width", "message"), [(0.0, 2, "m2_threshold=0.0 must be > 0"), (0.1, 3, "differ in shape")]
)
def test_m2po_bad_input_is_named(threshold, width, message):
    with pytest.raises(ValueError, match=message):
        m2po_mask(torch.zeros(2), torch.zeros(2), torch.zeros(width), threshold)


# --- the actor's loss on the vectors of its topic ---------------------------------------------------------------------
def actor_loss(vector: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Loss and its gradient ``[n, S]`` for a padded micro-batch of a vector file."""
    inputs, settings = vector["inputs"], vector["config"]
    theta = torch.tensor(inputs["current_logprobs"], requires_grad=True)
    n, width = theta.shape
    batch = {k: torch.tensor(v).reshape(-1) if isinstance(v, list) else v for k, v in inputs["batch"].items()}
    batch["cu_seqlens"] = torch.arange(n + 1, dtype=torch.int32) * width
    threshold = settings.pop("m2_threshold", None)
    if threshold is not None:  # the actor does this once per step
        batch["loss_mask"] = m2po_mask(batch["logprobs"], batch["prox_logp"], batch["loss_mask"], threshold)
    config = PPOActorConfig(use_decoupled_loss=True, **settings)
    loss = ActorLoss(config, DistributedStatsTracker(), 3)(theta.reshape(-1), torch.zeros(n * width), batch)
    loss.backward()
    assert theta.grad is not None
    return loss, theta.grad


@pytest.mark.parametrize("name", ["wrapper_m2po", "wrapper_distill_joint", "wrapper_distill_pure"])
def test_actor_loss_matches_vector(name):
    vector = load_vector(name)

    loss, grad = actor_loss(vector)

    assert_equals_vector(loss, vector["outputs"]["loss"])
    assert_equals_vector(grad, vector["outputs"]["grad_logprobs"])


def test_joint_distillation_k2_gradient_points_to_the_teacher():
    theta = torch.tensor([-1.0, -3.0, -2.0], requires_grad=True)
    teacher, mask = torch.tensor([-3.0, -1.0, math.nan]), torch.tensor([True, True, False])

    k1 = torch.autograd.grad(distillation_token_losses(theta, teacher, mask).sum(), theta)[0]
    k2 = torch.autograd.grad(distillation_token_losses(theta, teacher, mask, "k2").sum(), theta)[0]

    assert k1.tolist() == [1.0, 1.0, 0.0]
    assert k2.tolist() == [2.0, -2.0, 0.0]  # down where the policy is too sure, up where the teacher is surer


def test_pure_distillation_gradient_is_the_weighted_log_ratio():
    theta, old = torch.tensor([-1.0, -3.0], requires_grad=True), torch.tensor([-1.5, -3.0])
    teacher, mask = torch.tensor([-3.0, -1.0]), torch.tensor([True, True])

    pure_distillation_token_losses(theta, teacher, old, mask).sum().backward()

    expected = -(theta.detach() - old).exp() * (teacher - theta.detach())
    torch.testing.assert_close(theta.grad, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("term", ["k1", "k2", "pure"])
def test_distillation_expected_gradient_is_that_of_the_reverse_kl(term):
    # All tokens of a vocabulary of six, weighed by how often the policy draws them: the exact expectation.
    generator = torch.Generator().manual_seed(2)
    logits, other = torch.randn(2, 6, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    theta, teacher, everywhere = logits.log_softmax(0), other.log_softmax(0), torch.ones(6, dtype=torch.bool)
    (reverse_kl,) = torch.autograd.grad((theta.exp() * (theta - teacher)).sum(), logits, retain_graph=True)

    if term == "pure":
        losses = pure_distillation_token_losses(theta, teacher, theta.detach(), everywhere)
    else:
        losses = distillation_token_losses(theta, teacher, everywhere, term)
    (gradient,) = torch.autograd.grad((theta.detach().exp() * losses).sum(), logits)

    expected = torch.zeros(6, dtype=torch.float64) if term == "k1" else reverse_kl  # k1 does not teach
    assert reverse_kl.abs().max() > 0.01
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-12)


def test_distillation_unknown_estimator_is_named():
    with pytest.raises(ValueError, match="allowed: k1, k2"):
        distillation_token_losses(torch.zeros(1), torch.zeros(1), torch.ones(1) > 0, "k3")


# --- aggregation ------------------------------------------------------------------------------------------------------
# Three sequences: token losses 1, 1, 1, 5 (all trained), 4 (and one masked), none trained.
LOSSES = torch.tensor([1.0, 1.0, 1.0, 5.0, 4.0, math.nan, math.nan])
MASK = torch.tensor([1, 1, 1, 1, 1, 0, 0])
BOUNDS = torch.tensor([0, 4, 6, 7], dtype=torch.int32)


@pytest.mark.parametrize(
    ("kind", "loss", "weight"),
    [
        ("token-mean", 12 / 5, 5),
        ("seq-mean-token-mean", (2 + 4) / 2, 2),
        ("seq-mean-token-sum-norm", (8 / 10 + 4 / 10) / 3, 3),
    ],
)
def test_aggregate_hand_values(kind, loss, weight):
    assert aggregate(LOSSES, MASK, kind, 10.0, BOUNDS).item() == pytest.approx(loss, rel=1e-6)
    assert denominator(MASK, kind, BOUNDS).item() == weight


@pytest.mark.parametrize("kind", LOSS_AGGREGATIONS)
def test_aggregate_padded_equals_packed(kind):
    padded_losses = torch.tensor([[1.0, 1.0, 1.0, 5.0], [4.0, math.nan, 7.0, 7.0], [math.nan, 7.0, 7.0, 7.0]])
    padded_mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]])

    padded, packed = aggregate(padded_losses, padded_mask, kind, 10.0), aggregate(LOSSES, MASK, kind, 10.0, BOUNDS)

    torch.testing.assert_close(padded, packed, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", LOSS_AGGREGATIONS)
def test_aggregate_nothing_trained_is_zero_with_zero_gradient(kind):
    losses = torch.full((7,), 3.0, requires_grad=True)

    loss = aggregate(losses, torch.zeros(7), kind, 10.0, BOUNDS)
    loss.backward()

    assert loss.item() == 0
    assert losses.grad.tolist() == [0.0] * 7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "mean"}, "allowed: token-mean"),
        ({"kind": "seq-mean-token-sum-norm", "constant": 0.0}, "loss_agg_constant=0.0"),
        ({"kind": "seq-mean-token-mean"}, "need cu_seqlens"),
        ({"loss_mask": torch.ones(2)}, "differ in shape"),
    ],
)
def test_aggregate_bad_input_is_named(options, message):
    arguments = {"losses": LOSSES, "loss_mask": MASK, **options}
    with pytest.raises(ValueError, match=message):
        aggregate(**arguments)


# --- gradients in float64 ---------------------------------------------------------------------------------------------
_noise = torch.Generator().manual_seed(7)
OLD, ADVANTAGES, OTHER = (torch.randn(15, generator=_noise, dtype=torch.float64) * 0.6 for _ in range(3))
START = torch.randn(15, generator=_noise, dtype=torch.float64) * 0.6
TRAINED = torch.rand(15, generator=_noise) < 0.7
_sequence_ratio: dict[str, Any] = {"importance_sampling_level": "sequence", "cu_seqlens": CU}


def _ppo(x: Tensor, **options: Any) -> Tensor:
    return ppo_token_losses(x, OLD, OTHER, ADVANTAGES, 0.2, TRAINED, **options)[0]


def _dpo(x: Tensor, **options: Any) -> Tensor:
    sums, lens = completion_logprobs(x, TRAINED, CU)
    return dpo_loss(sums, completion_logprobs(OLD, TRAINED, CU)[0], lens, **options).loss


SMOOTH_LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "ppo": _ppo,
    "ppo_dual_clip": lambda x: _ppo(x, eps_clip_higher=0.3, c_clip=1.5),
    "ppo_sequence": lambda x: _ppo(x, **_sequence_ratio),
    "ppo_rejection_mask": lambda x: _ppo(x, rejection_sampling=RejectionSamplingConfig(upper=1.2)),
    "ppo_rejection": lambda x: _ppo(x, rejection_sampling=RejectionSamplingConfig(action="clamp", upper=1.2)),
    "sapo": lambda x: sapo_token_losses(x, OLD, ADVANTAGES, TRAINED)[0],
    "sapo_sequence": lambda x: sapo_token_losses(x, OLD, ADVANTAGES, TRAINED, **_sequence_ratio)[0],
    "distillation_k1": lambda x: distillation_token_losses(x, OLD, TRAINED),
    "distillation_k2": lambda x: distillation_token_losses(x, OLD, TRAINED, "k2"),
    "critic_mse": lambda x: critic_loss(x, OLD, 3 * OTHER, TRAINED)[0],
    "critic_huber": lambda x: critic_loss(x, OLD, 3 * OTHER, TRAINED, kind="huber", huber_delta=0.7)[0],
    "rw": lambda x: rw_loss(x, CU).loss,
    "dpo_sigmoid": lambda x: _dpo(x, label_smoothing=0.1),
    "dpo_ipo": lambda x: _dpo(x, loss_type="ipo"),
    "sft": lambda x: sft_loss(x, TRAINED),
    **{f"aggregate_{kind}": lambda x, kind=kind: aggregate(x**3, TRAINED, kind, 9.0, CU) for kind in LOSS_AGGREGATIONS},
}


@pytest.mark.parametrize("name", SMOOTH_LOSSES)
def test_loss_gradient_equals_finite_differences_in_float64(name):
    x = START.clone().requires_grad_()

    assert torch.autograd.gradcheck(SMOOTH_LOSSES[name], (x,), eps=1e-6, atol=1e-8, rtol=1e-6)
    assert SMOOTH_LOSSES[name](x).dtype == torch.float64


def test_cispo_gradient_in_float64_is_that_of_a_constant_weight():
    x = START.clone().requires_grad_()
    weight = (START - OLD).exp().clamp(0.8, 1.2)

    cispo_token_losses(x, OLD, OTHER, ADVANTAGES, 0.2, TRAINED)[0].sum().backward()

    assert torch.autograd.gradcheck(lambda y: torch.where(TRAINED, -weight * ADVANTAGES * y, 0.0), (x,))
    torch.testing.assert_close(x.grad, torch.where(TRAINED, -weight * ADVANTAGES, 0.0), rtol=1e-12, atol=0)


def test_pure_distillation_gradient_in_float64_is_that_of_a_constant_gap():
    x = START.clone().requires_grad_()
    gap = OTHER - START

    pure_distillation_token_losses(x, OTHER, OLD, TRAINED).sum().backward()

    assert torch.autograd.gradcheck(lambda y: torch.where(TRAINED, -(y - OLD).exp() * gap, 0.0), (x,))
    torch.testing.assert_close(x.grad, torch.where(TRAINED, -(START - OLD).exp() * gap, 0.0), rtol=1e-12, atol=0)
