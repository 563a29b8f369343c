"""``FSDPEngine.train_batch`` against a hand-written training loop: same model, attention, clipping and fused AdamW.

A random float32 Llama of SmolLM2-135M's shape takes steps on 2,048 packed tokens in sequences of mixed length. The
hand-written loop makes full logits and calls ``cross_entropy``, as most scripts do. Both sides run in one process, in
turns; the median of the round-by-round ratios of their times is reported, as JSON::

    OMP_NUM_THREADS=2 python benchmark/bench_train_batch.py
    OMP_NUM_THREADS=2 python benchmark/bench_train_batch.py --model tiny      # 256 sequences of about 12 tokens
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from areal.api.config.optimizer import OptimizerConfig
from areal.api.config.train import TrainEngineConfig
from areal.models.transformers.varlen_attention import register_varlen_attention
from areal.utils.batch import PackedBatch, pack, roll_packed
from benchmark.common import alternate, arguments, emit, ratio, summary

MIXED_LENGTHS = (600, 420, 300, 200, 150, 128, 100, 80, 50, 20)  # 2,048 tokens
TARGET = 1.10  # engine time over loop time, for the 135m model
ADAM: dict[str, Any] = {"lr": 1e-5, "weight_decay": 0.01, "eps": 1e-8}


def main() -> None:
    """Measure one model and print the report."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("135m", "tiny"), default="135m")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    lengths = MIXED_LENGTHS if options.model == "135m" else tuple(10 + i % 5 for i in range(256))
    with tempfile.TemporaryDirectory() as path:
        vocabulary = save_model(options.model, path)
        batch = make_batch(lengths, vocabulary)
        sides = {"engine": engine_step(path, batch), "loop": loop_step(path, batch)}
        for step in sides.values():
            step()  # memory, threads and optimizer state are set up
        seconds = alternate(sides, options.repeats)
    times = ratio(seconds["engine"], seconds["loop"])
    result = {
        "model": options.model,
        "tokens": batch.n_tokens,
        "sequences": batch.n_sequences,
        "threads": options.threads,
        "engine_s": summary(seconds["engine"]),
        "loop_s": summary(seconds["loop"]),
        "engine_over_loop": times,
        "target": f"<= {TARGET}",
        "met": times["median"] <= TARGET,
    }
    emit("train_batch", result, options.out)


def save_model(name: str, path: str, **changes: Any) -> int:
    """Write random float32 weights of the named shape with ``changes`` to ``path``; returns the vocabulary size."""
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

    if name == "135m":
        config: Any = LlamaConfig(
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
        )
    else:
        tiny: dict[str, Any] = {
            "vocab_size": 64,
            "hidden_size": 128,
            "intermediate_size": 512,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "tie_word_embeddings": True,
        }
        config = Qwen3Config(head_dim=32, **tiny) if name == "tiny-qwen3" else Qwen2Config(**tiny)
    config.update(changes)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return int(config.vocab_size)


def make_batch(lengths: tuple[int, ...], vocabulary: int) -> PackedBatch:
    """Random sequences of the given lengths, packed; every token but a sequence's first is predicted."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for n in lengths:
        ids = torch.randint(0, vocabulary, (1, n), generator=generator)
        ones = torch.ones(1, n, dtype=torch.int64)
        rows.append({"input_ids": ids, "attention_mask": ones.bool(), "loss_mask": ones})
    batch = pack(rows)
    return batch.with_tokens(loss_mask=roll_packed(batch.tokens["loss_mask"], batch.cu_seqlens))


def build_engine(path: str, backend: str, **settings: Any) -> Any:
    """An engine of ``backend`` in float32, ready to train; ``settings`` are fields of its ``TrainEngineConfig``."""
    from areal.trainer.roles import TRAIN_ENGINES

    config = TrainEngineConfig(
        experiment_name="bench",
        trial_name="bench",
        backend=backend,
        path=path,
        dtype="float32",
        optimizer=OptimizerConfig(gradient_clipping=1.0, **ADAM),
        **settings,
    )
    engine: Any = TRAIN_ENGINES.get(backend.partition(":")[0])(config)
    engine.create_process_group()
    engine.initialize()
    engine.train()
    return engine


def engine_step(path: str, batch: PackedBatch, backend: str = "fsdp:d1") -> Callable[[], float]:
    """A function that takes one step of a new engine and returns its seconds."""
    return step_of(build_engine(path, backend), batch)


def step_of(engine: Any, batch: PackedBatch) -> Callable[[], float]:
    """A function that takes one step of ``engine`` and returns its seconds."""

    def loss_fn(logprobs: torch.Tensor, entropy: torch.Tensor, packed_input: dict[str, Any]) -> torch.Tensor:
        mask = packed_input["loss_mask"].float()
        return -(logprobs * mask).sum() / mask.sum()

    def step() -> float:
        begin = time.perf_counter()
        engine.train_batch(batch, loss_fn, lambda packed_input: packed_input["loss_mask"].sum())
        return time.perf_counter() - begin

    return step


def loop_step(path: str, batch: PackedBatch) -> Callable[[], float]:
    """A function that takes one hand-written step and returns its seconds."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation=register_varlen_attention()
    ).train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAM)
    ids, positions = batch.tokens["input_ids"][None], batch.tokens["position_ids"][None]
    mask = batch.tokens["loss_mask"].bool()
    labels = torch.where(mask, roll_packed(batch.tokens["input_ids"], batch.cu_seqlens), -100)

    def step() -> float:
        begin = time.perf_counter()
        optimizer.zero_grad()
        bounds = batch.cu_seqlens.clone()  # a new tensor, as in a real loop: the attention plan is made anew
        output = model(ids, position_ids=positions, use_cache=False, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds)
        F.cross_entropy(output.logits[0], labels).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return time.perf_counter() - begin

    return step


if __name__ == "__main__":
    main()
