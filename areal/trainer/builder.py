"""Turns a config into the objects of a run; after this no code asks which backend it is running.

Called by the trainers. Every engine and role is hosted by a scheduler, which destroys them when the run closes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from areal.api.alloc_mode import ModelAllocation
from areal.api.io_struct import WeightUpdateMeta
from areal.api.scheduler_api import Job
from areal.engine.core.weight_sync import InProcessPublisher
from areal.engine.inference.embedded import EmbeddedInfEngine
from areal.engine.native.engine import NativeEngine
from areal.infra.scheduler.inline import InlineScheduler
from areal.infra.weight_update import WeightUpdater
from areal.trainer.ppo.actor import PPOActor
from areal.trainer.ppo.critic import PPOCritic
from areal.trainer.ppo.teacher import Teacher
from areal.trainer.roles import TRAIN_ENGINES
from areal.utils import logging
from areal.utils.errors import EngineError, UnsupportedFeatureError
from areal.utils.threads import process_threads, split_threads

if TYPE_CHECKING:
    from areal.api.cli_args import InferenceEngineConfig, PPOConfig, TrainEngineConfig
    from areal.api.engine_api import InferenceEngine, TrainEngine
    from areal.api.io_struct import FinetuneSpec
    from areal.api.trajectory import TrajectoryRef
    from areal.trainer.learners import LearnerKind
    from areal.trainer.remote_builder import RemoteLearnerParts, RemoteRLParts

logger = logging.getLogger("Builder")


@dataclass
class RolloutParts:
    """Everything that generates: the samplers and the two rollout engines on top of them."""

    sampler: NativeEngine
    train: EmbeddedInfEngine
    eval: EmbeddedInfEngine


@dataclass
class RLParts:
    """The objects of one RL run."""

    actor: PPOActor
    ref: PPOActor | None
    rollout: RolloutParts
    weights: WeightUpdater
    critic: PPOCritic | None = None
    teacher: Teacher | None = None

    def roles(self) -> dict[str, Any]:
        """Every role that computes on batches, by its section of the config; the actor comes last."""
        found = {"ref": self.ref, "critic": self.critic, "teacher": self.teacher, "actor": self.actor}
        return {name: role for name, role in found.items() if role is not None}

    def engines(self) -> dict[str, TrainEngine]:
        """Engines that learn, whose state a recover point holds, by checkpoint name."""
        engines = {"default": self.actor.engine}
        return engines if self.critic is None else {**engines, "critic": self.critic.engine}

    def share_targets(self, batch: Any) -> Any:
        """Make what came with the advantages known to the critic; here every role has the same batch."""
        return batch

    def claim(self, refs: Sequence[TrajectoryRef]) -> Any:
        """The step's batch. TensorLostError where a trajectory is gone, which cannot happen in one process."""
        return self.actor.pack([ref.data for ref in refs])

    def reopen_step(self, refs: Sequence[TrajectoryRef]) -> int:
        """Rows of lost trajectories go back to the queue; here none is ever lost."""
        raise EngineError(f"{len(refs)} trajectories of this process cannot be lost")

    def export_stats(self) -> dict[str, float]:
        """Statistics of the rollouts since the last call; those of the roles are in this process's trackers."""
        return {**self.rollout.train.export_stats(), **self.rollout.eval.export_stats()}

    def destroy(self) -> None:
        """Nothing: the scheduler hosts every object and destroys it."""


@dataclass
class LearnerParts:
    """The objects of one supervised run in this process."""

    engine: TrainEngine
    learner: Any
    ref: Any = None

    def export_stats(self) -> dict[str, float]:
        """Statistics since the last call, reduced over all ranks."""
        return self.engine.export_stats()

    def destroy(self) -> None:
        """Nothing: the scheduler hosts every object and destroys it."""


def build_train_engine(
    scheduler: InlineScheduler, role: str, config: TrainEngineConfig, ft_spec: FinetuneSpec
) -> TrainEngine:
    """One initialised train engine for ``role``, hosted as ``role/0.engine``."""
    allocation = ModelAllocation.from_str(config.backend, name=role)
    engine_cls = TRAIN_ENGINES.get(allocation.backend)
    (worker,) = scheduler.create_workers(Job(role=role, replicas=1, tasks=list(config.scheduling_spec)))
    engine: TrainEngine = scheduler.host(worker, engine_cls(config), f"{worker}.engine")
    engine.create_process_group(allocation.parallel)
    engine.initialize(addr=None, ft_spec=ft_spec)
    logger.info(f"{role}: {allocation.backend} engine ready on {engine.device}")
    return engine


def build_rollout(
    scheduler: InlineScheduler, config: PPOConfig, tokenizer: Any, initial_weights: TrainEngine
) -> RolloutParts:
    """The embedded sampler with the actor's weights, and a training and an evaluation rollout on it."""
    allocation = ModelAllocation.from_str(config.rollout.backend, name="rollout")
    if allocation.backend != "native":
        raise UnsupportedFeatureError(
            f"rollout.backend={config.rollout.backend!r} cannot run inline; use native:d1 or another scheduler.type"
        )
    (worker,) = scheduler.create_workers(Job(role="rollout", replicas=1, tasks=list(config.rollout.scheduling_spec)))
    dtype = config.native.dtype or config.actor.dtype
    native = config.native
    # a synchronous run takes turns: each side may have every thread while the other waits
    if native.num_threads is None and initial_weights.device.type == "cpu" and not config.rollout.synchronous:
        sampler_threads, trainer_threads = split_threads(process_threads())
        native = dataclasses.replace(native, num_threads=sampler_threads)
        torch.set_num_threads(trainer_threads)
    sampler = NativeEngine(native, config.actor.path, tokenizer=tokenizer, dtype=dtype)
    if config.rollout.use_lora:  # it holds the base, which is read from the same path, and gets adapters from here on
        initial_weights.send_adapter()
    sampler.receive_weights(initial_weights.named_full_tensors(), version=0)

    def rollout_engine(rollout: InferenceEngineConfig, *, is_eval: bool) -> EmbeddedInfEngine:
        engine = EmbeddedInfEngine(rollout, sampler, run_seed=config.seed, tokenizer=tokenizer, is_eval=is_eval)
        scheduler.host(worker, engine, "eval-rollout" if is_eval else "rollout")
        engine.initialize()
        return engine

    eval_rows = config.valid_dataset.batch_size if config.valid_dataset is not None else 1
    eval_config = dataclasses.replace(
        config.rollout,
        max_concurrent_rollouts=max(eval_rows, config.rollout.max_concurrent_rollouts or 1),
        queue_size=None,
    )
    evaluation = rollout_engine(eval_config, is_eval=True)
    training = rollout_engine(config.rollout, is_eval=False)  # last: closed first, before the sampler stops under it
    return RolloutParts(sampler, training, evaluation)


def build_rl(scheduler: Any, config: PPOConfig, ft_spec: FinetuneSpec, tokenizer: Any) -> RLParts | RemoteRLParts:
    """Actor, critic, teacher, reference model (only with a KL term), rollout and the weight path between them.

    Everything is hosted by ``scheduler``; if the building fails, the caller deletes the workers.
    """
    if not isinstance(scheduler, InlineScheduler):
        from areal.trainer.remote_builder import build_remote_rl

        return build_remote_rl(scheduler, config, ft_spec)
    engine = build_train_engine(scheduler, "actor", config.actor, ft_spec)
    actor = scheduler.host("actor/0", PPOActor(config.actor, engine), "actor/0")
    ref = None
    if config.ref is not None and config.actor.kl_ctl > 0:
        ref = PPOActor(config.ref, build_train_engine(scheduler, "ref", config.ref, ft_spec))
    critic = None
    if config.critic is not None:
        critic = PPOCritic(config.critic, build_train_engine(scheduler, "critic", config.critic, ft_spec))
    teacher = None
    if config.teacher is not None:
        teacher = Teacher(config.teacher, build_train_engine(scheduler, "teacher", config.teacher, ft_spec))
    rollout = build_rollout(scheduler, config, tokenizer, engine)
    publisher = InProcessPublisher(engine.named_full_tensors, rollout.sampler)
    followers: list[InferenceEngine | TrainEngine] = [rollout.train, rollout.eval, engine]
    if critic is not None:
        followers.append(critic.engine)
    weights = WeightUpdater(publisher, [rollout.sampler], followers)
    engine.connect_engine(rollout.train, WeightUpdateMeta(type="inproc"))
    engine.attach_weight_updater(weights)
    return RLParts(actor, ref, rollout, weights, critic, teacher)


def build_learner(
    scheduler: Any, config: Any, ft_spec: FinetuneSpec, kind: LearnerKind
) -> LearnerParts | RemoteLearnerParts:
    """The engine of a supervised run and its learner, and its reference model; hosted by ``scheduler``."""
    if not isinstance(scheduler, InlineScheduler):
        from areal.trainer.remote_builder import build_remote_learner

        return build_remote_learner(scheduler, config, ft_spec, kind)
    engine = build_train_engine(scheduler, "actor", config.actor, ft_spec)
    ref = None
    if kind.has_reference(config):
        ref = kind.make(config.ref, build_train_engine(scheduler, "ref", config.ref, ft_spec))
    return LearnerParts(engine, kind.make(config.actor, engine), ref)
