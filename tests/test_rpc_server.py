"""The server's routes: who is refused and how, what runs where, and that a refusal changes nothing."""

from __future__ import annotations

import http.client
import logging
import os
import socket
import struct
import threading
import time

import pytest
import torch

from areal.api.remote import ObjectRef, RemoteSpec, remote_spec
from areal.infra.rpc.client import WorkerClient
from areal.infra.rpc.errors import EngineCallError, RequestRefusedError, RPCTimeoutError, WireError
from areal.infra.rpc.identity import RunIdentity
from areal.infra.rpc.serialization import decode, encode
from areal.infra.rpc.server import WorkerServer
from areal.infra.rpc.store import process_store
from areal.utils.errors import CheckpointError
from tests.rpc_fakes import Base, Counter, doubled, headers_of, raw_request

IDENTITY = RunIdentity("run-1", "token-1")


@pytest.fixture
def server():
    server = WorkerServer(IDENTITY, role="actor", index=3, max_body_bytes=100_000)
    server.host_object("counter", Counter(10))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def client(server):
    client = WorkerClient(server.address, IDENTITY)
    yield client
    client.close()


def call_body(*args, **kwargs):
    return bytes(encode([list(args), kwargs]))


GOOD = headers_of(IDENTITY, Object="counter", Method="add")
REFUSED = {
    "no token": (401, {"X-Areal-Run": "run-1"}, call_body()),
    "wrong token": (401, {**GOOD, "Authorization": "Bearer token-2"}, call_body()),
    "token of another kind": (401, {**GOOD, "Authorization": "Basic token-1"}, call_body()),
    "odd token": (401, {**GOOD, "Authorization": "Bearer \xff\xfe"}, call_body()),
    "foreign run": (409, {**GOOD, "X-Areal-Run": "run-2"}, call_body()),
    "foreign run and token": (409, {**GOOD, "X-Areal-Run": "run-2", "Authorization": "Bearer x"}, call_body()),
    "no run": (409, {k: v for k, v in GOOD.items() if k != "X-Areal-Run"}, call_body()),
    "too large": (413, GOOD, b"x" * 200_000),
    "malformed": (400, GOOD, b"nonsense"),
    "no arguments": (400, GOOD, bytes(encode(5))),
    "odd keywords": (400, GOOD, bytes(encode([[], {1: 2}]))),
    "lost tensor": (400, GOOD, struct.pack("<4sI", b"AR\x01\x00", 3) + b"\x93\x01\x90"),
    "no method header": (400, headers_of(IDENTITY, Object="counter"), call_body()),
    "unknown method": (400, headers_of(IDENTITY, Object="counter", Method="nope"), call_body()),
    "unmarked method": (400, headers_of(IDENTITY, Object="counter", Method="unmarked"), call_body()),
    "private method": (400, headers_of(IDENTITY, Object="counter", Method="__init__"), call_body()),
    "attribute": (400, headers_of(IDENTITY, Object="counter", Method="value"), call_body()),
    "bad timeout": (400, {**GOOD, "X-Areal-Timeout": "nan"}, call_body()),
    "unknown object": (404, headers_of(IDENTITY, Object="other", Method="add"), call_body()),
    "unknown reference": (404, GOOD, call_body(ObjectRef("nobody"))),
}


@pytest.mark.parametrize("name", REFUSED)
def test_call_refused_names_cause_and_changes_nothing(server, name):
    status, headers, body = REFUSED[name]

    found, answer = raw_request(server.address, "POST", "/call", headers, body)

    assert found == status
    assert set(answer) == {"error", "detail"}
    assert answer["detail"]
    assert "token-1" not in str(answer)
    assert server.objects["counter"].value == 10
    assert list(server.objects) == ["counter"]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/health"), ("GET", "/stack"), ("GET", "/stats"), ("POST", "/alloc_ports"), ("POST", "/set_env"),
        ("POST", "/configure"), ("POST", "/create_engine"), ("POST", "/call"), ("GET", "/method"), ("PUT", "/data/x"),
        ("GET", "/data/x"), ("POST", "/data/batch"), ("DELETE", "/data/clear"), ("POST", "/fork"),
        ("POST", "/kill_forked_worker"), ("GET", "/nowhere"),
    ],
)  # fmt: skip
def test_every_route_wants_token_and_run(server, method, path):
    without = raw_request(server.address, method, path, {"X-Areal-Run": "run-1"})
    foreign = raw_request(server.address, method, path, {**GOOD, "X-Areal-Run": "run-2"})

    assert (without[0], foreign[0]) == (401, 409)
    assert "another run" in foreign[1]["detail"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/nowhere", b"", 404),
        ("POST", "/health", b"", 404),
        ("POST", "/alloc_ports", b'{"count": 0}', 400),
        ("POST", "/alloc_ports", b'{"count": "x"}', 400),
        ("POST", "/alloc_ports", b"{", 400),
        ("POST", "/alloc_ports", b"[1]", 400),
        ("POST", "/set_env", b'{"env": {"A": 1}}', 400),
        ("POST", "/set_env", b'{"env": {"A=B": "1"}}', 400),
        ("POST", "/configure", bytes(encode([[], {"seed": "x"}])), 400),
        ("POST", "/configure", b"", 400),
        ("GET", "/data/none", b"", 404),
        ("POST", "/data/batch", b'{"shard_ids": ["none"]}', 400),
        ("PUT", "/data/x", bytes(encode("no tensor")), 400),
        ("DELETE", "/data/clear", b'{"shard_ids": 5}', 400),
        ("POST", "/fork", b'{"role": "x", "worker_index": 0, "raw_cmd": "sleep"}', 400),
        ("POST", "/fork", b'{"role": "", "worker_index": 0, "raw_cmd": ["sleep"]}', 400),
        ("POST", "/kill_forked_worker", b'{"role": "x", "worker_index": 0}', 404),
        ("POST", "/create_engine", b"", 400),
    ],
)
def test_other_route_with_bad_request_is_refused(server, method, path, body, status):
    found, answer = raw_request(server.address, method, path, headers_of(IDENTITY), body)

    assert found == status
    assert answer["detail"]


def test_chunked_body_above_limit_is_refused(server):
    host, _, port = server.address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=10)
    connection.request("POST", "/call", body=(b"x" * 10_000 for _ in range(30)), headers=GOOD, encode_chunked=True)

    assert connection.getresponse().status == 413
    connection.close()


def test_broken_http_is_answered_and_leaves_the_server_alive(server, client):
    host, _, port = server.address.rpartition(":")
    for junk in (b"\x00\xff\r\n\r\n", b"GET /" + b"x" * 100_000, b"POST /call HTTP/1.1\r\nContent-Length: x\r\n\r\n"):
        with socket.create_connection((host, int(port)), timeout=5) as sock:
            sock.sendall(junk)

    assert client.health()["status"] == "healthy"


def test_refusals_are_logged_once_per_kind(server, client, caplog):
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            with pytest.raises(RequestRefusedError):
                client.call("counter", "nope")
            with pytest.raises(RequestRefusedError):
                client.call("nobody", "add")

    assert len([r for r in caplog.records if "refused with 400" in r.getMessage()]) == 1
    assert len([r for r in caplog.records if "refused with 404" in r.getMessage()]) == 1


def test_call_past_deadline_in_queue_is_504_and_never_runs(server, client):
    holder = threading.Thread(target=client.call, args=("counter", "hold"))
    holder.start()
    wait_until(lambda: client.health()["engine_busy_s"] > 0)

    status, answer = raw_request(server.address, "POST", "/call", {**GOOD, "X-Areal-Timeout": "0.2"}, call_body(1))
    with pytest.raises(RPCTimeoutError):
        client.call("counter", "add", timeout_s=0.2)
    client.call("counter", "release")
    holder.join(10)

    assert status == 504
    assert "not run" in answer["detail"]
    assert client.call("counter", "add", 0) == 10


def wait_until(condition, timeout_s=60.0):
    limit = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.005)


def test_engine_lane_runs_calls_in_order_of_arrival(client):
    threads = []
    holder = threading.Thread(target=client.call, args=("counter", "hold"))
    holder.start()
    wait_until(lambda: client.health()["engine_busy_s"] > 0)
    for number in range(20):
        threads.append(threading.Thread(target=client.call, args=("counter", "note", number)))
        threads[-1].start()
        wait_until(lambda expected=number + 1: client.health()["queue"] == expected)
    client.call("counter", "release")
    for thread in [holder, *threads]:
        thread.join(10)

    assert client.call("counter", "noted") == list(range(20))


def test_health_and_concurrent_calls_answer_while_engine_thread_works(client):
    spinner = threading.Thread(target=client.call, args=("counter", "spin", 1.5))
    spinner.start()
    wait_until(lambda: client.health()["engine_busy_s"] > 0)
    slowest = 0.0
    while spinner.is_alive():
        began = time.monotonic()
        client.health()
        client.call("counter", "peek")
        client.call("counter", "peek_async")
        slowest = max(slowest, time.monotonic() - began)
    spinner.join()

    assert slowest < 1.0


def test_engine_thread_is_one_thread_and_not_the_main_one(client):
    names = {client.call("counter", "thread") for _ in range(5)}

    assert names == {("engine", False)}
    assert client.call("counter", "on_loop") == "rpc-loop"


def test_call_method_marked_in_base_class_runs_override(client):
    assert client.call("counter", "overridden") == "derived"
    assert remote_spec(Counter, "overridden") == remote_spec(Base, "overridden") == RemoteSpec()
    assert remote_spec(Counter, "peek") == RemoteSpec(concurrent=True, idempotent=True)
    assert remote_spec(Counter, "unmarked") is None


def test_create_and_object_references(client, server):
    client.create("second", "tests.rpc_fakes.Counter", 5, other=ObjectRef("counter"))

    assert client.call("second", "other_value") == 10
    assert client.health()["engines"] == ["counter", "second"]
    assert server.objects["second"].other is server.objects["counter"]


@pytest.mark.parametrize(
    ("name", "path", "error", "says"),
    [
        ("counter", "tests.rpc_fakes.Counter", RequestRefusedError, "exists here already"),
        ("x", "tests.rpc_fakes.Nothing", AttributeError, "no attribute"),
        ("x", "no_such_module.Thing", ImportError, "no_such_module"),
        ("x", "tests.rpc_fakes.doubled", TypeError, "not a class"),
    ],
)
def test_create_that_fails_leaves_no_object(client, server, name, path, error, says):
    with pytest.raises(error, match=says):
        client.create(name, path)

    assert list(server.objects) == ["counter"]


def test_create_with_failing_constructor_can_be_repeated(client):
    with pytest.raises(TypeError, match="unexpected"):
        client.create("x", "tests.rpc_fakes.Counter", unexpected=1)

    client.create("x", "tests.rpc_fakes.Counter")
    assert client.call("x", "add", 2) == 2


ERRORS = {
    "key": (KeyError, "missing"),
    "value": (ValueError, "bad value"),
    "os": (FileNotFoundError, "No such file"),
    "areal": (CheckpointError, "disk is full"),
    "odd": (EngineCallError, "OddError: strange"),
    "exit": (EngineCallError, "SystemExit: 3"),
    "stop": (EngineCallError, "StopIteration: x"),
    "interrupt": (EngineCallError, "KeyboardInterrupt"),
    "unicode": (UnicodeDecodeError, "bad"),
    "cancelled": (EngineCallError, "CancelledError"),
}


@pytest.mark.parametrize("method", ["fail", "fail_async"])
@pytest.mark.parametrize("kind", ERRORS)
def test_remote_exception_is_raised_with_type_text_and_traceback(client, kind, method):
    expected, text = ERRORS[kind]
    if (method, kind) == ("fail_async", "stop"):
        expected, text = RuntimeError, "coroutine raised StopIteration"  # Python's own rule

    with pytest.raises(expected, match=text) as caught:
        client.call("counter", method, kind)

    assert type(caught.value) is expected
    assert "make_error(kind)" in caught.value.__notes__[0]
    assert client.call("counter", "add", 0) == 10


def test_remote_exception_with_own_constructor_keeps_its_fields(client):
    from areal.api.config.fields import FieldError

    with pytest.raises(FieldError) as caught:
        client.call("counter", "fail", "field")

    assert (caught.value.key, caught.value.value) == ("a.b", 3)


def test_result_that_cannot_travel_is_the_callers_error(client):
    with pytest.raises(WireError, match="lock"):
        client.call("counter", "unsendable")

    assert client.call("counter", "add", 0) == 11


def test_arguments_and_results_of_all_kinds(client):
    function = client.call("counter", "apply", doubled, 21)
    echoed = client.call("counter", "echo", (1, 2), x={3: torch.arange(3)})

    assert function == 42
    assert echoed[0] == [(1, 2)]
    assert torch.equal(echoed[1]["x"][3], torch.arange(3))
    assert client.call("counter", "peek_async", {"a": (1,)}) == {"a": (1,)}


def test_call_with_wrong_arguments_raises_type_error(client):
    with pytest.raises(TypeError, match="add"):
        client.call("counter", "add", 1, 2, 3)


def test_health_says_who_it_is(client):
    health = client.health()

    assert health.items() >= {"run_id": "run-1", "role": "actor", "index": 3, "pid": os.getpid(), "queue": 0}.items()
    assert health["engines"] == ["counter"]
    assert health["stream_port"] > 0


def test_alloc_ports_never_gives_one_twice(client):
    ports = [port for _ in range(10) for port in client.alloc_ports(5)]

    assert len(set(ports)) == 50


def test_set_env_and_stack_and_stats(client, monkeypatch):
    monkeypatch.setenv("AREAL_RPC_TEST", "before")

    client.set_env({"AREAL_RPC_TEST": "after"})

    assert os.environ["AREAL_RPC_TEST"] == "after"
    assert "engine" in client.stack()
    assert "test_rpc_server.py" in client.stack()
    assert client.stats()["counter"] == {"value": 10}


def test_configure_seeds_before_first_object(client, server):
    client.configure({"lr": 0.1}, rank=1, seed=7)
    client.create("x", "tests.rpc_fakes.Counter")
    first = client.call("x", "seed_draw")
    client.configure(rank=1, seed=7)
    client.create("y", "tests.rpc_fakes.Counter")

    assert client.call("y", "seed_draw") == first
    assert server.config is None


def test_fork_and_kill_process(client, server, tmp_path):
    mark = tmp_path / "mark"
    script = f"echo $AREAL_RPC_CHILD > {mark}; sleep 60 & wait"

    pid = client.fork("proxy", 0, ["sh", "-c", script], {"AREAL_RPC_CHILD": "hello"})
    wait_until(lambda: mark.exists() and mark.read_text() == "hello\n")
    again = pytest.raises(RequestRefusedError, client.fork, "proxy", 0, ["true"])
    children = client.health()["forked_children"]
    client.kill_forked("proxy", 0)

    assert "already" in str(again.value)
    assert children == ["proxy/0"]
    assert client.health()["forked_children"] == []
    assert not os.path.exists(f"/proc/{pid}")


def test_data_routes_store_read_and_clear(server):
    tensor = torch.arange(5)
    good = headers_of(IDENTITY)

    put = raw_request(server.address, "PUT", "/data/t1", good, bytes(encode(tensor)))
    got = raw_request(server.address, "GET", "/data/t1", good)
    batch = raw_request(server.address, "POST", "/data/batch", good, b'{"shard_ids": ["t1", "t1"]}')
    missing = raw_request(server.address, "POST", "/data/batch", good, b'{"shard_ids": ["t1", "t2"]}')
    cleared = raw_request(server.address, "DELETE", "/data/clear", good, b'{"shard_ids": ["t1", "t2"]}')

    assert put[0] == 200
    assert torch.equal(decode(got[1]), tensor)
    assert [len(x) for x in decode(batch[1])] == [5, 5]
    assert (missing[0], "t2" in missing[1]["detail"]) == (400, True)
    assert (cleared[0], cleared[1]["cleared_count"]) == (200, 1)
    assert raw_request(server.address, "GET", "/data/t1", good)[0] == 404


def test_large_tensors_bypass_the_body_limit_and_leave_nothing_behind(client):
    before = process_store().stats()
    large = torch.randn(300_000)

    echoed = client.call("counter", "echo", large, [large])
    with pytest.raises(RequestRefusedError):
        client.call("counter", "nope", large)

    assert torch.equal(echoed[0][0], large)
    assert echoed[0][0] is echoed[0][1][0]
    wait_until(lambda: process_store().stats() == before)


def test_stop_ends_port_and_can_be_repeated():
    server = WorkerServer(IDENTITY, role="x", index=0)
    server.start()
    address = server.address

    server.stop()
    server.stop()

    with pytest.raises(ConnectionRefusedError):
        raw_request(address, "GET", "/health", headers_of(IDENTITY))
