"""How long a step waits for a checkpoint: snapshot and background write against a synchronous save.

A random Llama of SmolLM2-135M's shape trains in bfloat16 (float32 masters) and is saved by ``Saver`` as Hugging Face
directory, and by the engine as recover point with optimizer. The blocking time of the asynchronous side ends when the
next step may start; the write is waited for outside of it. JSON::

    python benchmark/bench_async_save.py
    python benchmark/bench_async_save.py --case dcp --dir /path/on/the/disk/to/measure
    torchrun --nproc-per-node 2 benchmark/bench_async_save.py --threads 1      # sharded: layout d2
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from areal.api.config.optimizer import OptimizerConfig
from areal.api.config.timers import SaverConfig
from areal.api.config.train import TrainEngineConfig
from areal.api.io_struct import FinetuneSpec, SaveLoadMeta
from areal.engine.fsdp_engine import FSDPEngine
from areal.utils import ranks
from areal.utils.saver import Saver
from benchmark.bench_train_batch import save_model
from benchmark.common import alternate, arguments, emit, ratio, summary

TARGET = 0.10  # blocking time of an asynchronous save over the time of a synchronous one
SPEC = FinetuneSpec(total_train_epochs=1, dataset_size=1000, train_batch_size=1)


def main() -> None:
    """Measure and print the report."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--case", choices=("hf", "dcp"), default="hf")
    parser.add_argument("--model", choices=("135m", "tiny"), default="135m")
    parser.add_argument("--dir", help="where checkpoints go; default: the directory for temporary files")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    root = Path(options.dir or tempfile.gettempdir()) / f"bench-async-save-{environ_id()}"
    n_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    try:
        engine = build_engine(options.model, root, n_ranks)
        make = hf_sides if options.case == "hf" else dcp_sides
        sides = make(engine, str(root))
        for side in sides.values():
            side()  # buffers, pages and threads are set up
        seconds = alternate(sides, options.repeats)
        engine.destroy()
    finally:
        if ranks.is_first_rank():
            shutil.rmtree(root, ignore_errors=True)
    if not ranks.is_first_rank():
        return
    blocking = ratio(seconds["async"], seconds["sync"])
    result = {
        "case": options.case,
        "model": options.model,
        "ranks": n_ranks,
        "sync_s": summary(seconds["sync"]),
        "async_blocking_s": summary(seconds["async"]),
        "blocking_over_sync": blocking,
        "target": f"<= {TARGET}",
        "met": blocking["median"] <= TARGET,
    }
    emit("async_save", result, options.out)


def environ_id() -> str:
    """The same word on every rank of this run."""
    return os.environ.get("MASTER_PORT") or str(os.getpid())


def build_engine(model: str, root: Path, n_ranks: int) -> FSDPEngine:
    """A bfloat16 engine of a random model."""
    config = TrainEngineConfig(
        experiment_name="bench",
        trial_name="bench",
        path=str(root / "model"),
        dtype="bfloat16",
        backend=f"fsdp:d{n_ranks}",
        optimizer=OptimizerConfig(lr=1e-5),
    )
    engine = FSDPEngine(config)
    engine.create_process_group()
    if ranks.is_first_rank():
        save_model(model, config.path)
    ranks.barrier()
    engine.initialize(None, SPEC)
    return engine


def hf_sides(engine: FSDPEngine, root: str) -> dict[str, Callable[[], float]]:
    """Seconds that ``Saver.save`` takes in both modes."""

    def side(mode: str) -> Callable[[], float]:
        settings: dict[str, Any] = {"experiment_name": "bench", "trial_name": mode, "fileroot": root, "freq_steps": 1}
        saver = Saver(SaverConfig(**settings, mode=mode), SPEC)

        def measure() -> float:
            start = time.perf_counter()
            target = saver.save(engine, 0, 0, 0)
            blocked = time.perf_counter() - start
            saver.finalize()
            assert target is not None
            remove(target)
            return blocked

        return measure

    return {"sync": side("sync"), "async": side("async")}


def dcp_sides(engine: FSDPEngine, root: str) -> dict[str, Callable[[], float]]:
    """Seconds that ``save`` and ``stage_save`` take for a recover point with optimizer."""
    meta = SaveLoadMeta(f"{root}/recover", "dcp", True)

    def sync() -> float:
        start = time.perf_counter()
        engine.save(meta)
        blocked = time.perf_counter() - start
        remove(meta.path)
        return blocked

    def staged() -> float:
        start = time.perf_counter()
        write = engine.stage_save(meta)
        blocked = time.perf_counter() - start
        write()
        remove(meta.path)
        return blocked

    return {"sync": sync, "async": staged}


def remove(path: str) -> None:
    """Delete a checkpoint; every rank calls."""
    ranks.barrier()
    if ranks.is_first_rank():
        shutil.rmtree(path)
    ranks.barrier()


if __name__ == "__main__":
    main()
