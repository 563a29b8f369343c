"""How much memory each phase of a train engine takes: ``memory/<phase>/peak_gb`` and ``memory/<phase>/allocated_gb``.

Recorded in the statistics of the step (largest over calls and ranks), in units of 1024³ bytes. On a GPU: what torch
allocated, at most during the phase and after it. On a CPU: resident memory of the process, at most since it started and
after the phase; reading it takes microseconds. Called by the engine facades.
"""

from __future__ import annotations

import ctypes
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch

from areal.utils import stats_tracker
from areal.utils.stats_reduction import ReduceType

__all__ = ["MEMORY_SCOPE", "memory_of", "return_memory"]

MEMORY_SCOPE = "memory/"

_GIB = 1024**3
_MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes there, kilobytes elsewhere
_CALLS = torch.ones(1, dtype=torch.bool)


@contextmanager
def memory_of(phase: str, device: torch.device) -> Iterator[None]:
    """Record the memory of the block as ``memory/<phase>/…``; nested blocks of a GPU share one peak."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    yield
    if device.type == "cuda":
        peak, allocated = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_UNIT
        allocated = psutil.Process().memory_info().rss
        peak = max(peak, allocated)  # the kernel counts the peak in batches of pages
    with stats_tracker.disable_scope(), stats_tracker.scope(f"{MEMORY_SCOPE}{phase}"):
        stats_tracker.denominator(calls=_CALLS)
        figures = {"peak_gb": peak, "allocated_gb": allocated}
        values = {name: torch.tensor([n_bytes / _GIB], dtype=torch.float32) for name, n_bytes in figures.items()}
        stats_tracker.stat("calls", ReduceType.MAX, **values)


def return_memory(device: torch.device) -> None:
    """Freed memory goes back to the device or the system instead of staying with the allocator."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl does not
        if trim is not None:
            trim(0)
