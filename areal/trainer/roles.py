"""Roles under the names that scripts know: ``FSDPPPOActor(config)`` is a ``PPOActor`` that holds an ``FSDPEngine``.

One table names every pair; a new role or a new backend adds one entry. The object made offers the methods of both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from areal.trainer.dpo.learner import DPOLearner
from areal.trainer.ppo.actor import PPOActor
from areal.trainer.ppo.critic import PPOCritic
from areal.trainer.rw.learner import RWLearner
from areal.trainer.sft.learner import LMLearner
from areal.utils.registry import Registry

TRAIN_ENGINES: Registry[Any] = Registry(
    "train engine",
    {
        "fsdp": "areal.engine.fsdp_engine.FSDPEngine",
        "archon": "areal.experimental.engine.archon_engine.ArchonEngine",
        "megatron": "areal.engine.megatron_engine.MegatronEngine",
    },
)

_ROLES: dict[str, Callable[[Any, Any], Any]] = {
    "PPOActor": PPOActor,
    "PPOCritic": PPOCritic,
    "LMEngine": lambda config, engine: LMLearner(engine),
    "DPOEngine": DPOLearner,
    "RWEngine": lambda config, engine: RWLearner(engine),
}
_PREFIXES = {"FSDP": "fsdp", "Archon": "archon", "Megatron": "megatron"}


class HeldRole:
    """A role and the engine it holds, under one surface: the role's methods first, then the engine's."""

    def __init__(self, role: Any, engine: Any) -> None:
        self.role = role
        self.engine = engine

    def __getattr__(self, name: str) -> Any:
        if name in ("role", "engine"):  # not set yet, while copying
            raise AttributeError(name)
        return getattr(self.role if hasattr(type(self.role), name) else self.engine, name)


def make_role(prefix: str, role: str, config: Any) -> HeldRole:
    """The role ``role`` on a new engine of the backend that ``prefix`` stands for, not initialised yet."""
    engine = TRAIN_ENGINES.get(_PREFIXES[prefix])(config)
    return HeldRole(_ROLES[role](config, engine), engine)


def __getattr__(name: str) -> Any:
    for prefix in _PREFIXES:
        role = name.removeprefix(prefix)
        if name.startswith(prefix) and role in _ROLES:
            return lambda config: make_role(prefix, role, config)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
