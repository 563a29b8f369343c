"""The 1.x path of a script: a train engine that is connected to a remote inference engine over real servers."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from areal.api.alloc_mode import ModelAllocation
from areal.api.io_struct import SaveLoadMeta, WeightUpdateMeta
from areal.engine.core.weight_sync import ParamRecord
from areal.engine.fsdp_engine import FSDPEngine
from areal.engine.native_remote import RemoteNativeEngine
from areal.utils.errors import ConfigError, UnsupportedFeatureError, WeightSyncError
from tests.engine_fakes import batch, build_engine, loss_fn, weight_fn
from tests.external_servers import ExternalServer, external_servers
from tests.fakes import save_tiny_model
from tests.server_fakes import ask, remote_config

PROMPT = [5, 9, 12, 7]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Hugging Face directory of the initial policy."""
    return save_tiny_model(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def servers(policy: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ExternalServer]]:
    """Two, for all tests: each begins where the one before it left them."""
    with external_servers(2, policy, tmp_path_factory.mktemp("servers")) as started:
        yield started


@contextmanager
def script(servers: list[ExternalServer], policy: str) -> Iterator[tuple[FSDPEngine, RemoteNativeEngine]]:
    """What a script makes first."""
    rollout = RemoteNativeEngine(remote_config(backend="native:d2", tokenizer_path=policy, consumer_batch_size=4))
    actor = build_engine(policy)
    try:
        rollout.initialize(addr=[server.address for server in servers])
        yield actor, rollout
    finally:
        rollout.destroy()
        actor.destroy()


def meta_of(kind: str, root: Path) -> WeightUpdateMeta:
    """As 1.x scripts make it."""
    if kind == "disk":
        return WeightUpdateMeta.from_disk("test", "test", str(root))
    return WeightUpdateMeta.from_fsdp_xccl(ModelAllocation.from_str("native:d2"), weight_chunked_mem_mb=1)


def update(actor: FSDPEngine, rollout: RemoteNativeEngine, meta: WeightUpdateMeta, version: int) -> None:
    """What a script does after a step."""
    rollout.pause()
    actor.update_weights(meta.with_version(version))
    actor.set_version(version)
    rollout.set_version(version)
    rollout.resume()


def assert_serves(actor: FSDPEngine, rollout: RemoteNativeEngine, version: int) -> None:
    """Every server generates with the trainer's weights."""
    for rid in ("one", "other"):  # equal servers take turns
        reply = asyncio.run(rollout.agenerate(ask(PROMPT, rid=f"{rid}-{version}", max_new_tokens=8)))
        assert set(reply.output_versions) == {version}
        ids = torch.tensor([PROMPT + reply.output_tokens])
        row = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "loss_mask": torch.ones_like(ids)}
        (expected,) = actor.forward_batch([row])
        assert reply.output_logprobs == pytest.approx(expected[0, len(PROMPT) - 1 : -1].tolist(), abs=1e-4)


@pytest.mark.parametrize("kind", ["disk", "xccl"])
def test_update_weights_of_a_script_servers_generate_with_the_trainers(
    kind: str, servers: list[ExternalServer], policy: str, tmp_path: Path
) -> None:
    with script(servers, policy) as (actor, rollout):
        meta = meta_of(kind, tmp_path)
        actor.connect_engine(rollout, meta)
        for version in (1, 2, 3):
            actor.train_batch(batch(), loss_fn, weight_fn)
            update(actor, rollout, meta, version)
            assert_serves(actor, rollout, version)
        assert not list(tmp_path.rglob("weight_update_v*"))  # loaded, hence cleared
    for server in servers:
        assert set(server.generate(PROMPT)[2]) == {3}


@pytest.mark.parametrize("kind", ["disk", "xccl"])
def test_update_weights_that_fails_old_version_serves_and_the_next_one_arrives(
    kind: str, servers: list[ExternalServer], policy: str, tmp_path: Path
) -> None:
    with script(servers, policy) as (actor, rollout):
        meta = meta_of(kind, tmp_path)
        actor.connect_engine(rollout, meta)
        update(actor, rollout, meta, 1)
        with pytest.MonkeyPatch.context() as patch:
            save, foreign = actor.save, [("model.nowhere.weight", torch.ones(3)), *actor.named_full_tensors()]

            def save_foreign(meta: SaveLoadMeta) -> None:
                save(meta)
                save_file(dict(foreign), Path(meta.path) / "model.safetensors")

            patch.setattr(actor, "named_full_tensors", lambda: iter(foreign))
            patch.setattr(actor, "save", save_foreign)
            actor._connected_weights._specs = None
            with pytest.raises(WeightSyncError, match="model.nowhere.weight"):
                actor.update_weights(meta.with_version(2))
        actor._connected_weights._specs = None
        assert_serves(actor, rollout, 1)
        actor.train_batch(batch(), loss_fn, weight_fn)
        update(actor, rollout, meta, 2)
        assert_serves(actor, rollout, 2)


@pytest.mark.parametrize("kind", ["disk", "xccl"])
def test_update_weights_that_arrive_damaged_are_never_put_into_service(
    kind: str, servers: list[ExternalServer], policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with script(servers, policy) as (actor, rollout):
        meta = meta_of(kind, tmp_path)
        actor.connect_engine(rollout, meta)
        update(actor, rollout, meta, 1)
        sender = actor._connected_weights._sender
        way = {"disk": "write_directory", "xccl": "send"}[kind]
        monkeypatch.setattr(sender, way, _other_norm(getattr(sender, way)))
        with pytest.raises(WeightSyncError, match=r"v2: model\.norm\.weight was sent as"):
            actor.update_weights(meta.with_version(2))
        assert_serves(actor, rollout, 1)
        monkeypatch.undo()
        update(actor, rollout, meta, 2)
        assert_serves(actor, rollout, 2)


def _other_norm(send: Callable[..., list[ParamRecord]]) -> Callable[..., list[ParamRecord]]:
    """``send``, whose records say something else of one tensor than what arrives."""

    def lying(*args: Any) -> list[ParamRecord]:
        found = {record.name: record for record in send(*args)}
        norm = found["model.norm.weight"]
        found[norm.name] = dataclasses.replace(norm, checksum=norm.checksum + 1)
        return list(found.values())

    return lying


def test_initialize_server_that_a_killed_run_left_paused_generates(servers: list[ExternalServer], policy: str) -> None:
    servers[1].post("/pause_generation", {"mode": "keep"})
    with script(servers, policy):
        servers[1].generate(PROMPT)


def test_connect_engine_other_ways_are_refused(policy: str) -> None:
    actor, rollout = build_engine(policy), object()
    with pytest.raises(UnsupportedFeatureError, match="type='shm'"):
        actor.connect_engine(rollout, WeightUpdateMeta("shm"))
    with pytest.raises(UnsupportedFeatureError, match="use_lora"):
        actor.connect_engine(rollout, WeightUpdateMeta("xccl", use_lora=True))
    actor.destroy()


def test_update_weights_of_other_servers_than_announced_is_refused(
    servers: list[ExternalServer], policy: str, tmp_path: Path
) -> None:
    with script(servers, policy) as (actor, rollout):
        meta = WeightUpdateMeta.from_fsdp_xccl(ModelAllocation.from_str("native:d3"))
        actor.connect_engine(rollout, meta)
        with pytest.raises(ConfigError, match="describes 3 ranks"):
            actor.update_weights(meta.with_version(1))
