"""Random seeds: one base seed per process for the global generators, and derived seeds for everything that must not
depend on the order in which things happen.

``set_random_seed`` is called once per worker; ``derive_seed`` gives the sampling seed of one generation request.
"""

from __future__ import annotations

import hashlib

from areal.utils.errors import ConfigError

_SEED_BITS = 63  # fits a signed 64-bit integer, as wire formats and torch generators want
_base_seed: int | None = None


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def set_random_seed(base_seed: int, key: str) -> None:
    """Seed python, numpy and torch with ``base_seed + sha256(key)`` modulo 2**32.

    Args:
        base_seed: the run's seed.
        key: what distinguishes this process, such as ``"trainer0"``; equal keys draw equal numbers.
    """
    global _base_seed
    import random

    import numpy as np
    import torch

    _base_seed = base_seed
    seed = (base_seed + int.from_bytes(hashlib.sha256(key.encode()).digest(), "big")) % 2**32
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - the global generator is what third-party code draws from
    torch.manual_seed(seed)


def get_seed() -> int:
    """The base seed given to :func:`set_random_seed`.

    Raises:
        ConfigError: (a ValueError) it was not called in this process.
    """
    if _base_seed is None:
        raise ConfigError("the random seed is not set in this process: call set_random_seed(base_seed, key) first")
    return _base_seed


def derive_seed(run_seed: int, epoch: int, row: int, sample: int, turn: int) -> int:
    """Sampling seed of one request, in ``[0, 2**63)``: equal coordinates give equal seeds in any process.

    Args:
        run_seed: seed of the run.
        epoch: pass over the data.
        row: index of the row in the dataset.
        sample: place in the row's group.
        turn: generation within the episode, from 0.
    """
    return _hash(f"{run_seed}/{epoch}/{row}/{sample}/{turn}") >> (64 - _SEED_BITS)


def derive_named_seed(run_seed: int, *parts: object) -> int:
    """Seed of a named stream, such as ``derive_named_seed(seed, "order", epoch)``; in ``[0, 2**63)``."""
    return _hash("/".join(["named", str(run_seed), *map(str, parts)])) >> (64 - _SEED_BITS)
