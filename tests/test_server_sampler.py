"""The sampler of a rollout worker whose model runs in a server, and how servers of others are found."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from areal.api.config.inference import NativeConfig, SGLangConfig, vLLMConfig
from areal.api.config.rollout import GenerationHyperparameters, InferenceEngineConfig
from areal.api.io_struct import ModelRequest
from areal.engine.inference.discovery import find_servers, register_server, server_token, token_file
from areal.engine.inference.launch import LaunchOrder, launch_server
from areal.engine.inference.readiness import UnfitServerError
from areal.engine.inference.rollout_worker import RolloutSetup
from areal.engine.inference.server_sampler import OwnServerSampler, ServerSetup, sequence_limits, server_sampler
from areal.engine.native_remote import NativeProtocol
from areal.engine.sglang_remote import SGLangProtocol
from areal.engine.vllm_remote import VLLMProtocol
from areal.infra.launcher.inference_server import ServerStartError
from areal.infra.rpc.identity import write_token
from areal.infra.rpc.serialization import decode, encode
from areal.utils import name_resolve, network
from areal.utils.environ import temporary_env
from areal.utils.errors import ConfigError
from tests.fakes import char_tokenizer
from tests.server_programs import alive, fake_python, order_of, server_pids, wait_for


@pytest.fixture
def model_dir(tmp_path: Path) -> str:
    """A tokenizer and the facts of a model."""
    char_tokenizer().save_pretrained(tmp_path / "model")
    config = '{"max_position_embeddings": 64, "vocab_size": 40, "model_type": "qwen2"}'
    (tmp_path / "model" / "config.json").write_text(config, encoding="utf-8")
    return str(tmp_path / "model")


def setup_of(directory: Path, model_dir: str, mode: str = "serve", index: int = 0, **server: Any) -> RolloutSetup:
    settings: dict[str, Any] = {"section": vLLMConfig(python=fake_python(directory, mode)), "log_dir": str(directory)}
    return RolloutSetup(
        rollout=InferenceEngineConfig(backend="vllm:d1", setup_timeout=10.0, request_timeout=5.0, request_retries=1),
        native=NativeConfig(),
        model_path=model_dir,
        tokenizer_path=model_dir,
        dtype="float32",
        run_seed=1,
        index=index,
        arguments={"server": ServerSetup("vllm", **{**settings, **server})},
    )


def generate(sampler: Any, tokens: int) -> Any:
    settings = GenerationHyperparameters(max_new_tokens=tokens, max_tokens=64)
    return asyncio.run(sampler.agenerate(ModelRequest(input_ids=[1, 2], gconfig=settings)))


def test_server_sampler_starts_a_server_generates_and_ends_it(tmp_path: Path, model_dir: str) -> None:
    with temporary_env({"FAKE_SERVER_PIDS": str(tmp_path / "pids")}):
        sampler = server_sampler(setup_of(tmp_path, model_dir, index=2))
    try:
        response = generate(sampler, 3)

        assert isinstance(sampler, OwnServerSampler)
        assert response.output_tokens == [0, 1, 2]
        assert (tmp_path / "vllm-2.log").is_file()
        assert "--seed" in sampler.server.process.command
    finally:
        sampler.stop()
    assert not any(alive(pid) for pid in server_pids(tmp_path))


def test_server_sampler_own_servers_have_a_token_each(tmp_path: Path, model_dir: str) -> None:
    samplers = [server_sampler(setup_of(tmp_path / name, model_dir)) for name in ("a", "b")]
    tokens = {sampler.protocol.token for sampler in samplers}
    for sampler in samplers:
        sampler.stop()

    assert len(tokens) == 2
    assert all(token is not None and len(token) >= 32 for token in tokens)


def test_server_sampler_external_server_gets_the_token_of_its_file(
    tmp_path: Path, tiny_model_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AREAL_LLM_SERVER_TOKEN_FILE", str(tmp_path / "token"))
    write_token(tmp_path / "token", "secret")
    order = LaunchOrder("native", NativeConfig(max_seq_len=32), tiny_model_dir, tmp_path / "log", dtype="float32")
    running = launch_server(order, NativeProtocol("secret"))
    try:
        given = {"backend": "native", "section": NativeConfig(max_seq_len=32), "addresses": [running.address]}
        setup = setup_of(tmp_path, tiny_model_dir)
        setup.arguments["server"] = ServerSetup(**given, token_file=token_file())
        sampler = server_sampler(setup)
        tokens = generate(sampler, 3).output_tokens
        sampler.stop()

        assert len(tokens) == 3
        setup.arguments["server"] = ServerSetup(**given)
        with pytest.raises(UnfitServerError, match="401"):
            server_sampler(setup)
    finally:
        running.process.stop()


def test_server_token_without_a_file_is_new_and_an_unreadable_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AREAL_LLM_SERVER_TOKEN_FILE", raising=False)
    assert token_file() == ""
    assert server_token() != server_token()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AREAL_LLM_SERVER_TOKEN_FILE", "there")

    with pytest.raises(ConfigError, match=f"AREAL_LLM_SERVER_TOKEN_FILE: token file '{tmp_path}/there' cannot be read"):
        server_token()

    write_token("there", "secret")
    assert (token_file(), server_token()) == (f"{tmp_path}/there", "secret")


def test_server_sampler_whose_server_dies_tells_its_worker(tmp_path: Path, model_dir: str) -> None:
    with temporary_env({"FAKE_SERVER_PIDS": str(tmp_path / "pids")}):
        sampler = server_sampler(setup_of(tmp_path, model_dir))
    failures: list[BaseException] = []
    sampler.on_failure = failures.append
    try:
        os.kill(server_pids(tmp_path)[0], signal.SIGKILL)

        assert wait_for(lambda: bool(failures))
        assert "SIGKILL" in str(failures[0])
    finally:
        sampler.stop()


def test_server_sampler_that_cannot_start_leaves_nothing(tmp_path: Path, model_dir: str) -> None:
    pids = {"FAKE_SERVER_PIDS": str(tmp_path / "pids")}
    with temporary_env(pids), pytest.raises(ServerStartError, match="lacks /resume"):
        server_sampler(setup_of(tmp_path, model_dir, mode="no_endpoint"))

    assert wait_for(lambda: not any(alive(pid) for pid in server_pids(tmp_path)))


def test_server_sampler_external_servers_are_shared_out_and_left_running(tmp_path: Path, model_dir: str) -> None:
    directories = [tmp_path / name for name in ("a", "b", "c")]
    for directory in directories:
        directory.mkdir()
    servers = [launch_server(order_of(directory, "serve"), VLLMProtocol()) for directory in directories]
    addresses = [server.address for server in servers]
    try:
        samplers = [
            server_sampler(setup_of(tmp_path, model_dir, index=index, addresses=addresses, replicas=2))
            for index in (0, 1)
        ]
        taken = [[server.address for server in sampler._pool.servers] for sampler in samplers]
        for sampler in samplers:
            assert generate(sampler, 2).output_tokens == [0, 1]
            sampler.stop()

        assert taken == [[addresses[0], addresses[2]], [addresses[1]]]
        assert all(server.process.ended() is None for server in servers)
    finally:
        for server in servers:
            server.process.stop()


def test_server_sampler_fewer_servers_than_workers_is_refused(tmp_path: Path, model_dir: str) -> None:
    setup = setup_of(tmp_path, model_dir, index=1, addresses=["127.0.0.1:1"], replicas=2)

    with pytest.raises(ConfigError, match=r"1 inference servers for 2 rollout workers: worker 1 has none"):
        server_sampler(setup)


def test_server_setup_over_the_wire_remembers_what_nobody_wrote() -> None:
    setup = ServerSetup("vllm", vLLMConfig(dtype="bfloat16"))

    message = encode(setup)
    arrived: ServerSetup = decode(b"".join(bytes(part) for part in message.parts()))

    assert arrived.unwritten == setup.unwritten
    assert arrived.unwritten is not None
    assert "max_model_len" in arrived.unwritten
    assert "dtype" not in arrived.unwritten


def test_sequence_limits_are_the_smaller_of_context_and_model(model_dir: str) -> None:
    tokenizer = char_tokenizer()

    short = sequence_limits(ServerSetup("sglang", SGLangConfig(context_length=32)), model_dir, tokenizer)
    default = sequence_limits(ServerSetup("vllm", vLLMConfig()), model_dir, tokenizer)

    assert (short.vocab_size, short.max_seq_len) == (40, 32 - SGLangProtocol.CONTEXT_MARGIN)
    assert default.max_seq_len == 64
    assert default.eos_ids == {tokenizer.eos_token_id}


def test_find_servers_given_ones_win_over_registered_and_environment() -> None:
    with temporary_env({"AREAL_LLM_SERVER_ADDRS": "h:3, h:4"}):
        register_server("found", "trial", "h:2")
        try:
            assert find_servers("h:1, http://h:5/ ,h:1", "found", "trial") == ["h:1", "h:5"]
            assert find_servers(None, "found", "trial") == ["h:2"]
            assert find_servers([], "found", "other", wait_s=0.0) == ["h:3", "h:4"]
            assert find_servers() == ["h:3", "h:4"]
        finally:
            name_resolve.reset()
    with temporary_env({"AREAL_LLM_SERVER_ADDRS": None}):
        assert find_servers(None, "found", "trial", wait_s=0.0) == []


def test_register_server_entry_of_a_killed_process_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    lives: list[float | None] = []
    monkeypatch.setattr(name_resolve, "add_subentry", lambda *_, keepalive_ttl=None: lives.append(keepalive_ttl))

    register_server("found", "trial", "h:2")

    assert lives[0] is not None
    assert lives[0] <= 60


def test_find_servers_bad_address_names_where_it_stands() -> None:
    wanted = r"AREAL_LLM_SERVER_ADDRS: address 'h' must look like"
    with temporary_env({"AREAL_LLM_SERVER_ADDRS": "h:1,h"}), pytest.raises(ConfigError, match=wanted):
        find_servers()
    with pytest.raises(ConfigError, match="address of an inference server: address 'x:99999'"):
        find_servers(["x:99999"])


def test_find_servers_registered_a_moment_later_is_waited_for() -> None:
    address = f"127.0.0.1:{network.find_free_port()}"
    timer = threading.Timer(0.2, lambda: register_server("later", "trial", address))
    timer.start()
    try:
        assert find_servers(None, "later", "trial", wait_s=5.0) == [address]
    finally:
        timer.join()
        name_resolve.reset()
