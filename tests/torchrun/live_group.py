"""A group of live ranks: started once, then each test is a message to them, because a launch costs seconds."""

from __future__ import annotations

import multiprocessing as mp
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _serve(rank: int, world_size: int, port: int, pipe: Connection) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )
    import faulthandler

    import torch

    from areal.engine.core import distributed

    faulthandler.enable()  # a rank that dies of a signal says where

    torch.set_num_threads(1)
    device = distributed.current_device()
    distributed.join_world(device)
    while True:
        try:
            message = pipe.recv()
        except EOFError:
            break
        if message is None:
            break
        cell, kwargs = message
        try:
            pipe.send((True, cell(**kwargs)))
        except BaseException:  # noqa: BLE001 - reported to the test
            pipe.send((False, traceback.format_exc()))
    distributed.leave_world()


def _ready() -> None:
    """First message: returns once the rank is up and its imports are done."""
    import tests.torchrun.cells  # noqa: F401


class CellError(AssertionError):
    """A rank raised; the message is its traceback."""


class LiveGroup:
    """``world_size`` processes with a default gloo group; ``run(cell, **kwargs)`` calls a function on each."""

    def __init__(self, world_size: int) -> None:
        context = mp.get_context("spawn")
        port = _free_port()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world_size, port, theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        self.run(_ready)

    def run(self, cell: Callable[..., Any], timeout_s: float = 120, **kwargs: Any) -> list[Any]:
        """Results by rank; raises CellError with the first traceback."""
        for pipe in self._pipes:
            pipe.send((cell, kwargs))
        results = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(timeout_s):
                raise CellError(f"rank {rank} gave no answer to {cell.__name__} within {timeout_s} s")
            results.append(pipe.recv())
        failures = [value for ok, value in results if not ok]
        if failures:
            raise CellError(failures[0])
        return [value for _, value in results]

    def close(self) -> None:
        """Stop the ranks."""
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(20)
            if process.is_alive():
                process.kill()
