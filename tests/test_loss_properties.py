"""Every objective and aggregation: masked values, the cut into micro-batches and ranks and the order of rows change
nothing.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from areal.api.cli_args import PPOActorConfig, RejectionSamplingConfig
from areal.trainer.ppo.actor import ActorLoss
from areal.trainer.ppo.losses import LOSS_WEIGHTS
from areal.utils.batch import PackedBatch, pack
from areal.utils.functional import LOSS_AGGREGATIONS, completion_logprobs, critic_loss, dpo_loss, m2po_mask, rw_loss
from areal.utils.functional.rw_loss import valid_pairs
from areal.utils.stats_tracker import DistributedStatsTracker

LENS = (5, 2, 7, 3, 4, 6)
TOTAL = sum(LENS)
GARBAGE = torch.tensor([float("nan"), float("inf"), float("-inf"), 1e30, -1e30, 0.0, 7.5])
OBJECTIVES: dict[str, dict[str, Any]] = {
    "ppo": {"c_clip": 3.0},
    "gspo": {"importance_sampling_level": "sequence"},
    "decoupled": {"use_decoupled_loss": True, "rejection_sampling": RejectionSamplingConfig(upper=1.5)},
    "sapo": {"use_sapo_loss": True},
    "sapo_sequence": {"use_sapo_loss": True, "importance_sampling_level": "sequence"},
    "cispo": {"loss_fn": "cispo"},
}
DISTILLATION: dict[str, dict[str, Any]] = {
    "none": {},
    "joint": {"rl_loss_weight": 0.7, "distill_loss_weight": 0.3, "distill_estimator": "k2"},
    "pure": {"rl_loss_weight": 0.0, "distill_loss_weight": 1.0},
}
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
    batch = batch.with_tokens(loss_mask=mask.float(), **fields)
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


@pytest.mark.parametrize("distillation", DISTILLATION)
@pytest.mark.parametrize("loss_agg", LOSS_AGGREGATIONS)
@pytest.mark.parametrize("objective", OBJECTIVES)
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


@pytest.mark.parametrize("distillation", DISTILLATION)
@pytest.mark.parametrize("loss_agg", LOSS_AGGREGATIONS)
@pytest.mark.parametrize("objective", OBJECTIVES)
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


KNOBS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"eps_clip": 0.05}),
    ({}, {"eps_clip_higher": 3.0}),
    ({}, {"c_clip": 1.1}),
    ({}, {"importance_sampling_level": "sequence"}),
    ({}, {"use_sapo_loss": True}),
    ({}, {"loss_fn": "sapo"}),
    ({}, {"loss_fn": "cispo"}),
    ({"loss_fn": "cispo"}, {"loss_fn": "cispo", "eps_clip": 0.05}),
    ({"loss_fn": "cispo"}, {"loss_fn": "cispo", "eps_clip_higher": 3.0}),
    ({"use_sapo_loss": True}, {"use_sapo_loss": True, "sapo_tau_pos": 2.0}),
    ({"use_sapo_loss": True}, {"use_sapo_loss": True, "sapo_tau_neg": 2.0}),
    ({}, {"loss_agg": "seq-mean-token-mean"}),
    ({}, {"loss_agg": "seq-mean-token-sum-norm"}),
    ({"loss_agg": "seq-mean-token-sum-norm"}, {"loss_agg": "seq-mean-token-sum-norm", "loss_agg_constant": 3}),
    ({"use_decoupled_loss": True}, {"use_decoupled_loss": True, "rejection_sampling": RejectionSamplingConfig()}),
    (
        {"use_decoupled_loss": True, "rejection_sampling": RejectionSamplingConfig()},
        {"use_decoupled_loss": True, "rejection_sampling": RejectionSamplingConfig(action="clamp", upper=1.1)},
    ),
]


@pytest.mark.parametrize(("first", "second"), KNOBS, ids=[str(i) for i in range(len(KNOBS))])
def test_two_losses_that_differ_in_one_setting_differ(first, second):
    batch = make_batch(torch.Generator().manual_seed(9), {})
    everything = [list(range(len(LENS)))]

    one, other = (step_gradient(PPOActorConfig(**options), batch, everything) for options in (first, second))

    assert not torch.allclose(one[1], other[1], rtol=1e-3, atol=1e-6)


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


def pair_gradient(loss: str, values: Tensor, mask: Tensor, cu: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and weight of one micro-batch of pairs, and of a value model."""
    if loss == "rw":
        return rw_loss(values, cu).loss, valid_pairs(cu.diff()).sum()
    if loss == "critic":
        return critic_loss(values, values.detach() * 0.5, values.detach() + 1, mask)[0], (mask != 0).sum()
    sums, lens = completion_logprobs(values, mask, cu)
    return dpo_loss(sums, None, lens, loss_type=loss).loss, valid_pairs(lens).sum()


@pytest.mark.parametrize("loss", ["rw", "critic", "sigmoid", "ipo"])
@few
@given(seed=seeds, cut=st.integers(1, 2))
def test_pair_and_value_losses_do_not_depend_on_cut_or_pair_order(loss, seed, cut):
    generator = torch.Generator().manual_seed(seed)
    batch = make_batch(generator, {})
    results = []
    for parts in ([[0, 1, 2, 3, 4, 5]], [[4, 5, 0, 1, 2, 3][: 2 * cut], [4, 5, 0, 1, 2, 3][2 * cut :]]):
        theta = batch.tokens["theta"].clone().requires_grad_()
        pieces = [batch.with_tokens(theta=theta).select(rows) for rows in parts]
        found = [pair_gradient(loss, p.tokens["theta"], p.tokens["loss_mask"], p.cu_seqlens) for p in pieces]
        total = sum(value * weight for value, weight in found) / sum(weight for _, weight in found).clamp(min=1)
        total.backward()
        results.append((total.detach(), theta.grad))

    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
