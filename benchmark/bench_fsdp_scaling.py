"""Tokens per second of two data-parallel ranks on a core each against one process on one core.

A random float32 Llama of SmolLM2-135M's shape takes steps on 2,048 packed tokens per rank in sequences of mixed length.
Both sides stay in memory and step in turns: while one works, the other waits without using a core. The median of the
round-by-round ratios of their rates is reported, as JSON::

    python benchmark/bench_fsdp_scaling.py
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmark.common import alternate, arguments, emit, ratio, summary
from benchmark.ranks import Ranks, serve, start_ranks

TARGET = 1.6  # tokens per second of d2 over those of d1


def main() -> None:
    """Measure both sides, or be one rank of them."""
    parser = arguments(__doc__.splitlines()[0])
    parser.set_defaults(threads=1)
    parser.add_argument(
        "--lengths", type=int, nargs="*", help="tokens of each sequence of a rank (default: 2,048 in ten)"
    )
    parser.add_argument("--rank-of", help="be a rank that takes steps of this backend when asked on standard input")
    parser.add_argument("--path", help="model of that rank")
    options = parser.parse_args()
    from benchmark.bench_train_batch import MIXED_LENGTHS, save_model

    lengths = tuple(options.lengths or MIXED_LENGTHS)
    if options.rank_of:
        be_rank(options.rank_of, options.path, lengths, options.threads)
        return
    with tempfile.TemporaryDirectory() as path:
        save_model("135m", path)
        common = ["--path", path, "--threads", str(options.threads), "--lengths", *map(str, lengths)]

        def ranks(size: int) -> AbstractContextManager[Ranks]:
            return start_ranks([__file__, "--rank-of", f"fsdp:d{size}", *common], size, options.threads)

        with ranks(1) as one, ranks(2) as two:
            sides = {"d2": lambda: 2 * sum(lengths) / two.slowest(), "d1": lambda: sum(lengths) / one.slowest()}
            for side in sides.values():
                side()  # memory, threads and optimizer state are set up
            rates = alternate(sides, options.repeats)
            busy = {"d1": summary(one.busy[1:]), "d2": summary(two.busy[1:])}
    ratios = ratio(rates["d2"], rates["d1"])
    result = {
        "model": "135m",
        "tokens_per_rank": sum(lengths),
        "threads_per_rank": options.threads,
        "d1_tokens_per_s": summary(rates["d1"]),
        "d2_tokens_per_s": summary(rates["d2"]),
        "processor_time_over_wall": busy,
        "d2_over_d1": ratios,
        "target": f">= {TARGET}",
        "met": ratios["median"] >= TARGET,
    }
    emit("fsdp_scaling", result, options.out)


def be_rank(backend: str, path: str, lengths: tuple[int, ...], threads: int) -> None:
    """Take a step whenever asked."""
    import torch

    from benchmark.bench_train_batch import engine_step, make_batch

    torch.set_num_threads(threads)
    step = engine_step(path, make_batch(lengths, 49152), backend)
    serve({"go": lambda: {"seconds": step()}})


if __name__ == "__main__":
    main()
