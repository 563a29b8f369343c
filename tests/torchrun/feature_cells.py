"""What live ranks run to test compiled layers, mixtures of experts and captured failures."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from areal.api.config.fsdp import FSDPEngineConfig
from areal.api.config.train import FailureCaptureConfig
from areal.api.io_struct import SaveLoadMeta
from areal.engine.core import hf_checkpoint
from areal.engine.core.replay import replay_step
from areal.engine.core.weight_sync import InProcessPublisher
from tests.engine_fakes import build_engine, loss_fn, weight_fn
from tests.test_moe_names import CopyingReceiver
from tests.torchrun.cells import full_weights, rows_of


def _rows(engine: Any, split: int = 4) -> list[dict[str, Any]]:
    """This rank's rows: ranks that share rows get the same ones."""
    rank = engine.data_parallel_rank if engine.data_parallel_world_size > 1 else None
    return rows_of(rank, split) if rank is not None else rows_of(0, 7)


def compiled_steps(path: str, backend: str, enable_compile: bool) -> dict[str, Any]:
    """Two steps and a scoring pass."""
    engine = build_engine(path, backend=backend, fsdp=FSDPEngineConfig(enable_compile=enable_compile))
    rows = _rows(engine)
    losses, norms = [], []
    for _ in range(2):
        losses.append(engine.eval_batch(rows, loss_fn, weight_fn).item())
        norms.append(engine.train_batch(rows, loss_fn, weight_fn)["grad_norm"])
    answer = {
        "losses": losses,
        "norms": norms,
        "weights": full_weights(engine),
        "logprobs": engine.forward_batch(rows),
        "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"] if enable_compile else 0,
    }
    engine.destroy()
    return answer


def moe_steps(path: str, out: str) -> dict[str, Any]:
    """Two steps of a mixture of experts on two ranks, a publication, an export, and the export read back."""
    engine, receiver = build_engine(path, backend="fsdp:d2"), CopyingReceiver()
    rows = rows_of(dist.get_rank(), 4)
    losses, norms = [], []
    for _ in range(2):
        losses.append(engine.eval_batch(rows, loss_fn, weight_fn).item())
        norms.append(engine.train_batch(rows, loss_fn, weight_fn)["grad_norm"])
    receivers = [receiver] if dist.get_rank() == 0 else []
    InProcessPublisher(engine.named_full_tensors, *receivers).publish(1)
    engine.save(SaveLoadMeta(out, "hf", False))
    before, hf_checkpoint.SHARDED_FROM_BYTES = hf_checkpoint.SHARDED_FROM_BYTES, 0  # every rank writes a file
    try:
        engine.save(SaveLoadMeta(f"{out}-files", "hf", False))
    finally:
        hf_checkpoint.SHARDED_FROM_BYTES = before
    weights = full_weights(engine)
    engine.destroy()
    other = build_engine(path, backend="fsdp:d2")
    other.load(SaveLoadMeta(out, "hf", False))
    read_back = full_weights(other)
    other.destroy()
    return {"losses": losses, "norms": norms, "weights": weights, "read_back": read_back, "sent": receiver.weights}


def poisoned_loss(logprobs: Any, entropy: Any, packed_input: dict[str, Any]) -> Any:
    """The usual loss, times a factor that the batch carries."""
    return loss_fn(logprobs, entropy, packed_input) * packed_input["poison"].max()


def capture(path: str, directory: str, backend: str) -> list[str]:
    """The last share of rows has a NaN; both ranks write their part. Returns the names of what was captured."""
    settings = FailureCaptureConfig(directory=directory)
    engine = build_engine(path, backend=backend, failure_capture=settings, mb_spec={"n_mbs": 2})
    rows = _rows(engine)
    is_last = engine.data_parallel_rank == engine.data_parallel_world_size - 1
    for index, row in enumerate(rows):
        bad = is_last and index == 1
        row["poison"] = torch.full(row["input_ids"].shape, math.nan if bad else 1.0)
    engine.train_batch(rows, poisoned_loss, weight_fn)
    engine.destroy()
    dist.barrier()
    return sorted(str(p.relative_to(directory)) for p in Path(directory).glob("*/*"))


def replay(directory: str) -> dict[str, Any]:
    """Report of this rank."""
    return replay_step(directory).as_dict()
