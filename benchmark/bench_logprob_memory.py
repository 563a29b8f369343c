"""Peak memory of log-probs: the chunked head against full float32 logits, 8 × 2,048 tokens, vocabulary of 49,152.

Each side runs in a process of its own on hidden states of SmolLM2-135M's width and the head's weight. Ours gives
log-probs and entropy of every token and the gradients of hidden states and weight. The other side holds one copy of the
full logits, makes log-probs of it in place and no gradients: the least that full logits can take. Measured is how far
resident memory rises above what it was before; the median of the round-by-round ratios is reported, as JSON::

    python benchmark/bench_logprob_memory.py
    python benchmark/bench_logprob_memory.py --no-gradients
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmark.common import alternate, arguments, emit, ratio, run_json, summary

TARGET = 0.35  # peak of ours over peak of full logits
TOKENS, WIDTH, VOCABULARY = 8 * 2048, 576, 49152


def main() -> None:
    """Measure both sides, or be one of them."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--no-gradients", action="store_true", help="scoring only")
    parser.add_argument("--side", choices=("ours", "full"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(json.dumps(measure(options.side, gradients=not options.no_gradients)))
        return

    def peak(side: str) -> float:
        command = [sys.executable, __file__, "--side", side, *(["--no-gradients"] if options.no_gradients else [])]
        return float(run_json(command, threads=options.threads)["peak_bytes"])

    peaks = alternate({"ours": lambda: peak("ours"), "full": lambda: peak("full")}, options.repeats)
    ratios = ratio(peaks["ours"], peaks["full"])
    result = {
        "tokens": TOKENS,
        "width": WIDTH,
        "vocabulary": VOCABULARY,
        "gradients": not options.no_gradients,
        "full_logits_bytes": TOKENS * VOCABULARY * 4,
        "ours_bytes": summary(peaks["ours"]),
        "full_bytes": summary(peaks["full"]),
        "ours_over_full": ratios,
        "target": f"<= {TARGET}",
        "met": ratios["median"] <= TARGET,
    }
    emit("logprob_memory", result, options.out)


def measure(side: str, *, gradients: bool) -> dict[str, float]:
    """Rise of the peak resident memory of this process while one side runs, in bytes."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator).requires_grad_(gradients)
    head = torch.randn(VOCABULARY, WIDTH, generator=generator).mul_(0.02).requires_grad_(gradients)
    labels = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    run = _ours if side == "ours" else _full
    run(hidden[:8].detach(), head[:64].detach(), labels[:8] % 64)  # libraries set themselves up
    before = _peak()
    logprobs = run(hidden, head, labels)
    return {"peak_bytes": float(_peak() - before), "check": float(logprobs.sum())}


def _ours(hidden: torch.Tensor, head: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    from areal.engine.core.lm_head import token_output

    output = token_output(hidden, head, labels, None, 1.0)
    if output.logprobs.requires_grad:
        (output.logprobs + 0.01 * output.entropy).mean().backward()
    return output.logprobs.detach()


@torch.no_grad()
def _full(hidden: torch.Tensor, head: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = hidden @ head.t()
    logits.sub_(logits.amax(-1, keepdim=True))
    chosen = logits.gather(1, labels[:, None]).squeeze(1)
    return chosen - logits.exp_().sum(-1).log()


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
