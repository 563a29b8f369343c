"""The contract of a workflow: one dataset row in, one trajectory out.

Written by users, called by the rollout executor inside an asyncio loop: never block in ``arun_episode``.
"""

from __future__ import annotations

import abc
import warnings
from typing import TYPE_CHECKING, Any, Self, TypeAlias

if TYPE_CHECKING:
    from areal.api.engine_api import InferenceEngine


class RolloutWorkflow(abc.ABC):
    """How one episode is generated and scored.

    An object remembers what it was constructed with, so that rollout workers in other processes can build their own: it
    must not depend on state that is set afterwards.
    """

    constructed_with: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        self = super().__new__(cls)
        self.constructed_with = (args, kwargs)
        return self

    @abc.abstractmethod
    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Any] | None:
        """Run one episode.

        Args:
            engine: offers ``await engine.agenerate(request)``.
            data: one dataset row.

        Returns:
            A trajectory (see :mod:`areal.api.trajectory`); None rejects the episode. An exception ends this attempt:
            the row is tried again, then ends as failed.
        """


class AgentWorkflow(abc.ABC):  # noqa: B024 - kept for 1.x subclasses, which define what they need
    """Deprecated base of 1.x agents: any object with ``async run(data, **extra)`` will do."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        warnings.warn("AgentWorkflow is deprecated: write a class with async run()", DeprecationWarning, stacklevel=2)


WorkflowLike: TypeAlias = "RolloutWorkflow | type[RolloutWorkflow] | str | Any | None"
