"""Gathering all weights of ``archon:d2t2`` for publishing against a plain ``full_tensor()`` sweep, four processes.

One side iterates ``ArchonEngine.named_full_tensors``, which gives every tensor whole, under its checkpoint name and in
the dtype of the run; the other calls ``full_tensor()`` of every parameter and drops the result. Random float32 weights
of a Llama of SmolLM2-135M's shape, but with 8 heads, which two ranks can share; one thread a process. The median of the
round-by-round ratios of their times (that of the slowest rank) is reported, as JSON::

    python benchmark/bench_archon_publish.py
    python benchmark/bench_archon_publish.py --layout d2
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmark.common import alternate, arguments, emit, ratio, summary
from benchmark.ranks import serve, start_ranks

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 72}
TARGET = 1.3  # time of publishing over that of the sweep


def main() -> None:
    """Measure both sides, or be one rank."""
    parser = arguments(__doc__.splitlines()[0])
    parser.set_defaults(threads=1)
    parser.add_argument("--layout", default="d2t2")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    parser.add_argument("--path", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        be_rank(options)
        return
    from areal.api.alloc_mode import ModelAllocation
    from benchmark.bench_train_batch import save_model

    backend = f"archon:{options.layout}"
    size = ModelAllocation.from_str(backend).world_size
    with tempfile.TemporaryDirectory() as path:
        save_model("135m", path, **HEADS)
        command = [__file__, "--rank-of", backend, "--path", path, "--threads", str(options.threads)]
        with start_ranks(command, size, options.threads) as ranks:
            names = ("publish", "sweep")
            n_bytes = {name: ranks.ask(name)[0]["bytes"] for name in names}  # connections are made
            seconds = alternate({name: lambda name=name: ranks.slowest(name) for name in names}, options.repeats)
    times = ratio(seconds["publish"], seconds["sweep"])
    result = {
        "model": "135m, 8 heads",
        "backend": backend,
        "bytes": n_bytes,
        "publish_s": summary(seconds["publish"]),
        "sweep_s": summary(seconds["sweep"]),
        "publish_over_sweep": times,
        "target": f"<= {TARGET}",
        "met": times["median"] <= TARGET,
    }
    emit("archon_publish", result, options.out)


def be_rank(options: argparse.Namespace) -> None:
    """Gather all weights in one way or the other when asked."""
    import torch
    from torch.distributed.tensor import DTensor

    from benchmark.bench_train_batch import build_engine

    torch.set_num_threads(options.threads)
    engine = build_engine(options.path, options.rank_of)

    def publish() -> int:
        return sum(tensor.nbytes for _, tensor in engine.named_full_tensors())

    def sweep() -> int:
        parameters = (parameter.detach() for parameter in engine.module.parameters())
        return sum((x.full_tensor() if isinstance(x, DTensor) else x).nbytes for x in parameters)

    def timed(work: Any) -> dict[str, Any]:
        begin = time.perf_counter()
        return {"bytes": work(), "seconds": time.perf_counter() - begin}

    serve({"publish": lambda: timed(publish), "sweep": lambda: timed(sweep)})


if __name__ == "__main__":
    main()
