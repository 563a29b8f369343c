"""Real inference servers, one per model and settings, shared by the tests of a session."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from areal.api.config.inference import SGLangConfig, vLLMConfig
from areal.engine.inference.backends import protocol_class
from areal.engine.inference.launch import LaunchOrder, RunningServer, launch_server

MOST_SERVERS = 2
"""Of one kind at a time: each takes gigabytes."""
START_LIMIT_S = 400.0
_SECTIONS: dict[str, type[Any]] = {"sglang": SGLangConfig, "vllm": vLLMConfig}

ServerFactory = Callable[..., RunningServer]


def server_python(backend: str) -> str:
    """Interpreter with ``backend``; skips with the reason where none is named, fails for vLLM in CI."""
    variable = f"AREAL_{backend.upper()}_PYTHON"
    python = os.environ.get(variable)
    if python:
        return python
    reason = f"{variable} does not name the interpreter of an environment made by `areal install-server {backend} DIR`"
    if backend == "vllm" and os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


def _servers(backend: str, logs: Path) -> Iterator[ServerFactory]:
    running: dict[tuple[Any, ...], RunningServer] = {}

    def start(model_dir: str | Path, *, tensor: int = 1, dtype: str = "float32", **settings: Any) -> RunningServer:
        key = (str(model_dir), tensor, dtype, *sorted((name, repr(value)) for name, value in settings.items()))
        found = running.get(key)
        if found is not None and found.process.ended() is None:
            return found
        while len(running) >= MOST_SERVERS:
            running.pop(next(iter(running))).process.stop()
        section = _SECTIONS[backend](python=server_python(backend), **settings)
        number = len(list(logs.iterdir()))
        order = LaunchOrder(
            backend,
            section,
            str(model_dir),
            logs / f"{backend}-{number}.log",
            tensor=tensor,
            dtype=dtype,
            timeout_s=START_LIMIT_S,
            env={"OMP_NUM_THREADS": "1"},
        )
        running[key] = launch_server(order, protocol_class(backend)())
        return running[key]

    yield start
    for server in running.values():
        server.process.stop()


@pytest.fixture(scope="session")
def vllm_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerFactory]:
    """``vllm_server(model_dir, tensor=1, dtype="float32", **section)`` -> address and process of a vLLM server."""
    yield from _servers("vllm", tmp_path_factory.mktemp("vllm"))


@pytest.fixture(scope="session")
def sglang_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerFactory]:
    """The same for SGLang."""
    yield from _servers("sglang", tmp_path_factory.mktemp("sglang"))
