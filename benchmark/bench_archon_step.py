"""``ArchonEngine.train_batch`` against ``FSDPEngine.train_batch``, one process each, nothing compiled.

Random float32 weights of a Llama of SmolLM2-135M's shape (2,048 packed tokens in sequences of mixed length) or of a
tiny Qwen3 (256 sequences of about 12 tokens). Both engines live in one process and step in turns; the median of the
round-by-round ratios of their times is reported for each model, as JSON::

    OMP_NUM_THREADS=2 python benchmark/bench_archon_step.py
    OMP_NUM_THREADS=2 python benchmark/bench_archon_step.py --model tiny-qwen3 --profile
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmark.bench_train_batch import MIXED_LENGTHS, engine_step, make_batch, save_model
from benchmark.common import alternate, arguments, emit, ratio, summary

TARGET = 1.05  # time of Archon over that of FSDP
LENGTHS = {"135m": MIXED_LENGTHS, "tiny-qwen3": tuple(10 + i % 5 for i in range(256))}
STEPS = {"135m": 1, "tiny-qwen3": 10}  # steps of one measurement
ENGINES = {"archon": "archon:d1", "fsdp": "fsdp:d1"}


def main() -> None:
    """Measure the models and print the report."""
    parser = arguments(__doc__.splitlines()[0])
    parser.set_defaults(repeats=9)
    parser.add_argument("--model", choices=(*LENGTHS, "all"), default="all")
    parser.add_argument("--profile", action="store_true", help="print the operators of a step of each engine instead")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    models = list(LENGTHS) if options.model == "all" else [options.model]
    if options.profile:
        for model in models:
            profile(model)
        return
    results = {model: measure(model, options.repeats) for model in models}
    met = all(result["archon_over_fsdp"]["median"] <= TARGET for result in results.values())
    emit("archon_step", {"threads": options.threads, **results, "target": f"<= {TARGET}", "met": met}, options.out)


def measure(model: str, repeats: int) -> dict[str, Any]:
    """Times of both engines on one model."""
    seconds = alternate({name: several(step, STEPS[model]) for name, step in steps(model).items()}, repeats)
    return {
        "tokens": sum(LENGTHS[model]),
        "sequences": len(LENGTHS[model]),
        "archon_s": summary(seconds["archon"]),
        "fsdp_s": summary(seconds["fsdp"]),
        "archon_over_fsdp": ratio(seconds["archon"], seconds["fsdp"]),
    }


def steps(model: str, engines: Mapping[str, str] = ENGINES) -> dict[str, Callable[[], float]]:
    """By engine: a function that takes one step and returns its seconds; each took its first step already."""
    with tempfile.TemporaryDirectory() as path:
        batch = make_batch(LENGTHS[model], save_model(model, path))
        found = {name: engine_step(path, batch, backend) for name, backend in engines.items()}
    for step in found.values():
        step()  # memory, threads and optimizer state are set up
    return found


def profile(model: str) -> None:
    """Print where the time of a few steps of each engine goes."""
    for name, step in steps(model).items():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            for _ in range(STEPS[model]):
                step()
        table = profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=40)
        sys.stdout.write(f"{model}, {name}, {STEPS[model]} step(s)\n{table}\n")


def several(step: Callable[[], float], times: int) -> Callable[[], float]:
    """``step`` taken ``times`` times; the mean of its seconds."""
    return lambda: sum(step() for _ in range(times)) / times


if __name__ == "__main__":
    main()
