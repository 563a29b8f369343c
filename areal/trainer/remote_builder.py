"""Builds the objects of an RL run whose engines live in worker processes.

Called by ``builder`` for every scheduler but ``inline``; the trainer uses the result as it uses the local objects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from areal.api.alloc_mode import ModelAllocation
from areal.engine.core.memory import MEMORY_SCOPE
from areal.engine.core.remote_weights import RemotePublisher
from areal.infra.controller.learner_controller import LearnerController
from areal.infra.controller.rollout_controller import RolloutController
from areal.infra.controller.train_controller import CriticController, RoleSpec, ScoringController, TrainController
from areal.infra.rpc.errors import TensorLostError
from areal.infra.weight_update import WeightUpdater
from areal.trainer.resources import thread_env, worker_specs
from areal.trainer.roles import TRAIN_ENGINES
from areal.trainer.rollout_layout import (
    RolloutLayout,
    build_rollout_controller,
    read_layout,
    transfer_settings,
    weight_mode,
)
from areal.utils import stats_tracker
from areal.utils.errors import ConfigError

if TYPE_CHECKING:
    from areal.api.cli_args import PPOConfig, TrainEngineConfig
    from areal.api.io_struct import FinetuneSpec
    from areal.api.trajectory import TrajectoryRef
    from areal.infra.controller.train_controller import RemoteBatch
    from areal.infra.scheduler.base import BaseScheduler
    from areal.trainer.learners import LearnerKind

PPO_WORKER = "areal.trainer.role_worker.PPOActorWorker"
CRITIC_WORKER = "areal.trainer.role_worker.PPOCriticWorker"
TEACHER_WORKER = "areal.trainer.role_worker.TeacherWorker"


@dataclass
class RemoteRLParts:
    """The objects of one RL run in worker processes; see ``areal.trainer.builder.RLParts``."""

    actor: TrainController
    ref: ScoringController | None
    rollout: RolloutController
    weights: WeightUpdater
    publisher: RemotePublisher | None = None
    critic: CriticController | None = None
    teacher: ScoringController | None = None

    def engines(self) -> dict[str, Any]:
        """Engines that learn, whose state a recover point holds, by checkpoint name."""
        engines = {"default": self.actor.engine}
        return engines if self.critic is None else {**engines, "critic": self.critic.engine}

    def roles(self) -> dict[str, TrainController]:
        """Every role that computes on batches, by its section of the config; the actor, which sees the results of the
        others, comes last.
        """
        found: dict[str, TrainController | None] = {"ref": self.ref, "critic": self.critic, "teacher": self.teacher}
        found["actor"] = self.actor
        return {name: role for name, role in found.items() if role is not None}

    def share_targets(self, batch: RemoteBatch) -> RemoteBatch:
        """Make what came with the advantages known to the critic."""
        return self.actor.share_targets(batch)

    def claim(self, refs: Sequence[TrajectoryRef]) -> RemoteBatch:
        """The step's batch, fetched by every role that computes on it.

        Raises:
            TensorLostError: a rollout worker that holds a trajectory has died since.
        """
        batch = self.actor.pack([ref.data for ref in refs])
        roles = self.roles().values()
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
        critic = {} if self.critic is None else self.critic.engine.export_stats()
        actor = self.actor.engine.export_stats()
        peaks = {
            key: max(value, critic.get(key, value)) for key, value in actor.items() if key.startswith(MEMORY_SCOPE)
        }
        return {**critic, **actor, **peaks, **self.rollout.export_stats()}

    def destroy(self) -> None:
        """Stop what runs in this process; the scheduler stops the workers. Safe to call twice."""
        if self.publisher is not None:
            self.publisher.close()  # a worker that returns may be waiting for the next update
        self.rollout.destroy()
        for role in reversed(self.roles().values()):
            role.destroy()


@dataclass
class RemoteLearnerParts:
    """The objects of one supervised run in worker processes."""

    learner: LearnerController
    ref: LearnerController | None = None

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
        if self.ref is not None:
            self.ref.destroy()


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


def build_remote_rl(scheduler: BaseScheduler, config: PPOConfig, ft_spec: FinetuneSpec) -> RemoteRLParts:
    """Ranks of actor, critic, teacher and reference (only with a KL term), rollout workers and the weight path between
    them.

    All processes are started first and come up together. If the building fails, the caller deletes the workers.
    """
    _check_shared_processes(config)
    layout = read_layout(config)
    env = thread_env(config, layout.replicas)
    env["train"].update(layout.train_env)
    actor = TrainController(scheduler, role_spec("actor", config.actor, PPO_WORKER, env["train"]))
    ref = None
    if config.ref is not None and config.actor.kl_ctl > 0:
        ref = ScoringController(scheduler, role_spec("ref", config.ref, PPO_WORKER, env["train"]))
    critic = None
    if config.critic is not None:
        critic = CriticController(scheduler, role_spec("critic", config.critic, CRITIC_WORKER, env["train"]))
    teacher = None
    if config.teacher is not None:
        teacher = ScoringController(scheduler, role_spec("teacher", config.teacher, TEACHER_WORKER, env["train"]))
    rollout = build_rollout_controller(scheduler, config, layout, env["rollout"])
    parts = RemoteRLParts(actor, ref, rollout, None, critic=critic, teacher=teacher)  # type: ignore[arg-type]  # below
    try:
        starts: list[Callable[[], None]] = [rollout.initialize]
        hosts: dict[tuple[str, ...], list[TrainController]] = {}
        for role in sorted(parts.roles().values(), key=lambda role: role is not actor):  # it comes first
            hosts.setdefault(tuple(role.ranks.worker_ids), []).append(role)
        starts += [partial(_start_in_turn, roles, ft_spec) for roles in hosts.values()]
        with ThreadPoolExecutor(len(starts), thread_name_prefix="start") as threads:  # they come up together
            for future in [threads.submit(start) for start in starts]:
                future.result()
        if config.rollout.use_lora:  # samplers hold the base: they read it from the same path
            actor.ranks.call("send_adapter", part=".engine")
        parts.weights = _weight_updater(scheduler, config, layout, parts)
        parts.weights.update(0)  # samplers loaded the checkpoint; now they hold what the actor made of it
    except BaseException:
        parts.destroy()
        raise
    return parts


def _check_shared_processes(config: PPOConfig) -> None:
    """Statistics of a process are reduced once: roles in the same processes must have the same data-parallel ranks.

    Raises:
        ConfigError: they do not.
    """
    actor = ModelAllocation.from_str(config.actor.backend, name="actor").parallel
    for name, role in (("critic", config.critic), ("ref", config.ref), ("teacher", config.teacher)):
        if role is None or role.scheduling_strategy.type != "colocation" or role.scheduling_strategy.fork:
            continue
        own = ModelAllocation.from_str(role.backend, name=name).parallel
        ranks = range(own.world_size)
        if own.world_size == actor.world_size and [own.data_rank(r) for r in ranks] != [
            actor.data_rank(r) for r in ranks
        ]:
            raise ConfigError(
                f"{name}.scheduling_strategy.fork=false: {name}.backend={role.backend} and actor.backend="
                f"{config.actor.backend} have other data-parallel ranks; set fork=true, or give both one layout"
            )


def _start_in_turn(roles: Sequence[TrainController], ft_spec: FinetuneSpec) -> None:
    """Start roles that share workers: every rank must make their process groups in the same order."""
    for role in roles:
        role.initialize(ft_spec)


def build_remote_learner(
    scheduler: BaseScheduler, config: Any, ft_spec: FinetuneSpec, kind: LearnerKind
) -> RemoteLearnerParts:
    """The ranks of a supervised run, and those of its reference model."""
    env = thread_env(config, 0)
    parts = RemoteLearnerParts(
        LearnerController(scheduler, role_spec("actor", config.actor, kind.worker, env["train"]))
    )
    try:
        parts.learner.initialize(ft_spec)
        if kind.has_reference(config):
            parts.ref = LearnerController(scheduler, role_spec("ref", config.ref, kind.worker, env["train"]))
            parts.ref.initialize(ft_spec)
    except BaseException:
        parts.destroy()
        raise
    return parts


def _weight_updater(
    scheduler: BaseScheduler, config: PPOConfig, layout: RolloutLayout, parts: RemoteRLParts
) -> WeightUpdater:
    """The way of new weights from the actor's ranks to the samplers."""
    hosts = {worker.ip for role in ("actor", "rollout") for worker in scheduler.get_workers(role)}
    mode = weight_mode(config, layout, one_host=len(hosts | layout.other_hosts) == 1)
    parts.publisher = RemotePublisher(
        parts.actor.ranks,
        parts.rollout,
        mode=mode,
        transfer_while_paused=layout.served,
        settings=transfer_settings(config, layout, scheduler.get_workers("actor")[0].ip),
    )
    followers: list[Any] = [parts.rollout.train, parts.rollout.eval, *parts.engines().values()]
    return WeightUpdater(parts.publisher, [parts.rollout], followers)
