"""What the Ray scheduler decides without a cluster: fitting requests, checking addresses, reading causes."""

from __future__ import annotations

import http.server
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from areal.infra.utils.ray import (
    GIB,
    Node,
    RayUnavailableError,
    Request,
    check_address,
    death_cause,
    describe,
    first_fit,
    fit_requests,
)


def node(name: str, cpu: float = 8, gpu: float = 4, mem_gib: float = 64) -> Node:
    return Node(name, name, cpu, gpu, mem_gib * GIB)


def request(cpu: float = 1, gpu: int = 0, mem_gib: float = 1) -> Request:
    return Request(cpu, gpu, int(mem_gib * GIB))


# --- fitting -------------------------------------------------------------------------------------------------------
def test_fit_requests_that_fit_are_returned_unchanged() -> None:
    wanted = [request(gpu=3), request(gpu=3), request(cpu=8)]
    nodes = [node("a"), node("b"), node("c", gpu=0)]
    before = [replace(each) for each in nodes]

    fitted = fit_requests(wanted, nodes)

    assert fitted == wanted
    assert nodes == before


def test_fit_requests_large_ones_are_placed_before_small_ones() -> None:
    nodes = [node("a"), node("b")]

    count = first_fit([request(gpu=1), request(gpu=1), request(gpu=2), request(gpu=4)], nodes)

    assert count == 4
    assert [each.gpu for each in nodes] == [0, 0]


@pytest.mark.parametrize(
    ("wanted", "nodes", "reason"),
    [
        ([request(gpu=5)], [node("a"), node("b")], "only 0 of 1 workers fit; the nodes have left: a: 4 GPU, 8 CPU"),
        ([request(gpu=3)] * 3, [node("a"), node("b")], "only 2 of 3 workers fit"),
        ([request()], [], "only 0 of 1 workers fit; the nodes have left: no node is alive"),
    ],
)
def test_fit_requests_without_enough_devices_gives_the_reason(
    wanted: list[Request], nodes: list[Node], reason: str
) -> None:
    fitted = fit_requests(wanted, nodes)

    assert isinstance(fitted, str)
    assert reason in fitted


def test_fit_requests_more_cores_and_memory_than_there_are_shrinks_and_keeps_half() -> None:
    wanted = [request(cpu=8, gpu=1, mem_gib=32)] * 4

    fitted = fit_requests(wanted, [node("a", cpu=8, gpu=4, mem_gib=64)])

    assert fitted == [request(cpu=1, gpu=1, mem_gib=8)] * 4  # half of 8 cores and of 64 GiB, for four


def test_fit_requests_role_after_role_always_leaves_something() -> None:
    left = [node("a", cpu=2, gpu=0, mem_gib=8)]

    for _ in range(6):
        fitted = fit_requests([request(cpu=8, mem_gib=32)], left)
        assert isinstance(fitted, list)
        assert first_fit(fitted, left) == 1

    assert left[0].cpu > 0
    assert left[0].mem_bytes > 0


def test_resources_of_an_empty_request_still_ask_for_something() -> None:
    assert Request(0, 0, 0).resources() == {"CPU": 0.01}
    assert Request(2, 1, GIB).resources() == {"CPU": 2, "GPU": 1.0, "memory": float(GIB)}


def test_describe_many_nodes_counts_the_rest() -> None:
    text = describe([node(str(i)) for i in range(11)], most=2)

    assert text == "0: 4 GPU, 8 CPU, 64 GiB; 1: 4 GPU, 8 CPU, 64 GiB; and 9 more"


# --- addresses -----------------------------------------------------------------------------------------------------
@pytest.fixture
def web_address() -> Iterator[str]:
    """Something that listens and is no Ray."""
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("127.0.0.1:9", "does not answer"),
        ("no-such-host.invalid:6379", "does not answer"),
        ("ray://127.0.0.1:10001", "Ray Client"),
        ("127.0.0.1", "host:port"),
    ],
)
def test_check_address_without_ray_there_says_what_to_set(address: str, problem: str) -> None:
    with pytest.raises(RayUnavailableError, match=f"RAY_ADDRESS=.*{problem}.*set RAY_ADDRESS to the host:port"):
        check_address(address)


def test_check_address_of_a_web_server_is_refused(web_address: str) -> None:
    with pytest.raises(RayUnavailableError, match=f"{web_address}.*is no Ray head"):
        check_address(web_address)


def test_check_address_of_a_silent_listener_is_refused_in_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal.infra.utils.ray.PROBE_TIMEOUT_S", 0.3)
    began = time.monotonic()

    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = "{}:{}".format(*silent.getsockname())
        with pytest.raises(RayUnavailableError, match="does not answer"):
            check_address(address)

    assert time.monotonic() - began < 20


@pytest.mark.parametrize("address", ["", "auto", "local"])
def test_check_address_words_of_ray_pass(address: str) -> None:
    check_address(address)


# --- causes --------------------------------------------------------------------------------------------------------
def test_death_cause_keeps_the_process_and_the_reason_only() -> None:
    text = (
        "The actor died unexpectedly before finishing this task.\n\tclass_name: WorkerActor\n\tactor_id: 09c8\n\t"
        "pid: 22434\n\tname: a0\n\tnamespace: b922\n\tip: 127.0.0.2\nThe actor is dead because its worker process has "
        "died. Worker exit type: SYSTEM_ERROR Worker exit detail: End of file. Some common causes include: (1) the OOM"
    )

    cause = death_cause(RuntimeError(text))

    assert cause == (
        "process 22434 on 127.0.0.2: The actor died unexpectedly before finishing this task.; The actor is dead "
        "because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: End of file."
    )
