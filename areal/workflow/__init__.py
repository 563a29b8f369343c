"""Episodes: how one row is generated and scored. The names below are loaded when first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal.workflow.grouped import GroupedRolloutWorkflow
    from areal.workflow.multi_turn import MultiTurnWorkflow
    from areal.workflow.rlvr import RLVRWorkflow
    from areal.workflow.taught import TaughtWorkflow

_LAZY = {
    "GroupedRolloutWorkflow": "areal.workflow.grouped",
    "MultiTurnWorkflow": "areal.workflow.multi_turn",
    "RLVRWorkflow": "areal.workflow.rlvr",
    "TaughtWorkflow": "areal.workflow.taught",
}

__all__ = ["GroupedRolloutWorkflow", "MultiTurnWorkflow", "RLVRWorkflow", "TaughtWorkflow"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
