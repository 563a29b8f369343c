"""The processes of one side of a benchmark: started together, they wait without using a core until they are asked.

The parent starts ranks with :func:`start_ranks` and asks all of them at once; each rank is the same script, which calls
:func:`serve`. Questions are words on standard input, answers are lines of JSON on standard output.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

_STOP = "stop"


class Ranks:
    """Running ranks, in order.

    ``busy`` is the processor time of each answer over its wall time, of the rank that waited most. Far below 1 on every
    side, other programs used the cores and the measurement says nothing.
    """

    def __init__(self, processes: list[subprocess.Popen[str]]) -> None:
        self.processes = processes
        self.busy: list[float] = []

    def ask(self, word: str = "go") -> list[dict[str, Any]]:
        """What each rank answers; all work at the same time.

        Raises:
            RuntimeError: a rank ended.
        """
        for process in self.processes:
            _tell(process, word)
        answers = [_answer(process) for process in self.processes]
        self.busy.append(min(answer.pop("busy") for answer in answers))
        return answers

    def slowest(self, word: str = "go", key: str = "seconds") -> float:
        """The largest ``key`` of all ranks' answers."""
        return max(float(answer[key]) for answer in self.ask(word))


@contextmanager
def start_ranks(
    command: list[str], size: int, threads: int, variables: Mapping[str, str] | None = None
) -> Iterator[Ranks]:
    """Start ``python command`` ``size`` times with the environment of ``torchrun``, which a single rank does without.

    Args:
        command: script and arguments.
        size: number of ranks.
        threads: of each rank.
        variables: added to the environment.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank in range(size):
        env = dict(os.environ, OMP_NUM_THREADS=str(threads), TOKENIZERS_PARALLELISM="false", **(variables or {}))
        if size > 1:
            env.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
            env.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        processes.append(
            subprocess.Popen(
                [sys.executable, *command], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
            )
        )
    try:
        yield Ranks(processes)
    finally:
        for process in processes:
            if process.poll() is None:
                _tell(process, _STOP)
        for process in processes:
            process.wait(60)


def serve(answers: dict[str, Callable[[], dict[str, Any]]]) -> None:
    """Answer questions until told to stop; what a question is answered with also gets ``busy``."""
    for line in sys.stdin:
        word = line.strip()
        if word == _STOP:
            return
        begin, processor = time.perf_counter(), time.process_time()
        answer = answers[word]()
        busy = (time.process_time() - processor) / (time.perf_counter() - begin)
        sys.stdout.write(json.dumps({**answer, "busy": busy}) + "\n")
        sys.stdout.flush()


def _tell(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdin is not None
    process.stdin.write(word + "\n")
    process.stdin.flush()


def _answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a rank ended with exit code {process.wait()}")
    answer: dict[str, Any] = json.loads(line)
    return answer
