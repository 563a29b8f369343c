"""What the live ranks run to compare a value model in a layout with one process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from areal.api.io_struct import SaveLoadMeta
from areal.trainer.roles import TRAIN_ENGINES
from areal.utils.batch import pack
from tests.engine_fakes import ADAM, engine_config, predicting_mask, weight_fn
from tests.torchrun.layout_cells import LENGTHS, rows


@dataclass
class Outcome:
    """Two steps of a value model.

    Attributes:
        values: of each row, before the first step.
        losses: before each step.
        norms: of the gradients, before clipping.
        weights: full tensors at the end, by checkpoint name; on the rank that has them.
    """

    values: list[np.ndarray] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, np.ndarray] = field(default_factory=dict)


def squared_error(values: Tensor, packed: dict[str, Any]) -> Tensor:
    """Mean squared error of the values of predicting positions."""
    mask = predicting_mask(packed)
    return ((values - packed["returns"]).square() * mask).sum() / mask.sum()


def reference(classifier: Any) -> Outcome:
    """The same two steps in one process with transformers and torch alone; trains ``classifier``."""
    optimizer = torch.optim.AdamW(
        classifier.parameters(), lr=ADAM["lr"], eps=ADAM["eps"], weight_decay=ADAM["weight_decay"]
    )
    outcome = Outcome()
    for step in range(2):
        values = []
        for length, row in zip(LENGTHS, rows(), strict=True):
            hidden = classifier.base_model(row["input_ids"][:, :length]).last_hidden_state[0]
            values.append(classifier.score(hidden)[:, 0])
        if step == 0:
            outcome.values = [v.detach().numpy() for v in values]
        loss = squared_error(torch.cat(values), pack(rows()).as_loss_input())
        optimizer.zero_grad()
        loss.backward()
        outcome.losses.append(loss.item())
        outcome.norms.append(torch.nn.utils.clip_grad_norm_(classifier.parameters(), ADAM["gradient_clipping"]).item())
        optimizer.step()
    outcome.weights = {n: p.detach().numpy() for n, p in classifier.named_parameters()}
    return outcome


def build(path: str, backend: str, **settings: Any) -> Any:
    """An initialized value model in training mode."""
    kind = TRAIN_ENGINES.get(backend.partition(":")[0])
    engine = kind(engine_config(path, backend=backend, is_critic=True, **settings))
    engine.create_process_group()
    engine.initialize(None, None)
    return engine.train()


def two_steps(
    path: str, backend: str, shards: list[list[int]], out: str | None = None, n_mbs: int = 2, **settings: Any
) -> Outcome:
    """Values, two steps, and a Hugging Face export to ``out``; ``shards[r]`` are data-parallel rank r's rows."""
    engine = build(path, backend, mb_spec={"n_mbs": n_mbs}, **settings)
    own = [row for i, row in enumerate(rows()) if i in shards[engine.data_parallel_rank]]
    outcome = Outcome(values=[value[0].numpy() for value in engine.forward_batch(own)])
    for _ in range(2):
        outcome.losses.append(engine.eval_batch(own, squared_error, weight_fn).item())
        outcome.norms.append(engine.train_batch(own, squared_error, weight_fn)["grad_norm"])
    outcome.weights = {n: t.detach().float().clone().numpy() for n, t in engine.named_full_tensors()}
    if out is not None:
        engine.save(SaveLoadMeta(out, "hf", False))
    engine.destroy()
    return outcome


def heads(path: str, backend: str) -> np.ndarray | None:
    """The value head of a new engine; None on ranks whose stages lack it."""
    engine = build(path, backend)
    found = {n: t.detach().clone().numpy() for n, t in engine.named_full_tensors()}
    engine.destroy()
    return found.get("score.weight")


def save_and_go_on(path: str, backend: str, shards: list[list[int]], out: str) -> list[float]:
    """One step, a recover point, one more step; returns the norm of that one."""
    engine = build(path, backend)
    own = [row for i, row in enumerate(rows()) if i in shards[engine.data_parallel_rank]]
    engine.train_batch(own, squared_error, weight_fn)
    engine.save(SaveLoadMeta(out, "dcp", True))
    return _one_step(engine, own)


def resume(path: str, backend: str, shards: list[list[int]], out: str) -> list[float]:
    """Load that recover point, perhaps of another layout or engine, and take the step that followed."""
    engine = build(path, backend)
    own = [row for i, row in enumerate(rows()) if i in shards[engine.data_parallel_rank]]
    engine.load(SaveLoadMeta(out, "dcp", True))
    return _one_step(engine, own)


def _one_step(engine: Any, own: list[dict[str, Tensor]]) -> list[float]:
    before = engine.eval_batch(own, squared_error, weight_fn).item()
    norm = engine.train_batch(own, squared_error, weight_fn)["grad_norm"]
    after = engine.eval_batch(own, squared_error, weight_fn).item()
    engine.destroy()
    return [before, norm, after]
