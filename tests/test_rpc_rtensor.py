"""Remote tensors against a real worker process: fetch, slices, freeing, loss, and calls with large tensors."""

from __future__ import annotations

import subprocess
import threading

import pytest
import torch

from areal.infra.rpc import frames
from areal.infra.rpc.client import WorkerClient
from areal.infra.rpc.errors import TensorLostError
from areal.infra.rpc.identity import set_identity
from areal.infra.rpc.rtensor import RTensor, clear_node, collect_shards, local_store, localize, remotize
from areal.infra.rpc.store import process_store
from areal.infra.rpc.stream import stream_pool
from tests.rpc_fakes import wait_address, worker_command, worker_env, worker_process


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    with worker_process(tmp_path_factory.mktemp("worker")) as worker:
        set_identity(worker.identity)
        worker.client.create("tensors", "tests.rpc_fakes.Tensors")
        yield worker


@pytest.fixture
def client(worker):
    return worker.client


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool", "uint8"])
@pytest.mark.parametrize("shape", [(3, 4), (), (0, 5), (7,)])
def test_fetch_gives_the_tensor(client, dtype, shape):
    reference = client.call("tensors", "keep", shape, dtype)

    fetched = reference.fetch()

    expected = torch.arange(reference.numel()).reshape(shape).to(getattr(torch, dtype))
    assert (reference.ndim, reference.shape, reference.dtype) == (len(shape), shape, dtype)
    assert reference.torch_dtype == fetched.dtype
    assert reference.nbytes == expected.nbytes
    assert torch.equal(fetched, expected)


@pytest.mark.parametrize("rows", [slice(2, 5), slice(None), slice(5, 2), slice(-3, None), slice(8, 99)])
def test_slice_fetches_only_its_rows(client, rows, monkeypatch):
    reference = client.call("tensors", "keep", (10, 4))
    expected = torch.arange(40).reshape(10, 4).float()[rows]
    received = []
    original = frames.receive_into
    monkeypatch.setattr(
        frames, "receive_into", lambda sock, view: (received.append(view.nbytes), original(sock, view))[1]
    )

    part = reference[rows]

    assert part.shape == tuple(expected.shape)
    assert torch.equal(part.fetch(), expected)
    if expected.numel():
        assert expected.nbytes in received
    assert reference.nbytes not in received or expected.nbytes == reference.nbytes
    assert torch.equal(reference[2:8][1:3].fetch(), torch.arange(40).reshape(10, 4).float()[3:5])


@pytest.mark.parametrize("index", [0, slice(0, 4, 2), (slice(0, 1), 0)])
def test_other_index_is_refused(index):
    with pytest.raises(TypeError, match="first dimension"):
        RTensor("x", "a:1", "float32", (4, 4))[index]


def test_localize_nested_tree_fetches_each_shard_once(client, worker):
    first = client.call("tensors", "keep", (300, 300))
    second = client.call("tensors", "keep", (5,), "int64")
    tree = {"a": [first, (second, 3, "x")], "b": first, "c": None, "d": torch.ones(2)}

    result = localize(tree)

    assert result["a"][0] is result["b"]
    assert torch.equal(result["a"][0], torch.arange(90000).reshape(300, 300).float())
    assert torch.equal(result["a"][1][0], torch.arange(5))
    assert result["a"][1][1:] == (3, "x")
    assert result["d"] is tree["d"]
    assert collect_shards(tree) == {first.address: [first.shard_id, second.shard_id]}
    assert first.address == worker.client.stream_address()


def test_localize_many_and_large_tensors_uses_several_requests(client):
    references = [client.call("tensors", "keep", (size,)) for size in (1, 9_000_000, 10, 9_000_000, 100)]
    references += [client.call("tensors", "keep", (3, 2))] * 3

    fetched = localize(references, concurrency=4)

    for reference, tensor in zip(references, fetched, strict=True):
        assert torch.equal(tensor, torch.arange(reference.numel()).reshape(reference.shape).float())


def test_clear_node_frees_and_later_fetch_names_the_worker(client):
    reference = client.call("tensors", "keep", (1000,))
    before = client.call("tensors", "stats")

    count = clear_node(reference.address, [reference.shard_id, "unknown"])

    after = client.call("tensors", "stats")
    assert count == 1
    assert before["num_tensors"] - after["num_tensors"] == 1
    assert before["total_bytes"] - after["total_bytes"] == 4000
    with pytest.raises(TensorLostError, match=reference.address):
        reference.fetch()


def test_owner_frees_its_own_tensor(client):
    reference = client.call("tensors", "keep", (10,))

    assert client.call("tensors", "free", [reference.shard_id]) == (1, 40)
    with pytest.raises(TensorLostError, match="freed"):
        reference.fetch()


def test_fetch_past_the_end_of_a_tensor_is_lost_not_garbage(client):
    reference = client.call("tensors", "keep", (10,))

    with pytest.raises(TensorLostError):
        RTensor(reference.shard_id, reference.address, "float32", (11,)).fetch()


def test_fetch_after_owner_was_killed_names_the_worker(tmp_path):
    with worker_process(tmp_path) as other:
        other.client.create("tensors", "tests.rpc_fakes.Tensors")
        reference = other.client.call("tensors", "keep", (10,))
        other.process.kill()
        other.process.wait()

        with pytest.raises(TensorLostError, match=reference.address):
            reference.fetch()
        assert clear_node(reference.address, [reference.shard_id]) == 0
        with pytest.raises(TensorLostError):
            localize([reference, reference[1:2]])


def test_worker_fetches_from_another_worker(client, worker, tmp_path):
    reference = client.call("tensors", "keep", (50_000,))
    process = subprocess.Popen(worker_command(tmp_path, worker.identity), env=worker_env())
    try:
        other = WorkerClient(wait_address(tmp_path, process), worker.identity)
        worker.leash.hold("other/0", other.stream_address())
        other.create("tensors", "tests.rpc_fakes.Tensors")

        total = other.call("tensors", "total", reference)

        assert total == float(torch.arange(50_000).float().sum())
        other.close()
    finally:
        worker.leash.release("other/0")
        process.terminate()
        process.wait(10)


def test_same_process_shards_share_memory():
    tensor = torch.arange(12.0).reshape(3, 4)

    reference = remotize([tensor])[0]
    fetched, rows = localize([reference, reference[1:2]])

    assert fetched.data_ptr() == tensor.data_ptr()
    assert rows.data_ptr() == tensor[1].data_ptr()
    assert torch.equal(rows, tensor[1:2])
    assert local_store().free([reference.shard_id]) == (1, 48)
    with pytest.raises(TensorLostError):
        local_store().get(reference)


def test_put_of_strided_or_grad_tensor_keeps_values():
    tensor = torch.arange(12.0).reshape(3, 4).t().requires_grad_()

    reference = local_store().put(tensor)
    fetched = localize(reference)

    assert torch.equal(fetched, tensor.detach())
    assert not fetched.requires_grad
    local_store().free([reference.shard_id])


def test_call_with_large_tensors_sends_each_once_and_keeps_nothing(client):
    before = client.call("tensors", "stats")
    large = torch.randn(100_000)

    assert client.call("tensors", "same", large, large) is True
    with pytest.raises(ValueError, match="100000"):
        client.call("tensors", "raise_after", large)

    assert client.call("tensors", "stats") == before


def test_large_result_is_a_snapshot(client):
    result = client.call("tensors", "made", 100_000)
    client.call("tensors", "spoil")

    assert result.sum() == 100_000
    assert client.call("tensors", "stats")["num_tensors"] == client.stats()["tensors"]["num_tensors"]


def test_many_small_tensors_do_not_exceed_the_body(client):
    tensors = [torch.full((10_000,), float(i)) for i in range(400)]  # 16 MB, each below the stream's threshold

    echoed = client.call("tensors", "back", tensors)

    assert all(torch.equal(a, b) for a, b in zip(tensors, echoed, strict=True))
    assert len(echoed) == 400


def test_result_nobody_fetches_expires(monkeypatch):
    store = process_store()
    key = store.add(torch.ones(3), life_s=-1.0)

    store.add(torch.ones(1), life_s=10.0, key="other")

    assert key not in store
    store.remove(["other"])


def test_concurrent_fetches_of_one_tensor_agree(client):
    reference = client.call("tensors", "keep", (500_000,))
    expected = torch.arange(500_000).float()
    good = []

    def fetch() -> None:
        good.append(torch.equal(reference.fetch(), expected))

    threads = [threading.Thread(target=fetch) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert good == [True] * 8


def test_stale_pooled_connection_is_replaced(client):
    reference = client.call("tensors", "keep", (10,))
    reference.fetch()
    for connections in stream_pool._idle.values():
        for connection in connections:
            connection.sock.shutdown(2)

    assert torch.equal(reference.fetch(), torch.arange(10).float())
