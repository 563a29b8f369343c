"""``MegatronEngine.train_batch`` against ``FSDPEngine.train_batch``, one process each.

The models, batches and the way of measuring are those of ``bench_archon_step.py``. Needs megatron-core::

    OMP_NUM_THREADS=2 python benchmark/bench_megatron_step.py
    OMP_NUM_THREADS=1 python benchmark/bench_megatron_step.py --model tiny-qwen3
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmark.bench_archon_step import LENGTHS, STEPS, several, steps
from benchmark.common import alternate, arguments, emit, ratio, summary

TARGET = 1.3  # time of Megatron over that of FSDP, on the model of 135 M parameters
ENGINES = {"megatron": "megatron:d1", "fsdp": "fsdp:d1"}


def main() -> None:
    """Measure the models and print the report."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--model", choices=(*LENGTHS, "all"), default="all")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    models = list(LENGTHS) if options.model == "all" else [options.model]
    results = {model: measure(model, options.repeats) for model in models}
    large = results.get("135m")
    met = None if large is None else large["megatron_over_fsdp"]["median"] <= TARGET
    report = {"threads": options.threads, **results, "target": f"135m: <= {TARGET}", "met": met}
    emit("megatron_step", report, options.out)


def measure(model: str, repeats: int) -> dict[str, Any]:
    """Times of both engines on one model."""
    sides = {name: several(step, STEPS[model]) for name, step in steps(model, ENGINES).items()}
    seconds = alternate(sides, repeats)
    return {
        "tokens": sum(LENGTHS[model]),
        "sequences": len(LENGTHS[model]),
        "megatron_s": summary(seconds["megatron"]),
        "fsdp_s": summary(seconds["fsdp"]),
        "megatron_over_fsdp": ratio(seconds["megatron"], seconds["fsdp"]),
    }


if __name__ == "__main__":
    main()
