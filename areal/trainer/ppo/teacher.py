"""The teacher role of on-policy distillation: log-probs of what the policy drew, on an engine that it holds.

In: a step's batch. Out: the same batch with ``teacher_logp`` and the numbers that say how much it counts; the policy's
loss reads both (``areal.trainer.ppo.actor.ActorLoss``). Nothing here learns. Called by ``PPOTrainer``. A teacher on an
inference server is a workflow instead: ``areal.workflow.taught``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from areal.utils.batch import PackedBatch, pack
from areal.utils.errors import ConfigError, VocabularyError
from areal.utils.hf_utils import require_same_vocabulary

if TYPE_CHECKING:
    from areal.api.config.ppo import TeacherConfig
    from areal.api.engine_api import TrainEngine

Trajectories = list[dict[str, Any]]


class Teacher:
    """Scores the policy's tokens; its model stays as it was loaded.

    Args:
        config: weights of the two losses, estimator of the distillation term.
        engine: an initialised ``TrainEngine`` with the teacher's model.
    """

    least_rows = 1
    """Groups that a step needs at least."""

    def __init__(self, config: TeacherConfig, engine: TrainEngine) -> None:
        self.config = config
        self.engine = engine

    def pack(self, trajectories: Trajectories | PackedBatch) -> PackedBatch:
        """Pack trajectories once."""
        return pack(trajectories)

    @torch.no_grad()
    def compute_logp(self, data: Trajectories | PackedBatch) -> Any:
        """Aligned log-probs under the teacher: one ``[n, S]`` per trajectory, or ``[T]`` for a packed batch."""
        self.engine.eval()
        return self.engine.forward_batch(data)

    def annotate(self, batch: PackedBatch, key: str = "teacher_logp") -> PackedBatch:
        """Return ``batch`` with ``compute_logp``'s result as token field ``key``, and what the loss reads beside it.

        Raises:
            ConfigError: the workflow brought a teacher's log-probs already.
        """
        require_untaught(batch, key)
        return batch.with_tokens(**{key: self.compute_logp(batch)}).with_scalars(**self.config.loss_settings())


def require_untaught(batch: PackedBatch, key: str = "teacher_logp") -> None:
    """Refuse a batch that another teacher has scored.

    Raises:
        ConfigError: it has ``key``.
    """
    if key in batch.tokens:
        raise ConfigError(
            f"the workflow returned {key}, and there is a teacher section as well: one teacher can be learnt from. "
            "Remove the section, or the workflow's teacher (TaughtWorkflow)"
        )


def check_vocabulary(config: Any, tokenizer: Any) -> None:
    """Refuse a teacher whose log-probs would be those of other tokens; reads no weights.

    Every token of the run's tokenizer must have the same id in the teacher's, and the teacher must have a row for every
    id that the policy can draw. It may know more tokens.

    Args:
        config: ``PPOConfig``; without a ``teacher`` nothing is checked.
        tokenizer: of the run.

    Raises:
        VocabularyError: names the teacher and the first differing tokens.
    """
    if config.teacher is None:
        return
    where = f"teacher.path={config.teacher.path!r}"
    require_same_vocabulary(tokenizer, config.teacher.path, where)
    rows, wanted = _vocab_rows(config.teacher.path), _vocab_rows(config.actor.path)
    if rows < wanted:
        raise VocabularyError(
            f"{where} knows {rows} token ids and actor.path={config.actor.path!r} can draw {wanted}: use a teacher "
            "with at least as many"
        )


def _vocab_rows(path: str) -> int:
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(path).get_text_config().vocab_size)
