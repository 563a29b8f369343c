"""Packing sequences into micro-batches: 100,000 log-normal lengths under 8,192 tokens, against a plain first-fit.

``python benchmark/bench_seqpack.py [--lengths N] [--median TOKENS] [--sigma S]`` packs the same lengths by our own
``ffd`` and by a first-fit written in plain Python, in turn, and prints one JSON object. Targets: at least 20 times as
fast, and at most 2 % of the room of all micro-batches left empty (sequences are not padded to a multiple).
"""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from areal.utils.seqpack import ffd_allocate
from benchmark import common

CAPACITY = 8192
LIMIT_RATIO = 20.0
LIMIT_WASTE = 0.02

Packer = Callable[[list[int]], list[list[int]]]


def log_normal_lengths(n: int, median: float, sigma: float) -> list[int]:
    """``n`` lengths in tokens, at least 1 and at most ``CAPACITY``; the same ones in every run."""
    draw = random.Random(0)
    return [min(max(round(draw.lognormvariate(math.log(median), sigma)), 1), CAPACITY) for _ in range(n)]


def first_fit(lengths: list[int]) -> list[list[int]]:
    """Each length goes into the first bin with room, in the order they come."""
    bins: list[list[int]] = []
    room: list[int] = []
    for index, length in enumerate(lengths):
        for number, left in enumerate(room):
            if length <= left:
                bins[number].append(index)
                room[number] -= length
                break
        else:
            bins.append([index])
            room.append(CAPACITY - length)
    return bins


def ffd(lengths: list[int]) -> list[list[int]]:
    """What forms micro-batches under ``packing_algorithm=ffd``."""
    return ffd_allocate(lengths, CAPACITY, 1)


def waste(bins: list[list[int]], lengths: list[int]) -> float:
    """Share of the room of all bins that stays empty; every length is in one bin, and no bin is overfull."""
    assert sorted(index for members in bins for index in members) == list(range(len(lengths)))
    assert max(sum(lengths[index] for index in members) for members in bins) <= CAPACITY
    return 1 - sum(lengths) / (CAPACITY * len(bins))


def main() -> int:
    parser = common.arguments(__doc__ or "")
    parser.add_argument("--lengths", type=int, default=100_000)
    parser.add_argument("--median", type=float, default=1024, help="median length (tokens)")
    parser.add_argument("--sigma", type=float, default=1.0, help="standard deviation of the length's logarithm")
    args = parser.parse_args()
    lengths = log_normal_lengths(args.lengths, args.median, args.sigma)
    wasted: dict[str, float] = {}

    def seconds(packer: Packer) -> float:
        began = time.perf_counter()
        bins = packer(lengths)
        took = time.perf_counter() - began
        wasted[packer.__name__] = waste(bins, lengths)
        return took

    packers: tuple[Packer, ...] = (ffd, first_fit)
    measured = common.alternate({p.__name__: lambda p=p: seconds(p) for p in packers}, args.repeats)
    faster = common.ratio(measured["first_fit"], measured["ffd"])
    passed = faster["median"] >= LIMIT_RATIO and wasted["ffd"] <= LIMIT_WASTE
    result = {
        "lengths": {"n": len(lengths), "median": args.median, "sigma": args.sigma, "capacity": CAPACITY},
        "seconds": {name: common.summary(values) for name, values in measured.items()},
        "times_as_fast": faster,
        "waste": wasted,
        "target": f">= {LIMIT_RATIO:g} times as fast, waste <= {LIMIT_WASTE:.0%}",
        "passed": passed,
    }
    common.emit("seqpack", result, args.out)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
