"""A supervised learner on all its ranks: rows of this process are dealt out, every rank computes on its share.

The trainer calls the methods that a learner of this process has (``areal.trainer.{sft,dpo,rw}.learner``). A row is one
table; what must stay together, such as a preference pair, is one table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from areal.infra.controller.train_controller import TrainController, table_tokens
from areal.utils.seqpack import balanced_partition

Rows = Sequence[Mapping[str, Any]]


class LearnerController(TrainController):
    """A learner, or the reference model of one, on W ranks."""

    def train_lm(self, rows: Rows) -> None:
        """One optimizer step on rows with a loss mask."""
        self._call_on_shares("train_lm", rows)

    def evaluate_lm(self, rows: Rows) -> None:
        """Evaluate rows with a loss mask."""
        self._call_on_shares("evaluate_lm", rows)

    def train_dpo(self, rows: Rows) -> None:
        """One optimizer step on preference pairs."""
        self._call_on_shares("train_dpo", rows)

    def evaluate_dpo(self, rows: Rows) -> None:
        """Evaluate preference pairs."""
        self._call_on_shares("evaluate_dpo", rows)

    def train_rw(self, rows: Rows) -> None:
        """One optimizer step of a reward model on pairs."""
        self._call_on_shares("train_rw", rows)

    def evaluate_rw(self, rows: Rows) -> None:
        """Evaluate a reward model on pairs."""
        self._call_on_shares("evaluate_rw", rows)

    def compute_logp(self, rows: Rows) -> list[Tensor]:
        """Log-probs of every row under this role's weights, in the order of ``rows``."""
        parts, results = self._call_on_shares("compute_logp", rows)
        found: dict[int, Tensor] = {}
        for data_rank, part in enumerate(parts):
            rank = self._data_ranks.index(data_rank)  # ranks that share rows return the same
            found.update(zip(part, results[rank], strict=True))
        return [found[i] for i in range(len(rows))]

    def _call_on_shares(self, method: str, rows: Rows) -> tuple[list[list[int]], list[Any]]:
        """Call ``method`` on every rank with its share, balanced by tokens.

        Returns: the rows of each data-parallel rank, ascending, and what every rank returned.
        """
        parts = [sorted(part) for part in balanced_partition([table_tokens(row) for row in rows], self._data_size)]
        shares = [[dict(rows[i]) for i in part] for part in parts]
        results = self.ranks.each(lambda rank: self.ranks.call_one(rank, method, shares[self._data_ranks[rank]]))
        return parts, results
