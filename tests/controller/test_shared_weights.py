"""Weights in anonymous shared memory: what is written is what is read, and two versions do not touch each other."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from areal.engine.core.shared_weights import SharedParam, WeightManifest, WeightWriter, any_rank, read_weights
from areal.engine.core.weight_sync import compare_records
from areal.infra.rpc.rtensor import local_store
from areal.utils.errors import WeightSyncError

Pairs = list[tuple[str, torch.Tensor]]


def model(version: int) -> Pairs:
    """Three parameters of odd sizes and different types."""
    torch.manual_seed(version)
    return [
        ("embed.weight", torch.randn(7, 5)),
        ("norm.weight", torch.randn(3).to(torch.bfloat16)),
        ("head.weight", torch.randn(5, 7).t()),  # not contiguous
    ]


@pytest.fixture
def writer() -> Iterator[WeightWriter]:
    made = WeightWriter()
    yield made
    made.close()


def read(manifest: WeightManifest) -> Pairs:
    """Copies of what a reader sees."""
    with read_weights(manifest) as pairs:
        return [(name, tensor.clone()) for name, tensor in pairs]


def assert_equal(found: Pairs, expected: Pairs) -> None:
    assert [name for name, _ in found] == [name for name, _ in expected]
    for (name, mine), (_, theirs) in zip(found, expected, strict=True):
        assert mine.dtype == theirs.dtype, name
        assert torch.equal(mine, theirs), name


def test_read_weights_same_host_returns_what_was_written(writer: WeightWriter) -> None:
    manifest = writer.write(model(1), version=1)
    assert_equal(read(manifest), model(1))
    records = [param.record() for param in manifest.params]
    compare_records(records, [param.record() for param in manifest.params], 1)


def test_read_weights_other_host_takes_the_tensor_store(writer: WeightWriter) -> None:
    manifest = replace(writer.write(model(1), version=1), host="elsewhere", pid=1, fd=99999)
    assert_equal(read(manifest), model(1))


def test_write_next_version_leaves_the_one_in_service_alone(writer: WeightWriter) -> None:
    first = writer.write(model(1), version=1)
    second = writer.write(model(2), version=2)
    assert_equal(read(first), model(1))
    assert_equal(read(second), model(2))
    third = writer.write(model(3), version=3)  # takes the first buffer again
    assert third.fd == first.fd
    assert_equal(read(third), model(3))
    assert_equal(read(second), model(2))


def test_write_larger_model_grows_the_buffer(writer: WeightWriter) -> None:
    writer.write(model(1), version=1)
    writer.write(model(2), version=2)
    larger = [*model(3), ("more.weight", torch.randn(100, 10))]
    assert_equal(read(writer.write(larger, version=3)), larger)


def test_read_weights_in_another_process_sees_the_same_bytes(writer: WeightWriter) -> None:
    manifest = writer.write(model(1), version=1)
    code = (
        "import mmap, os, sys; fd = os.open(sys.argv[1], os.O_RDONLY);"
        "print(sum(mmap.mmap(fd, 0, prot=mmap.PROT_READ)[:]))"
    )
    path = f"/proc/{manifest.pid}/fd/{manifest.fd}"
    seen = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    assert int(seen.stdout) == int(local_store().get(manifest.shard).sum(dtype=torch.int64))


def test_read_weights_of_the_next_writer_lets_go_of_those_of_a_dead_one(writer: WeightWriter) -> None:
    manifest = writer.write(model(1), version=1)
    code = (
        "import os; fd = os.memfd_create('dead'); os.truncate(fd, 1 << 20); print(fd, os.fstat(fd).st_ino, flush=True);"
        "input()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as child:
        assert child.stdout is not None
        fd, inode = child.stdout.readline().split()
        foreign = SharedParam("w", (1 << 18,), "float32", 0, 0)
        read(replace(manifest, pid=child.pid, fd=int(fd), size_bytes=1 << 20, params=[foreign]))
        child.kill()
    assert inode in mapped_inodes()
    read(manifest)
    assert inode not in mapped_inodes()


def mapped_inodes() -> set[str]:
    """Of the files that this process maps."""
    return {line.split()[4] for line in Path("/proc/self/maps").read_text().splitlines()}


def test_close_frees_the_memory(writer: WeightWriter) -> None:
    manifest = writer.write(model(1), version=1)
    assert manifest.shard in local_store()
    writer.close()
    assert manifest.shard not in local_store()


def test_any_rank_without_a_writer_is_an_error() -> None:
    with pytest.raises(WeightSyncError, match="no rank"):
        any_rank([None, None])
