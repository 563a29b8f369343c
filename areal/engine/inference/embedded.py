"""The inference engine that lives in the trainer's process: the native sampler plus a rollout executor.

Built by the trainer's builder; given to workflows as ``engine``. Several of these may share one sampler (training and
evaluation), each with limits and statistics of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from areal.engine.inference.episode_sampler import EpisodeSampler
from areal.infra.rollout.executor import WorkflowExecutor
from areal.infra.rollout.facade import ExecutorFacade

if TYPE_CHECKING:
    from areal.api.cli_args import InferenceEngineConfig
    from areal.api.io_struct import ModelRequest, ModelResponse
    from areal.engine.native.engine import NativeEngine


class EmbeddedInfEngine(ExecutorFacade):
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
        self._episodes = EpisodeSampler(sampler)
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
        return await self._episodes.agenerate(req)

    def hold_admission(self) -> None:
        """Queue requests without admitting them, so that a batch is admitted as one."""
        self.sampler.hold_admission()

    def release_admission(self) -> None:
        """Admit what is queued, in order."""
        self.sampler.release_admission()

    def pause_generation(self) -> None:
        self.sampler.pause()

    def continue_generation(self) -> None:
        self.sampler.resume()

    def destroy(self) -> None:
        """Stop the rollout thread, then the sampler; safe to call twice."""
        self.executor.destroy()
        self.sampler.stop()
