"""CPU threads of a process that computes in two places at once: a trainer and an embedded sampler.

Each Python thread that runs torch operators has an OpenMP team of its own. As soon as all teams together hold more
threads than there are cores, libgomp puts idle team members to sleep at once instead of letting them spin, and every
small operator pays for waking them: a decode step of a one-million-parameter model took twice its time. So the teams
are sized to fit, and a thread that will only wait gives its team back.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

from areal.utils import logging

logger = logging.getLogger("Threads")
_PAUSE_SOFT = 1  # omp_pause_soft


@cache
def process_threads() -> int:
    """Threads that torch was given when this was first asked, before anybody split them."""
    import torch

    return torch.get_num_threads()


def split_threads(available: int) -> tuple[int, int]:
    """Threads for (sampler, trainer) out of ``available`` (>= 1) when both compute at once.

    The trainer gets one more than what is left: the thread that a team is led by is not counted as part of a pool.
    """
    sampler = max(1, available // 2)
    return sampler, max(1, available - sampler + 1)


def release_thread_pool() -> bool:
    """Give back the idle OpenMP team of the calling thread; its next parallel region makes a new one.

    Returns: whether there was a library to ask; without one nothing changes.
    """
    library = _openmp()
    if library is None:
        return False
    return bool(library.omp_pause_resource_all(_PAUSE_SOFT) == 0)


@cache
def _openmp() -> Any:
    """The OpenMP library that this process has loaded, or None."""
    try:
        maps = Path("/proc/self/maps").read_text()
        loaded = {line.rpartition(" ")[2] for line in maps.splitlines() if "libgomp" in line}
        for path in sorted(loaded):
            library = ctypes.CDLL(path)
            if hasattr(library, "omp_pause_resource_all"):
                return library
    except OSError as exc:
        logger.debug(f"no OpenMP library to ask: {exc}")
    return None
