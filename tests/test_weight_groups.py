"""Groups that carry weights: the bytes arrive, whatever their dtype and size, and a failure unblocks everybody."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from areal.api.io_struct import ParamSpec
from areal.engine.core.weight_groups import (
    _LOST,
    Membership,
    Memberships,
    WeightGroupLostError,
    enter_group,
    open_store,
)
from areal.engine.core.weight_sender import WeightSender
from areal.engine.core.weight_sources import WeightGroup
from areal.engine.core.weight_sync import ParamRecord, compare_records
from areal.engine.core.weight_wire import ALONE_FROM, make_buckets, receive_buckets, send_buckets
from areal.utils.errors import WeightSyncError
from tests.vector_files import load_vector


def tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    big = ALONE_FROM // 4
    return {
        "small.odd": torch.randn(3).to(torch.bfloat16),
        "big.one": torch.randn(big + 7),
        "small.two": torch.randn(5, 3),
        "empty": torch.randn(0, 4),
        "scalar": torch.tensor(3.5),
        "big.two": torch.randn(2, big).t(),  # not contiguous
        "counts": torch.arange(10),
    }


def specs(pairs: dict[str, Tensor]) -> list[ParamSpec]:
    return [ParamSpec(name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in pairs.items()]


def group_of(size: int, *, timeout_s: float = 30.0, torch_helper: bool = False) -> tuple[WeightGroup, Any]:
    store = open_store("127.0.0.1", timeout_s)
    name = f"weights-{time.monotonic_ns()}"
    return WeightGroup(name, "127.0.0.1", store.port, size, timeout_s=timeout_s, torch_helper=torch_helper), store


class Receivers:
    """Ranks 1.. of a group, each on a thread; they join and then do what they are told."""

    def __init__(self, group: WeightGroup, body: Callable[[Membership], Any], count: int) -> None:
        self.results: dict[int, Any] = {}
        self._threads = [
            threading.Thread(target=self._run, args=(replace(group, rank=rank), body), daemon=True)
            for rank in range(1, count + 1)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, group: WeightGroup, body: Callable[[Membership], Any]) -> None:
        try:
            self.results[group.rank] = body(enter_group(group))
        except Exception as exc:  # noqa: BLE001 - looked at by the test
            self.results[group.rank] = exc

    def join(self, timeout_s: float = 20.0) -> dict[int, Any]:
        for thread in self._threads:
            thread.join(timeout_s)
            assert not thread.is_alive(), "a receiver still waits"
        return self.results


def take_records(buckets: list[list[ParamSpec]]) -> Callable[[Membership], list[ParamRecord]]:
    return lambda member: [ParamRecord.of(name, tensor) for name, tensor in receive_buckets(member, buckets)]


@pytest.mark.parametrize("limit", [1, 1 << 20, 1 << 30])
@pytest.mark.parametrize("count", [1, 2])
def test_broadcast_every_kind_of_tensor_arrives_bit_by_bit(limit: int, count: int) -> None:
    pairs = tensors()
    buckets = make_buckets(specs(pairs), limit)
    group, store = group_of(count + 1)
    receivers = Receivers(group, take_records(buckets), count)
    member = enter_group(group, store)
    sent = send_buckets(member, pairs.items(), buckets)
    for received in receivers.join().values():
        compare_records(sent, received, 1)
    assert [record.name for record in sent] == list(pairs)
    member.abort()


def _helper_receiver(group: WeightGroup, names: list[ParamSpec], pipe: Any) -> None:
    """What SGLang does: torch's helper, then one asynchronous broadcast per tensor."""
    dist: Any = torch.distributed
    c10d = dist.distributed_c10d
    store, _, _ = next(dist.rendezvous(f"tcp://{group.host}:{group.port}", group.rank, group.world_size))
    store = dist.PrefixStore(group.name, store)
    size, backend = group.world_size, dist.Backend("gloo")
    process_group, _ = c10d._new_process_group_helper(
        size, group.rank, [], backend, store, group_name=group.name, timeout=timedelta(seconds=30)
    )
    c10d._world.pg_group_ranks[process_group] = {rank: rank for rank in range(group.world_size)}
    places = [torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in names]
    works = [dist.broadcast(place, src=0, group=process_group, async_op=True) for place in places]
    for work in works:
        work.wait()
    pipe.send([ParamRecord.of(spec.name, place) for spec, place in zip(names, places, strict=True)])
    dist.destroy_process_group(process_group)


def test_broadcast_group_of_torch_helper_serves_a_peer_that_builds_it_so() -> None:
    pairs = {name: tensor for name, tensor in tensors().items() if tensor.numel()}
    group, store = group_of(2, torch_helper=True)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    peer = context.Process(target=_helper_receiver, args=(replace(group, rank=1), specs(pairs), theirs))
    peer.start()
    try:
        member = enter_group(group, store)
        sent = send_buckets(member, pairs.items(), make_buckets(specs(pairs), 1 << 30))
        assert ours.poll(30)
        compare_records(sent, ours.recv(), 1)
        member.abort()
        peer.join(20)
    finally:
        peer.kill()


def test_broadcast_receiver_that_fails_ends_sender_and_other_receiver() -> None:
    pairs = {f"w{i}": torch.randn(ALONE_FROM // 4) for i in range(24)}
    buckets = make_buckets(specs(pairs), ALONE_FROM)
    group, store = group_of(3)

    def receive(member: Membership) -> Any:
        stream = receive_buckets(member, buckets)
        for position, _ in enumerate(stream):
            if member.group.rank == 1 and position == 1:
                stream.close()  # type: ignore[attr-defined]
                raise OSError("disk full")
        return "all"

    receivers = Receivers(group, receive, 2)
    member = enter_group(group, store)
    began = time.monotonic()
    with pytest.raises(WeightSyncError, match="lost the others"):
        send_buckets(member, pairs.items(), buckets)
    results = receivers.join()
    assert str(results[1]) == "disk full"
    assert isinstance(results[2], WeightSyncError)
    assert time.monotonic() - began < 20


def test_receive_group_that_another_rank_gives_up_ends_before_the_limit() -> None:
    group, store = group_of(3)
    buckets = make_buckets(specs(tensors()), 1 << 30)
    receivers = Receivers(group, lambda member: list(receive_buckets(member, buckets)), 2)
    member = enter_group(group, store)
    began = time.monotonic()

    member._store.set(_LOST, "1")  # what a rank does whose connections gloo keeps open

    results = receivers.join()
    assert all(isinstance(result, WeightGroupLostError) for result in results.values())
    assert time.monotonic() - began < 20
    member.abort()


def test_broadcast_sender_that_fails_ends_receivers_and_names_the_parameter() -> None:
    pairs = tensors()
    buckets = make_buckets(specs(pairs), 1 << 30)
    changed = {**pairs, "small.two": torch.randn(5, 4)}
    group, store = group_of(2)
    receivers = Receivers(group, take_records(buckets), 1)
    member = enter_group(group, store)
    with pytest.raises(WeightSyncError, match=r"small.two \(5, 3\) float32 was announced.*\(5, 4\)"):
        send_buckets(member, changed.items(), buckets)
    assert isinstance(receivers.join()[1], WeightSyncError)


@pytest.mark.parametrize("extra", [True, False])
def test_broadcast_too_many_or_too_few_tensors_is_refused(extra: bool) -> None:
    pairs = tensors()
    buckets = make_buckets(specs(pairs), 1 << 30)
    if extra:
        pairs["new"] = torch.zeros(2)
    else:
        del pairs["counts"]
    group, store = group_of(2)
    receivers = Receivers(group, take_records(buckets), 1)
    with pytest.raises(WeightSyncError, match="new is a weight" if extra else "counts was announced"):
        send_buckets(enter_group(group, store), pairs.items(), buckets)
    receivers.join()


def test_enter_group_receiver_that_never_comes_is_named() -> None:
    group, store = group_of(2, timeout_s=0.3)
    with pytest.raises(WeightSyncError, match="rank 1 did not join within 0.3 s"):
        enter_group(group, store)


def test_enter_group_one_that_never_comes_ends_the_waiting_of_the_others() -> None:
    group, store = group_of(3)
    receivers = Receivers(group, lambda member: member, 1)
    began = time.monotonic()
    with pytest.raises(WeightSyncError, match="given up"):
        enter_group(group, store, aborted=lambda: time.monotonic() > began + 0.3)
    assert "given up" in str(receivers.join()[1])
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("torch_helper", [False, True])
@pytest.mark.parametrize("early", [False, True])
def test_sender_that_leaves_while_others_are_missing_ends_everybodys_waiting(torch_helper: bool, early: bool) -> None:
    sender = WeightSender(SimpleNamespace(device=torch.device("cpu")), lambda: True)  # type: ignore[arg-type]
    host, port, _ = sender.open_store("127.0.0.1", 30.0)
    group = WeightGroup("g", host, port, 3, timeout_s=30.0, torch_helper=torch_helper)
    errors: list[Exception] = []

    def wait_at_the_store() -> None:
        """As every kind of receiver does."""
        try:
            if torch_helper:
                c10d: Any = torch.distributed
                store = c10d.TCPStore(host, port, is_master=False, wait_for_workers=False)
                store.wait(["g/address of rank 2"], timedelta(seconds=30))
            else:
                enter_group(replace(group, rank=1))
        except Exception as exc:  # noqa: BLE001 - looked at below
            errors.append(exc)

    receiver = threading.Thread(target=wait_at_the_store, daemon=True)
    receiver.start()
    leaver = threading.Timer(0.0 if early else 0.5, sender.leave_group, ("g",))
    time.sleep(0.3)
    leaver.start()
    if early:
        leaver.join()
    began = time.monotonic()
    with pytest.raises(WeightGroupLostError, match="given up"):
        sender.join_group(group)
    receiver.join(20)
    assert not receiver.is_alive()
    assert time.monotonic() - began < 20
    assert torch_helper or isinstance(errors[0], WeightGroupLostError)


def test_enter_group_given_up_returns_at_once() -> None:
    group, store = group_of(2)
    began = time.monotonic()
    with pytest.raises(WeightSyncError, match="given up"):
        enter_group(group, store, aborted=lambda: True)
    assert time.monotonic() - began < 20


def test_enter_group_without_rank_zero_says_where_it_looked() -> None:
    group = WeightGroup("g", "127.0.0.1", 9, 2, rank=1, timeout_s=1.0)
    with pytest.raises(WeightSyncError, match=r"rank 1 of 2 could not join at 127.0.0.1:9"):
        enter_group(group)


def test_memberships_new_group_of_a_stage_replaces_the_old_one() -> None:
    inbox = Memberships()
    members = []
    for _ in range(2):
        group, store = group_of(2)
        joiner = threading.Thread(target=inbox.join, args=(replace(group, rank=1),))
        joiner.start()
        members.append(enter_group(group, store))
        joiner.join(20)
    with pytest.raises(WeightSyncError, match="was not joined"):
        inbox.get(members[0].group.name)
    assert inbox.get(members[1].group.name).group.rank == 1
    inbox.leave(members[1].group.name)
    inbox.leave("never joined")
    for member in members:
        member.abort()


_LEAVES_AND_EXITS = """
import atexit, os, signal, time
from dataclasses import replace
import torch
from areal.engine.core.weight_groups import enter_group, open_store
from areal.engine.core.weight_sources import WeightGroup

told, tell = os.pipe()
other = os.fork()
if other == 0:  # joins and never receives
    member = enter_group(WeightGroup("g", "127.0.0.1", int(os.read(told, 10)), 2, rank=1, timeout_s=60.0))
    signal.pause()
store = open_store("127.0.0.1", 60.0)
os.write(tell, str(store.port).encode())
member = enter_group(WeightGroup("g", "127.0.0.1", store.port, 2, timeout_s=60.0), store)
work = member.broadcast(torch.zeros(64 << 20, dtype=torch.uint8))
del work
member.abort()
atexit.register(os.kill, other, signal.SIGKILL)
"""


def test_abort_process_that_ends_while_the_group_closes_ends_in_order() -> None:
    done = subprocess.run([sys.executable, "-c", _LEAVES_AND_EXITS], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_make_buckets_vector() -> None:
    vector = load_vector("weight_buckets")
    sizes = [ParamSpec(str(i), (size,), "uint8") for i, size in enumerate(vector["inputs"]["sizes"])]
    buckets = make_buckets(sizes, vector["config"]["cap"])
    assert [[int(spec.name) for spec in bucket] for bucket in buckets] == vector["outputs"]["buckets"]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
