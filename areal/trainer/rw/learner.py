"""The learner of reward models: Bradley-Terry loss and evaluation on pairs, on a value model's engine that it holds.

Input is what ``areal.trainer.pairs`` makes; the score of a sequence is the value at its last token. Called by
``RWTrainer``, directly or through a worker process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from areal.trainer.pairs import PairRows, keep_pairs_together, pack_pairs
from areal.utils import stats_tracker
from areal.utils.errors import EngineError
from areal.utils.functional import RewardPairs, rw_loss, valid_pairs

if TYPE_CHECKING:
    from areal.api.engine_api import TrainEngine


class RWLearner:
    """Trains and evaluates a reward model.

    Args:
        engine: an initialised ``TrainEngine`` with ``is_critic``; its micro-batches keep pairs together from now on.

    Raises:
        EngineError: the engine's model has no scalar head.
    """

    def __init__(self, engine: Any) -> None:
        if not engine.config.is_critic:
            raise EngineError("a reward model needs a scalar head: set actor.is_critic=true")
        self.engine: TrainEngine = engine
        keep_pairs_together(engine)

    def train_rw(self, data: PairRows) -> None:
        """One optimizer step; statistics go to the tracker ``rw``.

        Raises:
            DataError: the sequences are no pairs.
        """
        tracker = stats_tracker.get("rw")
        batch = pack_pairs(data)
        self.engine.train()
        tracker.scalar(**self.engine.train_batch(batch, RWLoss(tracker), scored_pairs))

    @torch.no_grad()
    def evaluate_rw(self, data: PairRows) -> Tensor | None:
        """Mean loss over the pairs of all data-parallel ranks; statistics go to ``rw-eval``."""
        batch = pack_pairs(data)
        self.engine.eval()
        return self.engine.eval_batch(batch, RWLoss(stats_tracker.get("rw-eval")), scored_pairs)


class RWLoss:
    """Loss callback of one batch plus its statistics.

    Args:
        tracker: receives them in the scope that is open when the loss is called.
    """

    def __init__(self, tracker: stats_tracker.DistributedStatsTracker) -> None:
        self.tracker = tracker

    def replay_arguments(self) -> dict[str, Any]:
        """See ``areal.engine.core.failure_files.ReplayableLoss``."""
        return {"role": self.tracker.name}

    @classmethod
    def for_replay(cls, config: Any, arguments: dict[str, Any]) -> RWLoss:
        """See ``areal.engine.core.failure_files.ReplayableLoss``."""
        del config
        return cls(stats_tracker.DistributedStatsTracker(arguments["role"]))

    def __call__(self, values: Tensor, packed_input: dict[str, Any]) -> Tensor:
        """Mean loss of the micro-batch's valid pairs; ``values`` is ``[T]``."""
        pairs = rw_loss(values, packed_input["cu_seqlens"])
        self._record(pairs)
        return pairs.loss

    def _record(self, pairs: RewardPairs) -> None:
        self.tracker.denominator(n_pairs=pairs.valid)
        self.tracker.stat(
            denominator="n_pairs",
            loss=pairs.pair_loss,
            correct_ratio=(pairs.chosen > pairs.rejected).float(),
            pos_score=pairs.chosen,
            neg_score=pairs.rejected,
            margin=pairs.chosen - pairs.rejected,
        )


def scored_pairs(packed_input: dict[str, Any]) -> Tensor:
    """Weight of a micro-batch: its pairs with a token on both sides."""
    return valid_pairs(packed_input["cu_seqlens"].diff()).count_nonzero()
