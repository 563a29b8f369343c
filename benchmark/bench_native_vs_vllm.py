"""Native decode against vLLM on CPU: the same 64 prompts, sampled at temperature 1 in float32, tokens per second.

Each side lives in a process of its own for the whole session and they take turns; the median over the turns of the
ratio of their speeds is reported, as JSON::

    python benchmark/bench_native_vs_vllm.py --vllm-python /path/to/vllm/bin/python               # both shapes
    python benchmark/bench_native_vs_vllm.py --vllm-python ... --model /path/to/a/hugging-face-directory

``tiny`` is the quickstart's character model (about 1 M parameters; 16 + 64 tokens), ``135m`` has the shape of
SmolLM2-135M with random weights (32 + 128 tokens); so does a directory. Sides: ``native`` (always reports log-probs
and seeds every request), ``vllm`` (log-probs of the drawn tokens, as reinforcement learning needs them; unseeded, its
fastest way to draw) and ``vllm_plain`` (no log-probs). vLLM runs as an offline ``LLM`` inside the child, so that
neither side pays for a socket, with room for all requests at once, eager, without prefix cache and with threads
where the system puts them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import common

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

REQUESTS = 64
SHAPES = {"tiny": (16, 64), "135m": (32, 128)}  # tokens of a prompt, new tokens
BATCHES = {"tiny": 8}  # generated one after the other for one measurement; others: 1
TARGETS = {"tiny": 1.5, "135m": 1.0}
GOAL = 1.5
SIDES = ("native", "vllm", "vllm_plain")
Run = Callable[[list[list[int]], int, bool], None]  # prompts, new tokens, log-probs


def open_native(model: str, longest: int) -> tuple[Run, int]:
    """The native engine in this process, and its vocabulary's size."""
    from areal.api.config.inference import NativeConfig
    from areal.api.io_struct import GenerationHyperparameters, ModelRequest
    from areal.engine.native.engine import NativeEngine

    engine = NativeEngine(NativeConfig(max_running_requests=REQUESTS, max_seq_len=longest), model)
    engine.start()

    def run(prompts: list[list[int]], new_tokens: int, _: bool) -> None:
        settings = GenerationHyperparameters(max_new_tokens=new_tokens, ignore_eos=True)
        engine.hold_admission()
        futures = [engine.submit(ModelRequest(input_ids=p, gconfig=settings, seed=i)) for i, p in enumerate(prompts)]
        engine.release_admission()
        if any(len(future.result().output_logprobs) != new_tokens for future in futures):
            raise RuntimeError("a native request stopped early")

    return run, engine.spec.vocab_size


def open_vllm(model: str, longest: int) -> tuple[Run, int]:
    """vLLM in this process, and its vocabulary's size."""
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    llm = LLM(
        model, dtype="float32", enforce_eager=True, skip_tokenizer_init=True, generation_config="vllm",
        max_model_len=longest, max_num_seqs=REQUESTS, max_num_batched_tokens=REQUESTS * longest,
        enable_prefix_caching=False, logprobs_mode="processed_logprobs", disable_log_stats=True,
    )  # fmt: skip

    def run(prompts: list[list[int]], new_tokens: int, logprobs: bool) -> None:
        settings = SamplingParams(
            temperature=1.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False, logprobs=0 if logprobs else None
        )
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], settings, use_tqdm=False)
        if any(len(output.outputs[0].token_ids) != new_tokens for output in outputs):
            raise RuntimeError("a vLLM request stopped early")

    return run, llm.model_config.get_vocab_size()


def serve(options: argparse.Namespace) -> None:
    """Child: reads one JSON order a line, answers with the seconds it took; everything else goes to stderr."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    prompt_len, new_tokens = options.lengths
    run, vocab = (open_native if options.side == "native" else open_vllm)(options.model, prompt_len + new_tokens)
    replies.write("ready\n")
    replies.flush()
    for line in sys.stdin:
        order = json.loads(line)
        draw = random.Random(order["seed"])
        batches = [
            [[draw.randrange(1, vocab) for _ in range(prompt_len)] for _ in range(REQUESTS)]
            for _ in range(order["batches"])
        ]
        begin = time.perf_counter()
        for prompts in batches:
            run(prompts, new_tokens, order["logprobs"])
        replies.write(f"{time.perf_counter() - begin}\n")
        replies.flush()


class Side:
    """A child that holds one engine between measurements."""

    def __init__(
        self, side: str, model: str, lengths: tuple[int, int], batches: int, options: argparse.Namespace
    ) -> None:
        self.new_tokens, self.batches = lengths[1], batches
        python = options.vllm_python if side == "vllm" else sys.executable
        env = dict(os.environ, OMP_NUM_THREADS=str(options.threads), TOKENIZERS_PARALLELISM="false")
        if side == "vllm":
            env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "2"}
            env |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
            if options.vllm_preload:
                env["LD_PRELOAD"] = options.vllm_preload
        command = [python, __file__, "--side", side, "--model", model, "--lengths", *map(str, lengths)]
        self._command = command
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the child
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env=env
        )
        self._answer()

    def _answer(self) -> str:
        line = self._child.stdout.readline() if self._child.stdout else ""
        if not line:
            self._child.wait()
            self._log.seek(0)
            raise RuntimeError(
                f"{' '.join(self._command)} ended with {self._child.returncode}:\n{self._log.read()[-4000:]}"
            )
        return line

    def tokens_per_s(self, seed: int, logprobs: bool = True) -> float:
        """Generate once and return the speed."""
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps({"seed": seed, "logprobs": logprobs, "batches": self.batches}) + "\n")
        self._child.stdin.flush()
        return self.batches * REQUESTS * self.new_tokens / float(self._answer())

    def close(self) -> None:
        """End the child."""
        self._child.kill()
        self._child.wait()
        self._log.close()


def measure(name: str, options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Both sides on one model, in turn."""
    model, lengths = name, SHAPES["135m"]
    if name in SHAPES:
        from bench_native_decode import build_model

        model, lengths = str(Path(folder) / name), SHAPES[name]
        build_model(name).save_pretrained(model)
    count = iter(range(10**6))
    with ExitStack() as stack:
        opened = {}
        for side in ("native", "vllm"):
            opened[side] = Side(side, model, lengths, BATCHES.get(name, 1), options)
            stack.callback(opened[side].close)
            opened[side].tokens_per_s(next(count))  # warm up
        sides: dict[str, Callable[[], float]] = {
            "native": lambda: opened["native"].tokens_per_s(next(count)),
            "vllm": lambda: opened["vllm"].tokens_per_s(next(count)),
        }
        if not options.no_plain:
            sides["vllm_plain"] = lambda: opened["vllm"].tokens_per_s(next(count), logprobs=False)
        rounds = common.alternate(sides, options.repeats)
    target = TARGETS.get(name, TARGETS["135m"])
    result: dict[str, Any] = {f"{side}_tokens_per_s": common.summary(values) for side, values in rounds.items()}
    result["speedup"] = common.ratio(rounds["native"], rounds["vllm"])
    if "vllm_plain" in rounds:
        result["speedup_without_logprobs"] = common.ratio(rounds["native"], rounds["vllm_plain"])
    median = result["speedup"]["median"]
    result["targets"] = {"speedup": target, "goal": GOAL}
    result["targets_met"] = {"speedup": median >= target, "goal": median >= GOAL}
    return result


def main() -> None:
    """Parse flags, measure, print one JSON object."""
    parser = common.arguments(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="all", help="tiny, 135m, all (both), or a Hugging Face directory")
    parser.add_argument("--vllm-python", default=os.environ.get("AREAL_VLLM_PYTHON"), help="interpreter that has vLLM")
    parser.add_argument("--vllm-preload", default="", help="LD_PRELOAD of the vLLM side, such as libiomp5.so")
    parser.add_argument("--no-plain", action="store_true", help="leave vLLM without log-probs out")
    parser.add_argument("--side", choices=["native", "vllm"], help=argparse.SUPPRESS)
    parser.add_argument("--lengths", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        serve(options)
        return
    if not options.vllm_python:
        parser.error("--vllm-python (or AREAL_VLLM_PYTHON) must name an interpreter that has vLLM")
    names = list(SHAPES) if options.model == "all" else [options.model]
    with tempfile.TemporaryDirectory() as folder:
        results = {name: measure(name, options, folder) for name in names}
    versions = {"vllm": common.package_version(options.vllm_python, "vllm-cpu")}
    common.emit("native_vs_vllm", {"versions": versions, **results}, options.out)


if __name__ == "__main__":
    main()
