"""Calls to one server: retries, limits, and errors that say what is wrong."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
from aiohttp import web

from areal.engine.inference.http_client import (
    ServerHttp,
    ServerRefusedError,
    ServerTimeoutError,
    ServerUnavailableError,
    pause_before_retry,
)
from areal.engine.inference.protocol import ReplyError, ServerCall
from tests.server_fakes import FakeServer, Fault, serving

CALL = ServerCall("POST", "/echo", {"x": 1})


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    fake.reply_to("/echo", lambda body: {"got": body})
    with serving(fake):
        yield fake


def send(server: FakeServer, call: ServerCall = CALL, *, timeout_s: float = 5.0, attempts: int = 2) -> Any:
    async def work(http: ServerHttp) -> Any:
        return await http.send(call)

    return with_client(server, work, timeout_s, attempts)


def with_client(
    server: FakeServer,
    work: Callable[[ServerHttp], Coroutine[Any, Any, Any]],
    timeout_s: float = 5.0,
    attempts: int = 2,
) -> Any:
    async def run() -> Any:
        http = ServerHttp(server.address, timeout_s, attempts, {"Authorization": "Bearer t"})
        try:
            return await work(http)
        finally:
            await http.close()

    return asyncio.run(run())


def test_send_json_returns_the_parsed_reply(server: FakeServer) -> None:
    assert send(server) == {"got": {"x": 1}}


def test_send_500_is_tried_again_on_a_new_connection(server: FakeServer) -> None:
    server.fail_next(Fault("status", 500, "boom"), path="/echo")
    assert send(server) == {"got": {"x": 1}}
    assert len(server.connections) == 2


@pytest.mark.parametrize("kind", ["drop", "cut"])
def test_send_broken_connection_is_tried_again(server: FakeServer, kind: str) -> None:
    server.fail_next(Fault(kind), path="/echo")
    assert send(server) == {"got": {"x": 1}}


def test_send_always_500_names_the_server_its_words_and_ends(server: FakeServer) -> None:
    server.fail_next(*[Fault("status", 503, "no room") for _ in range(9)], path="/echo")
    with pytest.raises(ServerUnavailableError, match=rf"{server.address} POST /echo answered 503: 'no room'"):
        send(server, attempts=3)
    assert len(server.calls("/echo")) == 3


def test_send_once_is_never_repeated(server: FakeServer) -> None:
    server.fail_next(Fault("drop"), path="/echo")
    with pytest.raises(ServerUnavailableError):
        send(server, ServerCall("POST", "/echo", {}, once=True), attempts=3)
    assert len(server.calls("/echo")) == 1


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('{"error": {"message": "prompt too long"}}', "prompt too long"),
        ('{"detail": [{"loc": ["body"], "msg": "field required"}]}', "field required"),
        ("plain words", "plain words"),
    ],
)
def test_send_4xx_says_the_servers_message_and_is_never_repeated(server: FakeServer, body: str, words: str) -> None:
    server.fail_next(Fault("status", 400, body), path="/echo")
    with pytest.raises(ServerRefusedError, match=f"refused the call with 400: .*{words}"):
        send(server)
    assert len(server.calls("/echo")) == 1


def test_send_web_page_is_named(server: FakeServer) -> None:
    server.fail_next(Fault("html"), path="/echo")
    with pytest.raises(ReplyError, match="a web page, not JSON.*nginx"):
        send(server)


def test_send_truncated_json_is_named(server: FakeServer) -> None:
    server.fail_next(Fault("truncated"), path="/echo")
    with pytest.raises(ReplyError, match=r"16 bytes of application/json that are no JSON.*\[3, 4"):
        send(server)


def test_send_stalled_server_ends_at_the_limit(server: FakeServer) -> None:
    server.fail_next(Fault("stall"), Fault("stall"), path="/echo")
    started = time.monotonic()
    with pytest.raises(ServerTimeoutError, match=r"no answer within 0.2 s.*rollout.request_timeout"):
        send(server, timeout_s=0.2)
    assert 0.4 <= time.monotonic() - started < 20


def test_send_own_limit_of_a_call_counts(server: FakeServer) -> None:
    server.fail_next(Fault("stall"), path="/echo")
    with pytest.raises(ServerTimeoutError, match=r"0.1 s"):
        send(server, ServerCall("POST", "/echo", {}, timeout_s=0.1, once=True))


def test_send_nobody_listens_is_named(server: FakeServer) -> None:
    server.stop()
    with pytest.raises(ServerUnavailableError, match=rf"{server.address} POST /echo: .*onnect"):
        send(server)


def test_send_text_and_empty_replies_are_returned(server: FakeServer) -> None:
    server.reply_to("/text", lambda _: web.Response(text="Cache flushed."))
    server.reply_to("/empty", lambda _: web.Response(text=""))
    assert send(server, ServerCall("GET", "/text")) == "Cache flushed."
    assert send(server, ServerCall("GET", "/empty")) is None


@pytest.mark.parametrize(("body", "expected"), [("flushed", "flushed"), ('{"a": 1}', {"a": 1})])
def test_send_reply_without_a_type_is_json_or_text(body: str, expected: Any) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        await writer.drain()
        writer.close()

    async def run() -> Any:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as raw:
            host, port = raw.sockets[0].getsockname()
            http = ServerHttp(f"{host}:{port}", 5.0, 1)
            try:
                return await http.send(ServerCall("GET", "/flush_cache"))
            finally:
                await http.close()

    assert asyncio.run(run()) == expected


def test_send_redirection_is_named(server: FakeServer) -> None:
    server.fail_next(Fault("status", 304, ""), path="/echo")
    with pytest.raises(ReplyError, match="304"):
        send(server)


def test_send_many_at_once_then_close_leaves_no_connection(server: FakeServer) -> None:
    async def work(http: ServerHttp) -> Any:
        return await asyncio.gather(*[http.send(CALL) for _ in range(50)])

    assert with_client(server, work) == [{"got": {"x": 1}}] * 50
    server.wait_for(lambda s: s.open_connections() == 0)


def test_send_after_close_opens_nothing(server: FakeServer) -> None:
    async def work(http: ServerHttp) -> Any:
        await http.close()
        return await http.send(CALL)

    with pytest.raises(ServerUnavailableError, match="were closed"):
        with_client(server, work)
    assert server.calls("/echo") == []


def test_send_server_that_came_back_is_reached_by_the_same_client(server: FakeServer) -> None:
    async def work(http: ServerHttp) -> Any:
        await http.send(CALL)
        await asyncio.to_thread(server.stop)
        await asyncio.to_thread(server.start)
        return await http.send(CALL)

    assert with_client(server, work) == {"got": {"x": 1}}


def test_pause_before_retry_grows_and_is_jittered() -> None:
    first = {pause_before_retry(0) for _ in range(50)}
    assert len(first) > 40
    assert 0.1 <= min(first) <= max(first) <= 0.3
    assert 2.5 <= pause_before_retry(20) <= 7.5
