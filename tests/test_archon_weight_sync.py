"""The parts of Archon's weight sync that one process shows; several ranks: tests/torchrun/test_archon_weights.py."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from areal.api.io_struct import WeightUpdateMeta
from areal.engine.core.distributed import current_device
from areal.engine.core.tensor_parts import laid_out_like, local_part
from areal.engine.core.weight_sender import WeightSender
from areal.engine.core.weight_wire import make_buckets
from areal.experimental.engine import archon_weight_sync as sync
from areal.experimental.engine.archon_engine import ArchonEngine
from areal.utils.errors import ConfigError, EngineError, WeightSyncError
from tests.engine_fakes import engine_config
from tests.fakes import tiny_model


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ArchonEngine]:
    """Alone, connected to nobody."""
    path: Path = tmp_path_factory.mktemp("model")
    tiny_model("qwen3", tie_word_embeddings=False).save_pretrained(path)
    made = ArchonEngine(engine_config(str(path), backend="archon:d1"))
    made.create_process_group()
    made.initialize(None, None)
    yield made
    made.destroy()


def test_weight_sync_state_knows_the_name_of_its_group_and_no_group() -> None:
    state = sync.WeightSyncState(3)
    assert (state.pp_rank, state.group_initialized, state.group_name) == (3, False, "update_weight_group_3")
    assert (state.master_addr, state.master_port, state.group) == ("", 0, None)
    assert state.group_names == state.groups == state.master_addrs == state.master_ports == []


def test_weight_sync_state_after_a_failed_update_knows_that_no_group_is_left() -> None:
    state = sync.WeightSyncState(0)
    group = SimpleNamespace(name="g", host="127.0.0.1", port=1)
    connected: Any = SimpleNamespace(group=group)
    state.note(connected)
    assert (state.group_initialized, state.group_name, state.groups) == (True, "g", [group])

    def fail(meta: WeightUpdateMeta) -> None:
        connected.group = None
        raise WeightSyncError("a server did not answer")

    connected.update = fail
    engine: Any = SimpleNamespace(connected_weights=connected)
    with pytest.raises(WeightSyncError, match="did not answer"):
        sync.update_weights_from_distributed(state, WeightUpdateMeta(type="xccl"), engine)

    assert (state.group_initialized, state.group, state.groups) == (False, None, [])


def test_buckets_of_an_engine_are_flushed_before_they_overflow(engine: ArchonEngine) -> None:
    specs = WeightSender(engine, lambda: True).specs()
    assert specs is not None
    limit = 5000  # bytes; the embedding has 8192, norms have 128 and 32

    buckets = make_buckets(specs, limit)

    assert [spec for bucket in buckets for spec in bucket] == specs
    assert [spec.name for spec in buckets[0]] == ["model.embed_tokens.weight"]  # larger than a bucket: alone
    for bucket, after in zip(buckets, [*buckets[1:], None], strict=True):
        filled = sum(spec.size for spec in bucket)
        assert filled <= limit or len(bucket) == 1
        assert after is None or filled + after[0].size > limit  # the next one would not have fitted


def test_get_full_tensor_of_a_plain_parameter_is_the_parameter_on_the_device() -> None:
    parameter = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    found = sync._get_full_tensor(parameter)
    assert found.device.type == current_device().type
    assert not found.requires_grad
    torch.testing.assert_close(found.cpu(), parameter.detach(), rtol=0, atol=0)


def test_named_full_tensors_gathers_every_parameter_with_get_full_tensor(
    engine: ArchonEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {name: tensor.clone() for name, tensor in engine.named_full_tensors()}
    monkeypatch.setattr(sync, "_get_full_tensor", lambda parameter: parameter + 1)
    for name, tensor in engine.named_full_tensors():
        torch.testing.assert_close(tensor, before[name] + 1, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_get_full_tensor_of_an_offloaded_shard_is_gathered_on_its_device() -> None:
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cuda", (1,))
    whole = torch.arange(6.0).reshape(2, 3)
    sharded = distribute_tensor(whole.cuda(), mesh, [Shard(0)])
    offloaded = laid_out_like(sharded, local_part(sharded).cpu())

    found = sync._get_full_tensor(offloaded)

    dist.destroy_process_group()
    assert found.device.type == "cuda"
    torch.testing.assert_close(found.cpu(), whole, rtol=0, atol=0)


def test_updates_of_another_type_are_refused(engine: ArchonEngine) -> None:
    state, disk, xccl = sync.WeightSyncState(0), WeightUpdateMeta("disk", path="/x"), WeightUpdateMeta("xccl")
    calls: list[Any] = [
        lambda: sync.init_weight_update_group(state, disk, engine),
        lambda: sync.update_weights_from_distributed(state, disk, engine),
        lambda: sync._update_bucket_weights(state, disk, None, contextlib.nullcontext(), [("a", torch.ones(1))]),  # type: ignore[arg-type]
        lambda: sync.update_weights_from_disk(xccl, engine),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match="WeightUpdateMeta.type"):
            call()


def test_updates_of_an_engine_without_servers_say_what_to_call_first(engine: ArchonEngine) -> None:
    state, meta = sync.WeightSyncState(0), WeightUpdateMeta("xccl")
    for function in (sync.init_weight_update_group, sync.update_weights_from_distributed):
        with pytest.raises(EngineError, match="connect_engine"):
            function(state, meta, engine)
    with pytest.raises(EngineError, match="connect_engine"):
        sync.update_weights_from_disk(WeightUpdateMeta("disk", path="/x"), engine)
    assert not state.group_initialized


def test_update_bucket_weights_without_a_group_keeps_its_list_and_without_tensors_does_nothing() -> None:
    state, meta, rollout = sync.WeightSyncState(0), WeightUpdateMeta("xccl"), object()
    tensors = [("model.norm.weight", torch.ones(4))]
    with pytest.raises(ConfigError, match="init_weight_update_group"):
        sync._update_bucket_weights(state, meta, rollout, contextlib.nullcontext(), tensors)  # type: ignore[arg-type]
    assert len(tensors) == 1
    sync._update_bucket_weights(state, meta, rollout, contextlib.nullcontext(), [])  # type: ignore[arg-type]
