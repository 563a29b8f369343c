"""Saving in one layout and loading in another; each function is called on every rank of a layout."""

from __future__ import annotations

import os
import resource
import threading
from pathlib import Path
from typing import Any

import torch

from areal.api.config.timers import SaverConfig
from areal.api.io_struct import SaveLoadMeta
from areal.engine.core import hf_checkpoint
from areal.engine.fsdp_engine import FSDPEngine
from areal.utils.errors import CheckpointError
from areal.utils.saver import Saver
from tests.engine_fakes import batch, build_engine
from tests.torchrun.cells import COSINE, SPEC, full_weights, step_some

STEPS_BEFORE, STEPS_AFTER = 2, 2


def build(path: str, backend: str, **settings: Any) -> FSDPEngine:
    """An engine of a layout with a cosine schedule."""
    return build_engine(path, backend=backend, ft_spec=SPEC, **{"optimizer": COSINE, **settings})


def own_rows(engine: FSDPEngine) -> list[dict[str, Any]]:
    """This rank's part of the reference batch: uneven, whole trajectories; one process has all."""
    return batch()[engine.data_parallel_rank :: engine.data_parallel_world_size]


def uninterrupted(path: str, backend: str, out: str | None = None, **settings: Any) -> dict[str, Any]:
    """Steps without a stop; a recover point on the way, if ``out`` is given."""
    engine = build(path, backend, **settings)
    rows = own_rows(engine)
    step_some(engine, rows, STEPS_BEFORE)
    saved = full_weights(engine)
    if out is not None:
        engine.save(SaveLoadMeta(out, "dcp", True))
    answer = {"saved": saved, "results": step_some(engine, rows, STEPS_AFTER), "weights": full_weights(engine)}
    answer["version"], answer["lr_steps"] = engine.get_version(), engine.loop.optimizer.schedule.steps_done
    engine.destroy()
    return answer


def resumed(path: str, backend: str, out: str, **settings: Any) -> dict[str, Any]:
    """The second half of those steps, from the recover point."""
    engine = build(path, backend, **settings)
    engine.load(SaveLoadMeta(out, "dcp", True))
    answer: dict[str, Any] = {"loaded": full_weights(engine), "loaded_version": engine.get_version()}
    answer["results"] = step_some(engine, own_rows(engine), STEPS_AFTER)
    answer["weights"] = full_weights(engine)
    answer["version"], answer["lr_steps"] = engine.get_version(), engine.loop.optimizer.schedule.steps_done
    engine.destroy()
    return answer


def export(path: str, backend: str, out: str, *, sharded: bool, staged: bool, **settings: Any) -> dict[str, Any]:
    """A Hugging Face export after a step; ``staged``: from a snapshot, while the next step runs."""
    engine = build(path, backend, **settings)
    rows = own_rows(engine)
    step_some(engine, rows, 2)
    weights = full_weights(engine)
    limit = hf_checkpoint.SHARDED_FROM_BYTES
    hf_checkpoint.SHARDED_FROM_BYTES = 0 if sharded else limit
    try:
        meta = SaveLoadMeta(out, "hf", True)
        if staged:
            thread = threading.Thread(target=engine.stage_save(meta))
            thread.start()
            step_some(engine, rows, 1)
            thread.join()
        else:
            engine.save(meta)
    finally:
        hf_checkpoint.SHARDED_FROM_BYTES = limit
        engine.destroy()
    return weights


def load_hf(path: str, backend: str, other: str, **settings: Any) -> dict[str, torch.Tensor]:
    """Full weights after loading another checkpoint."""
    engine = build(path, backend, **settings)
    engine.load(SaveLoadMeta(other, "hf", False))
    weights = full_weights(engine)
    engine.destroy()
    return weights


def load_hf_error(path: str, backend: str, other: str) -> str:
    """Message of the error that loading another checkpoint raises."""
    engine = build(path, backend)
    try:
        engine.load(SaveLoadMeta(other, "hf", False))
    except CheckpointError as exc:
        return str(exc)
    finally:
        engine.destroy()
    return "no error"


def save_on_full_disk(path: str, backend: str, out: str, weight_format: str, full_rank: int | None) -> dict[str, Any]:
    """Save twice; the second time rank ``full_rank`` (None: all) cannot write files above one kilobyte."""
    engine = build(path, backend)
    rows = own_rows(engine)
    meta = SaveLoadMeta(out, weight_format, True)
    hf_checkpoint.SHARDED_FROM_BYTES, limit = 0, hf_checkpoint.SHARDED_FROM_BYTES
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    message = "no error"
    try:
        engine.save(meta)
        saved = full_weights(engine)
        step_some(engine, rows, 1)
        if full_rank in (None, int(os.environ["RANK"])):
            resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
        engine.save(meta)
    except CheckpointError as exc:
        message = str(exc)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        hf_checkpoint.SHARDED_FROM_BYTES = limit
    listed = sorted(entry.name for entry in Path(out).parent.iterdir())
    engine.load(meta)
    answer = {"message": message, "saved": saved, "reloaded": full_weights(engine), "listed": listed}
    engine.destroy()
    return answer


def save_in_background(path: str, backend: str, root: str, steps: int) -> dict[str, Any]:
    """A saver in asynchronous mode that saves after every step."""
    engine = build(path, backend)
    rows = own_rows(engine)
    config = SaverConfig(experiment_name="e", trial_name="t", fileroot=root, freq_steps=1, mode="async")
    saver = Saver(config, SPEC)
    expected = {}
    for step in range(steps):
        step_some(engine, rows, 1)
        target = saver.save(engine, 0, step, step)
        expected[target] = full_weights(engine)
    saver.finalize()
    engine.destroy()
    return expected


def staged_recover_point(path: str, backend: str, out: str) -> dict[str, torch.Tensor]:
    """A recover point written in the background while training goes on, loaded back; full weights at its step."""
    engine = build(path, backend)
    rows = own_rows(engine)
    meta = SaveLoadMeta(out, "dcp", True)
    for _ in range(2):  # the second snapshot uses the buffers of the first
        step_some(engine, rows, 1)
        weights = full_weights(engine)
        thread = threading.Thread(target=engine.stage_save(meta))
        thread.start()
        step_some(engine, rows, 2)
        thread.join()
    engine.load(meta)
    assert engine.get_version() == 4
    assert all(torch.equal(value, weights[name]) for name, value in full_weights(engine).items())
    engine.destroy()
    return weights
