"""Paths and reply formats of inference servers, for ``tests/server_fakes.py``: its own, SGLang's and vLLM's."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from aiohttp import web

if TYPE_CHECKING:
    from tests.server_fakes import FakeServer


@dataclass
class Asked:
    """A generation request in our own terms."""

    ids: list[int]
    most: int
    least: int
    seed: int | None
    rid: str
    stop_ids: list[int]
    stop: list[str]


@dataclass(eq=False)
class Job:
    """One running generation."""

    asked: Asked
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    reason: str = "length"
    aborted: bool = False
    abort_after: int | None = None


class _Dialect:
    """Paths and formats."""

    generate_path: ClassVar[str]

    def __init__(self, server: FakeServer) -> None:
        self.server = server

    def read(self, body: Any) -> Asked:
        raise NotImplementedError

    def write(self, job: Job) -> dict[str, Any]:
        raise NotImplementedError

    def control(self, path: str, body: dict[str, Any]) -> Any:
        raise NotImplementedError

    def health(self) -> Any:
        return {} if self.server.healthy else web.Response(status=503, text="unhealthy")


class _Fake(_Dialect):
    generate_path = "/gen"

    def read(self, body: Any) -> Asked:
        return Asked(**body)

    def write(self, job: Job) -> dict[str, Any]:
        reply = {"tokens": job.tokens, "logprobs": job.logprobs, "reason": job.reason}
        return {**reply, "versions": job.versions} if self.server.stamps else reply

    def control(self, path: str, body: dict[str, Any]) -> Any:
        server = self.server
        if path == "/health":
            return self.health()
        if path == "/pause":
            server.pause(body["mode"])
        elif path == "/resume":
            server.paused = False
        elif path == "/abort":
            server.abort(body["rid"])
        elif path == "/stage":
            server.staged = body["version"]
            return {"records": [[["w", [2], "float32", body["version"]]]]}
        elif path == "/commit":
            if server.staged != body["version"]:
                return {"error": f"v{body['version']} is not staged"}
            server.version, server.staged = body["version"], None
        elif path == "/discard":
            server.staged = None
        elif path == "/stamp":
            server.version = body["version"]
        elif path not in ("/join", "/leave"):
            return web.Response(status=404, text=json.dumps({"error": {"message": f"no {path} here"}}))
        return {"success": True}


class _SGLang(_Dialect):
    generate_path = "/generate"

    def read(self, body: Any) -> Asked:
        params = body["sampling_params"]
        return Asked(
            ids=body["input_ids"],
            most=params["max_new_tokens"],
            least=params.get("min_new_tokens", 0),
            seed=params.get("sampling_seed"),
            rid=body.get("rid", ""),
            stop_ids=params.get("stop_token_ids") or [],
            stop=params.get("stop") or [],
        )

    def write(self, job: Job) -> dict[str, Any]:
        finish: dict[str, Any] = {"type": job.reason}
        if job.reason == "length":
            finish["length"] = len(job.tokens)
        if job.reason == "stop":
            finish["matched"] = job.tokens[-1]
        if job.reason == "abort":
            finish["message"] = "Aborted" if job.tokens else "Abort in waiting queue"
        pairs = [[logprob, token, None] for token, logprob in zip(job.tokens, job.logprobs, strict=True)]
        meta = {
            "id": job.asked.rid,
            "finish_reason": finish,
            "completion_tokens": len(job.tokens),
            "weight_version": str(job.versions[-1] if job.versions else self.server.version),
            "output_token_logprobs": pairs,
        }
        return {"text": "", "output_ids": job.tokens, "meta_info": meta}

    def control(self, path: str, body: dict[str, Any]) -> Any:
        server = self.server
        if path in ("/health", "/model_info", "/server_info"):
            return self.health()
        if path == "/pause_generation":
            server.pause(body.get("mode", "abort"))
        elif path == "/continue_generation":
            server.paused = False
        elif path == "/abort_request":
            for rid in list(server.jobs) if body.get("abort_all") else [body["rid"]]:
                server.abort(rid)
            return web.Response(text="")
        elif path == "/update_weights_from_disk" or path == "/update_weight_version":
            version = body.get("weight_version", body.get("new_version"))
            if version is not None:
                server.version = int(version)
            return {"success": True, "message": "Succeeded to update model weights."}
        elif path == "/flush_cache":
            return web.Response(text="Cache flushed.")
        else:
            return {"success": True, "message": ""}
        return {"status": "ok"}


class _VLLM(_Dialect):
    generate_path = "/inference/v1/generate"

    def read(self, body: Any) -> Asked:
        params = body["sampling_params"]
        return Asked(
            ids=body["token_ids"],
            most=params["max_tokens"],
            least=params.get("min_tokens", 0),
            seed=params.get("seed"),
            rid=body["request_id"],
            stop_ids=params.get("stop_token_ids") or [],
            stop=params.get("stop") or [],
        )

    def write(self, job: Job) -> dict[str, Any]:
        content = [
            {"token_id": token, "logprob": logprob, "rank": 1}
            for token, logprob in zip(job.tokens, job.logprobs, strict=True)
        ]
        spans: list[dict[str, Any]] = []
        for position, version in enumerate(job.versions):
            if spans and spans[-1]["version"] == str(version):
                spans[-1]["end"] = position + 1
            else:
                spans.append({"version": str(version), "start": position, "end": position + 1})
        choice = {
            "index": 0,
            "token_ids": job.tokens,
            "finish_reason": job.reason,
            "stop_reason": job.tokens[-1] if job.reason == "stop" else None,
            "logprobs": {"content": content} if job.tokens else None,
            "weight_versions": spans if self.server.stamps else None,
        }
        return {"request_id": job.asked.rid, "choices": [choice]}

    def control(self, path: str, body: dict[str, Any]) -> Any:
        server = self.server
        if path == "/health":
            return self.health()
        if path == "/pause":
            server.pause(body.get("mode", "abort"))
        elif path == "/resume":
            server.paused = False
        elif path == "/is_paused":
            return {"is_paused": server.paused}
        elif path == "/abort_requests":
            for name in body["request_ids"]:
                server.abort(name.removeprefix("generate-tokens-"))
        elif path == "/update_weight_version":
            server.version = int(body["new_version"])
        elif path == "/collective_rpc":
            return {"results": [None]}
        return {"status": "ok"}


DIALECTS: dict[str, type[_Dialect]] = {"fake": _Fake, "sglang": _SGLang, "vllm": _VLLM}
