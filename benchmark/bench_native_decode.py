"""Native decode against ``transformers.generate``: the same 64 prompts, 64 new tokens each, sampled at temperature 1.

Both sides run in one process, in turns; the median over the turns of the ratio of their times is reported, as JSON::

    OMP_NUM_THREADS=2 python benchmark/bench_native_decode.py                      # both models
    OMP_NUM_THREADS=2 python benchmark/bench_native_decode.py --model 135m --turns 3

``tiny`` is the quickstart's character model (Qwen2, 4 layers, hidden 128, about 1 M parameters), ``135m`` has the
shape of SmolLM2-135M with random weights. ``matmul_share``: time that the matrix products with the weights alone
would take at the speed of the fastest product measured in the same turn, over the time of the whole run. The native
side reports log-probs too; ``generate`` does not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

import torch

REQUESTS, PROMPT_LEN, NEW_TOKENS = 64, 16, 64
TARGETS = {"tiny": {"ratio": 2.0}, "135m": {"ratio": 1.6, "matmul_share": 0.6}}


def build_model(name: str) -> Any:
    """Random float32 weights of the named shape."""
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

    common: dict[str, Any] = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}
    common["tie_word_embeddings"] = True
    if name == "tiny":
        config: Any = Qwen2Config(
            vocab_size=32, hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=512, **common,
        )  # fmt: skip
    else:
        config = LlamaConfig(
            vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
            num_key_value_heads=3, max_position_embeddings=2048, **common,
        )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def weight_shapes(model: Any) -> list[tuple[int, int]]:
    """(in, out) of every weight product of one token."""
    shapes = [(m.in_features, m.out_features) for m in model.modules() if isinstance(m, torch.nn.Linear)]
    return [(i, o) for i, o in shapes if i * o]


def peak_flops() -> float:
    """Fastest of a few square float32 products, in flop/s."""
    best = 0.0
    for size in (512, 1024):
        a, b = torch.randn(size, size), torch.randn(size, size)
        for _ in range(6):
            begin = time.perf_counter()
            torch.mm(a, b)
            best = max(best, 2 * size**3 / (time.perf_counter() - begin))
    return best


def run_generate(model: Any, prompts: torch.Tensor) -> float:
    """Seconds of one ``generate`` call."""
    begin = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=NEW_TOKENS, do_sample=True, top_k=0,
            top_p=1.0, temperature=1.0, pad_token_id=0,
        )  # fmt: skip
    if out.shape[1] != PROMPT_LEN + NEW_TOKENS:
        raise RuntimeError(f"generate stopped early: {tuple(out.shape)}")
    return time.perf_counter() - begin


def run_native(engine: Any, prompts: torch.Tensor) -> float:
    """Seconds until the last of the requests is answered."""
    from areal.api.io_struct import GenerationHyperparameters, ModelRequest

    settings = GenerationHyperparameters(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    rows = prompts.tolist()
    begin = time.perf_counter()
    engine.hold_admission()
    futures = [engine.submit(ModelRequest(input_ids=row, gconfig=settings, seed=i)) for i, row in enumerate(rows)]
    engine.release_admission()
    if any(future.result().output_len != NEW_TOKENS for future in futures):
        raise RuntimeError("a native request stopped early")
    return time.perf_counter() - begin


def measure(name: str, turns: int) -> dict[str, Any]:
    """Alternate both sides ``turns`` times after one warm-up each."""
    from areal.api.config.inference import NativeConfig
    from areal.engine.native.engine import NativeEngine

    model = build_model(name)
    engine = NativeEngine(NativeConfig(max_running_requests=REQUESTS), model)
    engine.start()
    flops = 2 * sum(i * o for i, o in weight_shapes(model)) * REQUESTS * (NEW_TOKENS - 1)
    rows: list[tuple[float, float, float]] = []
    for turn in range(turns + 1):
        prompts = torch.randint(1, model.config.vocab_size, (REQUESTS, PROMPT_LEN))
        row = (run_generate(model, prompts), run_native(engine, prompts), peak_flops())
        if turn:
            rows.append(row)
    engine.stop()
    middle = statistics.median
    result = {
        "model": name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "turns": turns,
        "threads": torch.get_num_threads(),
        "generate_s": round(middle(g for g, _, _ in rows), 4),
        "native_s": round(middle(n for _, n, _ in rows), 4),
        "native_step_ms": round(middle(n for _, n, _ in rows) / NEW_TOKENS * 1e3, 3),
        "native_tokens_per_s": round(REQUESTS * NEW_TOKENS / middle(n for _, n, _ in rows), 1),
        "peak_gflops": round(middle(p for _, _, p in rows) / 1e9, 1),
        "ratio": round(middle(g / n for g, n, _ in rows), 3),
        "matmul_share": round(middle(flops / p / n for _, n, p in rows), 3),
        "targets": TARGETS[name],
    }
    result["targets_met"] = all(result[key] >= value for key, value in TARGETS[name].items())
    return result


def main() -> None:
    """Parse flags, measure, print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=[*TARGETS, "all"], default="all")
    parser.add_argument("--turns", type=int, default=5, help="alternations per model")
    args = parser.parse_args()
    names = list(TARGETS) if args.model == "all" else [args.model]
    results = [measure(name, args.turns) for name in names]
    sys.stdout.write(json.dumps({"benchmark": "native_decode", "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
