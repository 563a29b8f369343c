"""Equal results in every run: settings of torch and of the libraries below it. Called by the train engines."""

from __future__ import annotations

import torch

from areal.utils import environ

__all__ = ["DETERMINISTIC_ENV", "use_deterministic_algorithms"]

DETERMINISTIC_ENV = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NCCL_ALGO": ("Ring", "Tree", "CollnetDirect", "CollnetChain", "^NVLS"),
    "TORCHINDUCTOR_DETERMINISTIC": ("1",),
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),
}
"""Values that give equal results in every run; the first one is set unless another of them is."""


def use_deterministic_algorithms() -> None:
    """Equal results in every run of this process, with a warning where torch has no deterministic algorithm.

    NCCL and cuBLAS read their settings when they start, so call it before the first group and the first kernel. It
    stays on for the life of the process.
    """
    for name, allowed in DETERMINISTIC_ENV.items():
        if environ.get_env(name) not in allowed:
            environ.set_env({name: allowed[0]})
    torch.use_deterministic_algorithms(True, warn_only=True)
