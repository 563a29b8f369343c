"""The names under which a PPO step reports: a run that has everything on exports every documented one."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from areal.api.cli_args import RejectionSamplingConfig
from areal.utils import stats_tracker
from tests.fakes import tiny_model
from tests.test_ppo_actor import GROUP, build_actor, run_step, trajectories

RANGE = ("avg", "min", "max")
# Scope -> numbers under their bare name, and averages with their range.
NAMES: dict[str, tuple[str, str]] = {
    "ppo_actor": (
        "n_seqs n_tokens n_valid_tokens correct_n_seqs incorrect_n_seqs agent mask_no_eos_with_zero eps_clip "
        "use_dual_clip c_clip rs_upper rs_lower",
        "correct_seq_len incorrect_seq_len advantages kl_rewards final_reward no_eos_ratios task_reward prompt_len "
        "seq_len turns",
    ),
    "ppo_actor/update": (
        "n_tokens n_valid_tokens clipped_tokens dual_clipped_tokens unclipped_behave_tokens rs_filtered_fraction "
        "update_successful grad_norm lr num_micro_batches",
        "importance_weight approx_kl new_logp old_logp entropy actor_loss clip_ratio dual_clip_ratio vocab_min_logits "
        "vocab_max_logits clipped_new_logp clipped_old_logp behave_imp_weight behave_approx_kl rkl_loss",
    ),
    "ppo_actor/update/compute_logp": ("", "prox_logp_gt kl_div_direct kl_div_taylor kl_div_dual"),
    "ppo_actor/update/version_stats": (
        "v_theta v_proximal n_valid_generated_tokens "
        + " ".join(f"sample_staleness_{name}_{kind}" for name in ("proximal", "theta") for kind in RANGE),
        "",
    ),
    **{
        f"ppo_actor/update/compute_logp/{method}": (
            "",
            "approx_logp behave_imp_weight importance_weight abs_error rel_error squared_error "
            "behave_imp_weight_abs_error behave_imp_weight_rel_error importance_weight_abs_error "
            "importance_weight_rel_error",
        )
        for method in ("loglinear", "linear", "rollout")
    },
}
SAPO = "sapo_soft_gate sapo_scaled_gate_pos sapo_scaled_gate_neg"


@pytest.fixture
def model_dir(tmp_path: Path) -> str:
    tiny_model().save_pretrained(tmp_path)
    stats_tracker.export_all()
    return str(tmp_path)


def test_ppo_step_with_everything_on_exports_every_name(model_dir: str) -> None:
    actor = build_actor(
        model_dir,
        use_decoupled_loss=True,
        prox_logp_method="metrics",
        rejection_sampling=RejectionSamplingConfig(upper=5.0, lower=0.01),
        c_clip=1.5,
        eps_clip=0.01,
        reward_norm=GROUP,
        log_agent_stats=True,
        log_agent_stats_keys=["turns"],
    )
    actor.engine.set_version(2)
    data = trajectories(version=1)
    for t in data:
        t["begin_of_trajectory"] = t["turns"] = t["row_id"] + 1
        t["teacher_logp"] = t["logprobs"] - 1
        t["rewards"][0] = 0.0

    stats = run_step(actor, data)

    expected = set()
    for scope, (plain, averaged) in NAMES.items():
        expected |= {f"{scope}/{name}" for name in plain.split()}
        expected |= {f"{scope}/{name}/{kind}" for name in averaged.split() for kind in RANGE}
    assert expected - stats.keys() == set()
    assert all(math.isfinite(value) for value in stats.values())


def test_sapo_step_exports_its_gates(model_dir: str) -> None:
    stats = run_step(build_actor(model_dir, use_sapo_loss=True), trajectories())

    assert {f"ppo_actor/update/{name}/{kind}" for name in SAPO.split() for kind in RANGE} <= stats.keys()
