"""Values at mask == 0 change no bit of any result: losses, gradients, advantages, statistics."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.api.cli_args import NormConfig, PPOActorConfig, RejectionSamplingConfig
from areal.trainer.ppo.actor import ActorLoss
from areal.trainer.ppo.advantages import compute_advantages
from areal.trainer.sft.learner import SFTLoss
from areal.utils.batch import PackedBatch, pack
from areal.utils.functional import gae_packed, normalize, perplexity, ppo_actor_loss_fn, sft_loss
from areal.utils.stats_tracker import DistributedStatsTracker

GARBAGE = [float("nan"), float("inf"), float("-inf"), 1e30, -1e30, 0.0, 7.5]
LENS = [5, 3, 6, 1]
CU = torch.tensor([0, 5, 8, 14, 15], dtype=torch.int32)
SEQ_IDS = torch.repeat_interleave(torch.arange(4), torch.tensor(LENS))

seeds = st.integers(0, 2**31 - 1)
fast = settings(max_examples=25, deadline=None)


def _mask(generator):
    return torch.rand(15, generator=generator) < 0.5


def _spoil(x, mask, generator):
    """Replace values off the mask by NaN, infinities and large numbers."""
    choice = torch.randint(len(GARBAGE), x.shape, generator=generator)
    return torch.where(mask, x, torch.tensor(GARBAGE)[choice])


def _assert_same_bits(first, second):
    for a, b in zip(first, second, strict=True):
        assert not torch.isnan(a.float()).any()
        assert torch.equal(a, b)


LOSS_SETTINGS = [
    {},
    {"eps_clip_higher": 0.3, "c_clip": 1.5},
    {"importance_sampling_level": "sequence"},
    {"rejection_sampling": RejectionSamplingConfig(upper=1.5)},
    {"rejection_sampling": RejectionSamplingConfig(action="clamp", upper=1.5)},
    {"rejection_sampling": RejectionSamplingConfig(metric="kl_k3", upper=0.5)},
    {"rejection_sampling": RejectionSamplingConfig(level="sequence", agg="max", upper=1.5)},
    {"rejection_sampling": RejectionSamplingConfig(level="sequence", metric="kl_k2", agg="sum", upper=0.5)},
    {
        "rejection_sampling": RejectionSamplingConfig(level="sequence", upper=1.5),
        "importance_sampling_level": "sequence",
    },
]


@pytest.mark.parametrize("options", LOSS_SETTINGS)
@fast
@given(seed=seeds)
def test_ppo_loss_values_off_the_mask_change_no_bit(options, seed):
    generator = torch.Generator().manual_seed(seed)
    mask = _mask(generator)
    tensors = [torch.randn(15, generator=generator) * 0.5 for _ in range(4)]

    def run(values):
        theta = values[0].clone().requires_grad_()
        loss, stats = ppo_actor_loss_fn(theta, *values[1:], 0.2, mask, cu_seqlens=CU, **options)
        loss.backward()
        assert (theta.grad[~mask] == 0).all()
        return [loss.detach(), theta.grad, *stats.values()]

    _assert_same_bits(run(tensors), run([_spoil(t, mask, generator) for t in tensors]))


@fast
@given(seed=seeds)
def test_sft_loss_and_perplexity_values_off_the_mask_change_no_bit(seed):
    generator = torch.Generator().manual_seed(seed)
    mask = _mask(generator)
    logprobs = -torch.rand(15, generator=generator)

    def run(values):
        leaf = values.clone().requires_grad_()
        loss = sft_loss(leaf, mask)
        loss.backward()
        return [loss.detach(), leaf.grad, *perplexity(values, mask, SEQ_IDS, 4)]

    _assert_same_bits(run(logprobs), run(_spoil(logprobs, mask, generator)))


@pytest.mark.parametrize("factors", [(1.0, 1.0), (0.99, 0.95), (0.5, 0.0)])
@fast
@given(seed=seeds)
def test_gae_values_off_the_mask_change_no_bit(factors, seed):
    generator = torch.Generator().manual_seed(seed)
    mask = _mask(generator)
    rewards, values = torch.randn(15, generator=generator), torch.randn(15, generator=generator)
    last = torch.zeros(15, dtype=torch.bool).index_fill(0, CU[1:].long() - 1, True)

    def run(r, v):
        return gae_packed(r, mask, CU, discount=factors[0], gae_lambda=factors[1], values=v)

    # The last position predicts nothing, so it counts as off the mask.
    inside = mask & ~last
    _assert_same_bits(run(rewards, values), run(_spoil(rewards, inside, generator), _spoil(values, inside, generator)))


@pytest.mark.parametrize("mean_level", ["batch", "group", None])
@pytest.mark.parametrize("std_level", ["batch", "group", None])
@fast
@given(seed=seeds, leave_one_out=st.booleans())
def test_normalize_values_off_the_mask_change_no_bit(mean_level, std_level, seed, leave_one_out):
    generator = torch.Generator().manual_seed(seed)
    mask = _mask(generator)
    x = torch.randn(15, generator=generator)
    config = NormConfig(mean_level=mean_level, std_level=std_level, mean_leave1out=leave_one_out, group_size=2)

    first = normalize(x, mask, SEQ_IDS, config)
    second = normalize(_spoil(x, mask, generator), mask, SEQ_IDS, config)

    _assert_same_bits([first], [second])


def _trajectories(generator):
    width, n = 6, 4
    lens = torch.tensor([6, 4, 5, 3])
    real = torch.arange(width)[None] < lens[:, None]
    loss_mask = (real & (torch.arange(width)[None] >= 2)).int()
    return {
        "input_ids": torch.randint(1, 9, (n, width), generator=generator),
        "attention_mask": real,
        "loss_mask": loss_mask,
        "logprobs": -torch.rand(n, width, generator=generator),
        "prox_logp": -torch.rand(n, width, generator=generator),
        "ref_logp": -torch.rand(n, width, generator=generator),
        "versions": torch.where(loss_mask == 1, torch.randint(0, 4, (n, width), generator=generator), -1),
        "rewards": torch.randn(n, generator=generator),
        "group_id": torch.tensor([3, 3, 8, 8]),
        "truncated": torch.tensor([True, False, False, False]),
    }


@pytest.mark.parametrize("method", ["recompute", "loglinear", "metrics"])
@fast
@given(seed=seeds)
def test_advantages_loss_and_statistics_values_off_the_mask_change_no_bit(method, seed):
    generator = torch.Generator().manual_seed(seed)
    data = _trajectories(generator)
    config = PPOActorConfig(
        use_decoupled_loss=True,
        prox_logp_method=method,
        reward_norm=NormConfig(mean_level="group", std_level="group"),
        adv_norm=NormConfig(),
        rejection_sampling=RejectionSamplingConfig(),
        kl_ctl=0.1,
    )
    drawn = data["loss_mask"] == 1
    aligned = torch.roll(drawn, -1, dims=1)
    aligned[:, -1] = False
    spoiled = {
        **data,
        "logprobs": _spoil(data["logprobs"], drawn, generator),
        "prox_logp": _spoil(data["prox_logp"], aligned, generator),
        "ref_logp": _spoil(data["ref_logp"], aligned, generator),
    }
    theta = -torch.rand(18, generator=generator)

    def run(values, current):
        batch = compute_advantages(pack(values), config)
        tracker = DistributedStatsTracker("t")
        leaf = current.clone().requires_grad_()
        loss = ActorLoss(config, tracker, current_version=4)(leaf, leaf.detach().abs(), batch.as_loss_input())
        loss.backward()
        keys = ("advantages", "returns", "kl_rewards", "tot_rewards", "logprobs")
        return [loss.detach(), leaf.grad, *(batch.tokens[k] for k in keys)], tracker.export()

    mask = pack({**data, "loss_mask": aligned}).tokens["loss_mask"]
    first, first_stats = run(data, theta)
    second, second_stats = run(spoiled, _spoil(theta, mask, generator))

    _assert_same_bits(first, second)
    assert first_stats == second_stats
    assert all(value == value for value in first_stats.values())


@fast
@given(seed=seeds)
def test_sft_statistics_values_off_the_mask_change_nothing(seed):
    generator = torch.Generator().manual_seed(seed)
    mask = _mask(generator)
    logprobs = -torch.rand(15, generator=generator)
    batch = PackedBatch({"loss_mask": mask}, {}, CU, LENS).as_loss_input()

    def run(values):
        tracker = DistributedStatsTracker("t")
        SFTLoss(tracker)(values, values, batch)
        return tracker.export()

    assert run(logprobs) == run(_spoil(logprobs, mask, generator))
