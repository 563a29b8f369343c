"""``archon:p2`` (1F1B, 8 micro-batches, a core for each stage) against ``archon:d1`` on one core: speed and memory.

A random float32 Llama of SmolLM2-135M's shape takes steps on 8 rows of 256 tokens, a micro-batch each. The last stage
has fewer layers, because the head takes as long as some. The sides stay in memory and step in turns. Reported are the
medians of the round-by-round ratios of tokens per second, and of the last stage's peak memory with 8 micro-batches over
that with 2 (how far resident memory rises in a step above what it is between steps), as JSON::

    python benchmark/bench_archon_pipeline.py
    python benchmark/bench_archon_pipeline.py --last-less 8
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmark.common import alternate, arguments, emit, ratio, summary
from benchmark.ranks import Ranks, serve, start_ranks

TARGET_SPEED, TARGET_MEMORY = 1.4, 1.1
MANY, FEW = 8, 2  # micro-batches
VOCABULARY = 49152
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}  # freed memory leaves the process
HEAD_LAYERS = 10  # both stages then take the same processor time; by weights alone the head counts for 8 layers


def main() -> None:
    """Measure both sides, or be one rank of them."""
    parser = arguments(__doc__.splitlines()[0])
    parser.set_defaults(threads=1)
    parser.add_argument("--length", type=int, default=256, help="tokens of a micro-batch")
    parser.add_argument("--last-less", type=int, default=HEAD_LAYERS, help="layers that the head counts for")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    parser.add_argument("--path", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        be_rank(options)
        return
    from benchmark.bench_train_batch import save_model

    common = ["--length", str(options.length), "--last-less", str(options.last_less)]
    with tempfile.TemporaryDirectory() as path:
        save_model("135m", path)

        def command(backend: str) -> list[str]:
            return [__file__, "--rank-of", backend, "--path", path, "--threads", str(options.threads), *common]

        with (
            start_ranks(command("archon:d1"), 1, options.threads) as one,
            start_ranks(command("archon:p2"), 2, options.threads) as two,
        ):
            speed = measure_speed(one, two, options)
        with start_ranks(command("archon:p2"), 2, options.threads, GIVE_BACK) as two:
            memory = measure_memory(two, options.repeats)
    met = speed["p2_over_d1"]["median"] >= TARGET_SPEED and memory["memory_8_over_2"]["median"] <= TARGET_MEMORY
    result = {**speed, **memory, "target": f"speed >= {TARGET_SPEED}, memory <= {TARGET_MEMORY}", "met": met}
    emit("archon_pipeline", {"model": "135m", **result}, options.out)


def measure_speed(one: Ranks, two: Ranks, options: argparse.Namespace) -> dict[str, Any]:
    """Rates of both sides."""
    tokens = MANY * options.length
    rates = {"p2": lambda: tokens / two.slowest("many"), "d1": lambda: tokens / one.slowest("many")}
    for rate in rates.values():
        rate()  # memory, threads and optimizer state are set up
    speed = alternate(rates, options.repeats)
    return {
        "micro_batches": MANY,
        "tokens_per_micro_batch": options.length,
        "last_stage_less_layers": options.last_less,
        "threads_per_rank": options.threads,
        "d1_tokens_per_s": summary(speed["d1"]),
        "p2_tokens_per_s": summary(speed["p2"]),
        "processor_time_over_wall": {"d1": summary(one.busy[1:]), "p2": summary(two.busy[1:])},
        "p2_over_d1": ratio(speed["p2"], speed["d1"]),
    }


def measure_memory(two: Ranks, repeats: int) -> dict[str, Any]:
    """Peak of the last stage above what it holds between steps, which the gradients of the last step are part of."""
    peaks = {
        "many": lambda: float(two.ask("many_memory")[-1]["peak_bytes"]),
        "few": lambda: float(two.ask("few_memory")[-1]["peak_bytes"]),
    }
    for peak in peaks.values():
        peak()
    bytes_ = alternate(peaks, repeats)
    return {
        "last_stage_bytes": {"micro_batches_8": summary(bytes_["many"]), "micro_batches_2": summary(bytes_["few"])},
        "memory_8_over_2": ratio(bytes_["many"], bytes_["few"]),
    }


def be_rank(options: argparse.Namespace) -> None:
    """Take steps of 8 or 2 micro-batches when asked, and tell seconds or bytes."""
    import torch

    from areal.api.config.archon import ArchonEngineConfig
    from areal.api.config.train import MicroBatchSpec
    from benchmark.bench_train_batch import build_engine, make_batch, step_of
    from tests.memory_probe import PeakRssAnon

    torch.set_num_threads(options.threads)
    archon = ArchonEngineConfig(
        pp_schedule="1F1B", pp_first_stage_less_layers=0, pp_last_stage_less_layers=options.last_less
    )
    engine = build_engine(options.path, options.rank_of, archon=archon)
    steps = {n: step_of(engine, make_batch((options.length,) * n, VOCABULARY)) for n in (MANY, FEW)}

    def step(n: int) -> float:
        engine.config.mb_spec = MicroBatchSpec(n_mbs=n)
        return steps[n]()

    def memory(n: int) -> dict[str, Any]:
        with PeakRssAnon() as peak:
            step(n)
        return {"peak_bytes": peak.growth}

    serve(
        {
            "many": lambda: {"seconds": step(MANY)},
            "many_memory": lambda: memory(MANY),
            "few_memory": lambda: memory(FEW),
        }
    )


if __name__ == "__main__":
    main()
