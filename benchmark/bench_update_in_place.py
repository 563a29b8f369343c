"""Weight updates that keep running requests against waiting for the longest request before each of them.

``python benchmark/bench_update_in_place.py`` keeps the native engine full with requests of log-normal length. There is
one update for every batch of finished requests, as in training: what ends while the other side drains counts for its
next batch. New weights are staged while generation goes on, and then put in place: at once (``keep``: what runs goes
on, its prefix computed again under the new weights), or after no request is admitted any more and the last one has
ended (``drain``). The sides take turns with one engine; the median of the ratios of generated tokens per second is
reported, as JSON. Target: 1.15x.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

import common
import torch
from bench_native_decode import build_model

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from areal.api.config.inference import NativeConfig
from areal.api.io_struct import GenerationHyperparameters, ModelRequest
from areal.engine.native.engine import NativeEngine

PROMPT_LEN, LONGEST = 16, 496
TARGET = 1.15


class Stream:
    """A full engine: every request that ends is replaced by one that waits already."""

    def __init__(self, engine: NativeEngine, options: argparse.Namespace) -> None:
        self.engine, self.options = engine, options
        self.lengths: list[int] = []
        self._draw = random.Random(0)
        self._ended = threading.Condition()
        self._finished = 0
        self._submitted = 0
        self._open = True

    def begin(self, seed: int) -> None:
        """Submit the first requests: those that fit, and as many that wait."""
        self._draw = random.Random(seed)
        self._finished = self._submitted = 0
        self._open = True
        for _ in range(2 * self.options.slots):
            self._submit()

    def _submit(self) -> None:
        length = round(self.options.median_tokens * self._draw.lognormvariate(0.0, self.options.sigma))
        length = max(1, min(length, LONGEST))
        self.lengths.append(length)
        prompt = [self._draw.randrange(1, 32) for _ in range(PROMPT_LEN)]
        settings = GenerationHyperparameters(max_new_tokens=length, ignore_eos=True)
        self._submitted += 1
        request = ModelRequest(input_ids=prompt, gconfig=settings, seed=self._submitted)
        self.engine.submit(request).add_done_callback(self._done)

    def _done(self, _: Any) -> None:
        with self._ended:
            if self._open:
                self._submit()
            self._finished += 1
            self._ended.notify_all()

    def wait_for(self, count: int) -> None:
        """Wait until ``count`` requests have finished in all."""
        with self._ended:
            self._ended.wait_for(lambda: self._finished >= count)

    def drain(self) -> None:
        """Admit nothing and wait until nothing runs."""
        self.engine.hold_admission()
        while self.engine.stats.running:  # counted after the last reply is out
            time.sleep(0.0005)

    def end(self) -> None:
        """Submit no more and end what is left."""
        with self._ended:
            self._open = False
        self.engine.abort()
        with self._ended:
            self._ended.wait_for(lambda: self._finished == self._submitted)


def tokens_per_s(side: str, stream: Stream, weights: dict[str, Any], seed: int) -> float:
    """Generated tokens per second between the first and the last of ``updates + 1`` updates."""
    engine, options = stream.engine, stream.options
    stream.begin(seed)
    for update in range(options.updates + 1):
        stream.wait_for(options.slots + (update + 1) * options.batch)
        version = engine.get_version() + 1
        engine.stage_weights(weights.items(), version)
        if side == "drain":
            stream.drain()
        engine.commit_weights(version)
        if side == "drain":
            engine.release_admission()
        if update == 0:  # from the first update on, when lengths in flight are mixed, to the last
            before, began = engine.stats.generated_tokens, time.perf_counter()
    seconds = time.perf_counter() - began
    tokens = engine.stats.generated_tokens - before
    stream.end()
    return tokens / seconds


def main() -> None:
    """Parse flags, measure, print one JSON object."""
    parser = common.arguments(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", choices=("tiny", "135m"), default="tiny")
    parser.add_argument("--slots", type=int, default=64, help="requests that run at once")
    parser.add_argument("--batch", type=int, default=128, help="finished requests between two updates")
    parser.add_argument("--updates", type=int, default=4, help="updates of one measurement, besides the first")
    parser.add_argument("--median-tokens", type=float, default=48.0, help="median length of an answer")
    parser.add_argument("--sigma", type=float, default=1.0, help="sigma of the log of the length")
    options = parser.parse_args()
    torch.set_num_threads(1)  # of this thread, which only stages: the cores belong to the engine
    model = build_model(options.model)
    weights = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    config = NativeConfig(max_running_requests=options.slots, num_threads=options.threads)
    engine = NativeEngine(config, model)
    engine.start()
    stream = Stream(engine, options)
    seeds = {side: iter(range(10**6)) for side in ("keep", "drain")}  # both sides get the same requests
    for side in seeds:
        tokens_per_s(side, stream, weights, next(seeds[side]))
    stream.lengths.clear()
    recomputed = engine.stats.recomputed_tokens
    rounds = common.alternate(
        {side: lambda side=side: tokens_per_s(side, stream, weights, next(seeds[side])) for side in seeds},
        options.repeats,
    )
    engine.stop()
    speedup = common.ratio(rounds["keep"], rounds["drain"])
    result = {
        "keep_tokens_per_s": common.summary(rounds["keep"]),
        "drain_tokens_per_s": common.summary(rounds["drain"]),
        "answer_tokens": {"median": statistics.median(stream.lengths), "mean": statistics.mean(stream.lengths)},
        "recomputed_tokens_per_update": (engine.stats.recomputed_tokens - recomputed)
        / (options.repeats * (options.updates + 1)),
        "speedup": speedup,
        "targets": {"speedup": TARGET},
        "targets_met": {"speedup": speedup["median"] >= TARGET},
    }
    common.emit("update_in_place", result, options.out)


if __name__ == "__main__":
    main()
