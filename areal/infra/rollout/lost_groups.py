"""What an executor does when the processes that ran its groups fail: rows go back to the queue, or the rollout ends.

Called by the rollout controller and the trainer; in one process nothing of this can happen.
"""

from __future__ import annotations

from collections.abc import Callable

from areal.api.trajectory import TrajectoryRef
from areal.infra.rollout.dispatcher import Dispatcher
from areal.infra.rollout.steps import StepBook


class LostGroups:
    """Gives finished groups back.

    Args:
        dispatcher: holds the groups.
        steps: knows the open step.
    """

    def __init__(self, dispatcher: Dispatcher, steps: StepBook) -> None:
        self._dispatcher, self._steps = dispatcher, steps

    def give_back(self, lost: Callable[[TrajectoryRef], bool], *, reopen_step: bool = False) -> int:
        """Rows of finished groups whose trajectories are gone (``lost(ref)``) return to the head of the queue.

        Args:
            lost: asked about each finished group that no step has taken.
            reopen_step: the open step could not be trained: its groups count as not taken again.
        Returns: how many rows went back.
        """
        with self._dispatcher.condition:
            if reopen_step:
                self._steps.reopen()
            number = self._steps.regenerate_ready(lost)
        if number and self._dispatcher.runner.alive:
            self._dispatcher.kick()
        return number

    def fail(self, error: BaseException) -> None:
        """End the rollout: every wait raises ``error`` from now on."""
        self._dispatcher.fail(error)
