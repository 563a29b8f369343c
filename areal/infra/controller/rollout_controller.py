"""Rollout in worker processes: one executor with global numbers here, the episodes there.

Staleness and capacity are enforced once, by the executors of this process; workers only run what they are sent. A
worker that dies is replaced: its groups go back to the head of the queue, whether they were running or finished.
Built by the trainer's builder in place of the embedded engine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from areal.api.scheduler_api import Job
from areal.infra.controller.remote_groups import RemoteGroups
from areal.infra.controller.tables import RemoteTable
from areal.infra.controller.worker_pool import WorkerPool
from areal.infra.rollout.executor import WorkflowExecutor
from areal.infra.rollout.facade import ExecutorFacade
from areal.utils import logging
from areal.utils.errors import InfrastructureError, UnsupportedFeatureError
from areal.utils.stats_reduction import COUNT_SUFFIX

if TYPE_CHECKING:
    from areal.api.cli_args import InferenceEngineConfig
    from areal.api.config.scheduling import SchedulingSpec, SchedulingStrategy
    from areal.api.io_struct import ModelRequest, ModelResponse
    from areal.api.trajectory import TrajectoryRef
    from areal.infra.rpc.client import WorkerClient
    from areal.infra.scheduler.base import BaseScheduler

logger = logging.getLogger("RolloutController")

WORKER_CLASS = "areal.engine.inference.rollout_worker.RolloutWorker"


@dataclass(frozen=True)
class RolloutSpec:
    """What the rollout workers are.

    Attributes:
        role: name of the workers.
        replicas: how many.
        setup: constructor argument of :data:`WORKER_CLASS`; ``index`` is filled in.
        specs, placement: resources.
        env: environment of every worker.
        max_deaths: deaths of one worker in a row that end the run.
        worker: import path of the class they host.
    """

    role: str
    replicas: int
    setup: Any
    specs: Sequence[SchedulingSpec]
    placement: SchedulingStrategy
    env: Mapping[str, str]
    max_deaths: int = 3
    worker: str = WORKER_CLASS


class RemoteRollout(ExecutorFacade):
    """One executor (training or evaluation) over the controller's workers."""

    def __init__(self, controller: RolloutController, config: InferenceEngineConfig, *, is_eval: bool) -> None:
        self.config = config
        self._controller = controller
        groups = RemoteGroups(controller.pool)
        self.executor = WorkflowExecutor(config, None, is_eval=is_eval, remote=groups)

    def initialize(
        self, engine_id: str | None = None, addr: Any = None, train_data_parallel_size: int | None = None
    ) -> None:
        """Start the executor's thread."""
        self.executor.initialize(train_data_parallel_size)

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """Not here: episodes run in the workers."""
        raise UnsupportedFeatureError("agenerate: the controller has no sampler; run an episode with submit()")

    def pause_generation(self) -> None:
        self._controller.pause()

    def continue_generation(self) -> None:
        self._controller.resume()

    def destroy(self) -> None:
        """Stop the executor; the workers belong to the controller."""
        self.executor.destroy()


class RolloutController:
    """Starts rollout workers, keeps them alive, and offers a training and an evaluation rollout on them.

    Args:
        scheduler: hosts the workers.
        spec: what they are.
        train_config, eval_config: limits of the two executors.
    """

    def __init__(
        self,
        scheduler: BaseScheduler,
        spec: RolloutSpec,
        train_config: InferenceEngineConfig,
        eval_config: InferenceEngineConfig,
    ) -> None:
        self._scheduler, self.spec = scheduler, spec
        job = Job(spec.role, spec.replicas, list(spec.specs), spec.placement)
        self.worker_ids = scheduler.create_workers(job)
        self.pool = WorkerPool(
            self, self.worker_ids, max_deaths=spec.max_deaths, on_lost=self._lost, on_failure=self._fail
        )
        self.train = RemoteRollout(self, train_config, is_eval=False)
        self.eval = RemoteRollout(self, eval_config, is_eval=True)
        self.bring_up_to_date: Callable[[str], None] | None = None  # set by whoever publishes weights
        self._paused: list[list[str]] = []  # workers of each pause that was not undone
        # twice as many threads as workers: what ends a call that hangs must not queue behind it
        self._threads = ThreadPoolExecutor(max(4, 2 * spec.replicas), thread_name_prefix="rollout-calls")

    def initialize(self) -> None:
        """Build the workers' engines, and listen."""
        self._scheduler.get_workers(self.spec.role)
        for _ in self._threads.map(self._build, self.worker_ids):
            pass
        self._scheduler.on_failure(lambda worker_id, _: self.pool.worker_failed(worker_id))
        self.pool.start()
        self.eval.initialize()
        self.train.initialize()
        logger.info(f"{len(self.worker_ids)} rollout workers ready")

    # -- who the pool asks ---------------------------------------------------------------------------------------------

    def client(self, worker_id: str) -> WorkerClient:
        """See ``Crew``."""
        return self._scheduler.client(worker_id)

    def failure(self, worker_id: str) -> str | None:
        """See ``Crew``."""
        return self._scheduler.worker_failure(worker_id)

    def revive(self, worker_id: str) -> None:
        """See ``Crew``."""
        self._scheduler.restart_worker(worker_id)
        self._build(worker_id)
        if self.bring_up_to_date is not None:
            self.bring_up_to_date(worker_id)

    # -- all workers ---------------------------------------------------------------------------------------------------

    def alive(self) -> list[str]:
        """Workers in service."""
        return [member.worker_id for member in self.pool.members if member.alive]

    def call(self, worker_ids: Iterable[str], method: str, *args: Any) -> dict[str, Any]:
        """Call a method of workers at once; one that is lost meanwhile, or whose sampler is, is missing in the result.

        Raises:
            Exception: what the method raised on a worker that lives.
        """
        lives = self._lives()
        futures = {worker_id: self._threads.submit(self.call_one, worker_id, method, *args) for worker_id in worker_ids}
        found: dict[str, Any] = {}
        for worker_id, future in futures.items():
            try:
                found[worker_id] = future.result()
            except InfrastructureError as exc:
                replaced = self._lives()[worker_id] != lives[worker_id]  # by now
                if not (replaced or self.is_gone(worker_id) or self._cannot_go_on(worker_id)):
                    raise
                logger.warning(f"{method} did not reach {worker_id}: {exc}")
        return found

    def call_one(self, worker_id: str, method: str, *args: Any) -> Any:
        """Call a method of one worker; raises what it raised, or what was lost."""
        return self._scheduler.call_engine(worker_id, method, *args)

    def is_gone(self, worker_id: str) -> bool:
        """Whether a worker is dead or does not answer; the pool is told if it is."""
        try:
            self.client(worker_id).health(timeout_s=5.0)
        except Exception:  # noqa: BLE001 - no answer, for whatever reason
            self.pool.worker_failed(worker_id)
            return True
        return any(member.worker_id == worker_id and not member.alive for member in self.pool.members)

    def _cannot_go_on(self, worker_id: str) -> bool:
        """Whether a worker that answers has lost its sampler (a server that died); the pool is told if it has."""
        try:
            if self.call_one(worker_id, "is_well"):
                return False
        except InfrastructureError as exc:
            logger.debug(f"{worker_id} does not say whether it can go on: {exc}")
        self.pool.worker_failed(worker_id)
        return True

    def pause(self) -> None:
        """Freeze every sampler between two steps; pauses nest."""
        self._paused.append(list(self.call(self.alive(), "pause")))

    def resume(self) -> None:
        """Undo one :meth:`pause`."""
        if self._paused:
            self.call(self._paused.pop(), "resume")

    def reopen_step(self, refs: Sequence[TrajectoryRef]) -> int:
        """The step's trajectories could not all be fetched: rows of dead workers go back to the queue, the others stay
        finished. Returns how many rows went back.
        """
        owners = {ref.data.owner for ref in refs if isinstance(ref.data, RemoteTable)}
        lives = self._lives()
        gone = {owner for owner in owners if lives[owner[0]] != owner[1] or self.is_gone(owner[0])}
        return self.train.executor.lost_groups.give_back(lambda ref: _owner(ref) in gone, reopen_step=True)

    def export_stats(self) -> dict[str, float]:
        """Counters of both executors and what workflows recorded on the workers, weighted by their counts."""
        merged = merge_scalars(list(self.call(self.alive(), "export_stats").values()))
        return {**merged, **self.train.export_stats(), **self.eval.export_stats()}

    def destroy(self) -> None:
        """Stop executors and pool; the scheduler stops the workers. Safe to call twice."""
        self.train.destroy()
        self.eval.destroy()
        self.pool.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _lives(self) -> dict[str, int]:
        return {member.worker_id: member.life for member in self.pool.members}

    def _build(self, worker_id: str) -> None:
        index = int(worker_id.rpartition("/")[2])
        self._scheduler.set_env(worker_id, dict(self.spec.env))
        self._scheduler.make_engine(worker_id, self.spec.worker, dataclasses.replace(self.spec.setup, index=index))

    def _lost(self, owner: tuple[str, int]) -> None:
        for rollout in (self.train, self.eval):
            rollout.executor.lost_groups.give_back(lambda ref: _owner(ref) == owner)

    def _fail(self, error: BaseException) -> None:
        for rollout in (self.train, self.eval):
            rollout.executor.lost_groups.fail(error)


def _owner(ref: TrajectoryRef) -> tuple[str, int] | None:
    return ref.data.owner if isinstance(ref.data, RemoteTable) else None


def merge_scalars(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means of several processes as one: weighted by ``<key>__count``; counts and keys without one are added."""
    total: dict[str, float] = {}
    for part in parts:
        for key, value in part.items():
            weight = part.get(f"{key}{COUNT_SUFFIX}")
            total[key] = total.get(key, 0.0) + value * (1.0 if weight is None else weight)
    for key in [key for key in total if f"{key}{COUNT_SUFFIX}" in total]:
        count = total[f"{key}{COUNT_SUFFIX}"]
        total[key] = total[key] / count if count else 0.0
    return total
