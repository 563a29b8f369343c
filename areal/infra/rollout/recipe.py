"""How a workflow gets to a rollout worker: not as an object, but as what it is built from.

The controller turns what the user passed as ``workflow`` into a :class:`WorkflowRecipe`; each worker builds its own
object from it, once. Nothing is pickled: classes and functions travel as names, arguments as typed values.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any, cast

from areal.api.workflow_api import RolloutWorkflow
from areal.infra.rollout.resolve import check_workflow, import_workflow, resolve_workflow


@dataclass(eq=False)
class WorkflowRecipe:
    """What a workflow is built from.

    Attributes:
        target: import string, or a class.
        args, kwargs: its constructor's arguments.
    """

    target: Any
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def build(self) -> RolloutWorkflow:
        """The workflow object; raises what its constructor raises."""
        target = import_workflow(self.target) if isinstance(self.target, str) else self.target
        if not inspect.isclass(target):
            return resolve_workflow(target)
        return cast("RolloutWorkflow", target(*self.args, **self.kwargs))  # checked where the recipe was made


def workflow_recipe(workflow: Any, workflow_kwargs: dict[str, Any] | None = None) -> WorkflowRecipe:
    """The recipe of what a user may pass as ``workflow``.

    Args:
        workflow: a :class:`RolloutWorkflow` object or class, or the import string of either.
        workflow_kwargs: arguments of a class.

    Raises:
        ValueError, TypeError: as :func:`areal.infra.rollout.resolve.resolve_workflow`; an object that does not know
            what it was constructed with, because its class does not derive from :class:`RolloutWorkflow`.
    """
    target = check_workflow(workflow, workflow_kwargs)
    if inspect.isclass(target):
        return WorkflowRecipe(workflow, kwargs=dict(workflow_kwargs or {}))
    if isinstance(workflow, str):
        return WorkflowRecipe(workflow)
    made_of = getattr(target, "constructed_with", None)
    if made_of is None:
        raise ValueError(
            f"workflow {type(target).__name__} is an object that rollout workers cannot rebuild: derive its class from "
            "RolloutWorkflow, or pass the class (or its import string) with workflow_kwargs"
        )
    args, kwargs = made_of
    return WorkflowRecipe(type(target), tuple(args), dict(kwargs))


class RecipeResolver:
    """:func:`workflow_recipe` that makes one recipe for as long as the same workflow and arguments are asked for."""

    def __init__(self) -> None:
        self._asked: tuple[Any, Any] = (None, None)
        self._last: WorkflowRecipe | None = None

    def __call__(self, workflow: Any, workflow_kwargs: dict[str, Any] | None = None) -> WorkflowRecipe:
        """The recipe; raises what :func:`workflow_recipe` raises."""
        if isinstance(workflow, WorkflowRecipe):
            return workflow
        same = isinstance(workflow, str) and workflow == self._asked[0]
        if self._last is None or not ((same or workflow is self._asked[0]) and workflow_kwargs is self._asked[1]):
            self._last = workflow_recipe(workflow, workflow_kwargs)
            self._asked = (workflow, workflow_kwargs)
        return self._last
