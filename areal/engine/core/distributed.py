"""Device and process-group basics; the only place that chooses a device or starts ``torch.distributed``.

Called by the backends' ``create_process_group`` and by checkpoint code. With one rank nothing is started and every
function here returns at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from areal.utils import environ

COLLECTIVE_TIMEOUT = timedelta(hours=2)


def current_device() -> torch.device:
    """Where this process computes: its GPU where there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", environ.local_rank() % torch.cuda.device_count())
    return torch.device("cpu")


def padding_quantum(device: torch.device) -> int:
    """Packed rows are padded to a multiple of this many tokens: kernels want it on a GPU, a CPU does not."""
    return 256 if device.type == "cuda" else 1


def join_world(device: torch.device) -> None:
    """Start the default process group from the launcher's environment, or share the one that is there.

    Engines of one process share it; each calls :func:`leave_world` once.
    """
    if not dist.is_initialized():
        if device.type == "cuda":
            torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend=backend, timeout=COLLECTIVE_TIMEOUT)
        _world.started_here = True
    _world.users += 1


def leave_world() -> None:
    """Undo one :func:`join_world`; the last user stops the default group if an engine started it."""
    _world.users -= 1
    if _world.users == 0 and _world.started_here and dist.is_initialized():
        dist.destroy_process_group()
        _world.started_here = False


@dataclass
class _World:
    users: int = 0
    started_here: bool = False


_world = _World()


def group_size(group: dist.ProcessGroup | None) -> int:
    """Ranks in ``group``; 1 for None."""
    return 1 if group is None else dist.get_world_size(group)


def group_rank(group: dist.ProcessGroup | None) -> int:
    """This rank's place in ``group``; 0 for None."""
    return 0 if group is None else dist.get_rank(group)


def all_reduce_sum(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Sum ``x`` over ``group`` in place; every rank of it must call. None: this rank alone."""
    if group is not None:
        dist.all_reduce(x, op=dist.ReduceOp.SUM, group=group)
    return x


def barrier(group: dist.ProcessGroup | None) -> None:
    """Wait for every rank of ``group``; used around renames of checkpoint directories."""
    if group is not None:
        dist.barrier(group=group)
