"""The learners of supervised trainers, and what each is built from; one table entry per learner.

In: a trainer's ``kind``. Out: objects, made by ``builder`` and ``remote_builder``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from areal.trainer.dpo.learner import DPOLearner
from areal.trainer.rw.learner import RWLearner
from areal.trainer.sft.learner import LMLearner

if TYPE_CHECKING:
    from areal.api.cli_args import DPOConfig


def _never(config: Any) -> bool:
    del config
    return False


def _unless_reference_free(config: DPOConfig) -> bool:
    return not config.actor.reference_free


@dataclass(frozen=True)
class LearnerKind:
    """What a learner is made of.

    Attributes:
        make: ``(section, engine) -> learner``, in this process.
        worker: import path of the class that holds the learner in a worker process.
        has_reference: whether a run of this config also has a frozen ``ref`` model.
    """

    make: Callable[[Any, Any], Any]
    worker: str
    has_reference: Callable[[Any], bool] = _never


LM = LearnerKind(lambda section, engine: LMLearner(engine), "areal.trainer.learner_workers.LMWorker")
DPO = LearnerKind(DPOLearner, "areal.trainer.learner_workers.DPOWorker", _unless_reference_free)
RW = LearnerKind(lambda section, engine: RWLearner(engine), "areal.trainer.learner_workers.RWWorker")
