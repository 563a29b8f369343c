"""Addresses and ports. Ports and ids come from the operating system, never from a seeded generator, so that two runs
with the same seed do not meet on one port.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterable

from areal.utils.errors import NetworkError

DEFAULT_PORT_RANGE = (10000, 32767)
_TRIES_PER_PORT = 10


class PortRangeError(NetworkError, ValueError):
    """Not enough free ports in the range asked for."""


def gethostip() -> str:
    """IPv4 address of this machine that others can reach: by host name, else by the route to the outside.

    Raises:
        NetworkError: neither gives an address; set one explicitly.
    """
    try:
        address = socket.gethostbyname(socket.gethostname())
        if not address.startswith("127."):
            return address
    except OSError:
        pass
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))  # TEST-NET-1: a UDP connect sends nothing, it only asks the routing table
            return str(probe.getsockname()[0])
    except OSError as exc:
        raise NetworkError(f"no address found for host {socket.gethostname()!r}; name one in the settings") from exc


def address_towards(address: str) -> str:
    """This machine's address on the way to ``host:port``; nothing is sent.

    Raises:
        NetworkError: there is no way there.
    """
    host, port = split_hostport(address)
    try:
        family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as exc:
        raise NetworkError(f"no way to {address}: {exc}") from exc


def is_port_free(port: int, host: str = "") -> bool:
    """True when TCP and UDP ``port`` can be bound on ``host`` (all IPv4 interfaces by default) right now."""
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        with socket.socket(socket.AF_INET, kind) as probe:
            if kind == socket.SOCK_STREAM:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                return False
    return True


def find_free_ports(
    count: int,
    port_range: tuple[int, int] = DEFAULT_PORT_RANGE,
    exclude_ports: Iterable[int] | None = None,
) -> list[int]:
    """``count`` distinct ports that are free now, sorted.

    Args:
        count: how many, >= 0.
        port_range: first and last port, both included.
        exclude_ports: ports never to return.

    Raises:
        ValueError: fewer than ``count`` found after 10 tries for each.
    """
    low, high = port_range
    taken = set(exclude_ports or ())
    found: set[int] = set()
    for _ in range(_TRIES_PER_PORT * count):
        if len(found) == count:
            break
        port = low + secrets.randbelow(max(high - low + 1, 1))
        if port not in taken and port not in found and is_port_free(port):
            found.add(port)
    if len(found) < count:
        raise PortRangeError(
            f"found {len(found)} of {count} free ports in {low}-{high} ({len(taken)} excluded); widen the range"
        )
    return sorted(found)


def find_free_port(port_range: tuple[int, int] = DEFAULT_PORT_RANGE) -> int:
    """One free port; see ``find_free_ports``."""
    return find_free_ports(1, port_range)[0]


def new_run_id() -> str:
    """Random id of a run: 12 hex characters."""
    return secrets.token_hex(6)


def new_token() -> str:
    """Random bearer token of a run's services: 256 bits, URL-safe."""
    return secrets.token_urlsafe(32)


def format_hostport(host: str, port: int) -> str:
    """``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def split_hostport(address: str) -> tuple[str, int]:
    """Inverse of ``format_hostport``.

    Raises:
        ValueError: no port, or not a number from 0 to 65535.
    """
    host, separator, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not separator or not host or (":" in host and not bracketed) or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"address {address!r} must look like 'host:port' or '[ipv6]:port'")
    return (host[1:-1] if bracketed else host), int(port)
