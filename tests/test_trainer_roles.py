"""Roles under the names that scripts know: one object with the methods of the role and of its engine."""

from __future__ import annotations

import pytest
import torch

from areal.api.cli_args import DPOEngineConfig, OptimizerConfig, PPOActorConfig, PPOCriticConfig, TrainEngineConfig
from areal.engine.fsdp_engine import FSDPEngine
from areal.experimental.engine.archon_engine import ArchonEngine
from areal.trainer import roles
from areal.trainer.dpo.learner import DPOLearner
from areal.trainer.ppo.actor import PPOActor
from areal.trainer.ppo.critic import PPOCritic
from areal.trainer.rw.learner import RWLearner
from areal.trainer.sft.learner import LMLearner

NAMES = {"experiment_name": "tests", "trial_name": "roles", "backend": "fsdp:d1", "dtype": "float32"}


def test_fsdp_ppo_actor_offers_role_and_engine_methods(tiny_model_dir: str) -> None:
    config = PPOActorConfig(**NAMES, path=tiny_model_dir, optimizer=OptimizerConfig(lr=1e-3))
    actor = roles.FSDPPPOActor(config)
    actor.create_process_group()
    actor.initialize(None, None)
    actor.set_version(3)
    assert isinstance(actor.role, PPOActor)
    assert isinstance(actor.engine, FSDPEngine)
    assert actor.role.engine is actor.engine
    assert actor.get_version() == 3
    assert actor.should_compute_prox_logp() == config.should_compute_prox_logp()
    actor.destroy()


def test_fsdp_lm_engine_is_a_learner_on_an_engine(tiny_model_dir: str) -> None:
    engine = roles.FSDPLMEngine(TrainEngineConfig(**NAMES, path=tiny_model_dir))
    assert isinstance(engine.role, LMLearner)
    assert callable(engine.train_lm)
    assert callable(engine.forward_batch)


@pytest.mark.parametrize(("name", "role"), [("ArchonPPOActor", PPOActor), ("ArchonLMEngine", LMLearner)])
def test_archon_roles_hold_an_archon_engine(name: str, role: type, tiny_model_dir: str) -> None:
    settings = {**NAMES, "backend": "archon:d1", "path": tiny_model_dir}
    made = getattr(roles, name)(PPOActorConfig(**settings) if role is PPOActor else TrainEngineConfig(**settings))
    assert isinstance(made.role, role)
    assert isinstance(made.engine, ArchonEngine)
    made.create_process_group()
    made.initialize(None, None)
    assert made.initialized
    made.destroy()


@pytest.mark.parametrize(
    ("name", "role"),
    [("PPOActor", PPOActor), ("LMEngine", LMLearner), ("DPOEngine", DPOLearner), ("RWEngine", RWLearner)],
)
def test_megatron_roles_hold_a_megatron_engine(name: str, role: type, tiny_model_dir: str) -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed; pip install 'areal[megatron]'")
    kinds = {"PPOActor": PPOActorConfig, "DPOEngine": DPOEngineConfig}
    settings = {**NAMES, "backend": "megatron:d1", "path": tiny_model_dir, "is_critic": name == "RWEngine"}
    config = kinds.get(name, TrainEngineConfig)(**settings)
    made = getattr(roles, f"Megatron{name}")(config)
    assert isinstance(made.role, role)
    assert type(made.engine).__name__ == "MegatronEngine"
    made.create_process_group()
    made.initialize(None, None)
    assert made.initialized
    made.destroy()


def test_fsdp_dpo_and_reward_engines_keep_pairs_together(tiny_model_dir: str) -> None:
    dpo = roles.FSDPDPOEngine(DPOEngineConfig(**NAMES, path=tiny_model_dir))
    reward = roles.FSDPRWEngine(TrainEngineConfig(**NAMES, path=tiny_model_dir, is_critic=True))
    assert isinstance(dpo.role, DPOLearner)
    assert isinstance(reward.role, RWLearner)
    assert callable(dpo.compute_logp)
    assert [held.engine.config.mb_spec.granularity for held in (dpo, reward)] == [2, 2]


@pytest.mark.parametrize("prefix", ["FSDP", "Archon", "Megatron"])
def test_ppo_critic_of_every_backend_offers_role_and_engine_methods(tiny_model_dir: str, prefix: str) -> None:
    if prefix == "Megatron":
        pytest.importorskip("megatron.core", reason="megatron-core is not installed; pip install 'areal[megatron]'")
    backend = f"{prefix.lower()}:d1"
    names = {**NAMES, "backend": backend}
    config = PPOCriticConfig(**names, path=tiny_model_dir, is_critic=True, optimizer=OptimizerConfig(lr=1e-3))
    critic = getattr(roles, f"{prefix}PPOCritic")(config)
    critic.create_process_group()
    critic.initialize(None, None)
    ids = torch.arange(2, 8)[None]

    (values,) = critic.compute_values([{"input_ids": ids, "attention_mask": torch.ones_like(ids, dtype=torch.bool)}])

    assert isinstance(critic.role, PPOCritic)
    assert values.shape == (1, 6)
    assert callable(critic.ppo_update)
    critic.destroy()


def test_unknown_role_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="FSDPNothing"):
        _ = roles.FSDPNothing
