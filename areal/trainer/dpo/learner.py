"""The learner of direct preference optimisation: loss and evaluation on pairs, on an engine it holds.

Input is what ``areal.trainer.pairs`` makes, with ``loss_mask`` (1 on the completion's tokens) and, unless the loss is
reference-free, ``ref_logprobs``. The reference model is a second ``DPOLearner``, of which only ``compute_logp`` is
used. Called by ``DPOTrainer``, directly or through a worker process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from areal.trainer.pairs import PairRows, keep_pairs_together, pack_pairs
from areal.utils import stats_tracker
from areal.utils.batch import PackedBatch, roll_packed
from areal.utils.errors import DataError
from areal.utils.functional import PreferencePairs, completion_logprobs, dpo_loss, valid_pairs

if TYPE_CHECKING:
    from areal.api.cli_args import DPOEngineConfig
    from areal.api.engine_api import TrainEngine

REF_KEY = "ref_logprobs"


class DPOLearner:
    """Trains and evaluates a policy on preference pairs.

    Args:
        config: beta, loss type and its options.
        engine: an initialised ``TrainEngine`` of a language model; its micro-batches keep pairs together from now on.
    """

    def __init__(self, config: DPOEngineConfig, engine: TrainEngine) -> None:
        self.config = config
        self.engine = engine
        keep_pairs_together(engine)

    @torch.no_grad()
    def compute_logp(self, data: PairRows) -> Any:
        """Aligned log-probs under the current weights: one ``[2, S]`` per table, or ``[T]`` for a packed batch."""
        self.engine.eval()
        return self.engine.forward_batch(data)

    def train_dpo(self, data: PairRows) -> None:
        """One optimizer step; statistics go to the tracker ``dpo``.

        Raises:
            DataError: a field is missing, or the sequences are no pairs.
        """
        tracker = stats_tracker.get("dpo")
        batch = self._align(data)
        self.engine.train()
        loss = DPOLoss(self.config, tracker)
        tracker.scalar(**self.engine.train_batch(batch, loss, trained_pairs, token_mask="predicts"))

    @torch.no_grad()
    def evaluate_dpo(self, data: PairRows) -> Tensor | None:
        """Mean loss over the pairs of all data-parallel ranks; statistics go to ``dpo-eval``."""
        batch = self._align(data)
        self.engine.eval()
        loss = DPOLoss(self.config, stats_tracker.get("dpo-eval"))
        return self.engine.eval_batch(batch, loss, trained_pairs, token_mask="predicts")

    def _align(self, data: PairRows) -> PackedBatch:
        """Pack pairs and mark the positions that predict a completion's token as ``predicts``."""
        batch = pack_pairs(data)
        needed = ("loss_mask",) if self.config.reference_free else ("loss_mask", REF_KEY)
        missing = [key for key in needed if key not in batch.tokens]
        if missing:
            raise DataError(
                f"DPO pairs lack {', '.join(missing)}; reference log-probs come from ref.compute_logp(data)"
            )
        mask = batch.tokens["loss_mask"] != 0
        return batch.with_tokens(predicts=roll_packed(mask, batch.cu_seqlens, fill=False))


class DPOLoss:
    """Loss callback of one batch plus its statistics.

    Args:
        config: the learner's.
        tracker: receives them in the scope that is open when the loss is called.
    """

    def __init__(self, config: DPOEngineConfig, tracker: stats_tracker.DistributedStatsTracker) -> None:
        self.config = config
        self.tracker = tracker

    def replay_arguments(self) -> dict[str, Any]:
        """See ``areal.engine.core.failure_files.ReplayableLoss``."""
        return {"role": self.tracker.name}

    @classmethod
    def for_replay(cls, config: DPOEngineConfig, arguments: dict[str, Any]) -> DPOLoss:
        """See ``areal.engine.core.failure_files.ReplayableLoss``."""
        return cls(config, stats_tracker.DistributedStatsTracker(arguments["role"]))

    def __call__(self, logprobs: Tensor, entropy: Tensor, packed_input: dict[str, Any]) -> Tensor:
        """Mean loss of the micro-batch's valid pairs, float32; tensors are ``[T]``."""
        del entropy
        config = self.config
        mask, cu_seqlens = packed_input["loss_mask"], packed_input["cu_seqlens"]
        policy, lens = completion_logprobs(logprobs, mask, cu_seqlens)
        reference = None
        if not config.reference_free:
            reference, _ = completion_logprobs(packed_input[REF_KEY], mask, cu_seqlens)
        pairs = dpo_loss(policy, reference, lens, config.beta, config.loss_type, config.label_smoothing)
        self._record(pairs)
        return pairs.loss.float()

    def _record(self, pairs: PreferencePairs) -> None:
        chosen, rejected = pairs.chosen.float(), pairs.rejected.float()
        self.tracker.denominator(n_pairs=pairs.valid)
        self.tracker.stat(
            denominator="n_pairs",
            loss=pairs.pair_loss.float(),
            chosen_reward=chosen,
            rejected_reward=rejected,
            reward_accuracy=(chosen > rejected).float(),
            reward_margin=chosen - rejected,
        )


def trained_pairs(packed_input: dict[str, Any]) -> Tensor:
    """Weight of a micro-batch: its pairs with a completion on both sides."""
    mask = packed_input["loss_mask"]
    _, lens = completion_logprobs(torch.zeros_like(mask, dtype=torch.float32), mask, packed_input["cu_seqlens"])
    return valid_pairs(lens).count_nonzero()
