"""Allocation strings (``fsdp:d4t2``, ``vllm:d2``, ``native:d1``): grammar, parallel layouts, devices per model."""

from __future__ import annotations

from typing import Any

from areal.api.alloc_mode.grammar import INFERENCE_BACKENDS, TRAIN_BACKENDS, AllocationSyntaxError
from areal.api.alloc_mode.strategy import (
    AllocationType,
    AllocationValidationError,
    ExpertLayoutError,
    FSDPParallelStrategy,
    InvalidAllocationModeError,
    MegatronParallelStrategy,
    ModelAllocation,
    ParallelStrategy,
    _AllocationMode,
)

__all__ = [
    "INFERENCE_BACKENDS",
    "TRAIN_BACKENDS",
    "AllocationSyntaxError",
    "AllocationType",
    "AllocationValidationError",
    "ExpertLayoutError",
    "FSDPParallelStrategy",
    "InvalidAllocationModeError",
    "MegatronParallelStrategy",
    "ModelAllocation",
    "ParallelStrategy",
    "_AllocationMode",
]


def __getattr__(name: str) -> Any:
    if name == "AllocationMode":
        raise AttributeError(
            "AllocationMode is gone: parse each backend field with ModelAllocation.from_str (actor.backend='fsdp:d4', "
            "rollout.backend='vllm:d2')"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
