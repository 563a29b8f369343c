"""What the live ranks run to compare an Archon layout with one process; each function is called on every rank.

A rank returns the parts of gradients and parameters that it holds, with their place in the whole tensor, so the test
puts them together itself: no code of the engine gathers what is compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from areal.api.config.archon import ArchonEngineConfig
from areal.api.io_struct import FinetuneSpec, SaveLoadMeta
from areal.engine.core.tensor_parts import local_part, own_index
from areal.experimental.engine.archon_engine import ArchonEngine
from areal.experimental.models.archon.state_dict import plain_name
from areal.utils.errors import ArealError
from tests.engine_fakes import engine_config, weight_fn
from tests.torchrun.layout_cells import LOSSES, rows
from tests.torchrun.parity import Arrays, Part, RankOutcome, watched_steps

SPEC = FinetuneSpec(total_train_epochs=1, dataset_size=40, train_batch_size=4)
COSINE = {"lr": 1e-2, "eps": 1e-3, "lr_scheduler_type": "cosine", "warmup_steps_proportion": 0.2, "min_lr_ratio": 0.1}


def archon_engine(path: str, backend: str, archon: dict[str, Any] | None = None, **settings: Any) -> ArchonEngine:
    """An engine that has started nothing; ``archon`` are keys of its section."""
    return ArchonEngine(engine_config(path, backend=backend, archon=ArchonEngineConfig(**(archon or {})), **settings))


def build(path: str, backend: str, ft_spec: FinetuneSpec | None = None, **settings: Any) -> ArchonEngine:
    """An initialized engine in training mode; ``settings`` as for :func:`archon_engine`."""
    engine = archon_engine(path, backend, **settings)
    engine.create_process_group()
    engine.initialize(None, ft_spec)
    return engine.train()


def compare(
    path: str,
    backend: str,
    cases: list[tuple[str, int]],
    shards: list[list[int]],
    masked: tuple[int, ...] = (),
    out: str | None = None,
    **settings: Any,
) -> list[RankOutcome]:
    """Two steps from the saved weights for each ``(loss, micro-batches)``; ``shards[r]`` are rank r's rows (of d).

    With ``out``, the weights after the last case are exported there.
    """
    engine = build(path, backend, **settings)
    shards_of_rank = engine.loop.optimizer.shards
    initial = {name: shard.detach().clone() for name, shard in shards_of_rank.shards.items()}
    own = [row for i, row in enumerate(rows(masked=masked)) if i in shards[engine.data_parallel_rank]]
    outcomes = []
    for loss_name, n_mbs in cases:
        engine.config.mb_spec.n_mbs = n_mbs
        with torch.no_grad():
            for name, shard in shards_of_rank.shards.items():
                shard.copy_(initial[name])
        shards_of_rank.write_back()
        engine.loop.optimizer.torch_optimizer.state.clear()
        outcomes.append(_two_steps(engine, loss_name, own))
    if out is not None:
        engine.save(SaveLoadMeta(out, "hf", False))
    engine.destroy()
    return outcomes


def _two_steps(engine: ArchonEngine, loss_name: str, own: list[dict[str, Tensor]]) -> RankOutcome:
    outcome = watched_steps(engine, loss_name, own, 2, gradient_parts)
    outcome.parameters = {name: [_part(p, local_part(p))] for name, p in _parameters(engine)}
    outcome.weights = full_weights(engine)
    return outcome


def _parameters(engine: ArchonEngine) -> Iterator[tuple[str, Tensor]]:
    """``(own name, parameter)`` of the stages that this rank holds."""
    for part in engine.parts:
        for name, parameter in part.named_parameters():
            yield plain_name(name), parameter


def gradient_parts(engine: ArchonEngine) -> dict[str, list[Part]]:
    """This rank's part of every gradient, as the optimizer is about to use it; zeros where there is none."""
    grads = {plain_name(name): shard.grad for name, shard in engine.loop.optimizer.shards.shards.items()}
    found = {}
    for name, parameter in _parameters(engine):
        grad = grads[name]
        found[name] = [_part(parameter, torch.zeros_like(local_part(parameter)) if grad is None else grad)]
    return found


def _part(parameter: Tensor, values: Tensor) -> Part:
    return own_index(parameter), tuple(parameter.shape), values.detach().float().clone().numpy()


def full_weights(engine: ArchonEngine) -> Arrays:
    """Copies of all full tensors that this rank gives to publishers."""
    return {name: tensor.detach().clone().numpy() for name, tensor in engine.named_full_tensors()}


def fresh_weights(path: str, backend: str, seed: int, **settings: Any) -> Arrays:
    """Full tensors of an engine that reads no weights; every rank but the first has another seed."""
    torch.manual_seed(seed + (dist.get_rank() if dist.is_initialized() else 0))
    engine = build(path, backend, init_from_scratch=True, **settings)
    found = full_weights(engine)
    engine.destroy()
    return found


def save_and_go_on(path: str, backend: str, shards: list[list[int]], out: str, **settings: Any) -> dict[str, Any]:
    """Two steps, a recover point, two more steps."""
    engine = build(path, backend, SPEC, optimizer=COSINE, **settings)
    _some_steps(engine, shards)
    engine.save(SaveLoadMeta(out, "dcp", True))
    return _some_steps(engine, shards, destroy=True)


def resume(path: str, backend: str, shards: list[list[int]], out: str, **settings: Any) -> dict[str, Any]:
    """Load that recover point, perhaps of another layout, and take the same two steps."""
    engine = build(path, backend, SPEC, optimizer=COSINE, **settings)
    engine.load(SaveLoadMeta(out, "dcp", True))
    return _some_steps(engine, shards, destroy=True)


def _some_steps(engine: ArchonEngine, shards: list[list[int]], destroy: bool = False) -> dict[str, Any]:
    """Two steps of the schedule; results, version and full tensors after them."""
    own = [row for i, row in enumerate(rows()) if i in shards[engine.data_parallel_rank]]
    results = []
    for _ in range(2):
        results.append(engine.train_batch(own, LOSSES["ppo"], weight_fn))
        engine.lr_scheduler_step()
        engine.set_version(engine.get_version() + 1)
    answer = {"results": results, "version": engine.get_version(), "weights": full_weights(engine)}
    if destroy:
        engine.destroy()
    return answer


def reload(path: str, backend: str, out: str, **settings: Any) -> tuple[Arrays, Arrays]:
    """Full tensors after a step, and again after an export, another step and loading the export."""
    engine = build(path, backend, **settings)
    engine.train_batch(rows(), LOSSES["sft"], weight_fn)
    engine.save(SaveLoadMeta(out, "hf", False))
    before = full_weights(engine)
    engine.train_batch(rows(), LOSSES["sft"], weight_fn)
    engine.load(SaveLoadMeta(out, "hf", False))
    after = full_weights(engine)
    engine.destroy()
    return before, after


def count_groups(path: str, backend: str, engines: int, **settings: Any) -> list[int]:
    """Process groups of this process after each of several engines, one after the other."""
    counts = []
    for _ in range(engines):
        build(path, backend, **settings).destroy()
        counts.append(len(distributed_c10d._world.pg_map))
    return counts


def refusal(
    path: str,
    backend: str,
    late: dict[str, Any] | None = None,
    **settings: Any,
) -> tuple[str, str, bool]:
    """The error of an engine that is built: its class, its message, whether it is a ``ValueError``; empty if it works.

    Args:
        late: keys of the ``archon`` section that are set after the section was checked.
        settings: as for :func:`archon_engine`.
    """
    engine: ArchonEngine | None = None
    try:
        engine = archon_engine(path, backend, **settings)
        for key, value in (late or {}).items():
            setattr(engine.config.archon, key, value)
        engine.create_process_group()
        engine.initialize(None, None)
    except ArealError as exc:
        return type(exc).__name__, str(exc), isinstance(exc, ValueError)
    finally:
        if engine is not None:
            engine.destroy()
    return "", "", False
