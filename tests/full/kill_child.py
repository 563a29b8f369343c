"""A short synchronous run that saves at every step and can kill itself at a chosen moment of saving.

    python -m tests.full.kill_child ROOT POLICY [--report FILE] [--at-operation N [--delay-ms D] | --after-s T]

An audit hook numbers the file operations (open, rename, mkdir, remove, ... and fsync) below the run's checkpoint
directory: writing, publishing, cleaning up and, in a resumed run, loading. With ``--at-operation N`` the process kills
itself with SIGKILL when it comes to operation N, or D milliseconds later, which may be in the middle of a write.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEPS = 6
OVERRIDES = (
    f"total_train_steps={STEPS}",
    "saver.freq_steps=1",
    "recover.mode=on",
    "recover.freq_steps=1",
    "actor.optimizer.lr_scheduler_type=linear",
    "actor.optimizer.weight_decay=0.01",
)
_PATH_EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.symlink", "os.truncate", "os.listdir")


def die() -> None:
    """End as a crash does: no handler, no cleanup."""
    os.kill(os.getpid(), signal.SIGKILL)


class OperationCounter:
    """Numbers the file operations below ``directory`` from 1 and calls ``on_operation`` with each number."""

    def __init__(self, directory: Path, on_operation: Callable[[int], None]) -> None:
        self._prefix = str(directory)
        self._numbers = itertools.count(1)
        self._on_operation = on_operation
        self.count = 0

    def install(self) -> None:
        """Watch from now on; for good, as audit hooks cannot be removed."""
        sync = os.fsync

        def fsync(descriptor: Any) -> None:
            sync(descriptor)
            self._note()

        os.fsync = fsync
        sys.addaudithook(self._audit)

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event in _PATH_EVENTS and args and self._is_watched(args[0], args[-1]):
            self._note()

    def _is_watched(self, path: Any, last: Any) -> bool:
        if not isinstance(path, str | os.PathLike):
            return False
        name = os.fspath(path)
        # Removing a tree names its entries relative to the open directory.
        return str(name).startswith(self._prefix) or (not os.path.isabs(name) and isinstance(last, int) and last > 2)

    def _note(self) -> None:
        self.count = next(self._numbers)
        self._on_operation(self.count)


def main(argv: list[str]) -> None:
    """Run to the end, or to the kill."""
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("policy")
    parser.add_argument("--report", type=Path)
    parser.add_argument("--at-operation", type=int, default=0)
    parser.add_argument("--delay-ms", type=float, default=0.0)
    parser.add_argument("--after-s", type=float)
    options = parser.parse_args(argv)
    from tests.trainer_runs import rl_config, run_rl

    def on_operation(number: int) -> None:
        if number != options.at_operation:
            return
        if options.delay_ms == 0:
            die()
        threading.Timer(options.delay_ms / 1000, die).start()

    config = rl_config(options.root, options.policy, *OVERRIDES)
    counter = OperationCounter(options.root / "checkpoints", on_operation)
    counter.install()
    if options.after_s is not None:
        timer = threading.Timer(options.after_s, die)
        timer.daemon = True
        timer.start()
    began = time.monotonic()
    run_rl(config)
    if options.report is not None:
        options.report.write_text(json.dumps({"operations": counter.count, "seconds": time.monotonic() - began}))


if __name__ == "__main__":
    main(sys.argv[1:])
