"""Memory and optimizer cells that the live ranks run; each returns plain values."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from areal.api.config.fsdp import FSDPEngineConfig
from areal.engine.fsdp_engine import FSDPEngine
from areal.utils.errors import ArealError
from tests.engine_fakes import batch, build_engine, loss_fn, weight_fn
from tests.memory_probe import PeakRssAnon, rss_anon
from tests.torchrun.cells import full_weights, rows_of


def _build(path: str, fsdp: dict[str, Any] | None = None, backend: str = "fsdp:d2", **settings: Any) -> FSDPEngine:
    return build_engine(path, backend=backend, fsdp=FSDPEngineConfig(**(fsdp or {})), **settings)


def _local_state(engine: FSDPEngine) -> list[torch.Tensor]:
    """Copies of this rank's weights, masters and optimizer state."""
    optimizer = engine.loop.optimizer
    tensors = [p.to_local() if isinstance(p, DTensor) else p for p in engine.module.parameters()]
    for name, shard in optimizer.shards.shards.items():
        tensors += [shard, *optimizer.state_tensors(name).values()]
    return [tensor.detach().clone() for tensor in tensors]


def load(paths: tuple[str, str], **settings: Any) -> dict[str, Any]:
    """Full weights and log-probs after loading; each rank has a path of its own."""
    engine = _build(paths[dist.get_rank()], **settings)
    answer = {
        "weights": full_weights(engine),
        "logprobs": engine.forward_batch(batch()),
        "buffers": {n: b.clone() for n, b in engine.module.named_buffers()},
        "tied": engine.module.get_input_embeddings().weight is engine.module.get_output_embeddings().weight,
    }
    engine.destroy()
    return answer


def load_error(paths: tuple[str, str], **settings: Any) -> str:
    """The message of the error that loading raises."""
    try:
        _build(paths[dist.get_rank()], **settings)
    except ArealError as exc:
        return f"{type(exc).__name__}: {exc}"
    return "no error"


def growth(small: str, path: str, **settings: Any) -> dict[str, int]:
    """Peak rise of anonymous memory while a model is loaded, its shard here and its largest tensor, in bytes."""
    _build(small, **settings).destroy()
    with PeakRssAnon() as peak:
        engine = _build(path, **settings)
    parameters = list(engine.module.parameters())
    answer = {
        "growth": peak.growth,
        "shard": sum(p.to_local().untyped_storage().nbytes() for p in parameters),
        "largest": max(p.numel() * 4 for p in parameters),
        "whole": sum(p.numel() * 4 for p in parameters),
    }
    engine.destroy()
    return answer


def train_state(path: str, steps: int = 2, **settings: Any) -> dict[str, Any]:
    """Some steps; results, full weights and this rank's optimizer state."""
    engine = _build(path, **settings)
    rows = rows_of(dist.get_rank(), 4)
    results = [engine.train_batch(rows, loss_fn, weight_fn) for _ in range(steps)]
    answer = {"results": results, "weights": full_weights(engine), "state": _local_state(engine)}
    engine.destroy()
    return answer


def offload_roundtrip(path: str, out: str, **settings: Any) -> dict[str, Any]:
    """Offload between two steps, with a save while it is out; against an engine that stays."""
    from areal.api.io_struct import SaveLoadMeta

    engine, stays = _build(path, **settings), _build(path, **settings)
    rows = rows_of(dist.get_rank(), 4)
    for each in (engine, stays):
        each.train_batch(rows, loss_fn, weight_fn)
    before = _local_state(engine)
    engine.offload()
    held = sum(p.to_local().untyped_storage().nbytes() for p in engine.module.parameters())
    engine.save(SaveLoadMeta(out, "hf", False))
    still = engine.is_offload
    engine.onload()
    equal = all(torch.equal(a, b) for a, b in zip(before, _local_state(engine), strict=True))
    engine.offload()
    same = engine.train_batch(rows, loss_fn, weight_fn) == stays.train_batch(rows, loss_fn, weight_fn)
    after = all(torch.equal(a, b) for a, b in zip(_local_state(engine), _local_state(stays), strict=True))
    weights = full_weights(engine)
    for each in (engine, stays):
        each.destroy()
    return {"held": held, "still": still, "equal": equal, "same": same, "after": after, "weights": weights}


def offload_growth(small: str, path: str) -> list[int]:
    """Anonymous memory above the start: loaded, offloaded, onloaded; and the state's size."""
    _build(small).destroy()
    before = rss_anon()
    engine = _build(path)
    optimizer = engine.loop.optimizer
    for name in optimizer.shards.shards:
        for tensor in optimizer.state_tensors(name).values():
            tensor.fill_(1)
    figures = [rss_anon() - before]
    engine.offload()
    figures.append(rss_anon() - before)
    engine.onload()
    figures.append(rss_anon() - before)
    figures.append(3 * sum(p.to_local().untyped_storage().nbytes() for p in engine.module.parameters()))
    engine.destroy()
    return figures
