"""Supervised learners in worker processes: the role object of one rank, for each learner.

Hosted as ``actor/<rank>`` (or ``ref/<rank>``) beside its engine; called by
``areal.infra.controller.learner_controller``. A rank whose share is empty gets a row that counts nowhere: it must join
the collectives of the step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from areal.api.remote import remote
from areal.infra.controller.tables import load_tables
from areal.trainer.dpo.learner import REF_KEY, DPOLearner
from areal.trainer.pairs import empty_pair
from areal.trainer.role_worker import RoleWorker, Share
from areal.trainer.rw.learner import RWLearner
from areal.trainer.sft.learner import LMLearner

if TYPE_CHECKING:
    from areal.api.engine_api import TrainEngine


class LMWorker(RoleWorker):
    """Supervised fine-tuning on one rank."""

    def __init__(self, config: Any, engine: TrainEngine) -> None:
        super().__init__(config, engine)
        self.learner = LMLearner(engine)

    @remote
    def train_lm(self, share: Share) -> None:
        """One optimizer step on this rank's rows."""
        self.learner.train_lm(_rows(share))

    @remote
    def evaluate_lm(self, share: Share) -> None:
        """Evaluate this rank's rows; statistics go to ``sft-eval``."""
        self.learner.evaluate_lm(_rows(share))


class DPOWorker(RoleWorker):
    """Direct preference optimisation on one rank, or its reference model."""

    def __init__(self, config: Any, engine: TrainEngine) -> None:
        super().__init__(config, engine)
        self.learner = DPOLearner(config, engine)

    @remote
    def compute_logp(self, share: Share) -> list[Tensor]:
        """Log-probs ``[2, S]`` of each table of the share."""
        tables = load_tables(share)
        found: list[Tensor] = self.learner.compute_logp(tables or [empty_pair()])
        return [logprobs.cpu() for logprobs in found[: len(tables)]]

    @remote
    def train_dpo(self, share: Share) -> None:
        """One optimizer step on this rank's pairs."""
        self.learner.train_dpo(self._pairs(share))

    @remote
    def evaluate_dpo(self, share: Share) -> None:
        """Evaluate this rank's pairs; statistics go to ``dpo-eval``."""
        self.learner.evaluate_dpo(self._pairs(share))

    def _pairs(self, share: Share) -> list[dict[str, Any]]:
        return load_tables(share) or [{**empty_pair(), REF_KEY: torch.zeros(2, 1)}]


class RWWorker(RoleWorker):
    """Reward modelling on one rank."""

    def __init__(self, config: Any, engine: TrainEngine) -> None:
        super().__init__(config, engine)
        self.learner = RWLearner(engine)

    @remote
    def train_rw(self, share: Share) -> None:
        """One optimizer step on this rank's pairs."""
        self.learner.train_rw(load_tables(share) or [empty_pair()])

    @remote
    def evaluate_rw(self, share: Share) -> None:
        """Evaluate this rank's pairs; statistics go to ``rw-eval``."""
        self.learner.evaluate_rw(load_tables(share) or [empty_pair()])


def _rows(share: Share) -> list[dict[str, Any]]:
    none = {"input_ids": torch.zeros(1, 1, dtype=torch.int64), "loss_mask": torch.zeros(1, 1, dtype=torch.int64)}
    return load_tables(share) or [{**none, "attention_mask": torch.ones(1, 1, dtype=torch.bool)}]
