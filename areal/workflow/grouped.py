"""Several samples of one row as one workflow; the 1.x name. The executor's ``group_size`` does the same without it."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING, Any

from areal.api.trajectory import check_trajectory
from areal.api.workflow_api import RolloutWorkflow
from areal.infra import workflow_context
from areal.infra.rollout.groups import add_truncated, as_table, concat_tables, drop_reason
from areal.utils import logging

if TYPE_CHECKING:
    from areal.api.engine_api import InferenceEngine

_logger = logging.getLogger("Workflow")


class GroupedRolloutWorkflow(RolloutWorkflow):
    """Runs another workflow ``group_size`` times at once and concatenates what comes back.

    A sample that fails or returns None is dropped with a warning. If nothing is left, the first failure is raised, or
    None is returned when there was none.

    Args:
        workflow: run once per sample, each with a sample index (hence seeds) of its own.
        group_size: samples per row, >= 1.
        logger: takes the warnings.

    Raises:
        ValueError: ``group_size < 1``.
    """

    def __init__(self, workflow: RolloutWorkflow, group_size: int, logger: Any = None) -> None:
        if group_size < 1:
            raise ValueError(f"group_size={group_size} must be >= 1")
        self.workflow = workflow
        self.group_size = group_size
        self.logger = _logger if logger is None else logger

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Any] | None:
        context = workflow_context.get()
        samples = [self._run(context, index, engine, data) for index in range(self.group_size)]
        outcomes = await asyncio.gather(*samples, return_exceptions=True)
        tables = [outcome for outcome in outcomes if isinstance(outcome, dict)]
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if len(tables) < self.group_size:
            reasons = [drop_reason(error) for error in errors] + ["none"] * outcomes.count(None)
            self.logger.warning(f"{len(reasons)} of {self.group_size} samples of a group were dropped: {reasons}")
        if not tables and errors:
            raise errors[0]
        return concat_tables(tables) if tables else None

    async def _run(
        self, context: workflow_context.WorkflowContext, index: int, engine: InferenceEngine, data: dict[str, Any]
    ) -> dict[str, Any] | None:
        episode = context.episode
        own = None
        if episode is not None:
            first = episode.sample * self.group_size
            own = dataclasses.replace(episode, sample=first + index, turn=0, stop_reasons=[], on_request=None)
            if index == self.group_size - 1:  # the last to ask speaks for the group
                own.on_request, episode.on_request = episode.on_request, None
        workflow_context.set(dataclasses.replace(context, episode=own))
        value = await self.workflow.arun_episode(engine, dict(data))
        if value is None:
            return None
        table = as_table(value)
        check_trajectory(table)
        add_truncated(table, own.stop_reasons if own is not None else [])
        return table
