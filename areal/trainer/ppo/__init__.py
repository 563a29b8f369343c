"""Roles of the PPO family: the policy (``actor``), its advantages and its statistics. Each holds an engine.

The objectives that a config can name are in two tables: ``actor.loss_fn`` chooses from ``LOSS_FNS`` and
``actor.advantage_fn`` from ``ADVANTAGE_FNS``. Anything with a dot in it is the import path of a function of yours with
the same signature.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from areal.utils.dynamic_import import import_from_string
from areal.utils.errors import ConfigError
from areal.utils.registry import Registry

LOSS_FNS: Registry[Any] = Registry(
    "policy loss",
    {
        "ppo": "areal.trainer.ppo.losses.ppo_loss",
        "sapo": "areal.trainer.ppo.losses.sapo_loss",
        "cispo": "areal.trainer.ppo.losses.cispo_loss",
    },
)
ADVANTAGE_FNS: Registry[Any] = Registry("advantage", {"gae": "areal.trainer.ppo.advantages.gae_advantages"})


def resolve(key: str, name: str, table: Registry[Any]) -> Callable[..., Any]:
    """The function that the setting ``key`` names: an entry of ``table``, or an import path.

    Raises:
        ConfigError: no such name, the path cannot be imported, or what it names cannot be called; names the key.
    """
    try:
        found = import_from_string(name) if "." in name or ":" in name else table.get(name)
    except (ImportError, AttributeError, ValueError, ConfigError) as exc:
        raise ConfigError(
            f"{key}={name}: {exc}. Use one of {', '.join(table)} or the import path of a function"
        ) from exc
    if not callable(found):
        raise ConfigError(f"{key}={name} names a {type(found).__name__}; it must be a function")
    result: Callable[..., Any] = found
    return result
