"""Which rank this process is, and small exchanges of plain data between ranks; one home for "only rank 0 does this".

Works without ``torch.distributed`` (then there is one rank) and does not import torch by itself.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from areal.utils import environ
from areal.utils.errors import ArealError

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


def distributed_ready() -> bool:
    """True when the default process group exists."""
    dist = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_available() and dist.is_initialized()


def global_rank() -> int:
    """Rank in the default process group, else the one torchrun announced, else 0."""
    return int(sys.modules["torch.distributed"].get_rank()) if distributed_ready() else environ.rank()


def is_first_rank() -> bool:
    """True on the rank that writes files and talks to trackers."""
    return global_rank() == 0


def barrier(group: ProcessGroup | None = None) -> None:
    """Wait for every rank of ``group`` (default: all); every one must call. Nothing to wait for with one rank."""
    if distributed_ready():
        sys.modules["torch.distributed"].barrier(group=group)


def group_device(group: ProcessGroup | None = None) -> torch.device:
    """Device whose tensors the collectives of ``group`` accept."""
    import torch

    if "gloo" in str(torch.distributed.get_backend(group)) or not torch.accelerator.is_available():
        return torch.device("cpu")
    return torch.device(f"{torch.accelerator.current_accelerator()}:{torch.accelerator.current_device_index()}")


def gather_json(value: Any, group: ProcessGroup | None = None) -> list[Any]:
    """``[value of rank 0, of rank 1, …]`` of a JSON value, sent as UTF-8 bytes. Every rank of ``group`` must call."""
    if not distributed_ready():
        return [value]
    import torch

    device = group_device(group)
    payload = json.dumps(value).encode()
    n_ranks = torch.distributed.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(n_ranks)]
    torch.distributed.all_gather(sizes, torch.tensor([len(payload)], device=device), group=group)
    lengths = [int(size) for size in sizes]
    mine = torch.zeros(max(lengths), dtype=torch.uint8)
    mine[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    blobs = [torch.zeros(max(lengths), dtype=torch.uint8, device=device) for _ in range(n_ranks)]
    torch.distributed.all_gather(blobs, mine.to(device), group=group)
    return [json.loads(blob[:length].cpu().numpy().tobytes()) for blob, length in zip(blobs, lengths, strict=True)]


def value_of_rank(value: Any, rank: int, group: ProcessGroup | None) -> Any:
    """What ``value``, a JSON value, is on global ``rank``; every rank of ``group`` must call. None: this rank alone."""
    if group is None:
        return value
    return gather_json(value, group)[sys.modules["torch.distributed"].get_group_rank(group, rank)]


@contextmanager
def together(
    what: str, error: type[ArealError], group: ProcessGroup | None = None, *, alone: bool = False
) -> Iterator[None]:
    """Run a block in which one rank may fail alone; then every rank raises, so that none waits for it.

    The block must not skip collectives on the rank that fails. Every rank of ``group`` must enter.

    Args:
        what: start of the message, such as ``"/ckpt could not be written"``.
        error: class that other exceptions than ours become, and that the ranks raise which did not fail themselves.
        group: default: all ranks.
        alone: this process has no partners here, whatever groups exist.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as exc:  # noqa: BLE001 - raised below, on every rank
        failure = exc
    mine = None if failure is None else f"{type(failure).__name__}: {failure}"
    told: list[str | None] = [mine]
    if not alone:
        try:
            told = gather_json(mine, group)
        except RuntimeError as exc:  # a rank was killed; what failed here is the better reason
            if failure is None:
                raise error(f"{what}: another rank is gone: {exc}") from exc
    if isinstance(failure, ArealError):
        raise failure
    if failure is not None:
        raise error(f"{what}: {mine}") from failure
    for rank, message in enumerate(told):
        if message is not None:
            raise error(f"{what}: rank {rank}: {message}")
