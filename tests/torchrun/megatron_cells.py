"""What the live ranks run to compare a Megatron layout with one process; each function is called on every rank.

A rank returns the parts of gradients and parameters that it holds, with their place in the whole tensor, so the test
puts them together itself: no code of the engine gathers what is compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from areal.api.config.megatron import DistributedDataParallelConfig, MegatronEngineConfig
from areal.api.config.train import FailureCaptureConfig
from areal.api.io_struct import FinetuneSpec, SaveLoadMeta
from areal.engine.core.tensor_parts import relative_index
from areal.engine.megatron_engine import MegatronEngine
from areal.engine.megatron_utils.weights import Run, boxes_of_run
from areal.utils.errors import ArealError
from tests.engine_fakes import batch, engine_config, weight_fn
from tests.memory_probe import PeakRssAnon
from tests.torchrun.feature_cells import poisoned_loss
from tests.torchrun.layout_cells import LENGTHS, LOSSES, rows
from tests.torchrun.parity import Arrays, Part, RankOutcome, watched_steps

STEPS = 3  # of a comparison
SPEC = FinetuneSpec(total_train_epochs=1, dataset_size=40, train_batch_size=4)
COSINE = {"lr": 1e-2, "eps": 1e-3, "lr_scheduler_type": "cosine", "warmup_steps_proportion": 0.2, "min_lr_ratio": 0.1}


def megatron_engine(path: str, backend: str, megatron: dict[str, Any] | None = None, **settings: Any) -> MegatronEngine:
    """An engine that has started nothing; ``megatron`` are keys of its section."""
    section = dict(megatron or {})
    if isinstance(section.get("ddp"), dict):
        section["ddp"] = DistributedDataParallelConfig(**section["ddp"])
    config = engine_config(path, backend=backend, megatron=MegatronEngineConfig(**section), **settings)
    return MegatronEngine(config)


@contextmanager
def built(path: str, backend: str, ft_spec: FinetuneSpec | None = None, **settings: Any) -> Iterator[MegatronEngine]:
    """An initialized engine in training mode; ``settings`` as for :func:`megatron_engine`."""
    engine = megatron_engine(path, backend, **settings)
    try:
        engine.create_process_group()
        engine.initialize(None, ft_spec)
        yield engine.train()
    finally:
        engine.destroy()


def compare(
    path: str,
    backend: str,
    cases: list[tuple[str, int]],
    shards: list[list[int]],
    masked: tuple[int, ...] = (),
    out: str | None = None,
    **settings: Any,
) -> list[RankOutcome]:
    """Steps from the saved weights for each ``(loss, micro-batches)``; ``shards[r]`` are rank r's rows (of d).

    With ``out``, the weights after the last case are exported there.
    """
    outcomes = []
    with built(path, backend, **settings) as engine:
        own = [row for i, row in enumerate(rows(masked=masked)) if i in shards[engine.data_parallel_rank]]
        for loss_name, n_mbs in cases:
            engine.config.mb_spec.n_mbs = n_mbs
            engine.load(SaveLoadMeta(path, "hf", False))
            engine.loop.optimizer.torch_optimizer.state.clear()
            outcomes.append(_steps(engine, loss_name, own))
        if out is not None:
            engine.save(SaveLoadMeta(out, "hf", False))
    return outcomes


def _steps(engine: MegatronEngine, loss_name: str, own: list[dict[str, Tensor]]) -> RankOutcome:
    outcome = watched_steps(engine, loss_name, own, STEPS, gradient_parts)
    outcome.parameters = {part.name: [_part(part.index, part.shape, part.view)] for part in engine.layout.parts}
    outcome.weights = full_weights(engine)
    return outcome


def gradient_parts(engine: MegatronEngine) -> dict[str, list[Part]]:
    """This rank's parts of every gradient, as the optimizer is about to use it."""
    found = {}
    for run in engine.loop.optimizer.shards.runs:
        pieces = boxes_of_run(Run(run.part, run.leaf.grad, run.start, run.stop))
        found[run.part.name] = [_part(place, run.part.shape, values) for place, values in pieces]
    return found


def _part(place: Any, shape: tuple[int, ...], values: Tensor) -> Part:
    return place, shape, values.detach().float().clone().numpy()


def full_weights(engine: MegatronEngine) -> Arrays:
    """Copies of all full tensors that this rank gives to publishers."""
    return {name: tensor.detach().float().clone().numpy() for name, tensor in engine.named_full_tensors()}


def fresh_weights(path: str, backend: str, seed: int, **settings: Any) -> Arrays:
    """Full tensors of an engine that reads no weights; every rank but the first has another seed."""
    torch.manual_seed(seed + (dist.get_rank() if dist.is_initialized() else 0))
    with built(path, backend, init_from_scratch=True, **settings) as engine:
        return full_weights(engine)


def save_and_go_on(path: str, backend: str, shards: list[list[int]], out: str, **settings: Any) -> dict[str, Any]:
    """Two steps, a recover point (written from a snapshot), two more steps."""
    with built(path, backend, SPEC, optimizer=COSINE, **settings) as engine:
        _some_steps(engine, shards)
        write = engine.stage_save(SaveLoadMeta(out, "dcp", True))
        answer = _some_steps(engine, shards)
        write()
    return answer


def resume(path: str, backend: str, shards: list[list[int]], out: str, **settings: Any) -> dict[str, Any]:
    """Load that recover point, perhaps of another layout, and take the same two steps."""
    with built(path, backend, SPEC, optimizer=COSINE, **settings) as engine:
        engine.load(SaveLoadMeta(out, "dcp", True))
        return _some_steps(engine, shards)


def _some_steps(engine: MegatronEngine, shards: list[list[int]]) -> dict[str, Any]:
    """Two steps of the schedule; results, version and full tensors after them."""
    own = [row for i, row in enumerate(rows()) if i in shards[engine.data_parallel_rank]]
    results = []
    for _ in range(2):
        results.append(engine.train_batch(own, LOSSES["ppo"], weight_fn))
        engine.lr_scheduler_step()
        engine.set_version(engine.get_version() + 1)
    return {"results": results, "version": engine.get_version(), "weights": full_weights(engine)}


def states(path: str, backend: str, out: str, shards: list[list[int]] | None, **settings: Any) -> dict[str, list[Part]]:
    """This rank's parts of all masters and moments, by name and kind.

    Of an engine that took two steps on ``shards`` and saved them to ``out``, or (None) loaded them from there.
    """
    with built(path, backend, SPEC, **{"optimizer": COSINE, **settings}) as engine:
        meta = SaveLoadMeta(out, "dcp", True)
        if shards is None:
            engine.load(meta)
        else:
            _some_steps(engine, shards)
            engine.save(meta)
        found: dict[str, list[Part]] = {}
        optimizer = engine.loop.optimizer
        for run in optimizer.shards.runs:
            for kind, values in {"master": run.leaf, **optimizer.state_tensors(run.part.name)}.items():
                if values.dim():
                    pieces = boxes_of_run(Run(run.part, values, run.start, run.stop))
                    found[f"{run.part.name}.{kind}"] = [_part(place, run.part.shape, piece) for place, piece in pieces]
        return found


def place_in_schedule(path: str, out: str, restore: bool) -> list[float]:
    """Version and learning rate after a recover point of two steps was loaded; in one process."""
    arguments: dict[str, Any] = {"path": path, "backend": "megatron:d1", "ft_spec": SPEC, "optimizer": COSINE}
    with built(**arguments) as engine:
        _some_steps(engine, [list(range(len(LENGTHS)))])
        engine.save(SaveLoadMeta(out, "dcp", True))
    with built(**arguments, megatron={"use_checkpoint_opt_param_scheduler": restore}) as engine:
        engine.load(SaveLoadMeta(out, "dcp", True))
        return [engine.get_version(), engine.loop.optimizer.schedule.steps_done]


def reload(path: str, backend: str, out: str, **settings: Any) -> tuple[Arrays, Arrays]:
    """Full tensors after a step, and again after an export, another step and loading the export."""
    with built(path, backend, **settings) as engine:
        engine.train_batch(rows(), LOSSES["sft"], weight_fn)
        engine.save(SaveLoadMeta(out, "hf", False))
        before = full_weights(engine)
        engine.train_batch(rows(), LOSSES["sft"], weight_fn)
        engine.load(SaveLoadMeta(out, "hf", False))
        return before, full_weights(engine)


def count_groups(path: str, backend: str, engines: int, **settings: Any) -> list[int]:
    """Process groups of this process after each of several engines, one after the other."""
    counts = []
    for _ in range(engines):
        with built(path, backend, **settings):
            pass
        counts.append(len(distributed_c10d._world.pg_map))
    return counts


def refusal(path: str, backend: str, **settings: Any) -> tuple[str, str, bool]:
    """Class and message of the error of an engine that is built, and if it is a ``ValueError``; empty if it works."""
    engine: MegatronEngine | None = None
    try:
        engine = megatron_engine(path, backend, **settings)
        engine.create_process_group()
        engine.initialize(None, None)
    except ArealError as exc:
        return type(exc).__name__, str(exc), isinstance(exc, ValueError)
    finally:
        if engine is not None:
            engine.destroy()
    return "", "", False


def second_layout(path: str, first: str, second: str) -> str:
    """What an engine of another layout is told while the first one lives."""
    with built(path, first, init_from_scratch=True):
        return refusal(path, second, init_from_scratch=True)[1]


def norms(path: str, backend: str, dtype: str = "bfloat16", **settings: Any) -> list[float]:
    """Gradient norms of three steps of five micro-batches (three of each shard).

    The loss has no kinks: a clipped one takes another way where rounding moves a token over its edge.
    """
    with built(path, backend, dtype=dtype, optimizer={"lr": 1e-3}, **settings) as engine:
        engine.config.mb_spec.n_mbs = 5 if "d2" not in backend else 3
        own = rows()[engine.data_parallel_rank :: engine.data_parallel_world_size]
        found = [engine.train_batch(own, LOSSES["sft"], weight_fn)["grad_norm"] for _ in range(3)]
        kinds = {parameter.dtype for parameter in engine.module.parameters()}
        assert kinds == {getattr(torch, dtype)}
        leaves = {leaf.dtype for leaf in engine.loop.optimizer.shards.shards.values()}
        assert leaves == {torch.float32}
    return found


def masters(path: str, backend: str) -> float:
    """Largest difference between float32 masters of a bfloat16 engine and the float32 checkpoint it was made from."""
    with built(path, backend, dtype="bfloat16") as engine:
        source = engine.layout.source(path)
        worst = 0.0
        for run in engine.loop.optimizer.shards.runs:
            for place, values in boxes_of_run(run):
                for piece_place, piece in source.pieces(run.part.name, place):
                    own = values[relative_index(piece_place, place)]
                    worst = max(worst, (own - piece).abs().max().item())
        return worst


def norms_of_steps(path: str, backend: str, calls: tuple[int, ...], **settings: Any) -> list[float]:
    """Gradient norms of steps from the saved weights, made of ``calls[i]`` runs each.

    One is that of ``train_batch``; two are calls of ``forward_backward_batch`` with an evaluation behind them.
    """
    own, norms = rows(), []
    with built(path, backend, **settings) as engine:
        for count in calls:
            engine.load(SaveLoadMeta(path, "hf", False))
            if count == 1:
                norms.append(engine.train_batch(own, LOSSES["sft"], weight_fn)["grad_norm"])
                continue
            engine.optimizer_zero_grad()
            for half in (own[:4], own[4:]):
                engine.forward_backward_batch(half, lambda logits, packed: logits.float().square().mean())
            engine.eval_batch(own, LOSSES["sft"], weight_fn)
            norms.append(engine.optimizer_step()["grad_norm"])
    return norms


def heads(path: str, backend: str) -> tuple[int, bool, int]:
    """Who owns this rank's rows, whether that is this rank, and who ends up with losses."""
    engine = megatron_engine(path, backend)
    try:
        engine.create_process_group()
        return engine.current_data_parallel_head(), engine.is_data_parallel_head(), engine.result_rank
    finally:
        engine.destroy()


def skipped(path: str, backend: str) -> tuple[dict[str, float], bool]:
    """Result of a step whose loss is infinite, and whether the weights stayed."""
    with built(path, backend) as engine:
        before = full_weights(engine)
        result = engine.train_batch(rows(), lambda logp, h, packed: logp.sum() * float("inf"), weight_fn)
        after = full_weights(engine)
        return result, all((before[name] == after[name]).all() for name in before)


def offloaded(path: str, backend: str) -> bool:
    """Whether a step after leaving memory is the same as without."""
    found = []
    for leave in (False, True):
        with built(path, backend) as engine:
            engine.train_batch(rows(), LOSSES["sft"], weight_fn)
            if leave:
                buffers = [buffer.untyped_storage() for buffer in engine._gradient_buffers()]
                kept = {tensor.untyped_storage().data_ptr() for tensor in engine._tensors_to_move()}
                assert buffers
                assert not kept & {storage.data_ptr() for storage in buffers}  # zeros are not worth a copy
                engine.offload()
                assert engine.is_offload
                assert not any(storage.nbytes() for storage in buffers)
                engine.optimizer_zero_grad()
            norm = engine.train_batch(rows(), LOSSES["sft"], weight_fn)["grad_norm"]
            found.append((norm, full_weights(engine)))
    (one, first), (two, second) = found
    return one == two and all((first[name] == second[name]).all() for name in first)


def growth(small: str, path: str, backend: str, out: str) -> dict[str, int]:
    """Peak rise of anonymous memory while a model is loaded to be scored with, loaded again and exported, in bytes."""
    with built(small, backend, optimizer=None):
        pass
    engine = megatron_engine(path, backend, optimizer=None)
    try:
        engine.create_process_group()
        with PeakRssAnon() as first:
            engine.initialize(None, None)
        with PeakRssAnon() as again:
            engine.load(SaveLoadMeta(path, "hf", False))
        with PeakRssAnon() as export:
            engine.save(SaveLoadMeta(out, "hf", False))
        sizes = [part.parameter.numel() * part.parameter.element_size() for part in engine.layout.parts]
        whole = [math.prod(shape) * 4 for shape in engine.layout.names.shapes.values()]
        answer = {"first": first.growth, "again": again.growth, "export": export.growth}
        return {**answer, "shard": sum(sizes), "largest": max(whole), "whole": sum(whole)}
    finally:
        engine.destroy()


def published(path: str, backend: str, **settings: Any) -> tuple[list[tuple[str, np.ndarray]], set[torch.dtype]]:
    """What this rank gives to publishers, in its order, and its dtypes."""
    with built(path, backend, **settings) as engine:
        found = [(name, tensor.clone()) for name, tensor in engine.named_full_tensors()]
        return [(name, tensor.float().numpy()) for name, tensor in found], {tensor.dtype for _, tensor in found}


def captured(path: str, directory: str, backend: str) -> list[str]:
    """Train on rows of which one has a NaN; the names of what was captured."""
    settings = FailureCaptureConfig(directory=directory)
    with built(path, backend, failure_capture=settings, mb_spec={"n_mbs": 2}) as engine:
        found = batch()
        for index, row in enumerate(found):
            row["poison"] = torch.full(row["input_ids"].shape, math.nan if index == 1 else 1.0)
        engine.train_batch(found, poisoned_loss, weight_fn)
    dist.barrier()
    return sorted(str(p.relative_to(directory)) for p in Path(directory).glob("*/*"))
