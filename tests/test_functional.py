"""Formulas against hand-checked values and slow references; the faults that users of such systems met."""

from __future__ import annotations

import math

import pytest
import torch

from areal.api.cli_args import NormConfig, RejectionSamplingConfig
from areal.utils.functional import (
    apply_rejection,
    compute_prox_logp_approximations,
    gae_packed,
    gather_logprobs,
    gather_logprobs_entropy,
    kl_estimate,
    normalize,
    place_sequence_rewards,
    ppo_actor_loss_fn,
    sft_loss,
    token_kl_rewards,
    trained_from_here,
    version_alpha,
)


def cu(*lens):
    return torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32)


# --- log-probs --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("temperature", "logp", "entropy"), [(1.0, -0.4076, 0.8324), (0.5, -0.1429, 0.4411)])
def test_logprobs_entropy_temperature_scales_both(temperature, logp, entropy):
    logits = torch.tensor([[2.0, 1.0, 0.0]])

    logprobs, entropies = gather_logprobs_entropy(logits, torch.tensor([0]), temperature)

    torch.testing.assert_close(logprobs, torch.tensor([logp]), rtol=0, atol=1e-4)
    torch.testing.assert_close(entropies, torch.tensor([entropy]), rtol=0, atol=1e-4)


def test_logprobs_chunked_equals_one_chunk_with_gradient():
    logits = torch.randn(10, 7, requires_grad=True)
    labels = torch.arange(10) % 7

    chunked = gather_logprobs(logits, labels, 0.7, rows_per_chunk=3)
    chunked.sum().backward()
    grad, logits.grad = logits.grad, None
    whole = gather_logprobs(logits, labels, 0.7)
    whole.sum().backward()

    torch.testing.assert_close(chunked, whole, rtol=0, atol=0)
    torch.testing.assert_close(grad, logits.grad, rtol=0, atol=1e-6)


def test_entropy_forbidden_token_counts_zero():
    logits = torch.tensor([[0.0, 0.0, float("-inf")]])

    _, entropy = gather_logprobs_entropy(logits, torch.tensor([0]))

    torch.testing.assert_close(entropy, torch.tensor([math.log(2)]), rtol=0, atol=1e-6)


# --- PPO loss ---------------------------------------------------------------------------------------------------------
def test_ppo_loss_sequence_level_padding_advantages_do_not_leak():
    mask = torch.tensor([[1, 1, 0, 0]])
    zeros = torch.zeros(1, 4)

    def run(advantages):
        theta = zeros.clone().requires_grad_()
        loss, _ = ppo_actor_loss_fn(
            theta, zeros, zeros, torch.tensor([advantages]), 0.2, mask, importance_sampling_level="sequence"
        )
        loss.backward()
        return loss.item(), theta.grad

    loss, grad = run([1.0, 1.0, 10.0, 10.0])
    clean_loss, clean_grad = run([1.0, 1.0, 0.0, 0.0])

    assert loss == clean_loss == -1.0
    assert torch.equal(grad, clean_grad)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_ppo_loss_no_valid_token_is_zero_with_zero_gradient(level):
    theta = torch.randn(4, requires_grad=True)
    other = torch.full((4,), float("nan"))

    loss, stats = ppo_actor_loss_fn(
        theta,
        other,
        other,
        other,
        0.2,
        torch.zeros(4),
        importance_sampling_level=level,
        rejection_sampling=RejectionSamplingConfig(level=level),
        cu_seqlens=cu(4),
    )
    loss.backward()

    assert loss.item() == 0.0
    assert torch.equal(theta.grad, torch.zeros(4))
    assert all(not torch.isnan(v.float()).any() for v in stats.values())


def test_ppo_loss_dropped_sequence_stays_in_the_divisor_and_gets_no_gradient():
    # Documented choice: the divisor is counted before rejection, so dropping half the tokens halves the loss.
    theta = torch.zeros(8, requires_grad=True)
    old = torch.cat([torch.zeros(4), torch.full((4,), -10.0)])  # ratio e^10 in sequence 2
    rejection = RejectionSamplingConfig(level="sequence", upper=5.0)

    loss, _ = ppo_actor_loss_fn(
        theta,
        torch.zeros(8),
        old,
        -torch.ones(8),
        0.2,
        torch.ones(8),
        rejection_sampling=rejection,
        cu_seqlens=cu(4, 4),
    )
    loss.backward()

    assert loss.item() == 0.5
    assert torch.equal(theta.grad[4:], torch.zeros(4))


def test_ppo_loss_decoupled_hand_values():
    new, prox, behave = torch.tensor([[-1.0, -1.2], [-1.1, -1.0], [-1.3, -0.9]])
    advantages = torch.tensor([1.0, -1.0])

    loss, stats = ppo_actor_loss_fn(
        new, prox, behave, advantages, 0.2, torch.ones(2), rejection_sampling=RejectionSamplingConfig()
    )
    naive, _ = ppo_actor_loss_fn(new, behave, behave, advantages, 0.2, torch.ones(2))

    torch.testing.assert_close(stats["importance_weight"], torch.tensor([1.10517, 0.81873]), rtol=0, atol=1e-5)
    torch.testing.assert_close(stats["behave_imp_weight"], torch.tensor([1.22140, 0.90484]), rtol=0, atol=1e-5)
    torch.testing.assert_close(stats["loss"], torch.tensor([-1.34986, 0.74082]), rtol=0, atol=1e-5)
    assert loss.item() == pytest.approx(-0.30452, abs=1e-5)
    assert naive.item() == pytest.approx(-0.2, abs=1e-6)


def test_ppo_loss_proximal_equal_behaviour_reduces_to_ppo():
    theta, behave, advantages = torch.randn(3, 6)

    decoupled, _ = ppo_actor_loss_fn(
        theta, behave, behave, advantages, 0.2, torch.ones(6), rejection_sampling=RejectionSamplingConfig()
    )
    plain, _ = ppo_actor_loss_fn(theta, behave, behave, advantages, 0.2, torch.ones(6))

    assert torch.equal(decoupled, plain)


def test_ppo_loss_gspo_ratio_is_the_geometric_mean():
    new, old = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.2, -2.0, -2.7])

    _, stats = ppo_actor_loss_fn(
        new, old, old, torch.ones(3), 0.2, torch.ones(3), importance_sampling_level="sequence", cu_seqlens=cu(3)
    )

    torch.testing.assert_close(stats["importance_weight"], torch.full((3,), 0.96722), rtol=0, atol=1e-5)


def test_ppo_loss_dual_clip_hand_value():
    # rho = e^0.8 = 2.2255, A = -1.5: plain 3.338, bounded by 1.5 * 1.5 = 2.25.
    theta = torch.tensor([-0.1], requires_grad=True)

    loss, stats = ppo_actor_loss_fn(
        theta, torch.tensor([-0.9]), torch.tensor([-0.9]), torch.tensor([-1.5]), 0.2, torch.ones(1), c_clip=1.5
    )
    loss.backward()

    assert loss.item() == pytest.approx(2.25)
    assert theta.grad.item() == 0.0
    assert stats["dual_clip_mask"].tolist() == [True]


def test_ppo_loss_bad_arguments_raise():
    x = torch.zeros(4)
    with pytest.raises(ValueError, match="cu_seqlens"):
        ppo_actor_loss_fn(x, x, x, x, 0.2, x, importance_sampling_level="sequence")
    with pytest.raises(ValueError, match="differ in shape"):
        ppo_actor_loss_fn(x, x[:2], x, x, 0.2, x)
    with pytest.raises(ValueError, match="c_clip=1.0"):
        ppo_actor_loss_fn(x, x, x, x, 0.2, x, c_clip=1.0)
    with pytest.raises(ValueError, match="allowed: token, sequence"):
        ppo_actor_loss_fn(x, x, x, x, 0.2, x, importance_sampling_level="word")
    with pytest.raises(ValueError, match="1-D or padded 2-D"):
        ppo_actor_loss_fn(*[x.view(1, 2, 2)] * 4, 0.2, x.view(1, 2, 2))


def test_losses_weighted_by_tokens_do_not_depend_on_the_cut():
    # Token losses [1, 1, 1, 1] and [3] in two micro-batches: token mean 1.4, mean of means 2.0.
    logprobs = -torch.tensor([1.0, 1.0, 1.0, 1.0, 3.0])
    mask = torch.ones(5)

    def ppo(part):
        zeros = torch.zeros_like(logprobs[part])
        return ppo_actor_loss_fn(zeros, zeros, zeros, logprobs[part], 0.2, mask[part])[0]

    for loss_fn in (lambda part: sft_loss(logprobs[part], mask[part]), ppo):
        parts = [slice(0, 4), slice(4, 5)]
        weights = [mask[p].sum() for p in parts]
        combined = sum(loss_fn(p) * w for p, w in zip(parts, weights, strict=True)) / sum(weights)
        assert combined.item() == pytest.approx(1.4, abs=1e-5)
        assert loss_fn(slice(0, 5)).item() == pytest.approx(1.4, abs=1e-5)


# --- rejection --------------------------------------------------------------------------------------------------------
def test_rejection_long_sequence_weight_does_not_vanish():
    # 1000 tokens of -.003: the product is .0498, the geometric mean .997.
    old, prox = torch.zeros(1000), torch.full((1000,), -0.003)
    config = RejectionSamplingConfig(level="sequence", upper=5.0)

    result = apply_rejection(prox, old, torch.ones(1000, dtype=torch.bool), config, torch.zeros(1000).long(), 1)

    torch.testing.assert_close(result.weight, torch.full((1000,), math.exp(-0.003)), rtol=0, atol=1e-6)
    assert result.filtered_fraction.item() == 0.0


def test_rejection_bounds_are_inclusive_and_two_sided():
    config = RejectionSamplingConfig(metric="kl_k1", lower=-0.5, upper=0.5)
    d = torch.tensor([0.5, -0.5, 0.75, -0.75])

    result = apply_rejection(d, torch.zeros(4), torch.ones(4, dtype=torch.bool), config)

    assert result.mask.tolist() == [True, True, False, False]
    assert result.filtered_fraction.item() == 0.5


# --- normalisation ----------------------------------------------------------------------------------------------------
GROUP = {"mean_level": "group", "std_level": "group"}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (GROUP, [1.5, -0.5, -0.5, -0.5]),
        ({**GROUP, "std_unbiased": False}, [1.732, -0.577, -0.577, -0.577]),
        ({"mean_level": "group", "mean_leave1out": True, "std_level": None}, [1.0, -1 / 3, -1 / 3, -1 / 3]),
    ],
)
def test_normalize_one_right_answer_in_four(settings, expected):
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0])

    result = normalize(rewards, None, torch.full((4,), 9), NormConfig(**settings))

    torch.testing.assert_close(result, torch.tensor(expected), rtol=0, atol=1e-3)


@pytest.mark.parametrize("value", [1.0, 0.1, -3.3])
@pytest.mark.parametrize("level", ["group", "batch"])
@pytest.mark.parametrize("leave_one_out", [False, True])
def test_normalize_equal_rewards_are_exactly_zero(value, level, leave_one_out):
    config = NormConfig(mean_level=level, std_level=level, mean_leave1out=leave_one_out)

    result = normalize(torch.full((7,), value), None, torch.zeros(7), config)

    assert result.tolist() == [0.0] * 7


def test_normalize_group_mean_batch_std_shares_one_std():
    result = normalize(
        torch.tensor([1.0, 0.0, 0.0, 0.0]),
        None,
        torch.tensor([1, 1, 2, 2]),
        NormConfig(mean_level="group", std_level="batch", eps=1e-12),
    )

    std = math.sqrt((0.25 + 0.25) / 3)
    torch.testing.assert_close(result, torch.tensor([0.5, -0.5, 0.0, 0.0]) / std, rtol=0, atol=1e-6)


@pytest.mark.parametrize("leave_one_out", [False, True])
def test_normalize_groups_of_changed_size_use_their_own_members(leave_one_out):
    sizes, rewards = [4, 3, 1], torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0])
    group_id = torch.repeat_interleave(torch.tensor([5, 2, 9]), torch.tensor(sizes))
    config = NormConfig(**GROUP, mean_leave1out=leave_one_out, group_size=4)

    together = normalize(rewards, None, group_id, config)
    shuffled = torch.randperm(8, generator=torch.Generator().manual_seed(0))
    any_order = normalize(rewards[shuffled], None, group_id[shuffled], config)

    alone = [normalize(r, None, torch.zeros(len(r)), config) for r in rewards.split(sizes)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=1e-6)
    torch.testing.assert_close(any_order, together[shuffled], rtol=0, atol=1e-6)
    assert together[-1].item() == 0.0  # the lone survivor, never its raw reward


def test_normalize_lone_survivor_gets_zero_whatever_group_size_says():
    config = NormConfig(mean_level="group", mean_leave1out=True, std_level=None)  # group_size left at 1

    result = normalize(torch.tensor([1.0, 0.0, 1.0]), None, torch.tensor([4, 4, 7]), config)

    assert result.tolist() == [1.0, -1.0, 0.0]


def test_normalize_group_level_without_ids_raises():
    with pytest.raises(ValueError, match="group_id"):
        normalize(torch.ones(2), None, None, NormConfig(**GROUP))


# --- rewards and GAE --------------------------------------------------------------------------------------------------
def _gae_reference(rewards, values, mask, discount, lam, bootstrap):
    """One sequence, right to left, carrying value and advantage across masked positions."""
    n = len(rewards)
    out, gae, value = [0.0] * n, 0.0, bootstrap
    for t in reversed(range(n - 1)):
        if mask[t]:
            gae = rewards[t] + discount * value - values[t] + discount * lam * gae
            value = values[t]
        out[t] = gae
    return out


@pytest.mark.parametrize(("discount", "lam"), [(1.0, 1.0), (0.9, 0.8), (0.99, 0.95), (0.5, 0.0), (0.0, 1.0)])
@pytest.mark.parametrize("with_values", [True, False])
def test_gae_packed_equals_sequential_reference(discount, lam, with_values):
    generator = torch.Generator().manual_seed(1)
    lens = [7, 1, 12, 5, 40]
    total = sum(lens)
    rewards, values = torch.randn(2, total, generator=generator)
    mask = torch.rand(total, generator=generator) < 0.6
    truncated = torch.tensor([True, False, False, True, False])

    advantages, returns = gae_packed(
        rewards,
        mask,
        cu(*lens),
        discount=discount,
        gae_lambda=lam,
        values=values if with_values else None,
        truncated=truncated,
    )

    expected, start = [], 0
    for i, n in enumerate(lens):
        part = slice(start, start + n)
        v = values[part].tolist() if with_values else [0.0] * n
        bootstrap = v[-1] if truncated[i] else 0.0
        expected += _gae_reference(rewards[part].tolist(), v, mask[part].tolist(), discount, lam, bootstrap)
        start += n
    torch.testing.assert_close(advantages, torch.tensor(expected), rtol=1e-5, atol=1e-5)
    if with_values:
        last = cu(*lens)[1:].long() - 1
        trained = mask.index_fill(0, last, False)
        torch.testing.assert_close(returns[trained], (advantages + values)[trained], rtol=0, atol=1e-6)


def test_gae_masked_tail_value_does_not_leak():
    advantages, _ = gae_packed(
        torch.tensor([0.0, 1.0, 0.0]),
        torch.tensor([1, 1, 0]),
        cu(3),
        gae_lambda=0.95,
        values=torch.tensor([0.0, 0.0, 100.0]),
    )

    torch.testing.assert_close(advantages, torch.tensor([0.95, 1.0, 0.0]), rtol=0, atol=1e-6)


def test_gae_discount_counts_trained_tokens_only():
    # Two turns with tool text between them: the terminal reward decays once per trained position.
    mask = torch.tensor([1, 1, 0, 0, 1, 0], dtype=torch.bool)
    remaining = trained_from_here(mask, cu(6))
    rewards = place_sequence_rewards(torch.tensor([1.0]), mask, remaining, torch.zeros(6, dtype=torch.long))

    advantages, _ = gae_packed(rewards, mask, cu(6), discount=0.5)

    assert remaining.tolist() == [3, 2, 1, 1, 1, 0]
    assert advantages[mask].tolist() == [0.25, 0.5, 1.0]


@pytest.mark.parametrize("discount", [0.0, 1.0])
def test_reward_of_a_sequence_that_ends_with_masked_text_is_not_lost(discount):
    mask = torch.tensor([1, 1, 0, 0], dtype=torch.bool)  # the last tokens are the environment's
    remaining = trained_from_here(mask, cu(4))

    rewards = place_sequence_rewards(torch.tensor([2.0]), mask, remaining, torch.zeros(4, dtype=torch.long))
    advantages, _ = gae_packed(rewards, mask, cu(4), discount=discount)

    assert rewards.tolist() == [0.0, 2.0, 0.0, 0.0]
    assert advantages[1].item() == 2.0


def test_token_kl_rewards_without_reference_penalise_the_logprob():
    mask = torch.tensor([True, False])

    result = token_kl_rewards(torch.tensor([-0.5, -3.0]), None, mask, 0.1, "k1")

    torch.testing.assert_close(result, torch.tensor([0.05, 0.0]), rtol=0, atol=1e-7)


def test_kl_estimate_unknown_kind_raises():
    with pytest.raises(ValueError, match="k1, k2, k3"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k9")


# --- proximal policy --------------------------------------------------------------------------------------------------
def test_version_alpha_hand_values():
    alpha = version_alpha(torch.tensor([3, 4, 1, 5, 6, -1]), current_version=5)

    assert alpha.tolist() == [0.5, 0.0, 0.75, 0.0, 0.0, 0.0]


def test_prox_approximation_keeps_no_gradient_and_refuses_unknown_names():
    theta = torch.zeros(1, requires_grad=True)

    result = compute_prox_logp_approximations(torch.zeros(1), theta, torch.tensor([0]), 4, "loglinear")

    assert list(result) == ["loglinear"]
    assert not result["loglinear"].requires_grad
    with pytest.raises(ValueError, match="loglinear, linear, rollout"):
        compute_prox_logp_approximations(torch.zeros(1), theta, torch.tensor([0]), 4, "cubic")
