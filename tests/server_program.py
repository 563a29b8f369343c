"""A program that is started like vLLM and behaves as its first argument says; standard library only.

``python server_program.py MODE -m vllm.entrypoints.openai.api_server --port P ...``. Modes: ``serve``; ``crash`` (ends
at once with code 3), ``crash_late`` (while the probe is under way), ``silent`` (never listens), ``unhealthy`` (503 for
ever), ``no_endpoint`` (lacks ``/resume``), ``bad_probe`` (a log-prob is missing), ``stubborn`` (silent, and ignores
SIGTERM). A server starts a child that leaves its session, as servers' workers may.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ENDPOINTS = (
    "/health",
    "/inference/v1/generate",
    "/abort_requests",
    "/pause",
    "/resume",
    "/collective_rpc",
    "/reset_prefix_cache",
    "/update_weight_version",
)


class Handler(BaseHTTPRequestHandler):
    """Answers as vLLM does where it is asked during a start."""

    mode = "serve"
    version = "default"  # what it was told last, stamped on every token

    def do_GET(self) -> None:
        """Health and the list of endpoints."""
        if self.path == "/health":
            self._answer(503 if self.mode == "unhealthy" else 200, None)
        else:
            listed = [path for path in ENDPOINTS if self.mode != "no_endpoint" or path != "/resume"]
            self._answer(200, {"paths": dict.fromkeys(listed, {})})

    def do_POST(self) -> None:
        """As many tokens as were asked for; anything else succeeds."""
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        if self.path == "/update_weight_version":
            Handler.version = body["new_version"]
        if self.path != "/inference/v1/generate":
            self._answer(200, {})
            return
        if self.mode == "crash_late":
            os._exit(4)
        tokens = list(range(body["sampling_params"]["max_tokens"]))
        content = [{"token_id": token, "logprob": -0.5, "rank": 1} for token in tokens]
        if self.mode == "bad_probe":
            content.pop()
        choice = {"token_ids": tokens, "finish_reason": "length", "logprobs": {"content": content}}
        choice["weight_versions"] = [{"version": Handler.version, "start": 0, "end": len(tokens)}]
        self._answer(200, {"choices": [choice]})

    def _answer(self, status: int, value: Any) -> None:
        body = b"" if value is None else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Quiet."""


def main(mode: str, arguments: list[str]) -> int:
    """Do what ``mode`` says."""
    print(f"fake server, mode {mode}", flush=True)
    if mode == "crash":
        print("CUDA error: the device went away", flush=True)
        return 3
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    worker = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session=True)
    if (pids := os.environ.get("FAKE_SERVER_PIDS")) is not None:
        Path(pids).write_text(f"{os.getpid()} {worker.pid}", encoding="utf-8")
    if mode in ("silent", "stubborn"):
        time.sleep(600)
    Handler.mode = mode
    port = int(arguments[arguments.index("--port") + 1])
    ThreadingHTTPServer.request_queue_size = 64
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
