"""Starting a server: what is waited for, and what is said when it cannot work."""

from __future__ import annotations

import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from areal.api.config.inference import NativeConfig
from areal.engine.inference import launch
from areal.engine.inference.http_client import ServerUnavailableError
from areal.engine.inference.launch import LaunchOrder, launch_server, reserve_port
from areal.engine.inference.readiness import UnfitServerError, check_external
from areal.engine.inference.server_env import INCOMPLETE, has_gpu, inspect_environment
from areal.engine.native_remote import NativeProtocol
from areal.engine.vllm_remote import VLLMProtocol
from areal.infra.launcher.inference_server import ServerProcess, ServerStartError
from areal.utils import network
from areal.utils.environ import temporary_env
from tests.server_programs import alive, fake_python, order_of, server_pids, wait_for


def assert_nothing_left(directory: Path) -> None:
    assert wait_for(lambda: not any(alive(pid) for pid in server_pids(directory)))


def test_launch_server_that_serves_gives_its_address(tmp_path: Path) -> None:
    server = launch_server(order_of(tmp_path, "serve"), VLLMProtocol())
    try:
        host, port = network.split_hostport(server.address)

        assert host == "127.0.0.1"
        assert server.process.ended() is None
        assert not network.is_port_free(port)
        check_external(server.address, VLLMProtocol(), 5.0)
    finally:
        server.process.stop()
    assert_nothing_left(tmp_path)
    assert network.is_port_free(port)


def test_launch_native_server_generates_on_the_running_interpreter(tiny_model_dir: str, tmp_path: Path) -> None:
    order = LaunchOrder("native", NativeConfig(max_seq_len=32), tiny_model_dir, tmp_path / "log", dtype="float32")

    server = launch_server(order, NativeProtocol())

    server.process.stop()
    assert server.process.ended() == "stopped"


def test_launch_native_server_with_a_token_wants_it_from_everybody(tiny_model_dir: str, tmp_path: Path) -> None:
    order = LaunchOrder("native", NativeConfig(max_seq_len=32), tiny_model_dir, tmp_path / "log", dtype="float32")

    server = launch_server(order, NativeProtocol("secret"))
    try:
        file = Path(server.process.command[server.process.command.index("--token-file") + 1])

        check_external(server.address, NativeProtocol("secret"), 30.0)
        with pytest.raises(UnfitServerError, match="401"):
            check_external(server.address, NativeProtocol(), 30.0)
    finally:
        server.process.stop()
    assert not file.parent.exists()
    assert "secret" not in " ".join(server.process.command) + (tmp_path / "log").read_text()


def test_launch_native_server_token_is_in_a_file_for_this_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, int, int]] = []

    def look(self: ServerProcess) -> None:
        file = Path(self.command[self.command.index("--token-file") + 1])
        seen.append((file.read_text(), file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777))
        raise ServerStartError("enough")

    monkeypatch.setattr(ServerProcess, "start", look)
    with pytest.raises(ServerStartError, match="enough"):
        launch_server(LaunchOrder("native", NativeConfig(), "/nowhere", tmp_path / "log"), NativeProtocol("secret"))

    assert seen == [("secret", 0o600, 0o700)]


def test_launch_vllm_server_with_a_token_is_guarded_by_it(tmp_path: Path) -> None:
    with temporary_env({"VLLM_API_KEY": "the user's own"}):
        server = launch_server(order_of(tmp_path, "serve"), VLLMProtocol("secret"))
    try:
        text = Path(f"/proc/{server_pids(tmp_path)[0]}/environ").read_bytes().decode()
    finally:
        server.process.stop()

    words = server.process.command
    assert words[words.index("--middleware") + 1] == "areal_token_guard.TokenGuard"
    assert text.split("\0").count("VLLM_API_KEY=secret") == 1
    assert "secret" not in " ".join(words)


def test_launch_server_environment_keeps_what_the_user_chose_for_vllm(tmp_path: Path) -> None:
    with temporary_env({"VLLM_CPU_KVCACHE_SPACE": "7", "VLLM_CPU_OMP_THREADS_BIND": None, "RANK": "1"}):
        server = launch_server(order_of(tmp_path, "serve"), VLLMProtocol())
    try:
        text = Path(f"/proc/{server_pids(tmp_path)[0]}/environ").read_bytes().decode()
    finally:
        server.process.stop()
    env = dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)

    assert env["VLLM_CPU_KVCACHE_SPACE"] == "7"
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert env["VLLM_SERVER_DEV_MODE"] == "1"
    assert env["PYTHONPATH"].endswith("areal/engine/vllm_ext")
    assert "RANK" not in env


def test_launch_server_that_crashes_says_how_with_its_log_and_command(tmp_path: Path) -> None:
    with pytest.raises(ServerStartError) as caught:
        launch_server(order_of(tmp_path, "crash"), VLLMProtocol())

    message = str(caught.value)
    assert "vllm/0" in message
    assert "ended before it served (exit code 3)" in message
    assert "CUDA error: the device went away" in message
    assert "--max-model-len 64" in message
    assert str(tmp_path / "server.log") in message


def test_launch_server_that_dies_during_its_probe_does_not_wait_for_the_limit(tmp_path: Path) -> None:
    began = time.monotonic()

    with pytest.raises(ServerStartError, match=r"exit code 4|probe generation failed"):
        launch_server(order_of(tmp_path, "crash_late", timeout_s=60.0), VLLMProtocol())

    assert time.monotonic() - began < 40
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize("mode", ["silent", "unhealthy"])
def test_launch_server_that_is_never_ready_names_the_setting(tmp_path: Path, mode: str) -> None:
    with pytest.raises(ServerStartError, match=r"answers no health check after .*raise rollout.setup_timeout"):
        launch_server(order_of(tmp_path, mode, timeout_s=1.0), VLLMProtocol())

    assert_nothing_left(tmp_path)


def test_launch_server_that_lacks_an_endpoint_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(ServerStartError, match=r"lacks /resume; is this a vllm server of a version that was tested"):
        launch_server(order_of(tmp_path, "no_endpoint"), VLLMProtocol())

    assert_nothing_left(tmp_path)


def test_launch_server_whose_probe_is_wrong_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ServerStartError, match=r"probe generation failed: vLLM: 2 tokens"):
        launch_server(order_of(tmp_path, "bad_probe"), VLLMProtocol())


def test_launch_port_taken_meanwhile_tries_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ports = iter([taken.getsockname()[1], network.find_free_port()])
        monkeypatch.setattr(launch.network, "find_free_port", lambda: next(ports))

        server = launch_server(order_of(tmp_path, "serve"), VLLMProtocol())

        server.process.stop()
        assert not server.address.endswith(f":{taken.getsockname()[1]}")


def test_launch_sixteen_servers_at_once_get_distinct_ports(tmp_path: Path) -> None:
    orders = []  # every program is written before the first one starts: a child would inherit it open for writing
    for index in range(16):
        (tmp_path / str(index)).mkdir()
        orders.append(order_of(tmp_path / str(index), "serve", index=index, timeout_s=60.0))

    with ThreadPoolExecutor(16) as pool:
        servers = list(pool.map(lambda order: launch_server(order, VLLMProtocol()), orders))
    try:
        assert len({server.address for server in servers}) == 16
        assert all(server.process.ended() is None for server in servers)
    finally:
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda server: server.process.stop(), servers))
    for index in range(16):
        assert_nothing_left(tmp_path / str(index))


def test_launch_server_started_by_a_thread_that_ends_goes_on(tmp_path: Path) -> None:
    started = []
    thread = threading.Thread(target=lambda: started.append(launch_server(order_of(tmp_path, "serve"), VLLMProtocol())))
    thread.start()
    thread.join()

    time.sleep(0.7)

    assert started[0].process.ended() is None
    started[0].process.stop()


def test_reserve_port_twice_never_gives_one_port(monkeypatch: pytest.MonkeyPatch) -> None:
    port, hold = reserve_port()
    other = network.find_free_port()
    answers = iter([port, other])
    monkeypatch.setattr(launch.network, "find_free_port", lambda: next(answers))

    with hold:
        second, second_hold = reserve_port()
        second_hold.close()

    assert second == other


def test_inspect_environment_without_the_package_says_how_to_install_it(tmp_path: Path) -> None:
    python = fake_python(tmp_path, "serve", {"torch": "2.13.0"})

    with pytest.raises(
        ServerStartError, match=r"vllm is not installed .*areal install-server vllm DIR.*vllm.python=DIR"
    ):
        inspect_environment("vllm", python)


def test_inspect_environment_old_version_is_refused_and_new_one_remarked(tmp_path: Path) -> None:
    old = fake_python(tmp_path / "old", "serve", {"sglang": "0.5.9", "torch": "2.9.1"})
    new = fake_python(tmp_path / "new", "serve", {"sglang": "0.6.0", "torch": "2.9.1"})

    with pytest.raises(ServerStartError, match="0.5.10.post1 or newer"):
        inspect_environment("sglang", old)
    assert "0.6.0 was not tested" in inspect_environment("sglang", new).remark


def test_inspect_environment_missing_or_broken_interpreter_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'bad libpython' >&2\nexit 1\n", encoding="utf-8")
    broken.chmod(0o755)

    with pytest.raises(ServerStartError, match="vllm.python='/no/such/python' is not a program"):
        inspect_environment("vllm", "/no/such/python")
    with pytest.raises(ServerStartError, match="does not run: bad libpython"):
        inspect_environment("vllm", str(broken))


def test_inspect_environment_unfinished_installation_is_refused(tmp_path: Path) -> None:
    python = fake_python(tmp_path, "serve")
    (tmp_path / INCOMPLETE).touch()

    with pytest.raises(ServerStartError, match="installation of this environment has not finished"):
        inspect_environment("vllm", python)


def test_check_external_nobody_there_names_address_and_setting() -> None:
    address = f"127.0.0.1:{network.find_free_port()}"

    with pytest.raises(ServerUnavailableError, match=rf"server {address} answers no health check after 0.5 s; raise"):
        check_external(address, VLLMProtocol(), 0.5)


def test_check_external_server_of_another_kind_is_refused(tmp_path: Path) -> None:
    server = launch_server(order_of(tmp_path, "serve"), VLLMProtocol())
    try:
        protocol = VLLMProtocol()
        protocol.endpoints = ("/health", "/generate")  # type: ignore[misc]

        with pytest.raises(UnfitServerError, match=rf"server {server.address} lacks /generate"):
            check_external(server.address, protocol, 5.0)
    finally:
        server.process.stop()


def test_inspect_environment_without_a_name_asks_the_running_interpreter() -> None:
    installed = inspect_environment("native", "")

    assert installed.python == sys.executable
    assert installed.torch.startswith("2.")
    assert installed.device == ("cuda" if has_gpu() and not installed.torch.endswith("+cpu") else "cpu")


def test_has_gpu_hidden_devices_are_none() -> None:
    with temporary_env({"CUDA_VISIBLE_DEVICES": ""}):
        assert not has_gpu()
