"""Ray, as far as this package uses it: connecting, what the nodes have, fitting requests, placement groups.

In: a Ray address and what the workers of a role want. Out: a connection, placement groups whose bundles some node can
hold, and sentences that say why a request cannot be met. Called by the Ray scheduler and the SPMD launcher of Ray.

Devices are requirements: a request for more than the nodes have is an error at once. Cores and memory are wishes:
Ray only counts them, so where the nodes have less, each worker counts for less and half of what is left stays for
the roles that come later.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from areal.utils import environ, logging
from areal.utils.errors import SchedulerError
from areal.utils.network import split_hostport
from areal.utils.optional import import_extra

PROBE_TIMEOUT_S = 5.0
GIB = 1 << 30
_KEPT_FOR_OTHERS = 0.5  # share of the free cores and memory that a role which gets less than it asked leaves alone
_HTTP2_SETTINGS = b"\x04"  # type of a frame
_HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0" + _HTTP2_SETTINGS + b"\0" * 5
_DEATH_IDS = ("class_name", "actor_id", "pid", "name", "namespace", "ip")
_SMALLEST = 0.01  # Ray counts in steps of 1e-4; a bundle must ask for something

logger = logging.getLogger("RayScheduler")


class RayUnavailableError(SchedulerError):
    """There is no Ray at the address that was given."""


@dataclass(frozen=True)
class Request:
    """What one worker asks of a node; also one bundle of a placement group."""

    cpu: float
    gpu: int
    mem_bytes: int

    def resources(self) -> dict[str, float]:
        """The bundle as Ray writes it; resources that are not asked for are left out."""
        asked = {"CPU": self.cpu, "GPU": float(self.gpu), "memory": float(self.mem_bytes)}
        return {name: amount for name, amount in asked.items() if amount > 0} or {"CPU": _SMALLEST}

    def __str__(self) -> str:
        return f"{self.gpu} GPU, {self.cpu:g} CPU, {self.mem_bytes / GIB:.3g} GiB"


@dataclass
class Node:
    """What one node has, or has left."""

    node_id: str
    address: str
    cpu: float
    gpu: float
    mem_bytes: float

    def fits(self, request: Request) -> bool:
        return request.gpu <= self.gpu and request.cpu <= self.cpu and request.mem_bytes <= self.mem_bytes

    def take(self, request: Request) -> None:
        self.cpu -= request.cpu
        self.gpu -= request.gpu
        self.mem_bytes -= request.mem_bytes

    def __str__(self) -> str:
        return f"{self.address}: {self.gpu:g} GPU, {self.cpu:.3g} CPU, {self.mem_bytes / GIB:.3g} GiB"


def ensure_ray() -> Any:
    """Connect this process to Ray and return the module; a connection that exists is kept.

    The address is ``RAY_ADDRESS``, else a cluster that runs on this machine, else a new one for this process.

    Raises:
        ConfigError: Ray is not installed.
        RayUnavailableError: ``RAY_ADDRESS`` names something that does not answer.
    """
    ray = import_extra("ray", "ray")
    if ray.is_initialized():
        return ray
    given = (environ.get_env("RAY_ADDRESS") or "").strip()
    check_address(given)
    address = given or _cluster_of_this_machine() or "local"
    dashboard = False if address == "local" else None
    try:
        ray.init(address=address, log_to_driver=False, include_dashboard=dashboard, logging_level="warning")
    except (ConnectionError, RuntimeError, ValueError) as exc:
        raise RayUnavailableError(
            f"RAY_ADDRESS={given!r}: Ray refused the connection ({exc}); start it with `ray start --head` and set "
            "RAY_ADDRESS to the host:port it prints, or unset RAY_ADDRESS to run Ray on this machine only"
        ) from exc
    logger.info(f"connected to Ray ({address}): {describe(cluster_nodes())}")
    return ray


def _cluster_of_this_machine() -> str | None:
    """Address of the cluster started here last, if it still runs; Ray itself would wait for one that does not."""
    noted = Path(environ.get_env("RAY_TMPDIR") or "/tmp", "ray", "ray_current_cluster")
    try:
        address = noted.read_text(encoding="utf-8").strip()
        check_address(address)
    except (OSError, RayUnavailableError) as exc:
        logger.debug(f"no Ray runs on this machine: {exc}")
        return None
    return address or None


def check_address(address: str) -> None:
    """Find out within seconds whether a Ray head listens where it is said to be (Ray itself would wait for minutes).

    Raises:
        RayUnavailableError: no usable address, nobody listens there, or something else does.
    """
    if address in ("", "auto", "local"):
        return
    problem = None
    if "://" in address:
        problem = "is a Ray Client address; workers must reach the controller directly"
    else:
        try:
            with socket.create_connection(split_hostport(address), timeout=PROBE_TIMEOUT_S) as connection:
                if not (environ.get_bool_env_var("RAY_USE_TLS") or _speaks_http2(connection)):
                    problem = "is no Ray head: what listens there does not speak gRPC"
        except (OSError, ValueError) as exc:
            problem = f"does not answer ({exc})"
    if problem:
        raise RayUnavailableError(
            f"RAY_ADDRESS={address!r} {problem}; run the controller on a node of the cluster and set RAY_ADDRESS to "
            "the host:port that `ray start --head` prints, or unset it to run Ray on this machine only"
        )


def _speaks_http2(connection: socket.socket) -> bool:
    """Whether the other side answers an HTTP/2 greeting, as every gRPC server does, with its settings."""
    connection.sendall(_HTTP2_GREETING)
    header = connection.recv(9, socket.MSG_WAITALL)  # of the first frame: 3 bytes size, 1 byte type, flags, stream
    return header[3:4] == _HTTP2_SETTINGS


def cluster_nodes() -> list[Node]:
    """The nodes that are alive and what they have in total, in the order of their addresses."""
    ray = import_extra("ray", "ray")
    nodes = []
    for fact in ray.nodes():
        if fact["Alive"]:
            has = fact["Resources"]
            amounts = (has.get("CPU", 0.0), has.get("GPU", 0.0), has.get("memory", 0.0))
            nodes.append(Node(fact["NodeID"], fact["NodeManagerAddress"], *amounts))
    return sorted(nodes, key=lambda node: (node.address, node.node_id))


def describe(nodes: Sequence[Node], most: int = 8) -> str:
    """One line about the nodes; more than ``most`` are counted only."""
    listed = "; ".join(map(str, nodes[:most])) or "no node is alive"
    return listed + (f"; and {len(nodes) - most} more" if len(nodes) > most else "")


def free_nodes(groups: Iterable[Any]) -> list[Node]:
    """The nodes without what ``groups`` (of this run) hold; what other users hold counts as free."""
    from ray.util.placement_group import placement_group_table

    nodes = {node.node_id: node for node in cluster_nodes()}
    unplaced: list[Request] = []
    for group in groups:
        table = placement_group_table(group)
        for index, bundle in table["bundles"].items():
            held = Request(bundle.get("CPU", 0.0), int(bundle.get("GPU", 0)), int(bundle.get("memory", 0)))
            node = nodes.get(table["bundles_to_node_id"].get(index) or "")
            if node:
                node.take(held)
            else:
                unplaced.append(held)
    free = list(nodes.values())
    first_fit(unplaced, free)
    return free


def first_fit(requests: Sequence[Request], nodes: Sequence[Node]) -> int:
    """Put the requests on the nodes, most devices first; takes from ``nodes`` and returns how many fitted."""
    fitted = 0
    for request in sorted(requests, key=lambda r: (-r.gpu, -r.cpu, -r.mem_bytes)):
        node = next((node for node in nodes if node.fits(request)), None)
        if node:
            node.take(request)
            fitted += 1
    return fitted


def fit_requests(requests: Sequence[Request], free: Sequence[Node]) -> list[Request] | str:
    """Requests that the nodes can hold when nobody else uses them.

    Args:
        requests: what each worker asks for.
        free: the nodes without what this run holds already; not changed.

    Returns: the same requests, with fewer cores and less memory where needed; or, when the devices do not suffice,
        the reason in words.
    """

    def fitting(candidates: Sequence[Request]) -> int:
        return first_fit(candidates, [replace(node) for node in free])

    if fitting(requests) == len(requests):
        return list(requests)
    devices_only = [replace(request, cpu=0.0, mem_bytes=0) for request in requests]
    fitted = fitting(devices_only)
    if not free or fitted < len(requests):
        return f"only {fitted} of {len(requests)} workers fit; the nodes have left: {describe(free)}"
    cpu, mem = _largest_share(devices_only, free)
    return [replace(r, cpu=min(r.cpu, cpu), mem_bytes=min(r.mem_bytes, mem)) for r in requests]


def _largest_share(devices_only: Sequence[Request], free: Sequence[Node]) -> tuple[float, int]:
    """Cores and bytes for each worker so that all of them fit and some stay for later roles."""
    spread = [replace(node) for node in free]
    load = dict.fromkeys(range(len(spread)), 0)
    for request in sorted(devices_only, key=lambda r: -r.gpu):
        fitting = [i for i, node in enumerate(spread) if node.gpu >= request.gpu]
        chosen = max(fitting, key=lambda i: spread[i].cpu / (load[i] + 1)) if request.gpu == 0 else fitting[0]
        spread[chosen].gpu -= request.gpu
        load[chosen] += 1
    shares = [(spread[i].cpu / n, spread[i].mem_bytes / n) for i, n in load.items() if n]
    cpu = min(share[0] for share in shares) * _KEPT_FOR_OTHERS
    mem = min(share[1] for share in shares) * _KEPT_FOR_OTHERS
    return max(int(cpu * 100) / 100, _SMALLEST), max(int(mem), 0)


def create_group(requests: Sequence[Request], strategy: str, name: str) -> Any:
    """A placement group with one bundle per request; returns before it is placed.

    Args:
        requests: one per bundle.
        strategy: PACK, SPREAD, STRICT_PACK or STRICT_SPREAD.
        name: shown by `ray list placement-groups`.
    """
    from ray.util.placement_group import placement_group

    return placement_group([request.resources() for request in requests], strategy=strategy, name=name)


def group_is_ready(group: Any) -> bool:
    """Whether every bundle of the group is placed now (``group.wait(0)`` says no too often)."""
    from ray.util.placement_group import placement_group_table

    return bool(placement_group_table(group)["state"] == "CREATED")


def remove_group(group: Any) -> None:
    """Give a group's devices back; what runs in it is killed by Ray."""
    from ray.util.placement_group import remove_placement_group

    remove_placement_group(group)


def death_cause(error: BaseException) -> str:
    """Ray's account of how an actor ended: its process, then the reason, without ids and general advice."""
    facts: dict[str, str] = {}
    reasons = []
    for line in filter(None, map(str.strip, str(error).splitlines())):
        name, separator, value = line.partition(": ")
        if separator and name in _DEATH_IDS:
            facts[name] = value
        else:
            reasons.append(line.partition(" Some common causes include")[0])
    where = f"process {facts['pid']} on {facts['ip']}: " if {"pid", "ip"} <= facts.keys() else ""
    return where + ("; ".join(reasons) or type(error).__name__)
