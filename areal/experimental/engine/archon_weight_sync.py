"""Archon's weights on their way to inference servers: whole tensors of every stage, and the group they travel in.

    stage 1 ─┐
    stage 2 ─┼─► first rank of the pipeline ─► named_full_tensors ─► disk, shared memory, or one group with the servers
    stage 0 ─┘

Every way of ``engine/core`` reads ``ArchonEngine.named_full_tensors``, hence :func:`full_tensors`. The other functions
are the steps of the path of scripts (``connect_engine``, then ``update_weights`` after each step); the work is that of
``core/connected_weights.py``. One group is enough, with any number of stages on either side: servers take a version
whole, from one sender, or not at all.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from areal.api.io_struct import ParamSpec
from areal.engine.core.distributed import current_device, group_rank
from areal.engine.core.model_layout import named_full_tensors
from areal.engine.core.tensor_parts import full_tensor, laid_out_like, local_part
from areal.engine.core.weight_wire import as_bytes
from areal.utils.errors import ConfigError
from areal.utils.ranks import gather_json

if TYPE_CHECKING:
    from collections.abc import Iterator

    from areal.api.io_struct import WeightUpdateMeta
    from areal.engine.core.connected_weights import ConnectedWeights
    from areal.engine.core.weight_sources import WeightGroup
    from areal.engine.inference.remote_engine import RemoteInfEngine
    from areal.experimental.engine.archon_checkpoint import ArchonLayout
    from areal.experimental.engine.archon_engine import ArchonEngine

__all__ = [
    "WeightSyncState",
    "full_tensors",
    "init_weight_update_group",
    "update_weights_from_disk",
    "update_weights_from_distributed",
]


# -- whole tensors -----------------------------------------------------------------------------------------------------


def full_tensors(
    layout: ArchonLayout, dtype: torch.dtype, pp_group: dist.ProcessGroup | None
) -> Iterator[tuple[str, Tensor]]:
    """``(checkpoint name, full tensor of dtype)`` in model order, tied weights once; every rank must iterate.

    The first rank of each pipeline has the tensors of all stages, the others those of their own. They come one by one:
    a stage that is not first holds two whole tensors at most, the one that it hands over and the next.

    Args:
        layout: of the stages of this rank.
        dtype: of parameters; buffers keep theirs.
        pp_group: the ranks of this pipeline; None: this rank has every stage.
    """
    own = named_full_tensors(layout, dtype, _get_full_tensor)
    if pp_group is None:
        yield from own
        return
    rank, sending = group_rank(pp_group), _Handover(pp_group)
    for owner, spec in _in_model_order(layout, dtype, pp_group):
        if owner == rank:
            name, tensor = next(own)
            assert name == spec.name, f"{name} is not at the place of {spec.name} in the model"
            if rank != 0:
                sending.send(tensor)
            yield name, tensor
        elif rank == 0:
            yield spec.name, _receive(spec, owner, pp_group)
    sending.finish()


def _get_full_tensor(param: Tensor) -> Tensor:
    """The whole of a parameter on this rank's device; every rank that holds a part of it must call.

    A part that was offloaded to host memory moves to the device of its mesh first, whose collectives gather it.
    """
    if not isinstance(param, DTensor):
        return param.detach().to(current_device())
    local, device = local_part(param), param.device_mesh.device_type
    if local.device.type != device:
        return full_tensor(laid_out_like(param, local.to(device)))
    return full_tensor(param.detach())


def _in_model_order(
    layout: ArchonLayout, dtype: torch.dtype, pp_group: dist.ProcessGroup
) -> list[tuple[int, ParamSpec]]:
    """Every tensor of the pipeline after the rank of ``pp_group`` that has it; the same on all of its ranks."""
    own: list[tuple[str, list[int], str]] = []
    shapes = [(name, tensor.shape, dtype) for name, tensor in layout.named_parameters()]
    shapes += [(name, tensor.shape, tensor.dtype) for name, tensor in layout.persistent_buffers()]
    for name, shape, kind in shapes:
        parts = layout.split(name, torch.empty(shape, dtype=kind, device="meta"))
        own += [(key, list(part.shape), str(part.dtype).removeprefix("torch.")) for key, part in parts]
    place = {key: i for i, key in enumerate(key for keys in layout.whole_names.values() for key in keys)}
    found = [
        (owner, ParamSpec(key, tuple(shape), kind))
        for owner, listed in enumerate(gather_json(own, pp_group))
        for key, shape, kind in listed
    ]
    return sorted(found, key=lambda item: place[item[1].name])


class _Handover:
    """Sends tensors to the first rank of a pipeline, the next one while the one before it is under way."""

    def __init__(self, pp_group: dist.ProcessGroup) -> None:
        self._group = pp_group
        self._work: tuple[Any, Tensor] | None = None  # with the memory that it reads

    def send(self, tensor: Tensor) -> None:
        """Start to send, once the last tensor has arrived."""
        self.finish()
        memory = as_bytes(tensor.contiguous())
        self._work = dist.isend(memory, group=self._group, group_dst=0), memory

    def finish(self) -> None:
        """Wait for what is under way."""
        if self._work is not None:
            self._work[0].wait()
            self._work = None


def _receive(spec: ParamSpec, owner: int, pp_group: dist.ProcessGroup) -> Tensor:
    memory = torch.empty(spec.size, dtype=torch.uint8, device=current_device())
    dist.recv(memory, group=pp_group, group_src=owner)
    return memory.view(getattr(torch, spec.dtype)).view(spec.shape)


# -- the path of scripts -----------------------------------------------------------------------------------------------


@dataclass
class WeightSyncState:
    """What a rank knows of the group in which weights are broadcast.

    Attributes:
        pp_rank: of this rank; names the group until it is built.
        group_initialized: the servers are in a group with the first rank.
        group_name: of the group, in full once it is built.
        master_addr, master_port: where its members meet; known to the first rank.
        group: as the first rank built it.
        group_names, groups, master_addrs, master_ports: the same of every group; there is one for all stages.
    """

    pp_rank: int
    group_initialized: bool = False
    group_name: str = ""
    master_addr: str = ""
    master_port: int = 0
    group: WeightGroup | None = None
    group_names: list[str] = field(default_factory=list)
    groups: list[WeightGroup] = field(default_factory=list)
    master_addrs: list[str] = field(default_factory=list)
    master_ports: list[int] = field(default_factory=list)
    connected: ConnectedWeights | None = None

    def __post_init__(self) -> None:
        self.group_name = self.group_name or f"update_weight_group_{self.pp_rank}"

    def note(self, connected: ConnectedWeights, *, whole: bool = True) -> None:
        """Take over what ``connected`` has built; a group that broke is built again, under another name.

        Args:
            whole: nothing failed.
        """
        group = connected.group
        self.connected, self.group, self.group_initialized = connected, group, whole
        self.groups = [] if group is None else [group]
        if group is not None:
            self.group_name, self.master_addr, self.master_port = group.name, group.host, group.port
        self.group_names = [found.name for found in self.groups]
        self.master_addrs = [found.host for found in self.groups]
        self.master_ports = [found.port for found in self.groups]


def init_weight_update_group(state: WeightSyncState, meta: WeightUpdateMeta, engine: ArchonEngine) -> None:
    """Have the first rank and the servers build their group; every rank calls, after ``engine.connect_engine``.

    Args:
        state: filled in.
        meta: of type ``xccl``.
        engine: connected to the servers.

    Raises:
        WeightSyncError: a server did not join.
        ConfigError: ``meta`` is of another type, or describes other servers.
    """
    _check_type(meta, "xccl")
    connected = engine.connected_weights
    with _noted(state, connected):
        connected.open_group(_named(state, meta))


def update_weights_from_distributed(state: WeightSyncState, meta: WeightUpdateMeta, engine: ArchonEngine) -> None:
    """Have the servers generate with the engine's weights, which the first rank broadcasts; every rank calls.

    Tensors are gathered and sent in the order of the model, in buckets of at most ``meta.weight_chunked_mem_mb``. The
    servers pause meanwhile, and go on with the old version if anything fails. A missing group is built.

    Raises:
        WeightSyncError: the servers did not take the weights, or got something else than was sent.
        ConfigError: as :func:`init_weight_update_group`.
    """
    _check_type(meta, "xccl")
    connected = engine.connected_weights
    with _noted(state, connected):
        connected.update(_named(state, meta))


def _update_bucket_weights(
    state: WeightSyncState,
    meta: WeightUpdateMeta,
    rollout_engine: RemoteInfEngine,
    lock: AbstractContextManager[Any],
    named_tensors: list[tuple[str, Tensor]],
) -> None:
    """Broadcast tensors that are at hand, in their order, and empty the list; nothing without any.

    They have to make a whole version, as servers take no less. The first rank calls, whose group is built.

    Args:
        state: after :func:`init_weight_update_group`.
        meta: of type ``xccl``.
        rollout_engine: the one that the engine is connected to.
        lock: held while servers and sender are in the collective.
        named_tensors: ``(checkpoint name, tensor)``; kept if the servers refuse them.

    Raises:
        WeightSyncError: as :func:`update_weights_from_distributed`; or no group is open.
    """
    if not named_tensors:
        return
    _check_type(meta, "xccl")
    connected = state.connected
    if connected is None or connected.rollout is not rollout_engine:
        raise ConfigError("no weight group with this inference engine is open; call init_weight_update_group() first")
    with lock, _noted(state, connected):
        connected.send(_named(state, meta), named_tensors)
    named_tensors.clear()


def update_weights_from_disk(meta: WeightUpdateMeta, engine: ArchonEngine) -> None:
    """Save the weights as ``meta.path`` and have the servers load them; every rank calls.

    Raises:
        WeightSyncError: the servers could not load them, or hold something else.
        CheckpointError: a rank could not write.
        ConfigError: ``meta`` is of another type, or names no path.
    """
    _check_type(meta, "disk")
    engine.connected_weights.update(meta)


@contextmanager
def _noted(state: WeightSyncState, connected: ConnectedWeights) -> Iterator[None]:
    """Have ``state`` show what is left of the group after the block, also if it fails."""
    whole = False
    try:
        yield
        whole = True
    finally:
        state.note(connected, whole=whole)


def _named(state: WeightSyncState, meta: WeightUpdateMeta) -> WeightUpdateMeta:
    """``meta`` with the name that a group gets."""
    return replace(meta, nccl_group_name=meta.nccl_group_name or f"update_weight_group_{state.pp_rank}")


def _check_type(meta: WeightUpdateMeta, expected: str) -> None:
    if meta.type != expected:
        raise ConfigError(f"WeightUpdateMeta.type={meta.type!r} must be {expected!r} here")
