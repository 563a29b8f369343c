"""Collective groups that carry weights: the trainer's first rank sends, samplers receive.

    rank 0:   open_store(host) ─► port ─► enter_group(group, store) ─► send_buckets(...) ─► abort()
    others:                              enter_group(group)        ─► receive_buckets(...) ─► abort()

What travels is ``weight_wire``'s. A group does not survive an error: whoever meets one says so in the store and leaves.
The others look there while they wait: connections alone do not tell, since gloo closes them only when nothing is under
way, and two ranks may each wait for the other's part of another broadcast.
"""

from __future__ import annotations

import atexit
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from areal.utils.errors import WeightSyncError
from areal.utils.network import address_towards, format_hostport

if TYPE_CHECKING:
    from areal.engine.core.weight_sources import WeightGroup

_dist: Any = dist  # names that its stubs do not export
_POLL_S = 0.005
_LOOK_S = 0.5  # between looks whether somebody has given the group up
_LOST = "lost"
_EXIT_S = 2.0
_closing: set[threading.Thread] = set()


class WeightGroupLostError(WeightSyncError):
    """A group ended while it was needed: usually because another member failed, whose error says more."""


def open_store(host: str, timeout_s: float) -> Any:
    """A rendezvous store that listens on ``host`` only, on a port of the system's choice (``store.port``)."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.bind((host, 0))
            listener.listen(128)
            port = listener.getsockname()[1]
            fd = listener.detach()
    except OSError as exc:
        raise WeightSyncError(f"no port for the weight group can be had on {host}: {exc}") from exc
    timeout = timedelta(seconds=timeout_s)
    return _dist.TCPStore(host, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=fd)


class Membership:
    """A rank's place in a group. Leaving it (:meth:`abort`) is the only way to end it.

    Attributes:
        group: with the rank of this process.
        device: where tensors must lie to travel.
    """

    def __init__(self, group: WeightGroup, process_group: Any, store: Any) -> None:
        self.group = group
        self.device = torch.device("cuda" if group.backend == "nccl" else "cpu")
        self.memory = _Memory()
        self._process_group, self._store = process_group, store
        self._options = dist.BroadcastOptions()
        self._options.rootRank, self._options.rootTensor = 0, 0

    def broadcast(self, tensor: Tensor) -> Any:
        """Start to send (rank 0) or to fill ``tensor``; returns the work to wait for."""
        process_group = self._process_group
        if process_group is None:
            raise WeightGroupLostError(f"weight group {self.group.name} was left")
        return process_group.broadcast([tensor], self._options)

    def finish(self, work: Any) -> None:
        """Wait for a broadcast that was started.

        Raises:
            WeightGroupLostError: this rank or another one has given the group up.
        """
        if self.group.backend == "nccl":
            work.wait()
            return
        while True:
            try:
                work.wait(timedelta(seconds=_LOOK_S))
                return
            except RuntimeError:
                if work.is_completed():
                    raise
            if self._given_up():
                raise WeightGroupLostError(f"weight group {self.group.name} was given up by a rank")

    def give_up(self) -> None:
        """Leave after an error, and let the others know."""
        store = self._store
        if store is not None:
            with suppress(RuntimeError):  # it may have ended with rank 0
                store.set(_LOST, "1")
        self.abort()

    def _given_up(self) -> bool:
        store = self._store
        try:
            return store is None or bool(store.check([_LOST]))
        except RuntimeError:  # rank 0, which keeps the store, is gone
            return True

    def abort(self) -> None:
        """Leave: connections close, so that nobody waits for this rank. Safe to call twice and from any thread.

        Connections of gloo close with the object, which first waits for what it has under way here: that ends when
        the other side closes, so it is left to a thread.
        """
        process_group, self._process_group, self._store = self._process_group, None, None
        if process_group is not None:
            holder = [process_group]
            del process_group
            thread = threading.Thread(target=_close, args=(holder, self.group.torch_helper), daemon=True)
            _closing.add(thread)
            thread.start()


def _close(holder: list[Any], torch_helper: bool) -> None:
    with suppress(Exception):
        holder[0].abort()  # NCCL; nothing to gloo
    if torch_helper:
        with suppress(Exception):
            dist.destroy_process_group(holder[0])
    holder.clear()
    _closing.discard(threading.current_thread())


@atexit.register
def _finish_closing() -> None:
    """Wait a moment: a thread that comes back from gloo when the interpreter has ended takes the process with it."""
    deadline = time.monotonic() + _EXIT_S
    for thread in list(_closing):
        thread.join(max(0.0, deadline - time.monotonic()))


def enter_group(group: WeightGroup, store: Any = None, aborted: Callable[[], bool] = lambda: False) -> Membership:
    """Take the place ``group.rank``; returns when every rank has.

    Args:
        group: where to go.
        store: of rank 0, from :func:`open_store`; None: joins it as the others do.
        aborted: asked while waiting for the others.

    Raises:
        WeightSyncError: not everybody came within ``group.timeout_s``.
    """
    timeout = timedelta(seconds=group.timeout_s)
    scoped: Any = None
    try:
        if store is None:
            store = _dist.TCPStore(group.host, group.port, is_master=False, timeout=timeout, wait_for_workers=False)
        scoped = _dist.PrefixStore(group.name, store)
        if group.torch_helper:
            return Membership(group, _with_torch_helper(group, scoped, timeout), scoped)
        scoped.set(f"here/{group.rank}", "1")
        if group.rank == 0:
            try:
                _await_others(group, scoped, aborted)
            except WeightSyncError:
                with suppress(RuntimeError):  # the store may have ended with the group
                    scoped.set("go", "0")
                raise
            scoped.set("go", "1")
        else:
            scoped.wait(["go"], timeout)
            if scoped.get("go") != b"1":
                raise WeightGroupLostError(f"weight group {group.name}: not every rank joined, it was given up")
        return Membership(group, _direct(group, scoped, timeout), scoped)
    except (RuntimeError, OSError) as exc:  # torch's store and gloo errors derive from RuntimeError
        if isinstance(exc, WeightSyncError):
            raise
        if aborted():
            raise WeightGroupLostError(f"weight group {group.name} was given up before every rank joined") from exc
        lost = scoped is not None and isinstance(exc, _dist.DistNetworkError)  # rank 0 ended the store
        raise (WeightGroupLostError if lost else WeightSyncError)(
            f"weight group {group.name}: rank {group.rank} of {group.world_size} could not join at "
            f"{group.host}:{group.port} within {group.timeout_s:g} s: {exc}"
        ) from exc


def _await_others(group: WeightGroup, store: Any, aborted: Callable[[], bool]) -> None:
    deadline = time.monotonic() + group.timeout_s
    for rank in range(1, group.world_size):
        while not store.check([f"here/{rank}"]):
            if aborted():
                raise WeightGroupLostError(f"weight group {group.name} was given up before rank {rank} joined")
            if time.monotonic() > deadline:
                raise WeightSyncError(
                    f"weight group {group.name}: rank {rank} did not join within {group.timeout_s:g} s "
                    "(actor.weight_update_timeout_s)"
                )
            time.sleep(_POLL_S)


def _direct(group: WeightGroup, store: Any, timeout: timedelta) -> Any:
    """A process group beside any default one."""
    if group.backend == "nccl":
        options = _dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return _dist.ProcessGroupNCCL(store, group.rank, group.world_size, options)
    options = _dist.ProcessGroupGloo._Options()
    options._timeout = timeout
    own = address_towards(format_hostport(group.host, group.port))
    options._devices = [_dist.ProcessGroupGloo.create_device(hostname=own)]
    return _dist.ProcessGroupGloo(store, group.rank, group.world_size, options)


def _with_torch_helper(group: WeightGroup, store: Any, timeout: timedelta) -> Any:
    """The group that SGLang's ``init_weights_update_group`` builds."""
    c10d: Any = _dist.distributed_c10d
    process_group, _ = c10d._new_process_group_helper(
        group.world_size, group.rank, [], dist.Backend(group.backend), store, group_name=group.name, timeout=timeout
    )
    c10d._world.pg_group_ranks[process_group] = {rank: rank for rank in range(group.world_size)}
    return process_group


class _Memory:
    """Receive buffers, kept from one version to the next: new memory costs a fault per page."""

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = {}
        self._lent: list[Tensor] = []

    def take(self, n_bytes: int, device: torch.device) -> Tensor:
        free = self._free.get(n_bytes)
        return free.pop() if free else torch.empty(n_bytes, dtype=torch.uint8, device=device)

    def give(self, memory: Tensor, later: bool = False) -> None:
        if later:
            self._lent.append(memory)
        else:
            self._free.setdefault(memory.numel(), []).append(memory)

    def take_back(self) -> None:
        lent, self._lent = self._lent, []
        for memory in lent:
            self.give(memory)


class Memberships:
    """The groups that a receiver is in, by name; joined and left by calls of the trainer's side."""

    def __init__(self) -> None:
        self._members: dict[str, Membership] = {}
        self._lock = threading.Lock()

    def join(self, group: WeightGroup) -> None:
        """Take the place ``group.rank``; returns when every rank has. Groups that this one replaces are left."""
        member = enter_group(group)
        with self._lock:
            old = [name for name, other in self._members.items() if other.group.stage == group.stage]
            left = [self._members.pop(name) for name in old]
            self._members[group.name] = member
        for other in left:
            other.abort()

    def leave(self, name: str) -> None:
        """Leave a group; an unknown one is no error."""
        with self._lock:
            member = self._members.pop(name, None)
        if member is not None:
            member.abort()

    def get(self, name: str) -> Membership:
        """The place in a group.

        Raises:
            WeightSyncError: it was not joined.
        """
        with self._lock:
            member = self._members.get(name)
            known = ", ".join(self._members) or "none"
        if member is None:
            raise WeightGroupLostError(f"weight group {name} was not joined here (joined: {known})")
        return member
