"""The worker extension without vLLM: what it reads and receives, what it refuses, and what it imports."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import areal.engine.vllm_ext
from areal.api.io_struct import ParamSpec
from areal.engine.core import weight_groups, weight_wire
from areal.engine.core.shared_weights import WeightWriter
from areal.engine.core.weight_groups import Membership, enter_group, open_store
from areal.engine.core.weight_sources import WeightGroup, XcclSource
from areal.engine.core.weight_sync import ParamRecord, checksum
from areal.engine.core.weight_wire import make_buckets, send_buckets
from areal.engine.vllm_ext import vllm_worker_extension as extension
from areal.engine.vllm_ext.areal_token_guard import TokenGuard
from areal.engine.vllm_remote import VLLMProtocol
from areal.utils.errors import WeightSyncError
from tests.fakes import tiny_model

PROTOCOL = VLLMProtocol()
FOLDER = Path(areal.engine.vllm_ext.__file__).parent
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.float8_e4m3fn)


class FakeWorker(extension.VLLMWorkerExtension):
    """A worker whose model is transformers' own."""

    def __init__(self, model: Any, directory: Path, rank: int = 0) -> None:
        self.rank = rank
        self.device = torch.device("cpu")
        self.model_config = SimpleNamespace(model=str(directory), hf_config=model.config)
        self.model_runner = SimpleNamespace(get_model=lambda: model)
        self.model = model
        self.failing = False

    def reload_weights(self, weights_iterator: Iterator[tuple[str, Tensor]]) -> None:  # type: ignore[override]
        """As vLLM does, one tensor after the other."""
        for name, tensor in weights_iterator:
            self.model.state_dict()[name].copy_(tensor)
            if self.failing:
                raise RuntimeError("no memory")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A checkpoint of seed 0."""
    tiny_model(seed=0).save_pretrained(tmp_path / "v0")
    return tmp_path / "v0"


@pytest.fixture
def worker(directory: Path) -> FakeWorker:
    """It serves seed 0."""
    return FakeWorker(tiny_model(seed=0), directory)


def weights(model: Any) -> list[tuple[str, Tensor]]:
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


def mixed_tensors() -> list[tuple[str, Tensor]]:
    """Sizes and dtypes that travel in every way: alone, together, unaligned, empty of meaning."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(300, 1000, generator=generator), torch.randn(524288, generator=generator).bfloat16()]
    tensors += [torch.randn(3, 5, generator=generator).mul(40).to(dtype) for dtype in DTYPES]
    return [(f"p{i}", tensor) for i, tensor in enumerate(tensors)]


def rpc(worker: FakeWorker, calls: list[Any]) -> Any:
    """What ``/collective_rpc`` answers to the only call."""
    (call,) = calls
    return {"results": [getattr(worker, call.body["method"])(**call.body["kwargs"])]}


def same(first: Any, second: Any) -> bool:
    return all(torch.equal(a, b) for (_, a), (_, b) in zip(weights(first), weights(second), strict=True))


def test_checksum_is_the_one_of_the_trainer() -> None:
    for _, tensor in mixed_tensors():
        assert extension.checksum(tensor) == checksum(tensor)


def test_stage_shm_then_commit_serves_what_was_written(worker: FakeWorker) -> None:
    trainer, writer = tiny_model(seed=1), WeightWriter()
    manifest = writer.write(weights(trainer), 5)

    records = PROTOCOL.records([rpc(worker, PROTOCOL.stage(manifest, 5))])
    old = same(worker.model, tiny_model(seed=0))
    PROTOCOL.confirm([rpc(worker, PROTOCOL.commit(5)[:1])])
    writer.close()

    assert records == [[param.record() for param in manifest.params]]
    assert old
    assert same(worker.model, trainer)


def test_staged_memory_outlives_the_process_that_wrote_it(worker: FakeWorker) -> None:
    trainer, writer = tiny_model(seed=1), WeightWriter()

    worker.areal_stage_shm(**PROTOCOL.stage(writer.write(weights(trainer), 5), 5)[0].body["kwargs"])  # type: ignore[index]
    writer.close()
    worker.areal_commit(version=5)

    assert same(worker.model, trainer)


def test_directory_tensors_are_those_of_every_file_and_dtype(tmp_path: Path) -> None:
    tensors = mixed_tensors()
    save_file(dict(tensors[:3]), tmp_path / "model-00001-of-00002.safetensors", {"format": "pt"})
    save_file(dict(tensors[3:]), tmp_path / "model-00002-of-00002.safetensors")

    found = dict(extension.directory_tensors(str(tmp_path)))

    assert found.keys() == dict(tensors).keys()
    for name, tensor in tensors:
        assert ParamRecord.of(name, found[name]) == ParamRecord.of(name, tensor)


def test_directory_index_decides_which_files_count(tmp_path: Path) -> None:
    tensors = mixed_tensors()
    save_file(dict(tensors[:1]), tmp_path / "part.safetensors")
    save_file(dict(tensors[1:]), tmp_path / "consolidated.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"p0": "part.safetensors"}}')

    assert [name for name, _ in extension.directory_tensors(str(tmp_path))] == ["p0"]


@pytest.mark.parametrize("damage", ["absent", "no file", "cut", "header cut", "not safetensors"])
def test_stage_disk_directory_that_cannot_be_read_is_an_error(
    worker: FakeWorker, directory: Path, tmp_path: Path, damage: str
) -> None:
    target = tmp_path / "new"
    if damage != "absent":
        target.mkdir()
        content = (directory / "model.safetensors").read_bytes()
        cut = {"cut": content[:-100], "header cut": content[:40], "not safetensors": b"hello"}.get(damage)
        if cut is not None:
            (target / "model.safetensors").write_bytes(cut)

    answer = worker.areal_stage_disk(version=1, path=str(target))

    assert str(target) in answer["error"]
    assert "error" in worker.areal_commit(version=1)
    assert same(worker.model, tiny_model(seed=0))


def _without(name: str) -> Callable[[list[tuple[str, Tensor]]], list[tuple[str, Tensor]]]:
    return lambda pairs: [pair for pair in pairs if pair[0] != name]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_without("model.layers.1.self_attn.k_proj.weight"), "model.layers.1.self_attn.k_proj.weight.*missing"),
        (_without("model.norm.weight"), "model.norm.weight.*missing"),
        (lambda pairs: [*pairs, pairs[0]], "twice"),
        (lambda pairs: [*pairs, ("model.more.weight", pairs[0][1])], "model.more.weight is not in"),
        (lambda pairs: [(name, t[:2] if "norm" in name else t) for name, t in pairs], r"norm.weight has shape \[2\]"),
    ],
)
def test_stage_weights_that_are_not_the_models_are_refused(
    worker: FakeWorker, change: Callable[..., Any], named: str
) -> None:
    writer = WeightWriter()
    manifest = writer.write(change(weights(tiny_model(seed=1))), 1)

    with pytest.raises(WeightSyncError, match=named):
        PROTOCOL.records([rpc(worker, PROTOCOL.stage(manifest, 1))])

    writer.close()
    assert same(worker.model, tiny_model(seed=0))


def test_check_complete_tolerates_what_this_model_has_no_place_for() -> None:
    model = tiny_model(seed=0)
    given = weights(model)
    expected = {name: list(tensor.shape) for name, tensor in given}
    expected |= {"lm_head.weight": [64, 32], "mtp.layers.0.weight": [3], "model.layers.2.mlp.down_proj.weight": [3]}

    extension.check_complete(given, expected, model, model.config)
    extension.check_complete([*given, ("lm_head.weight", torch.zeros(64, 32))], expected, model, model.config)
    extension.check_complete([("anything", torch.zeros(1))], {}, model, model.config)


def test_check_complete_buffer_that_the_model_computes_may_be_absent() -> None:
    model = tiny_model(seed=0)
    given = weights(model)
    expected = {name: list(tensor.shape) for name, tensor in given}
    expected["model.layers.0.self_attn.rotary_emb.inv_freq"] = [4]

    extension.check_complete(given, expected, model, model.config)
    with pytest.raises(ValueError, match=r"layers.1.self_attn.q_proj.weight.*missing"):
        extension.check_complete(
            _without("model.layers.1.self_attn.q_proj.weight")(given), expected, model, model.config
        )


def test_check_complete_untied_head_may_not_be_absent() -> None:
    model = tiny_model(seed=0, tie_word_embeddings=False)
    given = weights(model)
    expected = {name: list(tensor.shape) for name, tensor in given}

    extension.check_complete(given, expected, model, model.config)
    with pytest.raises(ValueError, match=r"lm_head.weight.*missing"):
        extension.check_complete(_without("lm_head.weight")(given), expected, model, model.config)


def test_commit_what_is_not_staged_is_an_error(worker: FakeWorker, directory: Path) -> None:
    nothing = worker.areal_commit(version=1)
    worker.areal_stage_disk(version=1, path=str(directory))
    other = worker.areal_commit(version=2)
    worker.areal_discard()
    gone = worker.areal_commit(version=1)

    assert all("not staged" in answer["error"] for answer in (nothing, other, gone))


def test_commit_that_fails_half_way_ends_the_server(
    worker: FakeWorker, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()
    monkeypatch.setattr(extension, "_EXIT_DELAY_S", 0.01)
    monkeypatch.setattr(os, "_exit", lambda code: ended.set())
    worker.areal_stage_disk(version=1, path=str(directory))
    worker.failing = True

    answer = worker.areal_commit(version=1)

    assert "no memory" in answer["error"]
    assert ended.wait(5)


class Group:
    """Rank 0, and workers that have joined."""

    def __init__(self, workers: list[FakeWorker], timeout_s: float = 20.0, *, name: str = "g", stage: int = 0) -> None:
        store = open_store("127.0.0.1", timeout_s)
        self.group = WeightGroup(
            name, "127.0.0.1", store.port, 1 + len(workers), rank=1, stage=stage, timeout_s=timeout_s
        )
        self.threads = ThreadPoolExecutor(8)
        joins = [self.threads.submit(rpc, worker, PROTOCOL.join_group(self.group)) for worker in workers]
        self.member: Membership = enter_group(dataclasses.replace(self.group, rank=0), store)
        PROTOCOL.confirm([join.result(timeout_s) for join in joins])

    def send(
        self, workers: list[FakeWorker], pairs: list[tuple[str, Tensor]], bucket_bytes: int, count: int | None = None
    ) -> tuple[list[ParamRecord], list[list[ParamRecord]]]:
        """Send the first ``count`` of ``pairs`` to workers that expect all."""
        specs = [ParamSpec(name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in pairs]
        buckets = make_buckets(specs, bucket_bytes)
        stage = PROTOCOL.stage(XcclSource(1, self.group, buckets), 1)
        answers = [self.threads.submit(rpc, worker, stage) for worker in workers]
        try:
            sent = send_buckets(self.member, iter(pairs[:count]), buckets)
        finally:
            received = [answer.result(30) for answer in answers]
        return sent, [records for answer in received for records in PROTOCOL.records([answer]) or ()]


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20, 1 << 30])
@pytest.mark.parametrize("alone_bytes", [weight_wire.ALONE_FROM, 1 << 20])
def test_stage_xccl_receives_what_the_trainer_sends(
    directory: Path, tmp_path: Path, bucket_bytes: int, alone_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_wire, "ALONE_FROM", alone_bytes)
    monkeypatch.setattr(extension, "ALONE_BYTES", alone_bytes)
    empty = tmp_path / "no-checkpoint"
    workers = [FakeWorker(tiny_model(seed=0), empty, rank) for rank in (0, 1)]
    group = Group(workers)

    sent, received = group.send(workers, mixed_tensors(), bucket_bytes)

    assert received == [sent, sent]
    left = [worker.areal_leave(name="g")["left"] for worker in workers]
    assert (left, workers[0].areal_leave(name="g")["left"]) == ([True, True], False)


def test_stage_xccl_trainer_that_stops_half_way_wakes_the_worker(worker: FakeWorker) -> None:
    group = Group([worker])

    with pytest.raises(WeightSyncError, match="no more weights"):
        group.send([worker], mixed_tensors(), 1 << 20, count=3)

    assert not worker.areal_leave(name="g")["left"]
    assert "error" in worker.areal_commit(version=1)
    assert same(worker.model, tiny_model(seed=0))


def test_stage_xccl_group_that_another_rank_gives_up_ends_before_the_limit(worker: FakeWorker) -> None:
    group = Group([worker])
    specs = [ParamSpec(name, tuple(t.shape), "float32") for name, t in mixed_tensors() if t.dtype == torch.float32]
    answer = group.threads.submit(rpc, worker, PROTOCOL.stage(XcclSource(1, group.group, [specs]), 1))
    began = time.monotonic()

    group.member._store.set(weight_groups._LOST, "1")  # what a rank does whose connections gloo keeps open

    with pytest.raises(WeightSyncError, match="given up by a rank"):
        PROTOCOL.records([answer.result(30)])
    assert time.monotonic() - began < 10


class FakeNccl:
    """A process group whose broadcasts end when it is aborted, as if they had succeeded."""

    def __init__(self) -> None:
        self.aborted = threading.Event()

    def abort(self) -> None:
        self.aborted.set()

    def broadcast(self, tensors: list[Tensor], options: Any) -> Any:
        return SimpleNamespace(wait=self._wait)

    def _wait(self) -> None:
        if not self.aborted.wait(10):
            raise TimeoutError("nobody aborted the broadcast")


@pytest.mark.parametrize("how", ["a rank tells", "rank 0 ends"])
def test_stage_xccl_nccl_group_that_is_given_up_is_aborted(
    worker: FakeWorker, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(extension, "LOOK_S", 0.02)
    stores = [open_store("127.0.0.1", 20.0)]
    client = extension.c10d.TCPStore("127.0.0.1", stores[0].port, is_master=False, wait_for_workers=False)
    group = extension.Group(FakeNccl(), "nccl", extension.c10d.PrefixStore("g", client))
    extension._state(worker).groups["g"] = group
    if how == "a rank tells":
        extension.c10d.PrefixStore("g", stores[0]).set(extension.LOST, "1")
    else:
        stores.clear()

    answer = worker.areal_stage_xccl(version=1, group="g", buckets=[[("p", [4], "float32")]])

    assert "given up by a rank" in answer["error"]
    assert group.process_group.aborted.is_set()
    assert not worker.areal_leave(name="g")["left"]
    assert "error" in worker.areal_commit(version=1)


def test_watched_nccl_group_that_nobody_gives_up_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = threading.Semaphore(0)
    monkeypatch.setattr(extension, "LOOK_S", 0.01)
    group = extension.Group(FakeNccl(), "nccl", SimpleNamespace(check=lambda keys: looked.release()))

    with group.watched():
        assert all(looked.acquire(timeout=10) for _ in range(3))

    assert not group.process_group.aborted.is_set()
    assert not [thread for thread in threading.enumerate() if "(_watch)" in thread.name]


def test_wire_of_groups_is_the_one_of_the_trainer() -> None:
    ours = (weight_wire.ALONE_FROM, weight_wire.ALIGNMENT, weight_groups._LOST)
    assert ours == (extension.ALONE_BYTES, extension.ALIGN_BYTES, extension.LOST)


def test_join_leaves_the_group_of_the_same_stage_only(worker: FakeWorker) -> None:
    for name, stage in (("first", 0), ("other", 1), ("second", 0)):
        Group([worker], name=name, stage=stage)

    assert [worker.areal_leave(name=name)["left"] for name in ("first", "other", "second")] == [False, True, True]


def test_stage_xccl_group_that_was_not_joined_is_an_error(worker: FakeWorker) -> None:
    answer = worker.areal_stage_xccl(version=1, group="g", buckets=[])

    assert "group g was not joined" in answer["error"]


def test_join_that_nobody_answers_ends_at_the_limit(worker: FakeWorker) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        group = WeightGroup("g", "127.0.0.1", silent.getsockname()[1], 2, rank=1, timeout_s=0.5)
        answer = rpc(worker, PROTOCOL.join_group(group))

    with pytest.raises(WeightSyncError, match="areal_join"):
        PROTOCOL.confirm([answer])


def test_join_that_rank_0_gives_up_ends_at_once(worker: FakeWorker) -> None:
    store = open_store("127.0.0.1", 20.0)
    extension.c10d.PrefixStore("g", store).set("go", "0")
    group = WeightGroup("g", "127.0.0.1", store.port, 3, rank=1, timeout_s=20.0)

    with pytest.raises(WeightSyncError, match="rank 0 gave up group g"):
        PROTOCOL.confirm([rpc(worker, PROTOCOL.join_group(group))])


def test_extension_alone_imports_torch_and_the_standard_library() -> None:
    code = (
        "import sys, vllm_worker_extension, areal_vllm_server, areal_token_guard\n"
        "assert vllm_worker_extension.VLLMWorkerExtension\n"
        "found = {name.partition('.')[0] for name in sys.modules}\n"
        "assert not found & {'areal', 'transformers', 'safetensors', 'vllm'}, found"
    )
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"PYTHONPATH": str(FOLDER)}

    done = subprocess.run([sys.executable, "-c", code], env=env, cwd="/", capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("kind", "path", "headers", "answer"),
    [
        ("http", "/health", [], "the app"),
        ("http", "/collective_rpc", [(b"authorization", b"Bearer secret")], "the app"),
        ("http", "/collective_rpc", [], 401),
        ("http", "/collective_rpc", [(b"authorization", b"Bearer secre")], 401),
        ("http", "/pause", [(b"authorization", b"secret")], 401),
        ("http", "/health/../pause", [], 401),
        ("websocket", "/v1/realtime", [], 1008),
        ("lifespan", "", [], "the app"),
    ],
)
def test_token_guard_lets_in_who_knows_the_token(
    kind: str, path: str, headers: list[tuple[bytes, bytes]], answer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[Any] = []

    async def app(*_: Any) -> None:
        said.append("the app")

    async def send(message: dict[str, Any]) -> None:
        said.append(message.get("status") or message.get("code") or message)

    monkeypatch.setenv("VLLM_API_KEY", "secret")
    asyncio.run(TokenGuard(app)({"type": kind, "path": path, "headers": headers}, None, send))

    assert said[0] == answer


def test_server_entry_runs_vllms_own_server_with_its_arguments(tmp_path: Path) -> None:
    package = tmp_path / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    (package / "api_server.py").write_text("import sys\nif __name__ == '__main__': print(sys.argv[1:])\n")
    env = os.environ | {"PYTHONPATH": f"{tmp_path}:{FOLDER.parents[2]}"}
    command = [sys.executable, "-m", "areal.engine.vllm_ext.areal_vllm_server", "--model", "m"]

    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert done.stdout.strip() == "['--model', 'm']", done.stderr
