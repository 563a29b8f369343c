"""PPO steps that the live ranks run; each rank holds whole groups."""

from __future__ import annotations

from typing import Any

from areal.api.cli_args import NormConfig, OptimizerConfig, PPOActorConfig
from areal.engine.fsdp_engine import FSDPEngine
from areal.trainer.ppo.actor import PPOActor
from areal.utils import stats_tracker
from tests.test_ppo_actor import trajectories


def build(path: str, backend: str, **settings: Any) -> PPOActor:
    """An actor with batch-level normalisation and plain gradient descent, so that parameters show gradients."""
    config = PPOActorConfig(
        experiment_name="e",
        trial_name="t",
        backend=backend,
        path=path,
        dtype="float32",
        kl_ctl=0.0,
        recompute_logprob=True,
        reward_norm=NormConfig(mean_level="group", std_level="batch"),
        adv_norm=NormConfig(),
        optimizer=OptimizerConfig(type="sgd", lr=0.1, weight_decay=0.0, warmup_steps_proportion=0.0),
        **settings,
    )
    engine = FSDPEngine(config)
    engine.create_process_group()
    engine.initialize(None, None)
    return PPOActor(config, engine)


def ppo_step(path: str, backend: str, first_groups: int, **settings: Any) -> dict[str, Any]:
    """One step; data-parallel rank 0 has the first groups, rank 1 the others, a single one all of them."""
    actor = build(path, backend, **settings)
    data = trajectories()
    if actor.engine.data_parallel_world_size > 1:
        data = data[:first_groups] if actor.engine.data_parallel_rank == 0 else data[first_groups:]
    stats_tracker.export_all()
    batch = actor.annotate(actor.pack(data), "prox_logp")
    actor.ppo_update(actor.compute_advantages(batch))
    group = actor.engine.data_parallel_group
    result = {
        "weights": {name: tensor.clone() for name, tensor in actor.engine.named_full_tensors()},
        "stats": stats_tracker.export_all(reduce_group=group),
    }
    actor.engine.destroy()
    return result
