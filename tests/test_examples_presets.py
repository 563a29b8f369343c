"""The presets under ``examples/math``: each sets what its algorithm says, and nothing else than GRPO's file does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from areal.api.cli_args import GRPOConfig, load_expr_config

FOLDER = Path(__file__).parents[1] / "examples" / "math"
GROUP = ("group", "group", False)
# Preset -> settings of the actor that differ from GRPO's (null: the section is left out).
PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "ppo": {"reward_norm": None},
    "drgrpo": {"reward_norm": ("group", None, False)},
    "liteppo": {"reward_norm": ("group", "batch", False)},
    "rloo": {"reward_norm": ("group", None, True)},
    "reinforce_pp": {"reward_norm": None, "kl_ctl": 0.001, "kl_estimator": "k1"},
    "reinforce_pp_baseline": {"reward_norm": ("group", None, False), "kl_ctl": 0.001, "kl_estimator": "k2"},
    "gspo": {"importance_sampling_level": "sequence"},
    "dapo": {
        "eps_clip": 0.2,
        "eps_clip_higher": 0.28,
        "overlong_reward_penalty": True,
        "overlong_tokens": 512,
        "overlong_penalty_factor": 1.0,
        "max_new_tokens": 4096,
    },
    "distill": {},
    "sapo": {
        "eps_clip": 0.2,  # the default, which SAPO does not read
        "use_sapo_loss": True,
        "recompute_logprob": False,
        "use_decoupled_loss": False,
        "rejection_sampling": None,
    },
    "m2po": {"eps_clip": 0.0, "m2_threshold": 0.04},
    "cispo": {
        "loss_fn": "cispo",
        "eps_clip": 1.0,
        "eps_clip_higher": 0.28,
        "recompute_logprob": False,
        "use_decoupled_loss": False,
        "rejection_sampling": None,
    },
}
COMMON = {
    "reward_bias": -0.5,
    "reward_scaling": 10.0,
    "eps_clip": 0.4,
    "eps_clip_higher": None,
    "recompute_logprob": True,
    "use_decoupled_loss": True,
    "rejection_sampling": ("ratio", 5.0),
    "reward_norm": GROUP,
    "adv_norm": ("batch", "batch", False),
    "kl_ctl": 0.0,
    "kl_estimator": "k1",
    "ppo_n_minibatches": 1,
    "importance_sampling_level": "token",
    "overlong_reward_penalty": False,
    "overlong_tokens": None,
    "overlong_penalty_factor": None,
    "max_new_tokens": 1024,
    "use_sapo_loss": False,
    "loss_fn": None,
    "m2_threshold": None,
    "c_clip": None,
    "loss_agg": "token-mean",
}


def shown(value: Any) -> Any:
    """A setting in the form of the tables above."""
    kind = type(value).__name__
    if kind == "NormConfig":
        return (value.mean_level, value.std_level, value.mean_leave1out)
    return (value.metric, value.upper) if kind == "RejectionSamplingConfig" else value


@pytest.mark.parametrize("name", PRESETS)
def test_preset_sets_what_its_algorithm_says(name: str) -> None:
    config, _ = load_expr_config(["--config", str(FOLDER / f"gsm8k_{name}.yaml")], GRPOConfig)

    actor = {key: shown(getattr(config.actor, key)) for key in COMMON}

    assert actor == {**COMMON, **PRESETS[name]}
    assert (config.actor.optimizer.lr, config.actor.optimizer.weight_decay) == (1.7e-5, 0.017)
    assert config.actor.optimizer.lr_scheduler_type == "constant"
    assert config.gconfig.n_samples == 4
    assert config.dynamic_bs == (name == "dapo")
    assert (config.critic is not None) == (name == "ppo")
    assert (config.ref is not None) == name.startswith("reinforce")
    assert (config.teacher is not None) == (name == "distill")


def test_preset_ppo_trains_a_critic_of_its_own_settings() -> None:
    config, _ = load_expr_config(["--config", str(FOLDER / "gsm8k_ppo.yaml")], GRPOConfig)

    assert config.critic.is_critic
    assert config.critic.eps_clip == 0.5
    assert config.critic.optimizer == config.actor.optimizer
    assert config.critic.backend == config.actor.backend


def test_preset_distill_has_a_larger_teacher_that_takes_turns() -> None:
    config, _ = load_expr_config(["--config", str(FOLDER / "gsm8k_distill.yaml")], GRPOConfig)

    assert (config.teacher.rl_loss_weight, config.teacher.distill_estimator) == (1.0, "k2")
    assert config.teacher.path != config.actor.path
    assert config.teacher.offload
    assert config.enable_offload


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "grpo"])
def test_preset_differs_from_grpo_in_its_algorithm_only(name: str) -> None:
    base, preset = (
        flat(yaml.safe_load((FOLDER / f"gsm8k_{file}.yaml").read_text(encoding="utf-8"))) for file in ("grpo", name)
    )

    changed = {key for key in base.keys() | preset.keys() if base.get(key) != preset.get(key)}

    # The three in the middle: DAPO; the last one: the teacher takes turns.
    allowed = {"experiment_name", "dynamic_bs", "gconfig.max_new_tokens", "actor.path", "enable_offload"}
    algorithm = {f"actor.{key}" for key in PRESETS[name]}
    for key in changed - allowed:
        assert key.startswith(("critic.", "ref.", "teacher.")) or any(
            key == one or key.startswith(f"{one}.") for one in algorithm | {"actor.sapo_tau_pos", "actor.sapo_tau_neg"}
        ), key


@pytest.mark.parametrize("name", PRESETS)
def test_preset_row_of_its_page_gives_file_and_source(name: str) -> None:
    page = (FOLDER.parents[1] / "docs" / "en" / "algorithms" / "grpo.md").read_text(encoding="utf-8")

    (row,) = (line for line in page.splitlines() if line.startswith("|") and f"`gsm8k_{name}.yaml`" in line)

    assert re.search(r"arXiv \d{4}\.\d{5}", row)
    for setting in PRESETS[name].keys() - {"reward_norm", "overlong_tokens", "overlong_penalty_factor"}:
        spoken = {"overlong_reward_penalty": "overlong penalty", "max_new_tokens": "overlong penalty"}
        if name in ("sapo", "cispo"):
            spoken |= dict.fromkeys(("recompute_logprob", "use_decoupled_loss", "rejection_sampling"), "ecomputed")
            spoken["eps_clip"] = "eps_clip" if name == "cispo" else ""
        assert spoken.get(setting, setting) in row, setting


def test_preset_files_and_table_name_the_same_algorithms() -> None:
    files = {path.stem.removeprefix("gsm8k_") for path in FOLDER.glob("gsm8k_*.yaml")}
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")

    assert files == {*PRESETS, "grpo_cpu", "grpo_lora", "grpo_lora_cpu", "grpo_vllm", "sft_cpu"}
    assert all(f"`{path.name}`" in readme for path in FOLDER.glob("*.yaml"))
