"""Contracts and plain data types; names resolve on first use so that importing stays light."""

from __future__ import annotations

import importlib
from typing import Any

_LAZY = {
    "areal.api.alloc_mode": (
        "AllocationType",
        "FSDPParallelStrategy",
        "MegatronParallelStrategy",
        "ModelAllocation",
        "ParallelStrategy",
    ),
    "areal.api.engine_api": ("InferenceEngine", "TrainEngine"),
    "areal.api.io_struct": (
        "FinetuneSpec",
        "LocalInfServerInfo",
        "ModelRequest",
        "ModelResponse",
        "ParamSpec",
        "RolloutStat",
        "SaveLoadMeta",
        "StepInfo",
        "WeightUpdateMeta",
    ),
    "areal.api.reward_api": ("AsyncRewardWrapper",),
    "areal.api.scheduler_api": ("Job", "Scheduler", "Worker"),
    "areal.api.workflow_api": ("AgentWorkflow", "RolloutWorkflow", "WorkflowLike"),
}
_HOME = {name: module for module, names in _LAZY.items() for name in names}

__all__ = sorted(_HOME)  # noqa: PLE0605 - a generated list


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'areal.api' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
