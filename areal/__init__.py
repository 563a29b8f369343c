"""AReaL: asynchronous reinforcement learning for language models and agents.

``import areal`` loads nothing heavy; every public name is resolved when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_LAZY = {
    "DPOTrainer": "areal.trainer.dpo_trainer",
    "PPOTrainer": "areal.trainer.rl_trainer",
    "RWTrainer": "areal.trainer.rw_trainer",
    "SFTTrainer": "areal.trainer.sft_trainer",
    "StalenessManager": "areal.infra.rollout.staleness",
    "WorkflowExecutor": "areal.infra.rollout.executor",
    "workflow_context": "areal.infra.workflow_context",
}

__all__ = [
    "DPOTrainer",
    "PPOTrainer",
    "RWTrainer",
    "SFTTrainer",
    "StalenessManager",
    "WorkflowExecutor",
    "__version__",
    "workflow_context",
]

if TYPE_CHECKING:
    from areal.infra import workflow_context
    from areal.infra.rollout.executor import WorkflowExecutor
    from areal.infra.rollout.staleness import StalenessManager
    from areal.trainer.dpo_trainer import DPOTrainer
    from areal.trainer.rl_trainer import PPOTrainer
    from areal.trainer.rw_trainer import RWTrainer
    from areal.trainer.sft_trainer import SFTTrainer


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'areal' has no attribute {name!r}")
    module = importlib.import_module(_LAZY[name])
    return module if _LAZY[name].endswith(f".{name}") else getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
