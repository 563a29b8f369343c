"""Kills ranks in the middle of a save; afterwards every checkpoint that has a name must load bit for bit.

Two ranks train a tiny model and save after each step: a recover point that replaces the previous one, and a Hugging
Face directory per step, written at once or in the background. Each trial kills rank 0, rank 1 or both at a random
moment of a save (seeded) and then compares what is on the disk with an undisturbed run. A rank that survives must end
by itself. Run by ``test_kill_save.py``, or by hand::

    python -m tests.torchrun.kill_save --times 20 --seed 0
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import random
import re
import shutil
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from areal.api.config.timers import SaverConfig
from areal.api.io_struct import SaveLoadMeta
from areal.engine.core.weight_sync import checksum
from areal.engine.fsdp_engine import FSDPEngine
from areal.utils.saver import Saver
from tests.fakes import tiny_model
from tests.torchrun.cells import SPEC, step_some
from tests.torchrun.live_group import _free_port
from tests.torchrun.reshard_cells import build, own_rows

RANKS, STEPS = 2, 6
SURVIVOR_LIMIT_S = 60
_STEP = re.compile(r"globalstep(\d+)$")


def saver_of(root: str, mode: str) -> Saver:
    """A saver that fires at every step."""
    config = SaverConfig(experiment_name="e", trial_name="t", fileroot=root, freq_steps=1, mode=mode)
    return Saver(config, SPEC)


def train_and_save(rank: int, port: int, path: str, root: str, mode: str, pipe: Connection) -> None:
    """One rank; tells ``("saving", step, {})`` before and ``("saved", step, weights)`` after each save."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = str(port)
    torch.set_num_threads(1)
    engine = build(path, f"fsdp:d{RANKS}")
    saver = saver_of(root, mode)
    rows = own_rows(engine)
    for step in range(STEPS):
        step_some(engine, rows, 1)
        sums = checksums(engine)
        pipe.send(("saving", step, {}))
        saver.save(engine, 0, step, step)
        engine.save(SaveLoadMeta(f"{root}/recover", "dcp", True))
        pipe.send(("saved", step, sums))
    saver.finalize()
    engine.destroy()


def checksums(engine: FSDPEngine) -> dict[str, int]:
    """Sum of the bits of every full tensor."""
    return {name: checksum(tensor) for name, tensor in engine.named_full_tensors()}


class Trials:
    """Starts ranks, kills them, checks the disk."""

    def __init__(self, path: str, seed: int) -> None:
        self.path, self.random = path, random.Random(seed)
        self.context = mp.get_context("forkserver")
        self.context.set_forkserver_preload([__name__])
        self.reader = build(path, "fsdp:d1")
        self.expected: dict[int, dict[str, int]] = {}
        self.save_s = 0.0
        with tempfile.TemporaryDirectory() as root:
            self._undisturbed(root)

    def kill_once(self, mode: str) -> dict[str, Any]:
        """One trial; returns what was killed and what was found."""
        at_step, moment = self.random.randrange(1, STEPS - 1), self.random.uniform(0, self.save_s)
        victims = self.random.choice([(0,), (1,), (0, 1)])
        with tempfile.TemporaryDirectory() as root:
            processes, pipes = self._start(root, mode)
            self._wait_for(pipes[0], "saving", at_step)
            time.sleep(moment)
            for rank in victims:
                processes[rank].kill()
            for rank, process in enumerate(processes):
                process.join(SURVIVOR_LIMIT_S)
                if process.is_alive():
                    process.kill()
                    raise AssertionError(f"rank {rank} still ran {SURVIVOR_LIMIT_S} s after rank {victims} was killed")
            found = self.check(root)
        assert found["recover"] in (at_step - 1, at_step, at_step + 1), found
        return {"mode": mode, "step": at_step, "after_s": round(moment, 4), "killed": victims, **found}

    def check(self, root: str) -> dict[str, Any]:
        """Load everything that has a final name; returns the steps found and the number of leftovers."""
        self.reader.load(SaveLoadMeta(f"{root}/recover", "dcp", True))
        recover = self.reader.get_version() - 1
        assert checksums(self.reader) == self.expected[recover]
        saved = []
        models = Path(Saver.get_model_save_root("e", "t", root))
        for entry in models.iterdir():
            if (match := _STEP.search(entry.name)) and not entry.name.startswith("."):
                self.reader.load(SaveLoadMeta(str(entry), "hf", False))
                assert checksums(self.reader) == self.expected[int(match[1])], entry
                saved.append(int(match[1]))
        leftovers = [e.name for e in (*models.iterdir(), *Path(root).iterdir()) if ".aside-" in e.name]
        return {"recover": recover, "saved": sorted(saved), "leftovers": len(leftovers)}

    def close(self) -> None:
        """Free the engine that reads."""
        self.reader.destroy()

    def _undisturbed(self, root: str) -> None:
        processes, pipes = self._start(root, "sync")
        times = []
        for step in range(STEPS):
            self._wait_for(pipes[0], "saving", step)
            start = time.monotonic()
            self.expected[step] = self._wait_for(pipes[0], "saved", step)
            times.append(time.monotonic() - start)
        for process in processes:
            process.join(SURVIVOR_LIMIT_S)
        self.save_s = sorted(times)[len(times) // 2]
        assert self.check(root) == {"recover": STEPS - 1, "saved": list(range(STEPS)), "leftovers": 0}

    def _start(self, root: str, mode: str) -> tuple[list[Any], list[Connection]]:
        port = _free_port()
        processes, pipes = [], []
        for rank in range(RANKS):
            ours, theirs = self.context.Pipe(duplex=False)
            arguments = (rank, port, self.path, root, mode, theirs)
            process = self.context.Process(target=train_and_save, args=arguments, daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        return processes, pipes

    def _wait_for(self, pipe: Connection, what: str, step: int) -> dict[str, int]:
        while True:
            if not pipe.poll(SURVIVOR_LIMIT_S):
                raise AssertionError(f"no {what!r} of step {step} within {SURVIVOR_LIMIT_S} s")
            kind, number, sums = pipe.recv()
            if (kind, number) == (what, step):
                return dict(sums)


def run(times: int, seed: int) -> list[dict[str, Any]]:
    """The trials, asynchronous saves in every other one; raises AssertionError when one fails."""
    path = tempfile.mkdtemp()
    try:
        tiny_model("qwen2").save_pretrained(path)
        trials = Trials(path, seed)
        try:
            return [trials.kill_once(("sync", "async")[number % 2]) for number in range(times)]
        finally:
            trials.close()
    finally:
        shutil.rmtree(path)


def main() -> None:
    """Print one line per trial."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for trial in run(options.times, options.seed):
        sys.stdout.write(json.dumps(trial) + "\n")


if __name__ == "__main__":
    main()
