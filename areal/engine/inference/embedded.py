"""The inference engine that lives in the trainer's process: the native sampler plus a rollout executor.

Built by the trainer's builder; given to workflows as ``engine``. Several of these may share one sampler (training and
evaluation), each with limits and statistics of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from areal.api.engine_api import AcceptFn, InferenceEngine
from areal.infra import workflow_context
from areal.infra.rollout.executor import WorkflowExecutor
from areal.utils import perf_tracer

if TYPE_CHECKING:
    from areal.api.cli_args import InferenceEngineConfig
    from areal.api.io_struct import ModelRequest, ModelResponse
    from areal.api.workflow_api import WorkflowLike
    from areal.engine.native.engine import NativeEngine


class EmbeddedInfEngine(InferenceEngine):
    """Runs episodes against a :class:`NativeEngine` of the same process."""

    def __init__(
        self,
        config: InferenceEngineConfig,
        sampler: NativeEngine,
        *,
        run_seed: int = 1,
        tokenizer: Any = None,
        is_eval: bool = False,
    ) -> None:
        self.config = config
        self.sampler = sampler
        self.executor = WorkflowExecutor(
            config, self, run_seed=run_seed, tokenizer=tokenizer, is_eval=is_eval, dump_dir=config.dump_dir
        )

    def initialize(
        self, engine_id: str | None = None, addr: Any = None, train_data_parallel_size: int | None = None
    ) -> None:
        """Start the sampler (once, however many engines share it) and the rollout thread."""
        self.sampler.start()
        self.executor.initialize(train_data_parallel_size)

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """One continuation; seed and admission order come from the running episode unless the request names them."""
        workflow_context.prepare_request(req)
        with perf_tracer.trace_session_phase("generate"):
            response = await self.sampler.agenerate(req)
        workflow_context.note_response(response)
        return response

    def hold_admission(self) -> None:
        """Queue requests without admitting them, so that a batch is admitted as one."""
        self.sampler.hold_admission()

    def release_admission(self) -> None:
        """Admit what is queued, in order."""
        self.sampler.release_admission()

    def set_version(self, version: int) -> None:
        self.executor.set_version(version)

    def get_version(self) -> int:
        return self.executor.get_version()

    def pause_generation(self) -> None:
        self.sampler.pause()

    def continue_generation(self) -> None:
        self.sampler.resume()

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

    def destroy(self) -> None:
        """Stop the rollout thread, then the sampler; safe to call twice."""
        self.executor.destroy()
        self.sampler.stop()
