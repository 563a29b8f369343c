"""The public inference engine over scripted servers: episodes, pauses, updates as futures."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from areal.api.config.inference import NativeConfig
from areal.api.engine_api import InferenceEngine
from areal.api.io_struct import ParamSpec, WeightUpdateMeta
from areal.api.workflow_api import RolloutWorkflow
from areal.engine.inference.remote_engine import RemoteInfEngine, read_limits
from areal.infra.rollout.failures import RolloutStoppedError
from areal.utils.errors import ConfigError, EngineError, WeightSyncError
from tests.rollout_fakes import table
from tests.server_fakes import FakeProtocol, FakeServer, Fault, ask, draw, limits, remote_config, serving, wait_until


class OneTurn(RolloutWorkflow):
    """Generates once; the reward is the version of the first token."""

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Any] | None:
        response = await engine.agenerate(ask([5, data["x"]], seed=None, max_new_tokens=3))
        return table(float(response.output_versions[0]), 4, response.output_versions[0])


@contextmanager
def connected(*servers: FakeServer, **settings: Any) -> Iterator[RemoteInfEngine]:
    with serving(*servers):
        engine = RemoteInfEngine(remote_config(consumer_batch_size=4, **settings), FakeProtocol(), limits=limits())
        try:
            engine.initialize(addr=[server.address for server in servers])
            yield engine
        finally:
            engine.destroy()


def test_initialize_checks_each_server_and_generates() -> None:
    server = FakeServer()
    with connected(server) as engine:
        assert engine.initialized
        engine.initialize()
        probes = len(server.calls())
        response = asyncio.run(engine.agenerate(ask(max_new_tokens=2)))
    assert probes == 1
    assert response.output_tokens[0] == draw([5, 6, 7], 1, 0)[0]


def test_initialize_comma_list_connects_to_all() -> None:
    servers = [FakeServer(), FakeServer()]
    with serving(*servers):
        engine = RemoteInfEngine(remote_config(), FakeProtocol(), limits=limits())
        engine.initialize(addr=",".join(server.address for server in servers))
        assert engine.sampler.group_ranks == 2
        engine.destroy()


def test_initialize_without_servers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AREAL_LLM_SERVER_ADDRS", raising=False)
    engine = RemoteInfEngine(remote_config(), FakeProtocol(), limits=limits())
    with pytest.raises(EngineError, match="AREAL_LLM_SERVER_ADDRS"):
        engine.initialize()
    engine.destroy()


def test_initialize_addresses_of_the_environment_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    server = FakeServer()
    with serving(server):
        monkeypatch.setenv("AREAL_LLM_SERVER_ADDRS", server.address)
        engine = RemoteInfEngine(remote_config(), FakeProtocol(), limits=limits())
        engine.initialize()
        assert engine.initialized
        engine.destroy()


def test_generation_before_initialize_is_refused() -> None:
    engine = RemoteInfEngine(remote_config(), FakeProtocol(), limits=limits())
    with pytest.raises(EngineError, match="call initialize"):
        asyncio.run(engine.agenerate(ask()))
    engine.destroy()
    engine.destroy()


def test_rollout_batch_episodes_run_and_carry_versions() -> None:
    with connected(FakeServer()) as engine:
        engine.set_version(4)
        found = engine.rollout_batch([{"x": i} for i in range(2, 6)], OneTurn())
        assert engine.get_version() == 4
    assert [int(item["rewards"]) for item in found] == [4] * 4


def test_rollout_batch_server_that_fails_once_row_is_generated_again() -> None:
    server = FakeServer()
    with connected(server) as engine:
        server.fail_next(Fault("edit", edit=lambda reply: {**reply, "logprobs": [float("nan")] * 3}))
        found = engine.rollout_batch([{"x": i} for i in range(2, 6)], OneTurn())
    assert len(found) == 4
    assert len(server.calls()) == 1 + 4 + 1  # the probe, four rows, one of them again


def test_rollout_batch_servers_that_are_gone_for_good_end_the_rollout_with_the_reason() -> None:
    server = FakeServer()
    with connected(server, setup_timeout=1.0, max_failure_share=1.0) as engine:
        engine.rollout_batch([{"x": 2}], OneTurn())
        server.stop()
        with pytest.raises(RolloutStoppedError, match="none has worked for"):
            engine.rollout_batch([{"x": i} for i in range(2, 6)], OneTurn())


def test_pause_generation_freezes_and_continue_goes_on() -> None:
    server = FakeServer()
    with connected(server) as engine:
        engine.pause_generation()
        assert server.paused
        engine.continue_generation()
        assert not server.paused


def test_update_weights_from_disk_future_ends_when_the_version_serves(tmp_path: Path) -> None:
    server = FakeServer()
    meta = WeightUpdateMeta("disk", path=str(tmp_path / "weight_update")).with_version(3)
    with connected(server) as engine:
        future = engine.update_weights_from_disk(meta)  # the directory is still being written
        assert not future.done()
        Path(str(meta.path)).mkdir()
        future.result(30)
        engine.set_version(3)
        response = asyncio.run(engine.agenerate(ask(max_new_tokens=2)))
    assert response.output_versions == [3, 3]
    assert not Path(str(meta.path)).exists()
    order = [path for path, _ in server.log if path in ("/pause", "/stage", "/commit", "/resume")]
    assert order == ["/resume", "/pause", "/stage", "/commit", "/resume"]  # the first one when it connected


def test_update_weights_from_disk_that_fails_leaves_the_old_version_serving(tmp_path: Path) -> None:
    server = FakeServer()
    meta = WeightUpdateMeta("disk", path=str(tmp_path), version=1, clear_checkpoint_after_load=False)
    with connected(server) as engine:
        server.fail_next(Fault("status", 400, "directory lacks model.norm.weight"), path="/stage")
        with pytest.raises(WeightSyncError, match="lacks model.norm.weight"):
            engine.update_weights_from_disk(meta).result(30)
        response = asyncio.run(engine.agenerate(ask(max_new_tokens=2)))
        engine.update_weights_from_disk(meta).result(30)
        assert engine.sampler.get_version() == 1
    assert response.output_versions == [0, 0]
    assert len(server.calls("/discard")) == 1
    assert tmp_path.exists()


def test_update_weights_from_disk_directory_that_never_comes_names_the_setting(tmp_path: Path) -> None:
    with connected(FakeServer(), setup_timeout=0.5) as engine:
        meta = WeightUpdateMeta("disk", path=str(tmp_path / "nothing"), version=1)
        with pytest.raises(WeightSyncError, match="rollout.setup_timeout"):
            engine.update_weights_from_disk(meta).result(30)


def test_destroy_while_an_update_waits_for_its_directory_ends_it(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with connected(FakeServer(), setup_timeout=60.0) as engine:
        meta = WeightUpdateMeta("disk", path=str(tmp_path / "nothing"), version=1)
        future = engine.update_weights_from_disk(meta)
        wait_until(future.running)
        engine.destroy()
        with pytest.raises(WeightSyncError, match="destroyed before .*nothing was there"):
            future.result(5)
    wait_until(lambda: set(threading.enumerate()) <= before)


def test_destroy_while_servers_join_a_group_ends_the_join() -> None:
    server = FakeServer()
    server.fail_next(Fault("stall"), path="/join")
    with connected(server) as engine:
        meta = WeightUpdateMeta("xccl", nccl_master_address="127.0.0.1", nccl_master_port=1, nccl_group_name="g")
        future = engine.init_weights_update_group(meta)
        server.wait_for(lambda fake: len(fake.calls("/join")) == 1)
        engine.destroy()
        with pytest.raises(EngineError):
            future.result(10)


def test_external_servers_take_the_ranks_that_the_config_gives_them() -> None:
    servers = [FakeServer(), FakeServer()]
    with connected(*servers, backend="vllm:d2t2p2") as engine:
        meta = WeightUpdateMeta("xccl", nccl_master_address="127.0.0.1", nccl_master_port=1, nccl_group_name="g")
        engine.init_weights_update_group(meta).result(30)
        ranks = engine.sampler.group_ranks
    assert ranks == 8
    assert [server.calls("/join")[0]["rank"] for server in servers] == [1, 5]


def test_two_updates_at_once_run_one_after_the_other(tmp_path: Path) -> None:
    server = FakeServer()
    with connected(server) as engine:
        futures = [
            engine.update_weights_from_disk(
                WeightUpdateMeta("disk", path=str(tmp_path), version=version, clear_checkpoint_after_load=False)
            )
            for version in (1, 2, 3)
        ]
        for future in futures:
            future.result(30)
        assert engine.sampler.get_version() == 3
    order = [body["version"] for path, body in server.log if path in ("/stage", "/commit")]
    assert order == [1, 1, 2, 2, 3, 3]


def test_update_weights_from_distributed_joins_and_receives_in_buckets() -> None:
    servers = [FakeServer(), FakeServer()]
    meta = WeightUpdateMeta(
        "xccl", nccl_master_address="127.0.0.1", nccl_master_port=1234, nccl_group_name="g", weight_chunked_mem_mb=1
    )
    specs = [ParamSpec("a", (4,), "float32"), ParamSpec("b", (2, 2), "bfloat16")]
    with connected(*servers) as engine:
        with pytest.raises(WeightSyncError, match="init_weights_update_group"):
            engine.update_weights_from_distributed(meta, specs).result(30)
        engine.init_weights_update_group(meta).result(30)
        engine.update_weights_from_distributed(meta, specs).result(30)
        assert engine.sampler.get_version() == 1
    assert [server.calls("/join")[0]["rank"] for server in servers] == [1, 2]
    assert [server.calls("/stage")[0]["rank"] for server in servers] == [1, 2]


def test_updates_bad_meta_is_refused_at_once() -> None:
    with connected(FakeServer()) as engine:
        with pytest.raises(ConfigError, match="meta.path"):
            engine.update_weights_from_disk(WeightUpdateMeta("disk"))
        with pytest.raises(ConfigError, match="nccl_master_address"):
            engine.init_weights_update_group(WeightUpdateMeta("xccl"))


def test_engine_backend_by_name_config_or_from_pretrained_is_the_same() -> None:
    named = RemoteInfEngine(remote_config(), "vllm", limits=limits())
    configured = RemoteInfEngine(remote_config(backend="sglang:d2t4"), limits=limits())
    made = RemoteInfEngine.from_pretrained(dp_size=2, max_concurrent_rollouts=3, request_retries=5)
    assert [engine.protocol.name for engine in (named, configured, made)] == ["vllm", "sglang", "native"]
    assert (made.config.backend, made.config.max_concurrent_rollouts) == ("native:d2", 3)
    for engine in (named, configured, made):
        engine.destroy()


def test_destroy_leaves_no_thread_behind() -> None:
    before = set(threading.enumerate())
    with connected(FakeServer()) as engine:
        asyncio.run(engine.agenerate(ask(max_new_tokens=2)))
    wait_until(lambda: set(threading.enumerate()) <= before)


def test_read_limits_come_from_the_model_or_the_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 99, "max_position_embeddings": 512}')
    found = read_limits("native", NativeConfig(max_seq_len=100), str(tmp_path), None)
    assert (found.vocab_size, found.max_seq_len) == (99, 100)
    assert read_limits("vllm", None, str(tmp_path), None).max_seq_len == 512
    with pytest.raises(ConfigError, match="rollout.tokenizer_path"):
        read_limits("native", None, "", None)


def test_launch_server_starts_connects_and_tears_down(tmp_path: Path) -> None:
    from areal.engine.inference.launch import LaunchOrder, RunningServer

    server = FakeServer()
    stopped: list[bool] = []

    class Process:
        ended_how: str | None = None

        def ended(self) -> str | None:
            return self.ended_how

        def stop(self) -> None:
            stopped.append(True)

    process = Process()
    with serving(server), pytest.MonkeyPatch.context() as patch:
        running = RunningServer(server.address, process)  # type: ignore[arg-type]
        patch.setattr("areal.engine.inference.launch.launch_server", lambda order, protocol: running)
        engine = RemoteInfEngine(remote_config(), FakeProtocol(), limits=limits())
        order = LaunchOrder("native", NativeConfig(), "/nowhere", tmp_path / "log", tensor=2)
        info = engine.launch_server(order)
        engine.initialize()
        assert (info.port, engine.sampler.group_ranks) == (server.port, 2)
        process.ended_how = "exit code 1"
        wait_until(lambda: not engine.sampler._loop.alive)
        with pytest.raises(EngineError, match="exit code 1"):
            asyncio.run(engine.agenerate(ask()))
        engine.destroy()
    assert stopped == [True]
