"""The native HTTP server, as a process of its own, against the suite of all servers."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal.api.config.inference import NativeConfig
from areal.api.config.rollout import InferenceEngineConfig
from areal.api.io_struct import WeightUpdateMeta
from areal.engine.inference.launch import LaunchOrder
from areal.engine.native_remote import NativeProtocol, RemoteNativeEngine
from areal.infra.rpc.identity import write_token
from areal.utils.network import find_free_port
from tests.servers.peer import Peer, error_of, request, save_suite_model, suite_model
from tests.servers.suite import ServerSuite

_TOKEN = "a-token-of-this-test"


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def peer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    """A server of its own; it asks for a token."""
    directory = tmp_path_factory.mktemp("native")
    model = save_suite_model(directory / "v0", 0, request.param)
    write_token(directory / "token", _TOKEN)
    port = find_free_port()
    command = [sys.executable, "-m", "areal.engine.native.server", "--model-path", model, "--port", str(port)]
    command += ["--max-running-requests", "32", "--token-file", str(directory / "token"), "--num-threads", "1"]
    process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        _wait(process, f"http://127.0.0.1:{port}/health")
        served = Peer(NativeProtocol(_TOKEN), f"127.0.0.1:{port}", request.param, directory)
        yield served
        served.close()
        assert not served.failures
    finally:
        process.terminate()
        process.wait(5)


class TestNativeServer(ServerSuite):
    """Everything."""


def test_remote_engine_starts_updates_and_stops_a_server(tmp_path: Path) -> None:
    model = save_suite_model(tmp_path / "v0", 0, True)
    new = suite_model(5, True)
    config = InferenceEngineConfig(backend="native:d1", tokenizer_path=model, max_concurrent_rollouts=4)
    engine = RemoteNativeEngine(config)
    try:
        order = LaunchOrder(
            "native", NativeConfig(num_threads=1), model, tmp_path / "log", env={"OMP_NUM_THREADS": "1"}
        )
        info = engine.launch_server(order)
        engine.initialize()
        before = asyncio.run(engine.agenerate(request([5, 6, 7], greedy=True, max_new_tokens=8)))

        new.save_pretrained(tmp_path / "weight_update_v3")
        meta = WeightUpdateMeta(type="disk", path=str(tmp_path / "weight_update_v3"), version=3)
        engine.update_weights_from_disk(meta).result(60)
        engine.set_version(3)
        after = asyncio.run(engine.agenerate(request([5, 6, 7], greedy=True, max_new_tokens=8)))

        assert (before.output_versions, after.output_versions) == ([0] * 8, [3] * 8)
        assert error_of({0: suite_model(0, True), 3: new}, before) < 1e-3
        assert error_of({3: new}, after) < 1e-3
        assert engine.get_version() == 3
        assert not (tmp_path / "weight_update_v3").exists()
    finally:
        engine.destroy()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((info.host, info.port), timeout=2)


def _wait(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise AssertionError(f"the native server did not start, exit code {process.poll()}")
