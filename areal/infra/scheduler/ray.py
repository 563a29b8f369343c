"""The Ray scheduler: workers are actors in placement groups, on as many machines as the Ray cluster has.

In: jobs, as every scheduler. Ray places the actors, keeps them apart from other users of the cluster and says how they
ended; each actor's process runs the same worker server as a local worker, so calls never pass through Ray.

::

    group pending --placed--> actor starting --registered--> ready --(process, node or controller gone)--> ended
          `--(no node can ever hold it)--> error

``scheduling_spec.ray_placement_strategy`` decides what is placed together: one group for the role (``shared``), one per
worker (``separate``), or one per worker whose devices are left to the workers forked beside it (``deferred``).
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

from areal.infra.run_context import RunContext
from areal.infra.scheduler import launch
from areal.infra.scheduler.base import BaseScheduler
from areal.infra.scheduler.exceptions import GPUAllocationError, SchedulerError, WorkerCreationError
from areal.infra.scheduler.handles import WorkerHandle
from areal.infra.scheduler.monitor import address_keys
from areal.infra.scheduler.ray_actor import WorkerActor, kill_marked, read_log
from areal.infra.utils import ray as cluster
from areal.infra.utils.ray import Request
from areal.utils import logging, name_resolve

logger = logging.getLogger("RayScheduler")

MAIN_SHARE, FORK_SHARE = 0.9, 0.01  # of a single device: a worker, and each worker forked beside it
HOSTED_MODULES = (launch.RPC_SERVER, "areal.infra.rpc.guard")
_LOOK_AGAIN_S = 0.5  # between two questions to Ray about a group that is not placed
_KILL_WAIT_S = 10.0
_TASK_WAIT_S = 10.0  # of a small task on a node, whose process may have to start first


@dataclass(eq=False)
class Group:
    """One placement group.

    Attributes:
        bundles: what each bundle holds.
        users: ids of the workers in it; the last one that leaves takes the group along.
    """

    placement: Any
    bundles: list[Request]
    users: set[str] = field(default_factory=set)
    ready: bool = False
    looked_at: float = float("-inf")
    reason: str = ""


@dataclass(frozen=True)
class Slot:
    """Where a worker lives: one bundle of a group."""

    group: Group
    index: int

    @property
    def request(self) -> Request:
        return self.group.bundles[self.index]


@dataclass(eq=False)
class Actor:
    """One incarnation of a worker: its actor, and two promises of Ray.

    Attributes:
        started: facts about the worker, once its server listens.
        ended: how it ended; fails when Ray loses it.
    """

    ref: Any
    started: Any
    ended: Any
    facts: dict[str, Any] | None = None


class RayScheduler(BaseScheduler):
    """Starts workers as Ray actors.

    Args:
        context: the run. Its ``host``, if set, is the address every worker binds; else each binds its node's address.

    Raises:
        RayUnavailableError: RAY_ADDRESS names no running Ray.
    """

    def __init__(self, context: RunContext) -> None:
        self._ray = cluster.ensure_ray()
        self._slots: dict[str, Slot] = {}
        self._lock = threading.RLock()  # re-entrant: signal handlers stop workers too
        nodes = cluster.cluster_nodes()
        self._most_gpus = max((int(node.gpu) for node in nodes), default=0)
        super().__init__(context, cores=max((int(node.cpu) for node in nodes), default=0) or None)

    @property
    def n_gpus_per_node(self) -> int:
        return self._most_gpus

    # --- hooks of the base ----------------------------------------------------------------------------------------
    def _start(self, handles: list[WorkerHandle]) -> None:
        for handle in handles:
            _check_command(handle)
        with self._lock:
            fresh = [handle for handle in handles if handle.beside is None and handle.id not in self._slots]
            if fresh:
                self._place(fresh)
            for handle in handles:
                slot = self._slots[handle.beside.id if handle.beside is not None else handle.id]
                self._slots[handle.id] = slot
                slot.group.users.add(handle.id)
                handle.backend = self._start_actor(handle, slot)

    def _stop(self, handles: list[WorkerHandle], grace_s: float) -> None:
        started = [handle for handle in handles if handle.backend is not None]
        ends = [handle.backend.ended for handle in started]
        if grace_s > 0:
            self._wait_all([h.backend.ref.stop.remote() for h in started if h.backend.facts is not None], grace_s)
        for handle in started:
            self._ray.kill(handle.backend.ref, no_restart=True)
        left = self._wait_all(ends, _KILL_WAIT_S)
        if left:
            logger.warning(f"{left} of {len(ends)} actors still run {_KILL_WAIT_S:g} s after they were killed")
        self._kill_left_over(started)
        with self._lock:
            for handle in handles:
                self._leave(handle)

    def _poll(self, handle: WorkerHandle) -> str | None:
        actor: Actor | None = handle.backend
        if actor is None:
            return None
        if actor.facts is None and self._is_done(actor.started):
            self._note_start(handle, actor)
        if not self._is_done(actor.ended):
            return None
        errors = self._ray.exceptions
        try:
            cause = str(self._ray.get(actor.ended))
        except errors.ActorUnavailableError as exc:  # a break in the network, not an end
            actor.ended = actor.ref.ended.remote()
            raise SchedulerError(f"worker {handle.id}: {cluster.death_cause(exc)}") from exc
        except errors.RayError as exc:
            cause = cluster.death_cause(exc)
        self._fetch_log(handle, actor)
        return cause

    def _pending(self, handle: WorkerHandle) -> str | None:
        slot = self._slots.get(handle.id)
        if slot is None:
            return "it is being stopped"
        if handle.backend is not None and handle.backend.facts is not None:
            return None
        group = slot.group
        with self._lock:
            if group.ready or time.monotonic() - group.looked_at < _LOOK_AGAIN_S:
                return None if group.ready else group.reason
            group.looked_at = time.monotonic()
            group.ready = cluster.group_is_ready(group.placement)
            if not group.ready:
                self._refuse_impossible(handle, group)
        return None if group.ready else group.reason

    # --- placement --------------------------------------------------------------------------------------------------
    def _place(self, handles: list[WorkerHandle]) -> None:
        """Make the groups of new workers; nothing is made when their devices do not exist."""
        wishes = [_request_of(handle) for handle in handles]
        free = cluster.free_nodes(group.placement for group in self._groups())
        bundles = cluster.fit_requests(wishes, free)
        role = handles[0].role
        if isinstance(bundles, str):
            raise GPUAllocationError(_too_much(role, wishes, bundles))
        if bundles != wishes:
            logger.warning(
                f"role {role!r} asks for {wishes[0]} per worker (scheduling_spec.cpu, .mem) and the nodes have less: "
                f"Ray reserves {bundles[0]} per worker, and workers share what there is"
            )
        strategy = handles[0].spec.ray_placement_strategy
        name = f"areal-{self.context.identity.run_id}-{role}"
        if strategy == "shared":
            group = Group(cluster.create_group(bundles, "PACK", name), bundles)
            self._slots.update({handle.id: Slot(group, index) for index, handle in enumerate(handles)})
            return
        for handle, bundle in zip(handles, bundles, strict=True):
            group = Group(cluster.create_group([bundle], "PACK", f"{name}-{handle.index}"), [bundle])
            self._slots[handle.id] = Slot(group, 0)

    def _groups(self) -> list[Group]:
        return list({id(slot.group): slot.group for slot in self._slots.values()}.values())

    def _refuse_impossible(self, handle: WorkerHandle, group: Group) -> None:
        """Note what a group waits for; raise when it waits for what no node has."""
        others = [other.placement for other in self._groups() if other is not group]
        free = cluster.free_nodes(others)
        fitted = cluster.fit_requests(group.bundles, free)
        if fitted != group.bundles:
            reason = fitted if isinstance(fitted, str) else f"the nodes have left: {cluster.describe(free)}"
            raise GPUAllocationError(_too_much(handle.role, group.bundles, reason))
        group.reason = (
            f"Ray has not placed {len(group.bundles)} x ({group.bundles[0]}) yet, other users of the cluster hold what "
            f"it needs; the nodes without them: {cluster.describe(free)}"
        )

    def _leave(self, handle: WorkerHandle) -> None:
        """Take a worker out of its group, and the group away after the last one.

        A worker of a group with others keeps its slot: if it is restarted, its bundle is still there.
        """
        slot = self._slots.get(handle.id)
        if slot is None:
            return
        group = slot.group
        group.users.discard(handle.id)
        if handle.beside is not None:
            del self._slots[handle.id]
        if not group.users:
            self._slots = {name: other for name, other in self._slots.items() if other.group is not group}
            cluster.remove_group(group.placement)

    # --- actors -----------------------------------------------------------------------------------------------------
    def _start_actor(self, handle: WorkerHandle, slot: Slot) -> Actor:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        slot.group.ready = False  # its bundle may be gone with its node
        env = {**handle.env, "PYTHONPATH": launch.python_path(handle.env.get("PYTHONPATH"))}
        actor_class = self._ray.remote(WorkerActor).options(
            name=f"areal-{self.context.identity.run_id}-{handle.role}-{handle.index}-{handle.incarnation}",
            num_cpus=0,  # the bundle has them
            num_gpus=_device_share(handle, slot.request),
            max_restarts=0,
            max_concurrency=4,  # started, ended and stop wait at the same time
            runtime_env={"env_vars": env},
            scheduling_strategy=PlacementGroupSchedulingStrategy(slot.group.placement, slot.index),
        )
        timeout = ["--startup-timeout", f"{self.context.startup_timeout_s:g}"]
        flags = launch.worker_flags(self.context, handle.role, handle.index) + timeout
        beside = None
        if handle.beside is not None and handle.beside.backend is not None and slot.request.gpu > 1:
            beside = handle.beside.backend.started  # Ray starts this actor when that promise is kept
        ref = actor_class.remote(self.context.identity.token, flags, str(handle.log_path), beside)
        return Actor(ref, ref.started.remote(), ref.ended.remote())

    def _note_start(self, handle: WorkerHandle, actor: Actor) -> None:
        """Keep the facts of a started worker and register its address, which its node may have been unable to."""
        try:
            facts: dict[str, Any] = self._ray.get(actor.started)
        except self._ray.exceptions.RayError:  # ``ended`` says why
            return
        handle.gpus = facts["gpus"]
        name_resolve.add(address_keys(self.context, handle)[0], facts["address"], replace=True)
        actor.facts = facts

    def _kill_left_over(self, handles: list[WorkerHandle]) -> None:
        """End what the processes of workers left on their nodes; nodes that are gone took it along."""
        marks: dict[str, set[str]] = {}
        for handle in handles:
            if handle.backend.facts is not None:
                marks.setdefault(handle.backend.facts["node_id"], set()).add(handle.env[launch.MARKER])
        alive = {node.node_id for node in cluster.cluster_nodes()}
        tasks = [self._task_on(node, kill_marked).remote(found) for node, found in marks.items() if node in alive]
        try:
            self._ray.get(tasks, timeout=_TASK_WAIT_S)
        except self._ray.exceptions.RayError as exc:
            logger.warning(f"what workers left on their nodes could not be ended: {cluster.death_cause(exc)}")

    def _fetch_log(self, handle: WorkerHandle, actor: Actor) -> None:
        """Bring the end of the log here when its folder is not shared with the node that wrote it."""
        path = handle.log_path
        if actor.facts is None or (path.exists() and path.stat().st_size > handle.log_offset):
            return
        task = self._task_on(actor.facts["node_id"], read_log).remote(actor.facts["log_path"])
        try:
            text = self._ray.get(task, timeout=_TASK_WAIT_S)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                file.write(text)
        except (self._ray.exceptions.RayError, OSError) as exc:
            logger.warning(f"the log of worker {handle.id} stays on node {actor.facts['node']}: {exc}")

    def _task_on(self, node_id: str, function: Any) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        there = NodeAffinitySchedulingStrategy(node_id, soft=False)
        environment = {"env_vars": {"PYTHONPATH": launch.python_path()}}
        return self._ray.remote(function).options(
            num_cpus=0, max_retries=0, runtime_env=environment, scheduling_strategy=there
        )

    def _wait_all(self, promises: list[Any], timeout_s: float) -> int:
        """Wait until Ray keeps or breaks all promises; returns how many are open after ``timeout_s``."""
        if not promises:
            return 0
        _, left = self._ray.wait(promises, num_returns=len(promises), timeout=timeout_s, fetch_local=False)
        return len(left)

    def _is_done(self, promise: Any) -> bool:
        done, _ = self._ray.wait([promise], timeout=0, fetch_local=False)
        return bool(done)


def _request_of(handle: WorkerHandle) -> Request:
    spec = handle.spec
    return Request(cpu=float(spec.cpu), gpu=spec.gpu, mem_bytes=spec.mem * cluster.GIB)


def _device_share(handle: WorkerHandle, request: Request) -> float:
    """Devices that Ray counts for an actor: a worker leaves something for those forked beside it.

    Ray takes fractions of one device only, so beside a worker with several the forked ones count for none; they are
    told the devices of the first.
    """
    deferred = handle.spec.ray_placement_strategy == "deferred"
    if request.gpu == 0 or (deferred and handle.beside is None):
        return 0
    if handle.beside is None or deferred:
        return MAIN_SHARE if request.gpu == 1 else request.gpu
    return FORK_SHARE if request.gpu == 1 else 0


def _check_command(handle: WorkerHandle) -> None:
    words = handle.command
    module = words[words.index("-m") + 1] if "-m" in words[:-1] else words[0]
    if module not in HOSTED_MODULES:
        raise WorkerCreationError(
            f"role {handle.role!r}: scheduling_spec.cmd={handle.spec.cmd!r} cannot be run by scheduler.type=ray, whose "
            f"actors run {launch.RPC_SERVER}; leave cmd as it is and host the object with create_engine (an HTTP "
            "service with areal.infra.service.asgi_host.AsgiHost)"
        )


def _too_much(role: str, requests: list[Request], reason: str) -> str:
    return (
        f"role {role!r} asks Ray for {len(requests)} x ({requests[0]}); {reason}. Lower scheduling_spec.gpu or the "
        "number of workers, delete other roles, or start more nodes (`ray start --address=...`) first"
    )
