"""Builds the objects of an RL run whose engines live in worker processes.

Called by ``builder`` for every scheduler but ``inline``; the trainer uses the result as it uses the local objects.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from areal.api.alloc_mode import ModelAllocation
from areal.api.config.scheduling import SchedulingSpec
from areal.engine.core.remote_weights import RemotePublisher
from areal.engine.inference.rollout_worker import RolloutSetup
from areal.infra.controller.rollout_controller import RolloutController, RolloutSpec
from areal.infra.controller.train_controller import RoleSpec, ScoringController, TrainController
from areal.infra.rpc.errors import TensorLostError
from areal.infra.weight_update import WeightUpdater
from areal.trainer.roles import TRAIN_ENGINES
from areal.utils import stats_tracker
from areal.utils.errors import UnsupportedFeatureError

if TYPE_CHECKING:
    from areal.api.cli_args import PPOConfig, SFTConfig, TrainEngineConfig
    from areal.api.io_struct import FinetuneSpec
    from areal.api.trajectory import TrajectoryRef
    from areal.infra.controller.train_controller import RemoteBatch
    from areal.infra.scheduler.base import BaseScheduler

PPO_WORKER = "areal.trainer.role_worker.PPOActorWorker"
LM_WORKER = "areal.trainer.role_worker.LMWorker"
WORKER_COMMAND = "python -m areal.infra.rpc.rpc_server"


@dataclass
class RemoteRLParts:
    """The objects of one RL run in worker processes; see ``areal.trainer.builder.RLParts``."""

    actor: TrainController
    ref: ScoringController | None
    rollout: RolloutController
    weights: WeightUpdater

    def engines(self) -> dict[str, Any]:
        """Engines whose state a recover point holds, by checkpoint name."""
        return {"default": self.actor.engine}

    def claim(self, refs: Sequence[TrajectoryRef]) -> RemoteBatch:
        """The step's batch, fetched by every role that computes on it.

        Raises:
            TensorLostError: a rollout worker that holds a trajectory has died since.
        """
        batch = self.actor.pack([ref.data for ref in refs])
        roles: list[TrainController] = [self.actor] if self.ref is None else [self.ref, self.actor]
        try:
            for role in roles:
                role.load(batch)
        except TensorLostError:
            for role in roles:  # some ranks have their share, which nobody will ask for
                role.drop(batch, even_if_not_loaded=True)
            raise
        return batch

    def reopen_step(self, refs: Sequence[TrajectoryRef]) -> int:
        """See ``RolloutController.reopen_step``."""
        return self.rollout.reopen_step(refs)

    def export_stats(self) -> dict[str, float]:
        """Statistics of every role since the last call."""
        return {**self.actor.engine.export_stats(), **self.rollout.export_stats()}

    def destroy(self) -> None:
        """Stop what runs in this process; the scheduler stops the workers. Safe to call twice."""
        self.rollout.destroy()
        self.actor.destroy()
        if self.ref is not None:
            self.ref.destroy()


@dataclass
class RemoteLearnerParts:
    """The objects of one supervised run in worker processes."""

    learner: TrainController

    @property
    def engine(self) -> Any:
        """The engine on all ranks."""
        return self.learner.engine

    def export_stats(self) -> dict[str, float]:
        """Statistics since the last call, reduced over all ranks."""
        return {**stats_tracker.export_all(), **self.learner.engine.export_stats()}

    def destroy(self) -> None:
        """Stop calling; the scheduler stops the workers. Safe to call twice."""
        self.learner.destroy()


def role_spec(role: str, config: TrainEngineConfig, worker: str, env: dict[str, str]) -> RoleSpec:
    """What the ranks of ``role`` are made of."""
    allocation = ModelAllocation.from_str(config.backend, name=role)
    engine = TRAIN_ENGINES.get(allocation.backend)
    return RoleSpec(
        role=role,
        engine=f"{engine.__module__}.{engine.__qualname__}",
        worker=worker,
        config=config,
        strategy=allocation.parallel,
        specs=worker_specs(config.scheduling_spec),
        placement=config.scheduling_strategy,
        env=env,
    )


def worker_specs(specs: Sequence[SchedulingSpec]) -> list[SchedulingSpec]:
    """The spec of a role's workers: the command is ours unless the user names one, and a spec that says nothing else
    asks for a device each where this machine has some.
    """
    first = specs[0] if specs else SchedulingSpec()
    if not first.cmd:
        first = replace(first, cmd=WORKER_COMMAND)
    if first == SchedulingSpec(cmd=WORKER_COMMAND) and torch.cuda.is_available():
        first = replace(first, gpu=1)
    return [first]


def build_remote_rl(scheduler: BaseScheduler, config: PPOConfig, ft_spec: FinetuneSpec) -> RemoteRLParts:
    """Actor ranks, reference ranks (only with a KL term), rollout workers and the weight path between them.

    All processes are started first and come up together. If the building fails, the caller deletes the workers.
    """
    replicas = _native_replicas(config)
    env = thread_env(config, replicas)
    actor = TrainController(scheduler, role_spec("actor", config.actor, PPO_WORKER, env["train"]))
    ref = None
    if config.ref is not None and config.actor.kl_ctl > 0:
        ref = ScoringController(scheduler, role_spec("ref", config.ref, PPO_WORKER, env["train"]))
    rollout = _rollout_controller(scheduler, config, replicas, env["rollout"])
    parts = RemoteRLParts(actor, ref, rollout, None)  # type: ignore[arg-type]  # set below
    try:
        starts: list[Callable[[], None]] = [rollout.initialize]
        hosts: dict[tuple[str, ...], list[TrainController]] = {}
        for role in (actor, ref):
            if role is not None:
                hosts.setdefault(tuple(role.ranks.worker_ids), []).append(role)
        starts += [partial(_start_in_turn, roles, ft_spec) for roles in hosts.values()]
        with ThreadPoolExecutor(len(starts), thread_name_prefix="start") as threads:  # they come up together
            for future in [threads.submit(start) for start in starts]:
                future.result()
        publisher = RemotePublisher(actor.ranks, rollout)
        parts.weights = WeightUpdater(publisher, [rollout], [rollout.train, rollout.eval, actor.engine])
        publisher.stage(0)  # workers loaded the checkpoint; now they hold what the actor made of it
        publisher.commit(0)
    except BaseException:
        parts.destroy()
        raise
    return parts


def _start_in_turn(roles: Sequence[TrainController], ft_spec: FinetuneSpec) -> None:
    """Start roles that share workers: every rank must make their process groups in the same order."""
    for role in roles:
        role.initialize(ft_spec)


def build_remote_learner(scheduler: BaseScheduler, config: SFTConfig, ft_spec: FinetuneSpec) -> RemoteLearnerParts:
    """The ranks of a supervised run."""
    env = thread_env(config, 0)
    learner = TrainController(scheduler, role_spec("actor", config.actor, LM_WORKER, env["train"]))
    try:
        learner.initialize(ft_spec)
    except BaseException:
        learner.destroy()
        raise
    return RemoteLearnerParts(learner)


def thread_env(config: Any, replicas: int) -> dict[str, dict[str, str]]:
    """Thread settings of train ranks and rollout workers that compute on the CPUs of this machine.

    A synchronous run takes turns, so each side may use every core; else they share them. With devices, or a user's own
    setting in ``env_vars``, nothing is changed.
    """
    ranks = ModelAllocation.from_str(config.actor.backend, name="actor").parallel.world_size
    rollout = getattr(config, "rollout", None)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = ranks + replicas if rollout is not None and not rollout.synchronous else None

    def env(specs: Sequence[SchedulingSpec], processes: int) -> dict[str, str]:
        spec = specs[0] if specs else None
        if spec is not None and (spec.gpu or "OMP_NUM_THREADS" in spec.env_vars):
            return {}
        threads = str(max(1, cores // max(1, share or processes)))
        return dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), threads)

    return {
        "train": env(config.actor.scheduling_spec, ranks),
        "rollout": env(rollout.scheduling_spec, replicas) if rollout is not None else {},
    }


def _native_replicas(config: PPOConfig) -> int:
    allocation = ModelAllocation.from_str(config.rollout.backend, name="rollout")
    if allocation.backend != "native":
        raise UnsupportedFeatureError(f"rollout.backend={config.rollout.backend!r} is not available; use native:d1")
    return allocation.parallel.data_parallel_size


def _rollout_controller(
    scheduler: BaseScheduler, config: PPOConfig, replicas: int, env: dict[str, str]
) -> RolloutController:
    eval_rows = config.valid_dataset.batch_size if config.valid_dataset is not None else 1
    eval_config = replace(
        config.rollout,
        max_concurrent_rollouts=max(eval_rows, config.rollout.max_concurrent_rollouts or 1),
        queue_size=None,
    )
    setup = RolloutSetup(
        rollout=config.rollout,
        native=config.native,
        model_path=config.actor.path,
        tokenizer_path=config.tokenizer_path,
        dtype=config.native.dtype or config.actor.dtype,
        run_seed=config.seed,
        perf_tracer=config.perf_tracer,
    )
    spec = RolloutSpec(
        role="rollout",
        replicas=replicas,
        setup=setup,
        specs=worker_specs(config.rollout.scheduling_spec),
        placement=config.rollout.scheduling_strategy,
        env=env,
        max_deaths=config.recover.retries,
    )
    return RolloutController(scheduler, spec, config.rollout, eval_config)
