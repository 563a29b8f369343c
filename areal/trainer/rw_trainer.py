"""Reward models: pairs of chosen and rejected texts in, a model that scores a text by one number out."""

from __future__ import annotations

from typing import Any

from areal.trainer.learners import RW
from areal.trainer.pairs import collate_pairs
from areal.trainer.supervised import Batch, SupervisedTrainer


class RWTrainer(SupervisedTrainer):
    """Owns one run of reward modelling.

    Args:
        config: an ``RWConfig``; ``actor.is_critic`` is true.
        train_dataset: rows with ``chosen_ids`` and ``rejected_ids``.
        valid_dataset: same, evaluated when ``evaluator`` says so; statistics go to ``rw-eval``.
    """

    kind = RW

    @staticmethod
    def collate(samples: list[dict[str, Any]]) -> Batch:
        """Records -> one table ``[2, S]`` per pair."""
        return collate_pairs(samples, with_mask=False)

    def _update(self, batch: Batch) -> None:
        self.learner.train_rw(batch)

    def _score(self, batch: Batch) -> None:
        self.learner.evaluate_rw(batch)
