"""The native HTTP server: SGLang's contract, refusals that name the field, pause, and its end as a process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from areal.api.config.inference import NativeConfig
from areal.engine.native import server as native_server
from areal.engine.native.engine import NativeEngine
from areal.engine.native.server import ServerOptions
from areal.utils.network import find_free_port
from tests.fakes import char_tokenizer, tiny_model
from tests.native_http import PROMPT, Server, Serving, body_of, logprobs_of, until

pytestmark = pytest.mark.asyncio


@pytest_asyncio.fixture
async def server() -> AsyncIterator[Server]:
    async with Serving() as served:
        yield served


# -- generation --------------------------------------------------------------------------------------------------------


async def test_generate_length_reply_is_as_sglang_has_it(server: Server) -> None:
    reply = await server.generate(temperature=1.0, sampling_seed=3)

    meta = reply["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 8}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["weight_version"]) == (4, 8, "0")
    assert meta["output_token_versions"] == [0] * 8
    assert [entry[1:] for entry in meta["output_token_logprobs"]] == [[i, None] for i in reply["output_ids"]]
    reported, expected = logprobs_of(tiny_model(seed=0), reply)
    assert reported == pytest.approx(expected, abs=1e-4)
    assert reply["text"] == char_tokenizer().decode(reply["output_ids"], skip_special_tokens=True)


async def test_generate_same_seed_gives_same_tokens(server: Server) -> None:
    first, second = await asyncio.gather(server.generate(sampling_seed=3), server.generate(sampling_seed=3))
    other = await server.generate(sampling_seed=4)

    assert first["output_ids"] == second["output_ids"] != other["output_ids"]


async def test_generate_stop_token_is_named_and_kept(server: Server) -> None:
    free = await server.generate(temperature=0.0)
    stop = free["output_ids"][2]

    reply = await server.generate(temperature=0.0, stop_token_ids=[stop], ignore_eos=False)

    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert reply["output_ids"] == free["output_ids"][: len(reply["output_ids"])]
    assert reply["output_ids"][-1] == stop


async def test_generate_stop_string_is_named_and_cut_from_the_text(server: Server) -> None:
    free = await server.generate(temperature=0.0, max_new_tokens=12)
    stop = char_tokenizer().decode([i for i in free["output_ids"] if i > 1])[1]

    reply = await server.generate(temperature=0.0, max_new_tokens=12, stop=stop)

    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert stop not in reply["text"]
    assert reply["output_ids"] == free["output_ids"][: len(reply["output_ids"])]


async def test_generate_batch_and_samples_come_as_a_list(server: Server) -> None:
    replies = await server.post("/generate", body_of([PROMPT, [3, 4]], {"n": 2, "max_new_tokens": 3}, rid="r"))

    assert [reply["meta_info"]["prompt_tokens"] for reply in replies] == [4, 4, 2, 2]
    assert [reply["meta_info"]["id"] for reply in replies] == ["r_0", "r_1", "r_2", "r_3"]


async def test_generate_no_tokens_wanted_gives_empty_lists(server: Server) -> None:
    reply = await server.generate(max_new_tokens=0)

    assert (reply["output_ids"], reply["meta_info"]["output_token_logprobs"]) == ([], [])
    assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": 0}


async def test_generate_text_prompt_is_tokenized(server: Server) -> None:
    reply = await server.post("/generate", {"text": "3+4=", "sampling_params": {"max_new_tokens": 2}})

    assert reply["meta_info"]["prompt_tokens"] == len(char_tokenizer().encode("3+4="))


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({}, "input_ids"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [5, 64]}, "64"),
        ({"input_ids": [5, -1]}, "-1"),
        ({"input_ids": [5, True]}, "input_ids"),
        ({"input_ids": [5, 6.0]}, "input_ids"),
        ({"input_ids": "5"}, "input_ids"),
        ({"input_ids": [[5], [6, 99]]}, "99"),
        ({"input_ids": list(range(2, 60)) * 9}, "max_seq_len"),
        ({"input_ids": [5], "stream": True}, "stream"),
        ({"input_ids": [5], "rid": 7}, "rid"),
        ({"input_ids": [5], "return_logprob": 1}, "return_logprob"),
        ({"input_ids": [5], "lora_path": "a"}, "lora_path"),
        ({"input_ids": [5], "prompt": "x"}, "prompt"),
        ({"input_ids": [5], "sampling_params": []}, "sampling_params"),
        ({"input_ids": [5], "sampling_params": {"temprature": 1}}, "sampling_params.temprature"),
        ({"input_ids": [5], "sampling_params": {"temperature": -1}}, "temperature"),
        ({"input_ids": [5], "sampling_params": {"temperature": "1"}}, "sampling_params.temperature"),
        ({"input_ids": [5], "sampling_params": {"temperature": float("nan")}}, "sampling_params.temperature"),
        ({"input_ids": [5], "sampling_params": {"top_p": 0}}, "top_p"),
        ({"input_ids": [5], "sampling_params": {"top_k": 0}}, "top_k"),
        ({"input_ids": [5], "sampling_params": {"max_new_tokens": 1.5}}, "sampling_params.max_new_tokens"),
        ({"input_ids": [5], "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens"),
        ({"input_ids": [5], "sampling_params": {"stop": [1]}}, "sampling_params.stop"),
        ({"input_ids": [5], "sampling_params": {"stop": [""]}}, "stop"),
        ({"input_ids": [5], "sampling_params": {"stop_token_ids": ["a"]}}, "sampling_params.stop_token_ids"),
        ({"input_ids": [5], "sampling_params": {"repetition_penalty": 1.2}}, "repetition_penalty"),
        ({"input_ids": [5], "sampling_params": {"n": 0}}, "sampling_params.n"),
        ({"input_ids": [5], "sampling_params": {"n": 10**9}}, "sampling_params.n=1000000000"),
        ({"input_ids": [[5]] * 2049, "sampling_params": {"n": 2}}, "2049 prompts"),
        ([], "object"),
    ],
)
async def test_generate_wrong_body_is_refused_with_the_field(server: Server, body: Any, named: str) -> None:
    reply = await server.post("/generate", body, status=400)

    assert named in reply["error"]["message"]
    assert (await server.generate())["meta_info"]["completion_tokens"] == 8


async def test_generate_neutral_values_of_other_settings_are_taken(server: Server) -> None:
    params = {"max_new_tokens": 2, "ignore_eos": True, "repetition_penalty": 1.0, "min_p": 0.0}
    body = body_of(PROMPT, params, image_data=None)

    assert len((await server.post("/generate", body))["output_ids"]) == 2


async def test_requests_that_are_no_calls_are_refused_as_json() -> None:
    async with Serving(max_body_bytes=1000) as server:
        async with server.client.post("/generate", data=b"{nonsense") as response:
            assert (response.status, "JSON" in (await response.json())["message"]) == (400, True)
        async with server.client.post("/generate", data=b"[" * 900) as response:
            assert response.status == 400
        assert "1000 bytes" in (await server.post("/generate", {"input_ids": [5] * 900}, status=413))["message"]
        assert "/nowhere" in (await server.post("/nowhere", {}, status=404))["message"]
        assert (await server.client.get("/generate")).status == 405


async def test_token_everything_but_health_needs_it() -> None:
    async with Serving(token="secret") as server:
        assert (await server.client.get("/health")).status == 200
        for sent in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            assert (await server.client.get("/model_info", headers=sent)).status == 401
        assert (await server.client.get("/model_info", headers={"Authorization": "Bearer secret"})).status == 200


async def test_client_that_leaves_aborts_its_request(server: Server) -> None:
    task = asyncio.ensure_future(server.generate(max_new_tokens=400))
    await until(lambda: server.engine.stats.running == 1)

    task.cancel()

    await until(lambda: server.engine.stats.running == 0)
    assert server.engine.stats.aborted_requests == 1


async def test_engine_that_dies_is_told_and_seen_in_health(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(server.engine._scheduler, "step", fail)

    reply = await server.post("/generate", body_of(PROMPT, {}), status=500)

    assert "out of memory" in reply["message"]
    async with server.client.get("/health") as response:
        assert (response.status, "out of memory" in (await response.json())["message"]) == (503, True)
    await server.post("/generate", body_of(PROMPT, {}), status=500)


async def test_engine_that_dies_of_something_else_than_a_request_is_seen_in_health(server: Server) -> None:
    def fail() -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        await asyncio.to_thread(server.engine._worker.call, fail)

    async with server.client.get("/health") as response:
        assert (response.status, "out of memory" in (await response.json())["message"]) == (503, True)


# -- pause, abort ------------------------------------------------------------------------------------------------------


async def test_pause_abort_returns_parts_and_later_requests_wait(server: Server) -> None:
    running = [asyncio.ensure_future(server.generate(max_new_tokens=400)) for _ in range(3)]
    await until(lambda: server.engine.stats.generated_tokens > 30)

    await server.post("/pause_generation")
    parts = await asyncio.gather(*running)
    late = asyncio.ensure_future(server.generate())
    await asyncio.sleep(0.1)
    paused = not late.done()
    health = await (await server.client.get("/health")).json()
    await server.post("/continue_generation", {})

    assert [part["meta_info"]["finish_reason"]["type"] for part in parts] == ["abort"] * 3
    assert all(len(p["output_ids"]) == len(p["meta_info"]["output_token_logprobs"]) > 0 for p in parts)
    assert (paused, health["paused"]) == (True, True)
    assert (await late)["meta_info"]["finish_reason"]["type"] == "length"


async def test_pause_keep_freezes_requests_that_finish_later(server: Server) -> None:
    running = asyncio.ensure_future(server.generate(max_new_tokens=300))
    await until(lambda: server.engine.stats.generated_tokens > 10)

    await server.post("/pause_generation", {"mode": "keep"})
    await server.post("/pause_generation", {"mode": "in_place"})  # pauses do not nest
    before = server.engine.stats.generated_tokens
    await asyncio.sleep(0.1)
    frozen = server.engine.stats.generated_tokens == before
    await server.post("/continue_generation", {})
    await server.post("/continue_generation", {})

    assert frozen
    assert (await running)["meta_info"]["completion_tokens"] == 300


async def test_pause_whose_client_leaves_ends_and_continue_goes_on(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, reached, go = server.engine.pause, threading.Event(), threading.Event()

    def slow() -> None:  # behind a long step
        reached.set()
        assert go.wait(10)
        real()

    monkeypatch.setattr(server.engine, "pause", slow)
    leaving = asyncio.ensure_future(server.post("/pause_generation", {"mode": "keep"}))
    await until(reached.is_set)
    leaving.cancel()
    await asyncio.sleep(0.1)
    go.set()
    repeated = await server.post("/pause_generation", {"mode": "keep"})
    health = await (await server.client.get("/health")).json()
    await server.post("/continue_generation", {})

    assert (repeated["status"], health["paused"]) == ("ok", True)
    assert (await asyncio.wait_for(server.generate(), 10))["meta_info"]["completion_tokens"] == 8


async def test_pause_while_requests_end_and_leave_is_never_disturbed(server: Server) -> None:
    for _ in range(5):
        running = [asyncio.ensure_future(server.generate(max_new_tokens=400)) for _ in range(8)]
        await until(lambda: server.engine.stats.running > 4)
        for task in running[::2]:
            task.cancel()
        await server.post("/pause_generation", {"mode": "abort"})
        await server.post("/continue_generation", {})
        parts = await asyncio.gather(*running[1::2])

        assert {part["meta_info"]["finish_reason"]["type"] for part in parts} == {"abort"}


async def test_abort_one_running_one_queued_and_one_unknown(server: Server) -> None:
    async def send(rid: str) -> Any:
        return await server.post("/generate", body_of(PROMPT, {"max_new_tokens": 400, "ignore_eos": True}, rid=rid))

    running = asyncio.ensure_future(send("a"))
    await until(lambda: server.engine.stats.running == 1)
    await server.post("/pause_generation", {"mode": "keep"})
    queued = asyncio.ensure_future(send("b"))
    await asyncio.sleep(0.05)
    for rid in ("a", "b", "unknown"):
        await server.post("/abort_request", {"rid": rid})

    assert (await running)["meta_info"]["finish_reason"]["message"] == "Aborted"
    assert (await queued)["output_ids"] == []
    await server.post("/abort_request", {}, status=400)
    await server.post("/abort_request", {"abort_all": True})


async def test_pause_unknown_mode_is_refused(server: Server) -> None:
    assert "mode" in (await server.post("/pause_generation", {"mode": "stop"}, status=400))["message"]


async def test_duplicate_live_rid_is_refused(server: Server) -> None:
    await server.post("/pause_generation", {"mode": "keep"})
    body = body_of(PROMPT, {"max_new_tokens": 2, "ignore_eos": True}, rid="same")
    first = asyncio.ensure_future(server.post("/generate", body))
    await asyncio.sleep(0.05)

    reply = await server.post("/generate", body, status=400)
    await server.post("/continue_generation")

    assert "rid" in reply["message"]
    assert len((await first)["output_ids"]) == 2


# -- the process -------------------------------------------------------------------------------------------------------


async def test_serve_engine_that_dies_ends_the_process_whatever_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("out of memory")

    codes: list[int] = []
    monkeypatch.setattr(native_server, "_EXIT_S", 0.0)
    monkeypatch.setattr(os, "_exit", codes.append)
    config, port = NativeConfig(max_running_requests=2), find_free_port()
    engine = NativeEngine(config, tiny_model(seed=0), tokenizer=char_tokenizer(), device="cpu")
    monkeypatch.setattr(engine._scheduler, "step", fail)
    options = ServerOptions("tiny", None, "127.0.0.1", port, config, "cpu", 0, None, 1)
    serving = asyncio.ensure_future(native_server.serve(options, engine))
    url = f"http://127.0.0.1:{port}"
    async with aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.post(f"{url}/generate", json=body_of(PROMPT, {})) as response:
                    assert response.status == 500
                    break
            except aiohttp.ClientConnectorError:
                await asyncio.sleep(0.01)

    assert await asyncio.wait_for(serving, 10) == 1
    await until(lambda: codes == [1])


@pytest.mark.slow
@pytest.mark.ci
async def test_process_serves_and_ends_soon_after_sigterm(tiny_model_dir: str, tmp_path: Path) -> None:
    port = find_free_port()
    process = _start(tiny_model_dir, port)
    try:
        address = f"http://127.0.0.1:{port}"
        await asyncio.to_thread(_wait_healthy, process, address)
        body = body_of(PROMPT, {"max_new_tokens": 450, "ignore_eos": True, "n": 40})
        running = asyncio.ensure_future(asyncio.to_thread(_post, address + "/generate", body))
        await asyncio.sleep(0.3)

        process.send_signal(signal.SIGTERM)
        code = await asyncio.to_thread(process.wait, 20)

        assert code == 0
        assert native_server._EXIT_S < 2.0  # on a machine that is free
        assert {reply["meta_info"]["finish_reason"]["type"] for reply in await running} <= {"abort", "length"}
    finally:
        process.kill()


def _start(model_dir: str, port: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "areal.engine.native.server", "--model-path", model_dir, "--port", str(port)]
    return subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"})


def _wait_healthy(process: subprocess.Popen[bytes], address: str) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(address + "/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise AssertionError(f"the server is not there, exit code {process.poll()}")


def _post(url: str, body: Any) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)


@pytest.mark.slow
@pytest.mark.ci
async def test_process_without_a_model_says_so_and_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "areal.engine.native.server", "--model-path", str(tmp_path / "nowhere")]

    ended = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60, check=False)

    assert ended.returncode == 2
    assert "nowhere" in ended.stdout + ended.stderr
