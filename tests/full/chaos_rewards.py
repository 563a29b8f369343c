"""The reward of the chaos cells: misbehaves as its row says. Runs in the pool's worker processes, so imports little."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


class Unpicklable(Exception):
    """Cannot travel back to the caller."""

    def __init__(self) -> None:
        super().__init__("this error holds a function")
        self.function = lambda: None


def chaotic_reward(
    prompt: str,
    completion: str,
    prompt_ids: Any,
    completion_ids: list[int],
    fault: str = "",
    token: str = "",
    **row: Any,
) -> Any:
    """Share of digits in the completion, unless ``fault`` says otherwise; ``token`` is a file name of this attempt."""
    if fault == "reward-raises":
        raise RuntimeError("the judge is out")
    if fault == "reward-raises-strangely":
        raise Unpicklable
    if fault == "reward-hangs":
        time.sleep(3600)
    if fault == "reward-hangs-with-child":
        subprocess.run([sys.executable, "-c", "import time; time.sleep(3600)"], check=False)
    if fault == "reward-exits":
        os._exit(7)
    if fault == "reward-killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "reward-flaky" and not Path(token).exists():
        Path(token).touch()
        raise ConnectionError("works the next time")
    wrong = {
        "reward-none": None,
        "reward-nan": float("nan"),
        "reward-infinite": float("-inf"),
        "reward-text": "0.5",
        "reward-list": [1.0, 2.0],
    }
    if fault in wrong:
        return wrong[fault]
    return sum(4 <= item < 14 for item in completion_ids) / max(1, len(completion_ids))
