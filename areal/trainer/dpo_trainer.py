"""Direct preference optimisation: pairs of chosen and rejected completions in, an aligned language model out.

Every step scores the pairs under the frozen reference model, unless ``actor.reference_free``, and then trains on them.
"""

from __future__ import annotations

from typing import Any

from areal.trainer.dpo.learner import REF_KEY
from areal.trainer.learners import DPO
from areal.trainer.pairs import collate_pairs
from areal.trainer.supervised import Batch, SupervisedTrainer


class DPOTrainer(SupervisedTrainer):
    """Owns one DPO run.

    Args:
        config: a ``DPOConfig``.
        train_dataset: rows with ``chosen_ids``, ``rejected_ids``, ``chosen_loss_mask`` and ``rejected_loss_mask``.
        valid_dataset: same, evaluated when ``evaluator`` says so; statistics go to ``dpo-eval``.
    """

    kind = DPO

    @staticmethod
    def collate(samples: list[dict[str, Any]]) -> Batch:
        """Records -> one table ``[2, S]`` per pair, with ``loss_mask``."""
        return collate_pairs(samples, with_mask=True)

    def _complete(self, batch: Batch) -> Batch:
        """Add the reference model's log-probs as ``ref_logprobs [2, S]``."""
        if self.ref is None:
            return batch
        with self.phase("ref_logp"):
            found = self.ref.compute_logp(batch)
        return [{**table, REF_KEY: logprobs} for table, logprobs in zip(batch, found, strict=True)]

    def _update(self, batch: Batch) -> None:
        self.learner.train_dpo(batch)

    def _score(self, batch: Batch) -> None:
        self.learner.evaluate_dpo(batch)
