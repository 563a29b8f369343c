"""Reward functions that misbehave; importable by pool workers."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any


def good(prompt: str, completion: str, *_: Any, **__: Any) -> float:
    """Length of the completion."""
    return float(len(completion))


def by_order(order: str) -> Any:
    """Does what ``order`` says."""
    if order == "hang":
        while True:
            pass
    if order == "exit":
        os._exit(1)
    if order == "sys.exit":
        sys.exit(3)
    if order == "raise":
        raise ValueError("no reward for you")
    if order == "raise odd":
        raise OddError("one", "two")
    return {"none": None, "nan": float("nan"), "text": "abc", "true": True, "int": 3}.get(order, 1.0)


class OddError(Exception):
    """Pickles, but does not unpickle."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def loaded_modules() -> list[str]:
    """Heavy modules that this process has imported."""
    return [name for name in ("torch", "numpy", "transformers", "areal") if name in sys.modules]


def process_id() -> int:
    """Pid of the worker."""
    return os.getpid()


def spawn_child() -> int:
    """Start a grandchild that would outlive its parent, and hang."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(os.environ["CHILD_PID_FILE"], "w", encoding="utf-8") as file:
        file.write(str(child.pid))
    time.sleep(600)
    return child.pid


async def coroutine(order: str) -> Any:
    """The same, asynchronously."""
    import asyncio

    if order == "hang":
        await asyncio.sleep(600)
    return by_order(order)
