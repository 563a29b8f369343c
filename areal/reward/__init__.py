"""Reward functions: ``fn(prompt, completions, prompt_ids, completion_ids, **columns) -> float``.

``prompt`` and ``completions`` are decoded with their special tokens; ``columns`` are the other columns of the dataset
row. ``resolve_reward_fn`` accepts a function, a class or an import string; ``get_custom_reward_fn`` finds a built-in
one by the dataset's path. Functions must be picklable, as they run in a process pool, unless they carry ``areal_inline
= True``. A trained reward model is :class:`areal.reward.reward_model.RewardModel`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from areal.utils.dynamic_import import import_from_string
from areal.utils.errors import ConfigError, UnsupportedFeatureError
from areal.utils.registry import Registry, lazy_exports

__all__ = [  # noqa: F822 - some are resolved lazily
    "REWARDS",
    "MathVerifyWorker",
    "RewardModel",
    "get_custom_reward_fn",
    "get_math_verify_worker",
    "resolve_reward_fn",
]

RewardFn = Callable[..., float]
REWARDS: Registry[RewardFn] = Registry(
    "reward",
    {
        "gsm8k": "areal.reward.gsm8k.gsm8k_reward_fn",
        "reasoning_gym": "areal.reward.reasoning_gym.reasoning_gym_reward_fn",
        "arithmetic": "areal.reward.arithmetic.arithmetic_reward_fn",
    },
)
LATER_REWARDS = ("clevr_count_70k", "geometry3k")

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "MathVerifyWorker": "areal.reward.math_answer.MathVerifyWorker",
        "get_math_verify_worker": "areal.reward.math_answer.get_math_verify_worker",
        "RewardModel": "areal.reward.reward_model.RewardModel",
    },
)


def get_custom_reward_fn(path: str, **kwargs: Any) -> RewardFn:
    """The built-in reward of the dataset at ``path``; the leftmost name in it wins.

    Raises:
        UnsupportedFeatureError: a reward that this build does not offer.
        ConfigError: (a ValueError) no built-in reward fits; the message lists them.
    """
    lowered = path.lower()
    for name in LATER_REWARDS:
        if name in lowered:
            raise UnsupportedFeatureError(
                f"the reward of {name!r} is not available in this version; give a function instead"
            )
    found = [name for name in REWARDS if name in lowered]
    if not found:
        raise ConfigError(
            f"no built-in reward for {path!r}; known: {', '.join(REWARDS)}. Give a function or import string"
        )
    return REWARDS.get(min(found, key=lowered.find))


def resolve_reward_fn(reward: Any) -> RewardFn:
    """The callable behind a reward given as function, object, class, import string or name of a built-in one.

    A class is instantiated without arguments; the instance must be callable. An object with a method ``areal_prepare``
    loads here what its calls need.

    Raises:
        ConfigError: it is not callable.
    """
    source = reward
    if isinstance(reward, str):
        reward = import_from_string(reward) if "." in reward or ":" in reward else REWARDS.get(reward)
    if isinstance(reward, type):
        reward = reward()
    if not callable(reward):
        raise ConfigError(
            f"reward_fn={source!r} is not callable: give a function, a class with __call__, or an import string"
        )
    prepare = getattr(reward, "areal_prepare", None)
    if prepare is not None:
        prepare()
    resolved: RewardFn = reward
    return resolved
