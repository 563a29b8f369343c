"""Vectors of the formulas: normalisation, KL, rewards, advantages, losses, log-probs."""

from __future__ import annotations

import pytest
import torch

from areal.api.cli_args import NormConfig, PPOActorConfig, RejectionSamplingConfig
from areal.trainer.ppo.advantages import compute_advantages
from areal.utils.batch import pack, pad_packed
from areal.utils.data import KLEstimator, Normalization
from areal.utils.functional import (
    compute_prox_logp_approximations,
    gather_logprobs,
    gather_logprobs_entropy,
    kl_estimate,
    normalize,
    overlong_penalty,
    ppo_actor_loss_fn,
    sft_loss,
)
from tests.vector_files import assert_equals_vector, load_vector

NORM_VECTORS = [
    "norm_grpo_group_group",
    "norm_drgrpo_group_none",
    "norm_liteppo_group_batch",
    "norm_rloo_group_leave1out",
    "norm_batch_batch_biased",
    "norm_none_batch",
    "norm_adv_batch_masked",
    "norm_adv_group_masked",
]
ADVANTAGE_VECTORS = [
    "adv_gae_critic_kl_k1",
    "adv_mask_no_eos_zero",
    "adv_no_recompute_prox_is_behave",
    "adv_plain_no_critic",
    "adv_recompute_replaces_logp",
    "adv_reward_shape",
    "preset_dapo_shaping",
    "preset_drgrpo",
    "preset_grpo",
    "preset_liteppo",
    "preset_reinforce_pp",
]
LOSS_VECTORS = [
    "decoupled_seq_clamp_ratio_mean",
    "decoupled_seq_mask_ratio_max",
    "decoupled_seq_mask_ratio_mean",
    "decoupled_seq_mask_ratio_sum",
    "decoupled_token_clamp_ratio",
    "decoupled_token_mask_k1",
    "decoupled_token_mask_k2",
    "decoupled_token_mask_k3",
    "decoupled_token_mask_ratio",
    "gspo_sequence_2d",
    "gspo_sequence_packed",
    "ppo_all_masked",
    "ppo_token_clip",
    "ppo_token_clip_higher",
    "ppo_token_dual_clip",
    "ppo_wide_clip_higher",
    "ppo_wide_sym",
]


@pytest.mark.parametrize("name", NORM_VECTORS)
def test_normalize_matches_vector(name):
    vector = load_vector(name)
    config = NormConfig(**vector["config"])
    x = torch.tensor(vector["inputs"]["x"])
    mask = vector["inputs"].get("mask")
    mask = None if mask is None else torch.tensor(mask)
    rows = torch.arange(x.shape[0]) // config.group_size  # the vector's groups are consecutive rows
    group_id = rows.view(-1, *[1] * (x.dim() - 1)).expand_as(x)

    result = normalize(x, mask, group_id, config)

    assert_equals_vector(result, vector["outputs"]["y"])
    assert_equals_vector(Normalization(config)(x, mask), vector["outputs"]["y"])


def test_normalize_edge_cases_match_vector():
    vector = load_vector("norm_edge_cases")
    expected = vector["outputs"]
    x = torch.tensor(vector["inputs"]["x"])
    alone = torch.arange(2)
    single = NormConfig(mean_level="group", mean_leave1out=True, std_level="group", group_size=1)

    # group1_loo_unbiased holds for a configured group size of 1 only: the survivor of a larger group gets 0.
    assert_equals_vector(normalize(x, None, alone, single), expected["group1_loo_unbiased"])
    larger = NormConfig(mean_level="group", mean_leave1out=True, std_level="group", group_size=4)
    assert normalize(x, None, alone, larger).tolist() == [0.0, 0.0]

    plain = NormConfig(mean_level="group", std_level="group", group_size=1)
    assert_equals_vector(normalize(x, None, alone, plain), expected["group1_plain"])
    constant = normalize(torch.ones(2), None, torch.zeros(2), NormConfig(mean_level="group", std_level="group"))
    assert_equals_vector(constant, expected["constant_group"])
    # The 1.x name returns all-masked input unchanged; our own function gives 0 off the mask, always.
    masked = torch.zeros(1, 2)
    assert_equals_vector(Normalization(NormConfig())(x[None], masked), expected["all_masked"])
    assert normalize(x[None], masked, None, NormConfig()).tolist() == [[0.0, 0.0]]


def test_kl_estimators_match_vector():
    vector = load_vector("kl_estimators")
    p, base = (torch.tensor(vector["inputs"][k]) for k in ("log_probs", "log_probs_base"))
    for kind in ("k1", "k2", "k3"):
        assert_equals_vector(KLEstimator(kind)(p, base), vector["outputs"][f"{kind}_clamped"])
    for kind in ("k1", "k2"):
        assert_equals_vector(kl_estimate(p, base, kind, clamp=False), vector["outputs"][f"{kind}_raw"])
    assert_equals_vector(kl_estimate(p[:3], base[:3], "k3", clamp=False), vector["outputs"]["k3_raw_first3"])


def test_overlong_penalty_matches_vector():
    vector = load_vector("overlong_penalty")
    config, inputs = vector["config"], vector["inputs"]

    result = overlong_penalty(
        torch.tensor(inputs["rewards"]),
        torch.tensor(inputs["response_lengths"]),
        max_new_tokens=config["max_new_tokens"],
        overlong_tokens=config["overlong_tokens"],
        factor=config["overlong_penalty_factor"],
    )

    assert_equals_vector(result, vector["outputs"]["rewards"])


def _actor_config(settings):
    settings = dict(settings)
    for key in ("adv_norm", "reward_norm"):
        if settings.get(key) is not None:
            settings[key] = NormConfig(**settings[key])
    return PPOActorConfig(**settings)


@pytest.mark.parametrize("name", ADVANTAGE_VECTORS)
def test_compute_advantages_matches_vector(name):
    vector = load_vector(name)
    data = {key: torch.tensor(value) for key, value in vector["inputs"].items()}
    width = data["input_ids"].shape[1]
    # The vectors infer truncation from the width and groups from positions; here both are fields.
    data["truncated"] = data["attention_mask"].sum(-1) == width
    config = _actor_config(vector["config"])
    size = config.reward_norm.group_size if config.reward_norm else 1
    data["group_id"] = torch.arange(data["input_ids"].shape[0]) // size

    batch = compute_advantages(pack(data), config)

    real = data["attention_mask"].bool()
    trained = torch.tensor(vector["outputs"]["loss_mask"]).bool()
    for key in ("loss_mask", "logprobs", "kl_rewards", "tot_rewards", "advantages", "returns"):
        actual = pad_packed(batch.tokens[key], batch.lens, width)
        expected = torch.tensor(vector["outputs"][key])
        # Critic values off the mask are no part of our returns (masked positions reach no result).
        where = trained if key == "returns" else real
        assert_equals_vector(actual[where], expected[where].tolist())


@pytest.mark.parametrize("name", LOSS_VECTORS)
def test_ppo_actor_loss_matches_vector(name):
    vector = load_vector(name)
    settings, expected = dict(vector["config"]), vector["outputs"]
    inputs = {key: torch.tensor(value) for key, value in vector["inputs"].items()}
    logprobs = inputs["logprobs"].requires_grad_()
    if settings.get("rejection_sampling"):
        settings["rejection_sampling"] = RejectionSamplingConfig(**settings["rejection_sampling"])
    if "cu_seqlens" in settings:
        settings["cu_seqlens"] = torch.tensor(settings["cu_seqlens"], dtype=torch.int32)

    loss, stats = ppo_actor_loss_fn(**inputs, **settings)
    loss.backward()

    assert_equals_vector(loss, expected["loss"])
    assert_equals_vector(logprobs.grad, expected["grad_logprobs"])
    for key in ("importance_weight", "clip_mask", "dual_clip_mask", "behave_imp_weight", "behave_mask"):
        if key in expected:
            assert_equals_vector(stats[key], expected[key])
    if "behave_approx_kl" in expected:
        assert_equals_vector(stats["behave_approx_kl"], expected["behave_approx_kl"])
        assert_equals_vector(stats["filtered_fraction"], expected["filtered_fraction"])
    # The vectors' per-token loss has numbers off the mask; ours is 0 there.
    mask = inputs["loss_mask"].bool()
    per_token = torch.where(mask, torch.tensor(expected["per_token_loss"]), 0.0)
    assert_equals_vector(stats["loss"], per_token.tolist())


def test_prox_approximations_match_vector():
    vector = load_vector("prox_approximations")
    inputs = {key: torch.tensor(value) for key, value in vector["inputs"].items()}

    result = compute_prox_logp_approximations(**inputs, current_version=vector["config"]["current_version"])

    for method, expected in vector["outputs"].items():
        assert_equals_vector(result[method], expected)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprob_entropy_matches_vector(temperature):
    vector = load_vector("logprob_entropy")
    logits, labels = torch.tensor(vector["inputs"]["logits"]), torch.tensor(vector["inputs"]["labels"])

    logprobs, entropy = gather_logprobs_entropy(logits, labels, temperature)

    assert_equals_vector(logprobs, vector["outputs"][f"logp_T{temperature}"])
    assert_equals_vector(entropy, vector["outputs"][f"entropy_T{temperature}"])
    assert torch.equal(gather_logprobs(logits, labels, temperature, rows_per_chunk=1), logprobs)


def test_sft_loss_matches_vector():
    vector = load_vector("sft_packed")
    logprobs = torch.tensor(vector["inputs"]["logprobs"], requires_grad=True)

    loss = sft_loss(logprobs, torch.tensor(vector["inputs"]["loss_mask"]))
    loss.backward()

    assert_equals_vector(loss, vector["outputs"]["loss"])
    assert_equals_vector(logprobs.grad, vector["outputs"]["grad"])
