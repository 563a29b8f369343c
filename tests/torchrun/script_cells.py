"""What a 1.x script does on each of the live ranks: its own remote engine beside its share of the train engine."""

from __future__ import annotations

import asyncio

from areal.api.alloc_mode import ModelAllocation
from areal.api.io_struct import WeightUpdateMeta
from areal.engine.inference.remote_engine import read_limits
from areal.engine.native_remote import RemoteNativeEngine
from tests.engine_fakes import batch, loss_fn, weight_fn
from tests.server_fakes import ask, remote_config
from tests.torchrun import weight_cells

_rollouts: list[RemoteNativeEngine] = []


def meta_of(kind: str, root: str) -> WeightUpdateMeta:
    """How weights travel."""
    if kind == "disk":
        return WeightUpdateMeta.from_disk("test", "test", root)
    return WeightUpdateMeta.from_fsdp_xccl(ModelAllocation.from_str("native:d1"))


def connect(address: str, path: str, kind: str, root: str) -> None:
    """Connect the engine of ``weight_cells`` to a server."""
    rollout = RemoteNativeEngine(remote_config(consumer_batch_size=4), limits=read_limits("native", None, path, None))
    rollout.initialize(addr=address)
    _rollouts.append(rollout)
    weight_cells.the_engine().connect_engine(rollout, meta_of(kind, root))


def disconnect() -> None:
    _rollouts.pop().destroy()


def step(version: int, kind: str, root: str) -> None:
    """Train and publish."""
    engine, rollout = weight_cells.the_engine(), _rollouts[-1]
    engine.train_batch(batch(), loss_fn, weight_fn)
    engine.update_weights(meta_of(kind, root).with_version(version))
    engine.set_version(version)
    rollout.set_version(version)


def sample(ids: list[int]) -> tuple[list[int], list[float], list[int]]:
    """Tokens, log-probs and versions from this rank's remote engine."""
    reply = asyncio.run(_rollouts[-1].agenerate(ask(ids, max_new_tokens=6)))
    return reply.output_tokens, reply.output_logprobs, reply.output_versions
