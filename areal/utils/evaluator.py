"""Decides when to evaluate; the trainer gives it the function that does.

``should_evaluate_before_train`` is asked once before step 0 (or before a resumed run goes on), ``evaluate`` once per
training step, after the update.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from areal.utils.timeutil import EpochStepTimeFreqCtl, StepTracker

if TYPE_CHECKING:
    from areal.api.config.timers import EvaluatorConfig
    from areal.api.io_struct import FinetuneSpec, StepInfo


class Evaluator:
    """Runs an evaluation at the configured frequency.

    Args:
        config: ``freq_epochs``, ``freq_steps``, ``freq_secs`` (null = off; any of them fires), ``eval_before_train``.
        ft_spec: tells where an epoch ends.
    """

    def __init__(self, config: EvaluatorConfig, ft_spec: FinetuneSpec) -> None:
        self.config = config
        self.ft_spec = ft_spec
        self._tracker = StepTracker(EpochStepTimeFreqCtl(config.freq_epochs, config.freq_steps, config.freq_secs))
        self._owed = False

    def should_evaluate_before_train(self) -> bool:
        """For initial weights with ``eval_before_train``; and once after a resume whose last evaluation is owed."""
        if self._tracker.last_step < 0:
            return self.config.eval_before_train
        owed, self._owed = self._owed, False
        return owed

    def should_evaluate(self, step: int, global_step: int) -> bool:
        """Count this step (once) and say whether to evaluate after it."""
        return self._tracker.due(step, global_step, self.ft_spec.steps_per_epoch)

    def evaluate(self, fn: Callable[[], Any], epoch: int, step: int, global_step: int) -> bool:
        """Call ``fn()`` if this step is due; returns whether it was called."""
        if not self.should_evaluate(step, global_step):
            return False
        fn()
        return True

    def catch_up(self, last: StepInfo) -> None:
        """After a resume: count the recover point's own step if it was written before this step's check."""
        if self._tracker.last_step < last.global_step:
            self._owed = self._tracker.due(last.epoch_step, last.global_step, last.steps_per_epoch)

    def state_dict(self) -> dict[str, Any]:
        """Counters of the frequency."""
        return self._tracker.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the counters."""
        self._tracker.load_state_dict(state)
