"""Tokens per second of two data-parallel ranks on a core each against one process on one core.

A random float32 Llama of SmolLM2-135M's shape takes steps on 2,048 packed tokens per rank in sequences of mixed length.
Both sides stay in memory and step in turns: while one works, the other waits without using a core. The median of the
round-by-round ratios of their rates is reported, as JSON::

    python benchmark/bench_fsdp_scaling.py
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmark.common import alternate, arguments, emit, ratio, summary

TARGET = 1.6  # tokens per second of d2 over those of d1
GO, STOP = "go\n", "stop\n"


def main() -> None:
    """Measure both sides, or be one rank of them."""
    parser = arguments(__doc__.splitlines()[0])
    parser.set_defaults(threads=1)
    parser.add_argument(
        "--lengths", type=int, nargs="*", help="tokens of each sequence of a rank (default: 2,048 in ten)"
    )
    parser.add_argument("--rank-of", help="be a rank that serves steps of this backend on standard input")
    parser.add_argument("--path", help="model of that rank")
    options = parser.parse_args()
    from benchmark.bench_train_batch import MIXED_LENGTHS, save_model

    lengths = tuple(options.lengths or MIXED_LENGTHS)
    if options.rank_of:
        serve(options.rank_of, options.path, lengths, options.threads)
        return
    with tempfile.TemporaryDirectory() as path:
        save_model("135m", path)
        with ranks(path, 1, lengths, options.threads) as one, ranks(path, 2, lengths, options.threads) as two:
            sides = {"d2": two.tokens_per_s, "d1": one.tokens_per_s}
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


class Ranks:
    """The processes of one backend; they take a step whenever they are told to.

    ``busy`` is the processor time of each step over its wall time, of the rank that waited most. Far below 1 on both
    sides, other programs used the cores and the ratio says nothing.
    """

    def __init__(self, processes: list[subprocess.Popen[str]], n_tokens: int) -> None:
        self.processes, self.n_tokens = processes, n_tokens
        self.busy: list[float] = []

    def tokens_per_s(self) -> float:
        """Rate of one step over all ranks; the slowest rank counts."""
        for process in self.processes:
            _tell(process, GO)
        answers = [[float(word) for word in _answer(process).split()] for process in self.processes]
        seconds = max(answer[0] for answer in answers)
        self.busy.append(min(answer[1] for answer in answers))
        return self.n_tokens * len(self.processes) / seconds


@contextmanager
def ranks(path: str, size: int, lengths: tuple[int, ...], threads: int) -> Iterator[Ranks]:
    """Start the ranks of ``fsdp:d<size>``; they wait, without using a core, until they are told to step."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank in range(size):
        env = dict(os.environ, OMP_NUM_THREADS=str(threads), TOKENIZERS_PARALLELISM="false")
        if size > 1:
            env.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
            env.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        command = [sys.executable, __file__, "--rank-of", f"fsdp:d{size}", "--path", path, "--threads", str(threads)]
        command += ["--lengths", *map(str, lengths)]
        processes.append(
            subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        )
    try:
        yield Ranks(processes, sum(lengths))
    finally:
        for process in processes:
            if process.poll() is None:
                _tell(process, STOP)
        for process in processes:
            process.wait(60)


def serve(backend: str, path: str, lengths: tuple[int, ...], threads: int) -> None:
    """Take a step and print its seconds, and how busy the core was, for every line ``go`` on standard input."""
    import time

    import torch

    from benchmark.bench_train_batch import engine_step, make_batch

    torch.set_num_threads(threads)
    step = engine_step(path, make_batch(lengths, 49152), backend)
    while sys.stdin.readline() == GO:
        begin = time.process_time()
        seconds = step()
        print(seconds, (time.process_time() - begin) / seconds, flush=True)


def _tell(process: subprocess.Popen[str], message: str) -> None:
    assert process.stdin is not None
    process.stdin.write(message)
    process.stdin.flush()


def _answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a rank ended with exit code {process.wait()}")
    return line


if __name__ == "__main__":
    main()
