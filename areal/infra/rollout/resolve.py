"""Turns what a user may pass as ``workflow`` (object, class, import string) into one workflow object."""

from __future__ import annotations

import inspect
from typing import Any, cast

from areal.api.workflow_api import RolloutWorkflow
from areal.utils import logging
from areal.utils.dynamic_import import import_from_string

logger = logging.getLogger("Workflow")


def resolve_workflow(workflow: Any, workflow_kwargs: dict[str, Any] | None = None) -> RolloutWorkflow:
    """The workflow object to run.

    Args:
        workflow: a :class:`RolloutWorkflow` object, class, or the import string of either.
        workflow_kwargs: arguments of a class; required for one (``{}`` will do), ignored with a warning for an object.

    Raises:
        ValueError: no workflow; an import string that leads nowhere; a class without ``workflow_kwargs``; an agent
            (an object with ``async run``), which needs the agent proxy.
        TypeError: something that is no workflow at all.
    """
    target = check_workflow(workflow, workflow_kwargs)
    return cast("RolloutWorkflow", target(**(workflow_kwargs or {})) if inspect.isclass(target) else target)


def check_workflow(workflow: Any, workflow_kwargs: dict[str, Any] | None = None) -> Any:
    """The workflow object or class that ``workflow`` stands for; raises what :func:`resolve_workflow` raises."""
    if workflow is None:
        raise ValueError("workflow is None; give a workflow object, class or import string")
    target = import_workflow(workflow) if isinstance(workflow, str) else workflow
    if isinstance(target, RolloutWorkflow):
        if workflow_kwargs:
            logger.warning(
                f"workflow_kwargs={sorted(workflow_kwargs)} are ignored: {type(target).__name__} is an object"
            )
        return target
    if inspect.isclass(target) and issubclass(target, RolloutWorkflow):
        if workflow_kwargs is None:
            raise ValueError(f"workflow {target.__name__} is a class: give workflow_kwargs (may be {{}})")
        return target
    if inspect.iscoroutinefunction(getattr(target, "run", None)):
        raise ValueError(
            f"workflow {workflow!r} is an agent (async run): agents need a proxy address, and no proxy is running"
        )
    if hasattr(target, "arun_episode") and not inspect.isclass(target):
        return target  # anything with the one method is a workflow
    raise TypeError(f"workflow {workflow!r} is a {type(target).__name__}; it must be a RolloutWorkflow")


class WorkflowResolver:
    """:func:`resolve_workflow` that builds a class once for as long as the same class and arguments are asked for."""

    def __init__(self) -> None:
        self._asked: tuple[Any, dict[str, Any] | None] = (None, None)
        self._last: RolloutWorkflow | None = None

    def __call__(self, workflow: Any, workflow_kwargs: dict[str, Any] | None = None) -> RolloutWorkflow:
        """The workflow object to run; raises what :func:`resolve_workflow` raises."""
        same_name = isinstance(workflow, str) and workflow == self._asked[0]
        same = (workflow is self._asked[0] or same_name) and workflow_kwargs is self._asked[1]
        if self._last is None or not same:
            self._last = resolve_workflow(workflow, workflow_kwargs)
            self._asked = (workflow, workflow_kwargs)
        return self._last


def import_workflow(path: str) -> Any:
    """What an import string names; ValueError if it leads nowhere."""
    try:
        return import_from_string(path)
    except (ImportError, AttributeError, ValueError) as exc:
        raise ValueError(f"workflow {path!r} cannot be imported: {exc}") from exc
