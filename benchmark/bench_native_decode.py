"""Native decode against ``transformers.generate``: the same 64 prompts, 64 new tokens each, sampled at temperature 1.

Each side runs in a process of its own, in turns; the median over the turns of the ratio of their times is reported, as
JSON::

    python benchmark/bench_native_decode.py                      # both models
    python benchmark/bench_native_decode.py --model 135m --runs 1

``tiny`` is the quickstart's character model (Qwen2, 4 layers, hidden 128, about 1 M parameters), ``135m`` has the
shape of SmolLM2-135M with random weights. ``matmul_share``: time that the matrix products with the weights alone
would take at the speed of the fastest product measured in the same process, over the time of the whole run. The native
side reports log-probs too; ``generate`` does not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

import common
import torch

REQUESTS, PROMPT_LEN, NEW_TOKENS = 64, 16, 64
TARGETS = {"tiny": {"speedup": 2.0}, "135m": {"speedup": 1.6, "matmul_share": 0.6}}


def build_model(name: str) -> Any:
    """Random float32 weights of the named shape."""
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

    common: dict[str, Any] = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}
    common["tie_word_embeddings"] = True
    if name == "tiny":
        config: Any = Qwen2Config(
            vocab_size=32, hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=512, **common,
        )  # fmt: skip
    else:
        config = LlamaConfig(
            vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
            num_key_value_heads=3, max_position_embeddings=2048, **common,
        )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def product_flops(model: Any) -> int:
    """Floating-point operations of the weight products of one run: every layer for every token that is computed, the
    head for every token that is drawn."""
    linear = {id(m): m.in_features * m.out_features for m in model.modules() if isinstance(m, torch.nn.Linear)}
    head = linear.pop(id(model.get_output_embeddings()))
    computed = PROMPT_LEN + NEW_TOKENS - 1
    return 2 * REQUESTS * (sum(linear.values()) * computed + head * NEW_TOKENS)


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


def measure_side(side: str, name: str, runs: int) -> dict[str, Any]:
    """One side in this process: the median of ``runs`` after a warm-up, and the speed of the matrix products."""
    model = build_model(name)
    peak = peak_flops()
    prompts = [torch.randint(1, model.config.vocab_size, (REQUESTS, PROMPT_LEN)) for _ in range(runs + 1)]
    if side == "generate":
        seconds = [run_generate(model, batch) for batch in prompts]
    else:
        from areal.api.config.inference import NativeConfig
        from areal.engine.native.engine import NativeEngine

        engine = NativeEngine(NativeConfig(max_running_requests=REQUESTS), model)
        engine.start()
        seconds = [run_native(engine, batch) for batch in prompts]
        engine.stop()
    median = statistics.median(seconds[1:])
    return {
        "seconds": median,
        "matmul_share": product_flops(model) / peak / median,
        "parameters": model.num_parameters(),
    }


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Alternate both sides, each in a fresh process."""
    shares: list[float] = []

    def run(side: str) -> float:
        command = [sys.executable, __file__, "--side", side, "--model", name, "--runs", str(options.runs)]
        measured = common.run_json(command, threads=options.threads)
        if side == "native":
            shares.append(measured["matmul_share"])
        return float(measured["seconds"])

    rounds = common.alternate({side: lambda side=side: run(side) for side in ("generate", "native")}, options.repeats)
    speedup = common.ratio(rounds["generate"], rounds["native"])
    native_s = statistics.median(rounds["native"])
    result: dict[str, Any] = {
        "generate_s": common.summary(rounds["generate"]),
        "native_s": common.summary(rounds["native"]),
        "native_step_ms": native_s / NEW_TOKENS * 1e3,
        "native_tokens_per_s": REQUESTS * NEW_TOKENS / native_s,
        "speedup": speedup,
        "matmul_share": common.summary(shares),
        "targets": TARGETS[name],
    }
    medians = {"speedup": speedup["median"], "matmul_share": statistics.median(shares)}
    result["targets_met"] = {key: medians[key] >= value for key, value in TARGETS[name].items()}
    return result


def main() -> None:
    """Parse flags, measure, print one JSON object."""
    parser = common.arguments(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", choices=[*TARGETS, "all"], default="all")
    parser.add_argument("--runs", type=int, default=3, help="runs of each process after its warm-up")
    parser.add_argument("--side", choices=["generate", "native"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        sys.stdout.write(json.dumps(measure_side(options.side, options.model, options.runs)) + "\n")
        return
    names = list(TARGETS) if options.model == "all" else [options.model]
    common.emit("native_decode", {name: measure(name, options) for name in names}, options.out)


if __name__ == "__main__":
    main()
