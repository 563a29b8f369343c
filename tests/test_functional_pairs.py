"""Losses of the value model, of reward models and of preference pairs: right values, empty sides, bad input."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from areal.utils.functional import completion_logprobs, critic_loss, dpo_loss, rw_loss
from tests.vector_files import assert_equals_vector, load_vector


def cu(*lens: int) -> Tensor:
    return torch.tensor([0, *lens], dtype=torch.int32).cumsum(0).int()


@pytest.mark.parametrize(("name", "kind"), [("critic_mse", "mse"), ("critic_huber", "huber")])
def test_critic_loss_matches_vector(name, kind):
    vector = load_vector(name)
    inputs, expected = vector["inputs"], vector["outputs"]
    values = torch.tensor(inputs["value"], requires_grad=True)
    mask = torch.tensor(inputs["loss_mask"])

    loss, stats = critic_loss(
        values,
        torch.tensor(inputs["old_value"]),
        torch.tensor(inputs["target_value"]),
        mask,
        eps_clip=vector["config"]["value_eps_clip"],
        kind=kind,
        huber_delta=vector["config"]["huber_delta"],
    )
    loss.backward()

    assert_equals_vector(loss, expected["loss"])
    assert_equals_vector(values.grad, expected["grad_value"])
    assert_equals_vector(stats["clip_mask"], expected["clip_mask"])
    assert_equals_vector(stats["loss"][mask != 0], torch.tensor(expected["per_token"])[mask != 0].tolist())
    assert stats["loss"][mask == 0].tolist() == [0.0]


def test_critic_loss_nothing_masked_in_gives_zero_and_zero_gradient():
    values = torch.tensor([math.nan, 2.0], requires_grad=True)

    loss, _ = critic_loss(values, torch.zeros(2), torch.full((2,), math.inf), torch.zeros(2))
    loss.backward()

    assert loss.item() == 0
    assert values.grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "mae"}, "allowed: mse, huber"),
        ({"eps_clip": 0.0}, "must be > 0"),
        ({"loss_mask": torch.ones(3)}, "differ in shape"),
    ],
)
def test_critic_loss_bad_input_is_named(options, message):
    arguments = {"loss_mask": torch.ones(2), **options}
    with pytest.raises(ValueError, match=message):
        critic_loss(torch.zeros(2), torch.zeros(2), torch.zeros(2), **arguments)


def test_rw_loss_matches_vector():
    vector = load_vector("rw_pairwise")
    values = torch.tensor(vector["inputs"]["scores"], requires_grad=True)

    pairs = rw_loss(values, torch.tensor(vector["inputs"]["cu_seqlens"]))
    pairs.loss.backward()

    assert_equals_vector(pairs.loss, vector["outputs"]["loss"])
    assert_equals_vector(values.grad, vector["outputs"]["grad"])
    assert pairs.valid.tolist() == [True, False, True]
    assert_equals_vector(pairs.chosen, [0.9, 0.0, 1.5])
    assert_equals_vector(pairs.rejected, [-0.2, 0.0, 2.0])


@pytest.mark.parametrize("lens", [(0, 2), (2, 0), (0, 0)])
def test_rw_loss_no_valid_pair_gives_zero_and_zero_gradient(lens):
    values = torch.tensor([math.nan] * sum(lens), requires_grad=True)

    pairs = rw_loss(values, cu(*lens))
    pairs.loss.backward()

    assert pairs.loss.item() == 0
    assert values.grad.tolist() == [0.0] * sum(lens)
    assert pairs.valid.tolist() == [False]


def test_rw_loss_odd_number_of_sequences_names_the_remedy():
    with pytest.raises(ValueError, match="granularity=2"):
        rw_loss(torch.zeros(3), cu(1, 1, 1))


@pytest.mark.parametrize(("name", "loss_type"), [("dpo_sigmoid", "sigmoid"), ("dpo_ipo", "ipo")])
def test_dpo_loss_matches_vector(name, loss_type):
    vector = load_vector(name)
    inputs, expected = vector["inputs"], vector["outputs"]
    logprobs = torch.tensor(inputs["logprobs"], requires_grad=True)
    mask, cu_seqlens = torch.tensor(inputs["loss_mask"]), torch.tensor(inputs["cu_seqlens"])
    beta = vector["config"]["beta"]

    sums, lens = completion_logprobs(logprobs, mask, cu_seqlens)
    ref_sums, _ = completion_logprobs(torch.tensor(inputs["ref_logprobs"]), mask, cu_seqlens)
    pairs = dpo_loss(sums, ref_sums, lens, beta, loss_type)
    pairs.loss.backward()

    assert_equals_vector(pairs.loss, expected["loss"])
    assert_equals_vector(logprobs.grad, expected["grad"])
    assert_equals_vector(sums.view(-1, 2), expected["policy_sums"])
    assert_equals_vector(ref_sums.view(-1, 2), expected["ref_sums"])
    assert_equals_vector(lens.view(-1, 2), expected["completion_lens"])
    rewards = beta * (torch.tensor(expected["policy_sums"]) - torch.tensor(expected["ref_sums"]))
    assert_equals_vector(torch.stack([pairs.chosen, pairs.rejected], 1), rewards.tolist())


def test_dpo_loss_label_smoothing_mixes_both_orders():
    sums, lens = torch.tensor([2.0, -1.0], dtype=torch.float64), torch.ones(2)

    plain = dpo_loss(sums, None, lens, beta=0.5).loss
    swapped = dpo_loss(sums.flip(0), None, lens, beta=0.5).loss
    smoothed = dpo_loss(sums, None, lens, beta=0.5, label_smoothing=0.2).loss

    assert plain.item() == pytest.approx(math.log1p(math.exp(-1.5)), rel=1e-12)  # -log sigmoid(0.5 * 3)
    torch.testing.assert_close(smoothed, 0.8 * plain + 0.2 * swapped, rtol=1e-12, atol=0)


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
def test_dpo_loss_reference_free_equals_a_reference_of_zeros(loss_type):
    sums, lens = torch.tensor([-3.0, -4.0, -1.0, -9.0], dtype=torch.float64), torch.tensor([2.0, 2.0, 1.0, 4.0])

    free = dpo_loss(sums, None, lens, loss_type=loss_type)
    zeros = dpo_loss(sums, torch.zeros_like(sums), lens, loss_type=loss_type)

    assert free.loss.item() == zeros.loss.item() != 0
    torch.testing.assert_close(free.chosen, torch.tensor([-0.3, -0.1], dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
def test_dpo_loss_pair_with_an_empty_side_is_left_out(loss_type):
    sums = torch.tensor([1.0, 0.0, -3.0, -4.0], dtype=torch.float64, requires_grad=True)
    lens = torch.tensor([3.0, 0.0, 2.0, 2.0])

    both = dpo_loss(sums, None, lens, loss_type=loss_type)
    alone = dpo_loss(sums[2:], None, lens[2:], loss_type=loss_type)
    both.loss.backward()

    assert both.loss.item() == alone.loss.item()
    assert both.valid.tolist() == [False, True]
    assert sums.grad[:2].tolist() == [0.0, 0.0]
    assert sums.grad[2:].abs().min() > 0


def test_dpo_loss_no_valid_pair_gives_zero_and_zero_gradient():
    sums = torch.tensor([1.0, 0.0], dtype=torch.float64, requires_grad=True)

    loss = dpo_loss(sums, None, torch.tensor([1.0, 0.0]), loss_type="ipo").loss
    loss.backward()

    assert loss.item() == 0
    assert sums.grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_type": "hinge"}, "allowed: sigmoid, ipo"),
        ({"beta": 0.0}, "beta=0.0 must be > 0"),
        ({"label_smoothing": 0.5}, r"\[0, 0.5\)"),
        ({"label_smoothing": 0.1, "loss_type": "ipo"}, "unless loss_type=sigmoid"),
        ({"reference": torch.zeros(4)}, "differ in number"),
        ({"policy": torch.zeros(3), "lens": torch.ones(3)}, "granularity=2"),
    ],
)
def test_dpo_loss_bad_input_is_named(options, message):
    arguments = {"policy": torch.zeros(2), "reference": None, "lens": torch.ones(2), **options}
    with pytest.raises(ValueError, match=message):
        dpo_loss(**arguments)


def test_completion_logprobs_shifts_the_mask_inside_each_sequence():
    # The second sequence begins with a completion token: nothing predicts it, and it must not reach the first sequence.
    logprobs = torch.tensor([1.0, 2.0, 99.0, 4.0, math.nan])

    sums, lens = completion_logprobs(logprobs, torch.tensor([0, 1, 1, 1, 1]), cu(3, 2))

    assert sums.tolist() == [3.0, 4.0]
    assert lens.tolist() == [2.0, 1.0]
