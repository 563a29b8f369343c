"""Device and process-group basics; the only place that chooses a device or starts ``torch.distributed``.

Called by the backends' ``create_process_group`` and by checkpoint code. With one rank nothing is started and every
function here returns at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from areal.utils import environ
from areal.utils.errors import ConfigError

COLLECTIVE_TIMEOUT = timedelta(hours=2)


def current_device() -> torch.device:
    """Where this process computes: its GPU where there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", environ.local_rank() % torch.cuda.device_count())
    return torch.device("cpu")


def padding_quantum(device: torch.device) -> int:
    """Packed rows are padded to a multiple of this many tokens: kernels want it on a GPU, a CPU does not."""
    return 256 if device.type == "cuda" else 1


def check_world_size(backend: str, needed: int) -> None:
    """Raises ConfigError: this job has another number of processes than ``backend`` needs."""
    found = dist.get_world_size() if dist.is_initialized() else environ.world_size()
    if found != needed:
        hint = "; set scheduler.type=local, which starts them, or launch the script with torchrun" if needed > 1 else ""
        raise ConfigError(f"backend {backend} needs {needed} processes, this job has {found}{hint}")


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
        _world.started_here, _world.agreement = False, None


def agreement_group() -> dist.ProcessGroup:
    """The gloo group of all ranks in which engines agree on counts and guard files; every rank must call.

    It is made once and shared by the engines of a process: making and closing one per engine costs time and sockets,
    and closing a gloo group while another rank still sends in it is not safe.
    """
    default = dist.group.WORLD
    assert default is not None
    if _world.agreement is None or _world.agreement[0] is not default:
        _world.agreement = (default, dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT))
    return _world.agreement[1]


@dataclass
class _World:
    users: int = 0
    started_here: bool = False
    agreement: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None  # default group, and ours beside it


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


def gather_rows(x: torch.Tensor, group: dist.ProcessGroup | None, *, mean_gradient: bool = False) -> torch.Tensor:
    """Concatenate ``[L, ...]`` of every rank in rank order to ``[L * size, ...]``; every rank of ``group`` must call.

    Backward sums (or averages) the gradients that the ranks have for one rank's rows, so it is a collective too.
    """
    if group is None:
        return x
    gathered: torch.Tensor = _GatherRows.apply(x, group, mean_gradient)  # type: ignore[no-untyped-call]
    return gathered


def reduce_rows(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Sum ``[L, ...]`` of every rank and keep this rank's ``[L / size, ...]`` of it; every rank of ``group`` must call.

    Backward gathers the gradients of all parts, so it is a collective too.
    """
    if group is None:
        return x
    reduced: torch.Tensor = _ReduceRows.apply(x, group)  # type: ignore[no-untyped-call]
    return reduced


class _ReduceRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        out = x.new_empty((x.shape[0] // group_size(group), *x.shape[1:]))
        dist.reduce_scatter_single(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        whole = grad.new_empty((grad.shape[0] * group_size(ctx.group), *grad.shape[1:]))
        dist.all_gather_single(whole, grad.contiguous(), group=ctx.group)
        return whole, None


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, mean_gradient: bool) -> torch.Tensor:
        ctx.group, ctx.rows, ctx.mean_gradient = group, x.shape[0], mean_gradient
        out = x.new_empty((x.shape[0] * group_size(group), *x.shape[1:]))
        dist.all_gather_single(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        own = grad.new_empty((ctx.rows, *grad.shape[1:]))
        dist.reduce_scatter_single(own, grad.contiguous(), group=ctx.group)
        return (own.div_(group_size(ctx.group)) if ctx.mean_gradient else own), None, None


def barrier(group: dist.ProcessGroup | None) -> None:
    """Wait for every rank of ``group``; used around renames of checkpoint directories."""
    if group is not None:
        dist.barrier(group=group)
