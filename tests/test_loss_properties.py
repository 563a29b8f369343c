"""Every objective and aggregation: masked values, the cut into micro-batches and ranks and the order of rows change
nothing.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from areal.api.cli_args import PPOActorConfig, RejectionSamplingConfig
from areal.trainer.ppo.actor import ActorLoss
from areal.trainer.ppo.losses import LOSS_WEIGHTS
from areal.utils.batch import PackedBatch, pack, roll_packed
from areal.utils.functional import (
    CRITIC_LOSSES,
    DPO_LOSSES,
    LOSS_AGGREGATIONS,
    completion_logprobs,
    critic_loss,
    dpo_loss,
    m2po_mask,
    rw_loss,
    sft_loss,
)
from areal.utils.functional.rw_loss import valid_pairs
from areal.utils.stats_tracker import DistributedStatsTracker

LENS = (5, 2, 7, 3, 4, 6)
TOTAL = sum(LENS)
GARBAGE = torch.tensor([float("nan"), float("inf"), float("-inf"), 1e30, -1e30, 0.0, 7.5])
OBJECTIVES: dict[str, dict[str, Any]] = {
    "ppo": {"c_clip": 3.0},
    "gspo": {"importance_sampling_level": "sequence"},
    "decoupled": {"use_decoupled_loss": True, "rejection_sampling": RejectionSamplingConfig(upper=1.5)},
    "decoupled_sequence": {
        "use_decoupled_loss": True,
        "rejection_sampling": RejectionSamplingConfig(level="sequence", action="clamp", agg="max", upper=1.5),
    },
    "loglinear": {"use_decoupled_loss": True, "prox_logp_method": "loglinear", "eps_clip_higher": 0.4},
    "sapo": {"use_sapo_loss": True},
    "sapo_sequence": {"use_sapo_loss": True, "importance_sampling_level": "sequence"},
    "cispo": {"loss_fn": "cispo"},
}
DISTILLATION: dict[str, dict[str, Any]] = {
    "none": {},
    "joint": {"rl_loss_weight": 0.7, "distill_loss_weight": 0.3, "distill_estimator": "k2"},
    "pure": {"rl_loss_weight": 0.0, "distill_loss_weight": 1.0},
}
CASES = [
    *((objective, loss_agg, "none") for objective in OBJECTIVES for loss_agg in LOSS_AGGREGATIONS),
    *(("ppo", loss_agg, mode) for mode in ("joint", "pure") for loss_agg in LOSS_AGGREGATIONS),
    ("sapo_sequence", "token-mean", "joint"),
    ("decoupled", "seq-mean-token-mean", "pure"),
]
every_case = pytest.mark.parametrize(("objective", "loss_agg", "distillation"), CASES)
seeds = st.integers(0, 2**31 - 1)
few = settings(max_examples=8, deadline=None)


def make_batch(generator: torch.Generator, scalars: dict[str, Any]) -> PackedBatch:
    """What ``compute_advantages`` gives; the second sequence has no trained token."""
    width, n = max(LENS), len(LENS)
    real = torch.arange(width)[None] < torch.tensor(LENS)[:, None]
    batch = pack({"input_ids": torch.ones(n, width, dtype=torch.long), "attention_mask": real})
    mask = torch.rand(TOTAL, generator=generator) < 0.6
    mask[batch.cu_seqlens[1:].long() - 1] = False
    mask[batch.seq_ids == 1] = False
    names = ("theta", "logprobs", "prox_logp", "advantages", "teacher_logp")
    fields = {name: torch.randn(TOTAL, generator=generator) * 0.5 for name in names}
    if not scalars:
        del fields["teacher_logp"]
    versions = torch.randint(4, (TOTAL,), generator=generator)
    batch = batch.with_tokens(loss_mask=mask.float(), aligned_versions=versions, **fields)
    batch.scalars.update(scalars)
    return batch


def step_gradient(config: PPOActorConfig, batch: PackedBatch, parts: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Loss of a step and its gradient to ``theta``, cut as the engine loop does it: each part is a micro-batch of some
    rank, weighed with its denominator over the sum of all."""
    theta = batch.tokens["theta"].clone().requires_grad_()
    whole = batch.with_tokens(theta=theta)
    loss_fn = ActorLoss(config, DistributedStatsTracker(), 3)
    inputs = [whole.select(rows).as_loss_input() for rows in parts]
    weights = [LOSS_WEIGHTS[config.loss_agg](item) for item in inputs]
    losses = [loss_fn(item["theta"], item["theta"].detach(), item) for item in inputs]
    loss = sum(loss * weight for loss, weight in zip(losses, weights, strict=True)) / sum(weights)
    loss.backward()
    return loss.detach(), theta.grad


@every_case
@few
@given(seed=seeds, owner=st.lists(st.integers(0, 3), min_size=len(LENS), max_size=len(LENS)), order=st.randoms())
def test_step_does_not_depend_on_cut_ranks_or_row_order(objective, loss_agg, distillation, seed, owner, order):
    batch = make_batch(torch.Generator().manual_seed(seed), DISTILLATION[distillation])
    config = PPOActorConfig(loss_agg=loss_agg, max_new_tokens=9, **OBJECTIVES[objective])
    rows = list(range(len(LENS)))
    order.shuffle(rows)
    parts = [[row for row in rows if owner[row] == part] for part in range(4)]

    whole = step_gradient(config, batch, [list(range(len(LENS)))])
    cut = step_gradient(config, batch, [part for part in parts if part])

    for one, other in zip(whole, cut, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
    assert whole[0] != 0


@every_case
@few
@given(seed=seeds)
def test_step_values_off_the_mask_change_no_bit(objective, loss_agg, distillation, seed):
    generator = torch.Generator().manual_seed(seed)
    batch = make_batch(generator, DISTILLATION[distillation])
    config = PPOActorConfig(loss_agg=loss_agg, max_new_tokens=9, **OBJECTIVES[objective])
    mask = batch.tokens["loss_mask"] != 0
    names = batch.tokens.keys() & {"theta", "logprobs", "prox_logp", "advantages", "teacher_logp"}
    spoiled = {
        name: torch.where(mask, batch.tokens[name], GARBAGE[torch.randint(len(GARBAGE), (TOTAL,), generator=generator)])
        for name in sorted(names)
    }
    everything = [list(range(len(LENS)))]

    clean, dirty = (
        step_gradient(config, batch, everything),
        step_gradient(config, batch.with_tokens(**spoiled), everything),
    )

    assert torch.equal(clean[0], dirty[0])
    assert torch.equal(clean[1], dirty[1])


@pytest.mark.parametrize(
    "change",
    [{"rl_loss_weight": 0.5}, {"rl_loss_weight": 0.0}, {"distill_loss_weight": 0.9}, {"distill_estimator": "k1"}],
)
def test_two_distillations_that_differ_in_one_setting_differ(change):
    everything = [list(range(len(LENS)))]
    base = DISTILLATION["joint"]

    one, other = (
        step_gradient(PPOActorConfig(), make_batch(torch.Generator().manual_seed(5), scalars), everything)
        for scalars in (base, {**base, **change})
    )

    assert not torch.allclose(one[1], other[1], rtol=1e-3, atol=1e-6)


@settings(max_examples=50, deadline=None)
@given(seed=seeds, threshold=st.floats(1e-3, 3.0), levels=st.integers(1, 6))
def test_m2po_bounds_the_mean_and_ignores_order_and_masked_values(seed, threshold, levels):
    generator = torch.Generator().manual_seed(seed)
    old, prox = (torch.randint(levels, (20,), generator=generator).float() for _ in range(2))  # with many ties
    mask = torch.rand(20, generator=generator) < 0.7
    order = torch.randperm(20, generator=generator)
    spoiled = torch.where(mask, old, GARBAGE[torch.randint(len(GARBAGE), (20,), generator=generator)])

    kept = m2po_mask(old, prox, mask, threshold)

    assert torch.equal(m2po_mask(spoiled, prox, mask, threshold), kept)
    assert torch.equal(m2po_mask(old[order], prox[order], mask[order], threshold), kept[order])
    moments = (old - prox).square()
    assert not (kept & ~mask).any()
    if mask.any():
        assert kept.any()
        assert moments[kept].mean() < threshold or moments[kept].max() == moments[mask].min()
        assert (mask & ~kept).sum() == 0 or moments[mask & ~kept].min() > moments[kept].max()


def loss_and_weight(loss: str, values: Tensor, mask: Tensor, cu: Tensor) -> tuple[Tensor, Tensor]:
    """Loss of one micro-batch of pairs, of a value model or of supervised rows, and its weight among others."""
    if loss == "rw":
        return rw_loss(values, cu).loss, valid_pairs(cu.diff()).sum()
    if loss in CRITIC_LOSSES:
        old, returns = values.detach() * 0.5, values.detach() + 1
        return critic_loss(values, old, returns, mask, kind=loss, huber_delta=0.7)[0], (mask != 0).sum()
    if loss == "sft":
        return sft_loss(-values.abs(), mask), (mask != 0).sum()
    sums, lens = completion_logprobs(values, mask, cu)
    return dpo_loss(sums, None, lens, loss_type=loss).loss, valid_pairs(lens).sum()


OTHER_LOSSES = ["rw", "sft", *CRITIC_LOSSES, *DPO_LOSSES]


@pytest.mark.parametrize("loss", OTHER_LOSSES)
@few
@given(seed=seeds, cut=st.integers(1, 2))
def test_pair_value_and_supervised_losses_do_not_depend_on_cut_or_pair_order(loss, seed, cut):
    generator = torch.Generator().manual_seed(seed)
    batch = make_batch(generator, {})
    results = []
    for parts in ([[0, 1, 2, 3, 4, 5]], [[4, 5, 0, 1, 2, 3][: 2 * cut], [4, 5, 0, 1, 2, 3][2 * cut :]]):
        theta = batch.tokens["theta"].clone().requires_grad_()
        pieces = [batch.with_tokens(theta=theta).select(rows) for rows in parts]
        found = [loss_and_weight(loss, p.tokens["theta"], p.tokens["loss_mask"], p.cu_seqlens) for p in pieces]
        total = sum(value * weight for value, weight in found) / sum(weight for _, weight in found).clamp(min=1)
        total.backward()
        results.append((total.detach(), theta.grad))

    tolerance = 2e-5 if loss == "sft" else 1e-5  # its denominator is 1e-5 more than the number of trained tokens
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=1e-7)


def counted(loss: str, batch: PackedBatch) -> Tensor:
    """Positions whose value the loss reads."""
    mask, cu = batch.tokens["loss_mask"] != 0, batch.cu_seqlens
    if loss == "rw":  # the last token of each sequence
        return torch.zeros_like(mask).index_fill(0, cu[1:].long() - 1, True)
    if loss in DPO_LOSSES:  # its mask is by token: the position before a token of the completion predicts it
        aligned = roll_packed(mask, cu, fill=False)
        _, lens = completion_logprobs(torch.zeros(TOTAL), mask, cu)
        return aligned & valid_pairs(lens).repeat_interleave(2)[batch.seq_ids]
    return mask


@pytest.mark.parametrize("loss", OTHER_LOSSES)
@few
@given(seed=seeds)
def test_pair_value_and_supervised_losses_values_that_do_not_count_change_no_bit(loss, seed):
    generator = torch.Generator().manual_seed(seed)
    batch = make_batch(generator, {})
    reads = counted(loss, batch)
    garbage = GARBAGE[torch.randint(len(GARBAGE), (TOTAL,), generator=generator)]
    results = []

    for values in (batch.tokens["theta"], torch.where(reads, batch.tokens["theta"], garbage)):
        theta = values.clone().requires_grad_()
        found, _ = loss_and_weight(loss, theta, batch.tokens["loss_mask"], batch.cu_seqlens)
        found.backward()
        results.append((found.detach(), theta.grad))

    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    assert (results[0][1][~reads] == 0).all()


@every_case
def test_step_without_a_trained_token_is_zero_with_finite_statistics(objective, loss_agg, distillation):
    batch = make_batch(torch.Generator().manual_seed(4), DISTILLATION[distillation])
    batch = batch.with_tokens(loss_mask=torch.zeros(TOTAL), theta=torch.full((TOTAL,), torch.nan))
    config = PPOActorConfig(loss_agg=loss_agg, max_new_tokens=9, **OBJECTIVES[objective])
    tracker = DistributedStatsTracker()
    theta = batch.tokens["theta"].requires_grad_()

    loss = ActorLoss(config, tracker, 3)(theta, theta.detach(), batch.as_loss_input())
    loss.backward()

    assert loss.item() == 0
    assert (theta.grad == 0).all()
    assert all(math.isfinite(value) for value in tracker.export().values())
