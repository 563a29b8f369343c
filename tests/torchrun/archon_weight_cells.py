"""What the live ranks tell of an Archon engine's weights and statistics; each function is called on every rank."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from areal.api.cli_args import NormConfig, OptimizerConfig, PPOActorConfig
from areal.api.config.archon import ArchonEngineConfig
from areal.api.config.ppo import MismatchConfig
from areal.api.config.train import FailureCaptureConfig
from areal.api.io_struct import WeightUpdateMeta
from areal.engine.inference.remote_engine import read_limits
from areal.engine.native_remote import RemoteNativeEngine
from areal.experimental.engine import archon_weight_sync as sync
from areal.experimental.engine.archon_engine import ArchonEngine
from areal.trainer.ppo.actor import PPOActor
from areal.trainer.ppo.mismatch import MismatchError
from areal.utils import stats_tracker
from areal.utils.errors import WeightSyncError
from tests.engine_fakes import batch, engine_config, loss_fn, weight_fn
from tests.server_fakes import remote_config
from tests.test_ppo_actor import trajectories
from tests.torchrun import script_cells, weight_cells
from tests.torchrun.feature_cells import poisoned_loss

Weights = list[tuple[str, np.ndarray]]


def archon_of(schedule: str = "1F1B") -> ArchonEngineConfig:
    """Its section."""
    return ArchonEngineConfig(attn_type="sdpa", pp_schedule=schedule)  # type: ignore[arg-type]  # one of the names


def build(path: str, backend: str, schedule: str = "1F1B", **settings: Any) -> ArchonEngine:
    """An initialised engine."""
    engine = ArchonEngine(engine_config(path, backend=backend, archon=archon_of(schedule), **settings))
    engine.create_process_group()
    engine.initialize(None, None)
    return engine


def published(path: str, backend: str, schedule: str = "1F1B", **settings: Any) -> tuple[Weights, set[torch.dtype]]:
    """What this rank gives to publishers, in its order, and its dtypes."""
    engine = build(path, backend, schedule, **settings)
    found, dtypes = [], set()
    for name, tensor in engine.named_full_tensors():
        found.append((name, tensor.float().numpy().copy()))
        dtypes.add(tensor.dtype)
    engine.destroy()
    return found, dtypes


def whole_of_parts() -> dict[str, bool]:
    """Whether ``_get_full_tensor`` gives the whole of a parameter, in each form that one can have."""
    whole = torch.arange(30.0).reshape(5, 6)  # 5 rows on 2 ranks: uneven shards
    lines = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    forms = {
        "plain": torch.nn.Parameter(whole),
        "rows": torch.nn.Parameter(distribute_tensor(whole, lines, [Shard(0)])),
        "columns": torch.nn.Parameter(distribute_tensor(whole, lines, [Shard(1)])),
    }
    found = {name: sync._get_full_tensor(parameter) for name, parameter in forms.items()}
    return {name: torch.equal(tensor, whole) and not tensor.requires_grad for name, tensor in found.items()}


# -- statistics --------------------------------------------------------------------------------------------------------


def _actor(path: str, schedule: str, **settings: Any) -> PPOActor:
    config = PPOActorConfig(
        experiment_name="e",
        trial_name="t",
        backend="archon:p2",
        path=path,
        dtype="float32",
        kl_ctl=0.0,
        recompute_logprob=False,
        use_decoupled_loss=False,
        ppo_n_minibatches=2,
        reward_norm=NormConfig(mean_level="group", std_level="batch"),
        optimizer=OptimizerConfig(type="sgd", lr=0.1, weight_decay=0.0, warmup_steps_proportion=0.0),
        archon=archon_of(schedule),
        **settings,
    )
    engine = ArchonEngine(config)  # type: ignore[arg-type]  # as every role's config
    engine.create_process_group()
    engine.initialize(None, None)
    return PPOActor(config, engine)


def stats_of_a_step(path: str, schedule: str) -> tuple[dict[str, float], dict[str, float]]:
    """Statistics of a PPO step as the engine exports them, and what this rank recorded of them."""
    actor = _actor(path, schedule)
    stats_tracker.export_all()
    actor.ppo_update(actor.compute_advantages(actor.pack(trajectories())))
    own = stats_tracker.export_all(reset=False)
    exported = actor.engine.export_stats()
    actor.engine.destroy()  # type: ignore[attr-defined]  # of an engine of its own
    return exported, own


def mismatch_that_stops(path: str, schedule: str) -> str:
    """What a rank says of log-probs that are not the sampler's."""
    actor = _actor(path, schedule, mismatch=MismatchConfig(action="stop", limit=1e-12))
    try:
        actor.ppo_update(actor.compute_advantages(actor.pack(trajectories())))
    except MismatchError as exc:
        return str(exc)
    finally:
        actor.engine.destroy()  # type: ignore[attr-defined]
        stats_tracker.export_all()
    return ""


def captured(path: str, directory: str, schedule: str) -> list[str]:
    """Train on rows of which one has a NaN; the names of what was captured."""
    settings = FailureCaptureConfig(directory=directory)
    engine = build(path, "archon:p2", schedule, failure_capture=settings, mb_spec={"n_mbs": 2}).train()
    rows = batch()
    for index, row in enumerate(rows):
        row["poison"] = torch.full(row["input_ids"].shape, math.nan if index == 1 else 1.0)
    engine.train_batch(rows, poisoned_loss, weight_fn)
    engine.destroy()
    dist.barrier()
    return sorted(str(p.relative_to(directory)) for p in Path(directory).glob("*/*"))


# -- a script's own steps ----------------------------------------------------------------------------------------------

_states: list[sync.WeightSyncState] = []


def connect(address: str, path: str, kind: str, root: str) -> dict[str, Any]:
    """Connect the engine of ``weight_cells`` to a server; what is known of the group then."""
    rollout = RemoteNativeEngine(remote_config(consumer_batch_size=4), limits=read_limits("native", None, path, None))
    rollout.initialize(addr=address)
    engine, meta = weight_cells.the_engine(), meta_of(kind, root)
    engine.connect_engine(rollout, meta)
    script_cells._rollouts.append(rollout)
    state = sync.WeightSyncState(dist.get_rank(engine.groups.pp) if engine.groups.pp is not None else 0)
    _states.append(state)
    before = state.group_initialized, state.group_name
    if kind == "xccl":
        sync.init_weight_update_group(state, meta, engine)
    return {"before": before, **_described(state)}


def meta_of(kind: str, root: str) -> WeightUpdateMeta:
    """How weights travel, in small buckets."""
    meta = script_cells.meta_of(kind, root)
    meta.weight_chunked_mem_mb = 1
    return meta


def _described(state: sync.WeightSyncState) -> dict[str, Any]:
    return {
        "initialized": state.group_initialized,
        "name": state.group_name,
        "address": (state.master_addr, state.master_port),
        "lists": (state.group_names, state.master_addrs, state.master_ports),
        "ranks": [group.world_size for group in state.groups],
    }


def step(version: int, kind: str, root: str) -> dict[str, Any]:
    """Train and publish."""
    engine, rollout, state = weight_cells.the_engine(), script_cells._rollouts[-1], _states[-1]
    engine.train_batch(batch(), loss_fn, weight_fn)
    meta = meta_of(kind, root).with_version(version)
    if kind == "xccl":
        sync.update_weights_from_distributed(state, meta, engine)
    else:
        sync.update_weights_from_disk(meta, engine)
    engine.set_version(version)
    rollout.set_version(version)
    return _described(state)


def send_list(version: int, *, without_last: bool = False) -> dict[str, Any]:
    """Train, and publish tensors from a list that the first rank made; what is left of it, and the refusal."""
    engine, rollout, state = weight_cells.the_engine(), script_cells._rollouts[-1], _states[-1]
    engine.train_batch(batch(), loss_fn, weight_fn)
    pairs = [(name, tensor.clone()) for name, tensor in engine.named_full_tensors()]
    if without_last:
        pairs.pop()
    refusal = ""
    if dist.get_rank() == 0:
        meta = meta_of("xccl", "").with_version(version)
        lock = threading.Lock()
        sync._update_bucket_weights(state, meta, rollout, lock, [])
        try:
            sync._update_bucket_weights(state, meta, rollout, lock, pairs)
        except WeightSyncError as exc:
            refusal = str(exc)
        assert not lock.locked()
    if not refusal and not without_last:
        engine.set_version(version)
        rollout.set_version(version)
    return {"left": len(pairs), "refusal": refusal}


def disconnect() -> None:
    """Undo :func:`connect`."""
    _states.pop()
    script_cells.disconnect()
