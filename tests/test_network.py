"""Ports and addresses."""

from __future__ import annotations

import random
import socket

import pytest

from areal.utils import network


def test_find_free_ports_distinct_sorted_in_range():
    ports = network.find_free_ports(5)
    assert ports == sorted(set(ports))
    assert len(ports) == 5
    assert all(10000 <= port <= 32767 for port in ports)


def test_find_free_ports_same_random_seed_gives_different_ports():
    draws = []
    for _ in range(2):
        random.seed(1)
        draws.append(network.find_free_ports(8))
    assert draws[0] != draws[1]


def test_find_free_ports_skips_excluded_and_busy_ports():
    with socket.socket() as busy:
        busy.bind(("", 0))
        busy.listen()
        port = busy.getsockname()[1]
        assert not network.is_port_free(port)
        with pytest.raises(ValueError, match="0 of 1 free ports"):
            network.find_free_ports(1, (port, port))
    free = network.find_free_port()
    with pytest.raises(ValueError, match="1 excluded"):
        network.find_free_ports(1, (free, free), exclude_ports=[free])


def test_is_port_free_sees_udp_too():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as busy:
        busy.bind(("", 0))
        assert not network.is_port_free(busy.getsockname()[1])


def test_run_ids_and_tokens_are_unpredictable():
    assert network.new_run_id() != network.new_run_id()
    assert len(network.new_token()) >= 40


@pytest.mark.parametrize(
    ("host", "port", "text"), [("10.0.0.1", 80, "10.0.0.1:80"), ("::1", 80, "[::1]:80"), ("node-3", 1, "node-3:1")]
)
def test_hostport_roundtrip(host, port, text):
    assert network.format_hostport(host, port) == text
    assert network.split_hostport(text) == (host, port)


@pytest.mark.parametrize("text", ["", "host", "host:", ":80", "host:x", "::1:80", "host:70000"])
def test_split_hostport_bad_text_is_refused(text):
    with pytest.raises(ValueError, match="host:port"):
        network.split_hostport(text)


def test_gethostip_is_an_ipv4_address():
    socket.inet_aton(network.gethostip())
