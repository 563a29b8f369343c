"""A native HTTP server in the process of a test, and calls of it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import torch
from aiohttp.test_utils import TestClient, TestServer

from areal.api.config.inference import NativeConfig
from areal.engine.native.engine import NativeEngine
from areal.engine.native.server import NativeServer
from tests.fakes import char_tokenizer, tiny_model

PROMPT = [5, 9, 12, 7]


class Server:
    """An in-process server and what the tests ask of it."""

    def __init__(self, engine: NativeEngine, client: TestClient[Any, Any]) -> None:
        self.engine, self.client = engine, client

    async def post(self, path: str, body: Any = None, status: int = 200) -> Any:
        async with self.client.post(path, json=body) as response:
            reply = await response.json()
            assert response.status == status, reply
            return reply

    async def generate(self, ids: Any = PROMPT, **params: Any) -> Any:
        params = {"ignore_eos": True, "max_new_tokens": 8, **params}
        return await self.post("/generate", body_of(ids, params))


def body_of(ids: Any, params: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"input_ids": ids, "sampling_params": params, "return_logprob": True, **fields}


class Serving:
    """A server for the length of a block."""

    def __init__(self, token: str | None = None, max_body_bytes: int = 1 << 20) -> None:
        self._token, self._limit = token, max_body_bytes

    async def __aenter__(self) -> Server:
        config = NativeConfig(max_running_requests=8)
        self.engine = NativeEngine(config, tiny_model(seed=0), tokenizer=char_tokenizer(), device="cpu")
        self.engine.start()
        self.client = TestClient(TestServer(NativeServer(self.engine, "tiny", self._token, self._limit).app))
        await self.client.start_server()
        return Server(self.engine, self.client)

    async def __aexit__(self, *_: object) -> None:
        self.engine.stop()
        await self.client.close()


def logprobs_of(model: Any, reply: Any, ids: list[int] = PROMPT) -> tuple[list[float], list[float]]:
    """(reported, of a plain forward pass)."""
    tokens = reply["output_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([ids + tokens])).logits[0, len(ids) - 1 : -1].float()
    expected = torch.log_softmax(logits, -1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    return [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]], expected.tolist()


async def until(condition: Any, limit_s: float = 60.0) -> None:
    """Wait for ``condition()``."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.005)
