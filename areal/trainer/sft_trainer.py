"""Supervised fine-tuning: rows of tokens with a loss mask in, a fine-tuned language model out."""

from __future__ import annotations

from typing import Any

import torch

from areal.trainer.learners import LM
from areal.trainer.supervised import Batch, SupervisedTrainer


def collate_tokens(samples: list[dict[str, Any]]) -> Batch:
    """Records with ``input_ids`` and ``loss_mask`` lists -> ``[1, S]`` tensors, ``attention_mask`` of ones added.

    A rank without rows (a short last step dealt out to several ranks) gets one token without loss: every rank must join
    the collectives of a step.
    """
    batch = []
    for sample in samples or [{"input_ids": [0], "loss_mask": [0]}]:
        row = {key: torch.as_tensor(sample[key])[None] for key in ("input_ids", "loss_mask")}
        row["attention_mask"] = torch.ones_like(row["input_ids"], dtype=torch.bool)
        batch.append(row)
    return batch


class SFTTrainer(SupervisedTrainer):
    """Owns one supervised run.

    Args:
        config: an ``SFTConfig``.
        train_dataset: rows with ``input_ids`` and ``loss_mask`` lists.
        valid_dataset: same, evaluated when ``evaluator`` says so; statistics go to ``sft-eval``.
    """

    kind = LM
    collate = staticmethod(collate_tokens)

    def _update(self, batch: Batch) -> None:
        self.learner.train_lm(batch)

    def _score(self, batch: Batch) -> None:
        self.learner.evaluate_lm(batch)
