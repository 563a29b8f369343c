"""AsgiHost: loading, serving, stopping, and its behaviour on a real port."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from fastapi import FastAPI

from areal.api.remote import remote_spec
from areal.infra.service.asgi_host import AsgiHost, load_app
from areal.utils.errors import ConfigError, EngineError, NetworkError

plain_app = FastAPI()


@plain_app.get("/ping")
def ping() -> dict[str, str]:
    return {"pong": threading.current_thread().name}


async def raw_app(scope: Any, receive: Any, send: Any) -> None:
    """An application without a framework and without a lifespan."""
    assert scope["type"] == "http"
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"raw"})


def make_app(greeting: str = "hello", events: list[str] | None = None) -> FastAPI:
    """A factory whose application notes when it starts and ends."""
    log = events if events is not None else []

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        log.append("started")
        yield
        log.append("ended")

    app = FastAPI(lifespan=lifespan)

    @app.get("/greet")
    async def greet() -> dict[str, str]:
        return {"text": greeting}

    return app


def make_failing_app() -> FastAPI:
    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        raise RuntimeError("no database at port 5")
        yield

    return FastAPI(lifespan=lifespan)


def make_nothing() -> int:
    return 3


@pytest.fixture
def hosts() -> Iterator[list[AsgiHost]]:
    """Hosts made by a test; all are destroyed after it."""
    made: list[AsgiHost] = []
    yield made
    for host in made:
        host.destroy()


def get(address: str, path: str) -> bytes:
    with urllib.request.urlopen(f"http://{address}{path}", timeout=5) as reply:
        return bytes(reply.read())


def test_start_application_serves_it_until_stop(hosts: list[AsgiHost]) -> None:
    host = AsgiHost("tests.test_asgi_host:plain_app")
    hosts.append(host)

    address = host.start("127.0.0.1")
    reply = json.loads(get(address, "/ping"))
    running = host.status()
    host.stop()

    assert "pong" in reply
    assert running == {"app": "tests.test_asgi_host:plain_app", "address": address}
    assert host.status()["address"] is None
    with pytest.raises(urllib.error.URLError):
        get(address, "/ping")


def test_start_factory_with_arguments_gets_them_and_runs_lifespan(hosts: list[AsgiHost]) -> None:
    events: list[str] = []
    host = AsgiHost("tests.test_asgi_host:make_app", greeting="hi", events=events)
    hosts.append(host)

    address = host.start()
    text = json.loads(get(address, "/greet"))
    host.destroy()

    assert text == {"text": "hi"}
    assert events == ["started", "ended"]


def test_start_again_after_stop_serves_on_a_new_port(hosts: list[AsgiHost]) -> None:
    host = AsgiHost("tests.test_asgi_host.raw_app")
    hosts.append(host)

    first = host.start()
    same = host.start()
    host.stop()
    second = host.start(port=0)

    assert same == first
    assert get(second, "/") == b"raw"


def test_start_two_hosts_in_one_process_both_answer(hosts: list[AsgiHost]) -> None:
    hosts += [AsgiHost("tests.test_asgi_host:make_app", greeting=name) for name in ("a", "b")]

    texts = [json.loads(get(host.start(), "/greet"))["text"] for host in hosts]

    assert texts == ["a", "b"]


def test_start_busy_port_raises_naming_it(hosts: list[AsgiHost]) -> None:
    host = AsgiHost("tests.test_asgi_host:plain_app")
    hosts.append(host)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(NetworkError, match=f"port={port}.*choose port=0"):
            host.start("127.0.0.1", port)

    assert host.status()["address"] is None


def test_start_failing_lifespan_raises_its_cause(hosts: list[AsgiHost]) -> None:
    host = AsgiHost("tests.test_asgi_host:make_failing_app")
    hosts.append(host)

    with pytest.raises(EngineError, match="no database at port 5"):
        host.start()

    assert host.status()["address"] is None


def test_stop_with_an_open_connection_returns(hosts: list[AsgiHost]) -> None:
    host = AsgiHost("tests.test_asgi_host:plain_app")
    hosts.append(host)
    name, port = host.start().split(":")

    with socket.create_connection((name, int(port))):  # says nothing and stays
        host.stop()

    assert host.status()["address"] is None


@pytest.mark.parametrize(
    ("path", "kwargs", "message"),
    [
        ("tests.test_asgi_host:missing", {}, "has no attribute 'missing'"),
        ("tests.no_such_module:app", {}, "No module named"),
        ("nodots", {}, "must look like"),
        ("tests.test_asgi_host:plain_app", {"x": 1}, "takes no arguments"),
        ("tests.test_asgi_host:make_app", {"colour": 1}, "colour"),
        ("tests.test_asgi_host:make_nothing", {}, "gave a int"),
    ],
)
def test_load_app_bad_input_raises_config_error(path: str, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_app(path, kwargs)


def test_methods_of_the_host_are_remote() -> None:
    specs = {name: remote_spec(AsgiHost, name) for name in ("start", "stop", "destroy", "status")}

    assert all(specs.values())
    assert specs["status"] is not None
    assert specs["status"].concurrent
    assert remote_spec(AsgiHost, "__init__") is None
