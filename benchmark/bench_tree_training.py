"""A training step with trees (``enable_tree_training``) against one on packed sequences: original tokens per second.

``--groups`` prompts of ``--prompt`` tokens, each with ``--answers`` answers of ``--answer`` tokens, on a random float32
Llama of SmolLM2-135M's shape; only answers are trained. Both sides are one engine step on the same rows and process
every token of every sequence, so the ratio of their times is that of original tokens per second. Both run in one
process, in turns; the median of the round-by-round ratios is reported, as JSON::

    OMP_NUM_THREADS=2 python benchmark/bench_tree_training.py
    OMP_NUM_THREADS=2 python benchmark/bench_tree_training.py --backend archon:d1 --model tiny
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from areal.api.config.train import MicroBatchSpec
from areal.utils.batch import PackedBatch, pack
from benchmark.bench_train_batch import build_engine, save_model
from benchmark.common import alternate, arguments, emit, ratio, summary

TARGET = 2.0  # original tokens per second, trees over packed


def main() -> None:
    """Measure one model and print the report."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("135m", "tiny"), default="135m")
    parser.add_argument("--backend", default="fsdp:d1")
    parser.add_argument("--groups", type=int, default=1, help="prompts")
    parser.add_argument("--prompt", type=int, default=192, help="tokens of a prompt")
    parser.add_argument("--answers", type=int, default=8, help="answers to a prompt")
    parser.add_argument("--answer", type=int, default=64, help="tokens of an answer")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as path:
        vocabulary = save_model(options.model, path)
        batch = make_batch(options, vocabulary)
        rows = options.groups * (options.prompt + options.answers * options.answer)
        limit = -(-rows // 128) * 128
        trees = {"mb_spec": MicroBatchSpec(max_tokens_per_mb=limit), "pad_to_maximum": True}
        measured = {
            "packed": engine_step(path, options.backend, batch),
            "trees": engine_step(path, options.backend, batch, enable_tree_training=True, **trees),
        }
        stats = {name: step()[1] for name, step in measured.items()}  # threads and optimizer state are set up
        seconds = alternate({name: lambda s=step: s()[0] for name, step in measured.items()}, options.repeats)
    speed = ratio(seconds["packed"], seconds["trees"])
    tokens_per_s = {name: batch.n_tokens / summary(values)["median"] for name, values in seconds.items()}
    result = {
        "model": options.model,
        "backend": options.backend,
        "tokens": batch.n_tokens,
        "sequences": batch.n_sequences,
        "tree_token_ratio": stats["trees"]["tree_token_ratio"],
        "grad_norm": {name: values["grad_norm"] for name, values in stats.items()},
        "threads": options.threads,
        "packed_s": summary(seconds["packed"]),
        "trees_s": summary(seconds["trees"]),
        "original_tokens_per_s": tokens_per_s,
        "trees_over_packed": speed,
        "target": f">= {TARGET}",
        "met": speed["median"] >= TARGET,
    }
    emit("tree_training", result, options.out)


def make_batch(options: Any, vocabulary: int) -> PackedBatch:
    """Rows without group ids, so that the packed side shares nothing; the answers' tokens are predicted."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for _ in range(options.groups):
        prompt = torch.randint(0, vocabulary, (options.prompt,), generator=generator)
        for _ in range(options.answers):
            answer = torch.randint(0, vocabulary, (options.answer,), generator=generator)
            ids = torch.cat([prompt, answer])[None]
            place = torch.arange(ids.shape[1])[None]
            trained = (place >= options.prompt - 1) & (place < ids.shape[1] - 1)
            rows.append({"input_ids": ids, "attention_mask": torch.ones_like(ids).bool(), "loss_mask": trained.long()})
    return pack(rows)


def engine_step(path: str, backend: str, batch: PackedBatch, **settings: Any) -> Callable[[], tuple[float, Any]]:
    """A function that takes one engine step and returns its seconds and its statistics."""
    engine = build_engine(path, backend, **settings)

    def loss_fn(logprobs: torch.Tensor, entropy: torch.Tensor, fields: dict[str, Any]) -> torch.Tensor:
        return -(logprobs * fields["loss_mask"]).sum() / fields["loss_mask"].sum()

    def step() -> tuple[float, Any]:
        begin = time.perf_counter()
        stats = engine.train_batch(batch, loss_fn, lambda fields: fields["loss_mask"].sum(), token_mask="loss_mask")
        return time.perf_counter() - begin, stats

    return step


if __name__ == "__main__":
    main()
