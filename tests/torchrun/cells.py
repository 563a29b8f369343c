"""What the live ranks run; each function is called on every rank and returns plain picklable values."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from areal.api.io_struct import FinetuneSpec, SaveLoadMeta
from areal.engine.fsdp_engine import FSDPEngine
from areal.utils.seqpack import PackingError
from tests.engine_fakes import batch, build_engine, loss_fn, weight_fn

SPEC = FinetuneSpec(total_train_epochs=1, dataset_size=40, train_batch_size=4)
COSINE = {"lr": 1e-2, "eps": 1e-3, "lr_scheduler_type": "cosine", "warmup_steps_proportion": 0.2, "min_lr_ratio": 0.1}


def rows_of(rank: int, split: int) -> list[dict[str, Any]]:
    """The reference batch: the first ``split`` trajectories on rank 0, the rest on rank 1."""
    rows = batch()
    return rows[:split] if rank == 0 else rows[split:]


def full_weights(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    """Copies of all full tensors."""
    return {name: tensor.clone() for name, tensor in engine.named_full_tensors()}


def train(path: str, split: int, masked_rank: int | None = None, steps: int = 2, **settings: Any) -> dict[str, Any]:
    """A few steps on uneven shards; optionally one rank has no loss token."""
    engine = build_engine(path, backend="fsdp:d2", **settings)
    rows = rows_of(dist.get_rank(), split)
    if masked_rank == dist.get_rank():
        for row in rows:
            row["loss_mask"].zero_()
    losses, results = [], []
    for _ in range(steps):
        losses.append(engine.eval_batch(rows, loss_fn, weight_fn).item())
        results.append(engine.train_batch(rows, loss_fn, weight_fn))
    out = {
        "losses": losses,
        "results": results,
        "weights": full_weights(engine),
        "logprobs": engine.forward_batch(rows),
        "world": (engine.data_parallel_rank, engine.data_parallel_world_size),
        "local": sum(p.to_local().numel() for p in engine.module.parameters()),
    }
    engine.destroy()
    return out


def packing_error(path: str) -> str:
    """Only rank 0 has a sequence above the token limit; both ranks must raise."""
    engine = build_engine(path, backend="fsdp:d2", mb_spec={"max_tokens_per_mb": 8})
    rows = batch((12,)) if dist.get_rank() == 0 else batch((4,))
    try:
        engine.forward_batch(rows)
    except PackingError as exc:
        return str(exc)
    finally:
        engine.destroy()
    return "no error"


def export(path: str, out: str, **settings: Any) -> dict[str, torch.Tensor]:
    """One step, then a Hugging Face export."""
    engine = build_engine(path, backend="fsdp:d2", **settings)
    engine.train_batch(rows_of(dist.get_rank(), 4), loss_fn, weight_fn)
    engine.save(SaveLoadMeta(out, "hf", False))
    weights = full_weights(engine)
    engine.destroy()
    return weights


def load_hf(path: str, other: str) -> dict[str, torch.Tensor]:
    """Load another checkpoint into a sharded engine."""
    engine = build_engine(path, backend="fsdp:d2")
    engine.load(SaveLoadMeta(other, "hf", False))
    weights = full_weights(engine)
    engine.destroy()
    return weights


def step_some(engine: FSDPEngine, rows: list[dict[str, Any]], steps: int) -> list[dict[str, float]]:
    """Train steps with the schedule advancing."""
    results = []
    for _ in range(steps):
        results.append(engine.train_batch(rows, loss_fn, weight_fn))
        engine.lr_scheduler_step()
        engine.set_version(engine.get_version() + 1)
    return results


def save_and_go_on(path: str, out: str) -> dict[str, Any]:
    """Two steps, a recover point, two more steps."""
    engine = build_engine(path, backend="fsdp:d2", optimizer=COSINE, ft_spec=SPEC)
    rows = rows_of(dist.get_rank(), 4)
    step_some(engine, rows, 2)
    engine.save(SaveLoadMeta(out, "dcp", True))
    drawn = torch.rand(3)
    results = step_some(engine, rows, 2)
    answer = {"results": results, "weights": full_weights(engine), "drawn": drawn}
    engine.destroy()
    return answer


def resume(path: str, out: str) -> dict[str, Any]:
    """Load that recover point and take the same two steps."""
    engine = build_engine(path, backend="fsdp:d2", optimizer=COSINE, ft_spec=SPEC)
    engine.load(SaveLoadMeta(out, "dcp", True))
    answer = {"version": engine.get_version(), "drawn": torch.rand(3)}
    answer["results"] = step_some(engine, rows_of(dist.get_rank(), 4), 2)
    answer["weights"] = full_weights(engine)
    engine.destroy()
    return answer
