"""The public methods of an inference engine that a rollout executor answers, written once.

Inherited by the embedded engine and by the rollout controller's engines, which add generation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from areal.api.engine_api import AcceptFn, InferenceEngine

if TYPE_CHECKING:
    from areal.api.workflow_api import WorkflowLike
    from areal.infra.rollout.executor import WorkflowExecutor


class ExecutorFacade(InferenceEngine):
    """Hands everything about episodes to ``executor``."""

    executor: WorkflowExecutor

    def set_version(self, version: int) -> None:
        self.executor.set_version(version)

    def get_version(self) -> int:
        return self.executor.get_version()

    def pause(self) -> None:
        self.executor.pause()

    def resume(self) -> None:
        self.executor.resume()

    def submit(  # noqa: PLR0913 - public 1.x signature
        self,
        data: dict[str, Any],
        workflow: WorkflowLike,
        workflow_kwargs: dict[str, Any] | None = None,
        should_accept_fn: AcceptFn | str | None = None,
        group_size: int = 1,
        task_id: int | None = None,
        is_eval: bool = False,
    ) -> int:
        return self.executor.submit(data, workflow, workflow_kwargs, should_accept_fn, group_size, task_id, is_eval)

    def wait(self, count: int, timeout: float | None = None, raise_timeout: bool = True) -> list[dict[str, Any] | None]:
        return self.executor.wait(count, timeout, raise_timeout)

    def wait_for_task(
        self, task_id: int, timeout: float | None = None, raise_timeout: bool = True
    ) -> dict[str, Any] | None:
        return self.executor.wait_for_task(task_id, timeout, raise_timeout)

    def rollout_batch(
        self,
        data: list[dict[str, Any]],
        workflow: WorkflowLike,
        workflow_kwargs: dict[str, Any] | None = None,
        group_size: int = 1,
    ) -> list[dict[str, Any]]:
        return self.executor.rollout_batch(data, workflow, workflow_kwargs, group_size)

    def prepare_batch(  # noqa: PLR0913 - public 1.x signature
        self,
        dataloader: Any,
        workflow: WorkflowLike,
        workflow_kwargs: dict[str, Any] | None = None,
        should_accept_fn: AcceptFn | str | None = None,
        group_size: int = 1,
        dynamic_bs: bool = False,
    ) -> list[dict[str, Any]]:
        return self.executor.prepare_batch(
            dataloader, workflow, workflow_kwargs, should_accept_fn, group_size, dynamic_bs
        )

    def export_stats(self) -> dict[str, float]:
        return self.executor.export_stats()
