"""Native servers that somebody else runs: processes at fixed addresses, which tests kill, start again and ask."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
START_LIMIT_S = 90.0


class ExternalServer:
    """``python -m areal.engine.native.server`` on one port.

    Args:
        model: directory that it loads whenever it starts.
        log: file of all its lives.
        tokenizer: its directory; None: the model's, ``none``: it serves token ids alone.
    """

    def __init__(self, model: str, log: Path, tokenizer: str | None = None) -> None:
        self._model, self._log, self._tokenizer = model, log, tokenizer or model
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    @property
    def address(self) -> str:
        """``host:port``."""
        return f"127.0.0.1:{self.port}"

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return self._process is not None and self._process.poll() is None

    def start(self, *, wait: bool = True) -> None:
        """Start it, at the port that it had before."""
        begin = self._log.stat().st_size if self._log.exists() else 0
        command = [sys.executable, "-m", "areal.engine.native.server", "--model-path", self._model]
        options = ["--tokenizer-path", self._tokenizer, "--num-threads", "1", "--dtype", "float32"]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "--port", str(self.port), *options],
                env={**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        if wait:
            self.wait(begin)

    def wait(self, begin: int = 0) -> None:
        """Until it serves; its log since offset ``begin`` says so."""
        deadline = time.monotonic() + START_LIMIT_S
        while (found := re.search(r"serving .* on 127\.0\.0\.1:(\d+)", self.log(begin))) is None:
            assert self.alive, self.log()
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.05)
        self.port = int(found[1])

    def log(self, begin: int = 0) -> str:
        """What it has written since an offset."""
        return self._log.read_bytes()[begin:].decode(errors="replace")

    def kill(self) -> None:
        """As a lost machine does."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(10)

    def post(self, path: str, body: Any) -> Any:
        """The reply to a call."""
        data = json.dumps(body).encode()
        call = urllib.request.Request(f"http://{self.address}{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(call, timeout=20) as response:
            return json.load(response)

    def generate(self, ids: Sequence[int], count: int = 8) -> tuple[list[int], list[float], list[int]]:
        """Greedy tokens, their log-probs and versions; fails within seconds where the server is paused."""
        body = {
            "input_ids": list(ids),
            "sampling_params": {"max_new_tokens": count, "temperature": 0.0, "ignore_eos": True},
            "return_logprob": True,
        }
        reply = self.post("/generate", body)
        meta = reply["meta_info"]
        return reply["output_ids"], [entry[0] for entry in meta["output_token_logprobs"]], meta["output_token_versions"]


@contextmanager
def external_servers(
    count: int, model: str, root: Path, tokenizer: str | None = None
) -> Iterator[list[ExternalServer]]:
    """Servers for the length of a block."""
    servers = [ExternalServer(model, root / f"external-{number}.log", tokenizer) for number in range(count)]
    try:
        for server in servers:
            server.start(wait=False)
        for server in servers:
            server.wait()
        yield servers
    finally:
        for server in servers:
            server.kill()
