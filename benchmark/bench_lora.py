"""A step of adapters (``use_lora``) against one of all weights: its time, and memory that the engine takes.

512 tokens on a random float32 Llama of SmolLM2-135M's shape; every token is trained. One side trains the model, the
others adapters of rank 8 on ``q_proj`` and ``v_proj`` and of rank 32 on every linear layer. Steps are taken in turns
in one process; the median of the round-by-round ratios is reported.

Memory is how far the peak resident memory of a process that takes steps lies above what it was before it built its one
engine, in turns too. The same with ``gradient_checkpointing`` on all sides is reported beside it, without a target.
As JSON::

    OMP_NUM_THREADS=2 python benchmark/bench_lora.py
    OMP_NUM_THREADS=2 python benchmark/bench_lora.py --model tiny
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmark.bench_train_batch import build_engine, make_batch, save_model, step_of
from benchmark.common import alternate, arguments, emit, ratio, run_json, summary

LENGTHS = (160, 120, 100, 80, 52)  # 512 tokens
SIDES: dict[str, dict[str, Any]] = {
    "full": {},
    "rank8_qv": {"use_lora": True, "lora_rank": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
    "rank32_all": {"use_lora": True, "lora_rank": 32, "lora_alpha": 32},
}
TIME_TARGETS = {"rank8_qv": 0.75, "rank32_all": 0.9}
MEMORY_TARGET = 0.5
CHECKPOINTED = "_checkpointed"


def main() -> None:
    """Measure one model and print the report."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("135m", "tiny"), default="135m")
    parser.add_argument("--child", help="print the memory of one side as JSON: PATH SIDE VOCABULARY", nargs=3)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.child:
        path, side, vocabulary = options.child
        print(json.dumps(taken_bytes(path, side, int(vocabulary))))
        return
    with tempfile.TemporaryDirectory() as path:
        vocabulary = save_model(options.model, path)
        steps = {name: engine_step(path, settings, vocabulary) for name, settings in SIDES.items()}
        for step in steps.values():
            step()  # memory, threads and optimizer state are set up
        seconds = alternate(steps, options.repeats)
        del steps
        script = [sys.executable, __file__, "--threads", str(options.threads), "--child", path]
        kinds = [name + kind for kind in ("", CHECKPOINTED) for name in SIDES]
        command = {kind: [*script, kind, str(vocabulary)] for kind in kinds}
        measure = {name: lambda c=c: float(run_json(c, threads=options.threads)) for name, c in command.items()}
        taken = alternate(measure, options.repeats)
    time = {name: ratio(seconds[name], seconds["full"]) for name in TIME_TARGETS}
    memory = {
        name + kind: ratio(taken[name + kind], taken["full" + kind])
        for kind in ("", CHECKPOINTED)
        for name in TIME_TARGETS
    }
    met = {name: time[name]["median"] <= target for name, target in TIME_TARGETS.items()}
    result = {
        "model": options.model,
        "tokens": sum(LENGTHS),
        "threads": options.threads,
        "seconds": {name: summary(values) for name, values in seconds.items()},
        "bytes": {name: summary(values) for name, values in taken.items()},
        "time_over_full": time,
        "memory_over_full": memory,
        "targets": {"time": TIME_TARGETS, "memory": MEMORY_TARGET},
        "met": met | {f"{name}_memory": memory[name]["median"] <= MEMORY_TARGET for name in TIME_TARGETS},
    }
    emit("lora", result, options.out)


def engine_step(path: str, settings: dict[str, Any], vocabulary: int) -> Any:
    """A function that takes one step of a new engine and returns its seconds."""
    return step_of(build_engine(path, "fsdp:d1", **settings), make_batch(LENGTHS, vocabulary))


def taken_bytes(path: str, side: str, vocabulary: int) -> int:
    """Peak memory of this process during three steps of one side, above what it had before the engine was built."""
    before = psutil.Process().memory_info().rss
    settings = SIDES[side.removesuffix(CHECKPOINTED)]
    step = engine_step(path, {**settings, "gradient_checkpointing": side.endswith(CHECKPOINTED)}, vocabulary)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew: loading maps the checkpoint's file
    for _ in range(3):
        step()
    status = Path("/proc/self/status").read_text().splitlines()
    (peak,) = (line.split()[1] for line in status if line.startswith("VmHWM"))
    return int(peak) * 1024 - before


if __name__ == "__main__":
    main()
