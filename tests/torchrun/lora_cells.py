"""What the live ranks run to compare adapters in a layout with one process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from areal.api.io_struct import SaveLoadMeta
from areal.engine.fsdp_engine import FSDPEngine
from areal.experimental.engine.archon_engine import ArchonEngine
from areal.utils.errors import ArealError
from tests.engine_fakes import engine_config, weight_fn
from tests.torchrun.layout_cells import rows, sft


@dataclass
class Outcome:
    """Two steps: losses before each, gradient norms, adapters at the end, merged weights at the end."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    adapter: dict[str, np.ndarray] = field(default_factory=dict)
    merged: dict[str, np.ndarray] = field(default_factory=dict)


def build(path: str, backend: str, **settings: Any) -> FSDPEngine | ArchonEngine:
    """An initialized engine with adapters, in training mode."""
    kind = FSDPEngine if backend.startswith("fsdp") else ArchonEngine
    lora = {"use_lora": True, "lora_rank": 4, "lora_alpha": 8}
    engine = kind(engine_config(path, backend=backend, **lora, **settings))
    engine.create_process_group()
    engine.initialize(None, None)
    return engine.train()


def save_start(path: str, out: str) -> str:
    """An adapter that adds something, for every engine to start with."""
    engine = build(path, "fsdp:d1")
    engine.train_batch(rows(), sft, weight_fn)
    engine.save(SaveLoadMeta(out, "hf", False))
    engine.destroy()
    return out


def two_steps(
    path: str, backend: str, shards: list[list[int]], start: str, out: str | None = None, **settings: Any
) -> Outcome:
    """``shards[r]`` are data-parallel rank r's rows; after the first step everything is saved below ``out``."""
    engine = build(path, backend, **settings)
    engine.load(SaveLoadMeta(start, "hf", False))
    own = [row for i, row in enumerate(rows()) if i in shards[engine.data_parallel_rank]]
    outcome = Outcome()
    for number in range(2):
        outcome.losses.append(engine.eval_batch(own, sft, weight_fn).item())
        outcome.norms.append(engine.train_batch(own, sft, weight_fn)["grad_norm"])
        if out is not None and number == 0:
            engine.save(SaveLoadMeta(f"{out}/point", "dcp", True))
            engine.save(SaveLoadMeta(f"{out}/adapter", "hf", False))
            engine.save(SaveLoadMeta(f"{out}/merged", "hf", False, merged=True))
    outcome.merged = {n: t.detach().float().clone().numpy() for n, t in engine.named_full_tensors()}
    engine.send_adapter()
    outcome.adapter = {n: t.detach().float().clone().numpy() for n, t in engine.named_full_tensors()}
    engine.destroy()
    return outcome


def second_step(path: str, backend: str, shards: list[list[int]], out: str) -> list[float]:
    """Resume from the recover point of :func:`two_steps`; loss before the second step and its norm."""
    engine = build(path, backend)
    own = [row for i, row in enumerate(rows()) if i in shards[engine.data_parallel_rank]]
    engine.load(SaveLoadMeta(f"{out}/point", "dcp", True))
    loss = engine.eval_batch(own, sft, weight_fn).item()
    norm = engine.train_batch(own, sft, weight_fn)["grad_norm"]
    engine.destroy()
    return [loss, norm]


def fresh(path: str, backend: str) -> dict[str, np.ndarray]:
    """The adapter that a new engine starts with."""
    engine = build(path, backend)
    engine.send_adapter()
    found = {n: t.detach().float().clone().numpy() for n, t in engine.named_full_tensors()}
    engine.destroy()
    return found


def refusal(path: str, backend: str) -> str:
    """The error of building an engine with adapters in a layout."""
    try:
        build(path, backend)
    except ArealError as exc:
        return f"{type(exc).__name__}: {exc}"
    return "built"
