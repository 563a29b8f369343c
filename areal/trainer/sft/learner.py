"""The learner of supervised fine-tuning: loss and evaluation of a language model, on an engine it holds.

Input is a list of padded ``[1, S]`` (or ``[n, S]``) dicts with ``input_ids, attention_mask, loss_mask``, one padded
dict, or a ``PackedBatch``. Called by ``SFTTrainer``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from areal.utils import stats_tracker
from areal.utils.batch import PackedBatch, pack, roll_packed, sequence_ids
from areal.utils.errors import DataError
from areal.utils.functional import perplexity, sft_loss

if TYPE_CHECKING:
    from areal.api.engine_api import TrainEngine

Rows = list[dict[str, Any]] | dict[str, Any] | PackedBatch


class LMLearner:
    """Trains and evaluates a language model on rows with a loss mask.

    Args:
        engine: an initialised ``TrainEngine``.
    """

    def __init__(self, engine: TrainEngine) -> None:
        self.engine = engine

    def train_lm(self, data: Rows) -> None:
        """One optimizer step; statistics go to the tracker ``sft``."""
        batch = align_rows(data)
        tracker = stats_tracker.get("sft")
        self.engine.train()
        result = self.engine.train_batch(batch, SFTLoss(tracker), trained_tokens, token_mask="loss_mask")
        tracker.scalar(**result)

    @torch.no_grad()
    def evaluate_lm(self, data: Rows) -> Tensor | None:
        """Mean loss over the rows of all data-parallel ranks; statistics go to the tracker ``sft-eval``."""
        batch = align_rows(data)
        self.engine.eval()
        return self.engine.eval_batch(
            batch, SFTLoss(stats_tracker.get("sft-eval")), trained_tokens, token_mask="loss_mask"
        )


class SFTLoss:
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
    def for_replay(cls, config: Any, arguments: dict[str, Any]) -> SFTLoss:
        """See ``areal.engine.core.failure_files.ReplayableLoss``."""
        return cls(stats_tracker.DistributedStatsTracker(arguments["role"]))

    def __call__(
        self, logprobs: Tensor, entropy: Tensor, packed_input: dict[str, Any], **logit_range: Tensor
    ) -> Tensor:
        """Mean negative log-likelihood of the micro-batch's trained tokens; tensors are ``[T]``."""
        del entropy
        mask = packed_input["loss_mask"] != 0
        self._record(logprobs.detach(), mask, packed_input["cu_seqlens"], logit_range)
        return sft_loss(logprobs, mask)

    @torch.no_grad()
    def _record(self, logprobs: Tensor, mask: Tensor, cu_seqlens: Tensor, logit_range: dict[str, Tensor]) -> None:
        n_sequences = cu_seqlens.shape[0] - 1
        ppl, has_tokens = perplexity(logprobs, mask, sequence_ids(cu_seqlens, mask.shape[0]), n_sequences)
        self.tracker.denominator(
            n_seqs=has_tokens, n_tokens=torch.ones_like(mask), n_valid_tokens=mask, prompt_tokens=~mask
        )
        self.tracker.stat(denominator="n_seqs", ppl=ppl)
        losses = torch.where(mask, -logprobs, 0.0)
        self.tracker.stat("n_valid_tokens", None, loss=losses, **{k: v.detach() for k, v in logit_range.items()})


def align_rows(data: Rows) -> PackedBatch:
    """Pack rows and roll their loss mask left by one inside each sequence.

    Raises:
        DataError: a row lacks ``loss_mask``.
    """
    batch = pack(data)
    if "loss_mask" not in batch.tokens:
        raise DataError("SFT rows need 'loss_mask' (1 on tokens to learn); the dataset's collator must provide it")
    return batch.with_tokens(loss_mask=roll_packed(batch.tokens["loss_mask"] != 0, batch.cu_seqlens, fill=False))


def trained_tokens(packed_input: dict[str, Any]) -> Tensor:
    """Weight of a micro-batch: its trained tokens."""
    mask: Tensor = packed_input["loss_mask"]
    return mask.count_nonzero()
