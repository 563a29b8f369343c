"""The worker program: start, registration, the ways it ends, and functions of the main script."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from areal.api.config.cluster import NameResolveConfig
from areal.infra.rpc import rpc_server
from areal.infra.rpc.errors import RequestRefusedError
from areal.infra.rpc.identity import RunIdentity
from areal.infra.rpc.stream import Leash
from areal.utils import name_resolve
from areal.utils.errors import ConfigError
from tests.rpc_fakes import process_gone, worker_command, worker_env, worker_process

END_S = 25.0
"""Limit of an end that takes at most five seconds on an idle machine; what it must not wait for takes a minute."""


def test_worker_registers_serves_and_ends_on_sigterm(tmp_path):
    mark = tmp_path / "mark"
    with worker_process(tmp_path) as worker:
        health = worker.client.health()
        worker.client.create("engine", "tests.rpc_fakes.Destroyed", str(mark))
        child = worker.client.fork("proxy", 0, ["sleep", "300"])
        store = name_resolve.NameStore(name_resolve.NfsBackend(tmp_path / "names"))
        by_run = store.get(f"runs/{worker.identity.run_id}/workers/test/0")

        worker.process.send_signal(signal.SIGTERM)
        code = worker.process.wait(END_S)

        assert by_run == worker.client.address
        assert health["pid"] == worker.process.pid
        assert (health["role"], health["index"], health["run_id"]) == ("test", 0, worker.identity.run_id)
        assert (code, mark.read_text()) == (0, "destroyed")
        assert process_gone(child, END_S)
        assert store.find_subtree("") == []


def test_worker_that_is_told_to_end_allows_itself_less_than_five_seconds():
    assert rpc_server._DESTROY_S + rpc_server._CHILDREN_S < rpc_server._EXIT_S < 5.0


def test_worker_busy_in_a_call_still_ends_long_before_the_call(tmp_path):
    with worker_process(tmp_path) as worker:
        worker.client.create("engine", "tests.rpc_fakes.Destroyed", str(tmp_path / "mark"))
        worker.client.fork("stubborn", 0, ["sh", "-c", "trap '' TERM; while true; do sleep 1; done"])

        def call() -> None:
            with pytest.raises(OSError):  # noqa: PT011 - the connection breaks in one of several ways
                worker.client.call("engine", "sleep", 60.0)

        thread = threading.Thread(target=call)
        thread.start()
        while worker.client.health()["engine_busy_s"] == 0:
            time.sleep(0.01)
        worker.process.send_signal(signal.SIGTERM)

        assert worker.process.wait(END_S) == 0
        thread.join(END_S)


def test_worker_that_gets_many_signals_at_once_ends_once(tmp_path):
    with worker_process(tmp_path) as worker:
        for _ in range(200):
            worker.process.send_signal(signal.SIGTERM)

        assert worker.process.wait(END_S) == 0
        assert worker.log.read_text().count("ends: SIGTERM") == 1


def test_worker_without_torch_objects_loads_no_torch(tmp_path):
    with worker_process(tmp_path) as worker:
        worker.client.configure({"a": 1}, rank=0, seed=1)
        worker.client.stats()
        maps = Path(f"/proc/{worker.process.pid}/maps").read_text(encoding="utf-8")

        assert "libtorch" not in maps


CONTROLLER = textwrap.dedent(
    """
    import json, os, subprocess, sys, time
    from pathlib import Path
    from areal.infra.rpc.client import WorkerClient
    from areal.infra.rpc.identity import RunIdentity
    from areal.infra.rpc.stream import Leash
    from tests.rpc_fakes import wait_address, worker_command, worker_env

    directory = Path(sys.argv[1])
    identity = RunIdentity.new()
    log = open(directory / "worker.log", "wb")
    process = subprocess.Popen(
        worker_command(directory, identity), env=worker_env(), start_new_session=True, stdout=log, stderr=log
    )
    client = WorkerClient(wait_address(directory, process), identity)
    leash = Leash(identity)
    leash.hold("test/0", client.stream_address())
    child = client.fork("proxy", 0, ["sleep", "300"])
    forked = os.fork()  # a copy of this process must not hold the worker
    if forked == 0:
        time.sleep(60)
        os._exit(0)
    print(json.dumps({"worker": process.pid, "child": child, "forked": forked}), flush=True)
    time.sleep(60)
    """
)


def test_worker_and_its_children_end_when_the_controller_is_killed(tmp_path):
    script = tmp_path / "controller.py"
    script.write_text(CONTROLLER, encoding="utf-8")
    controller = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)], env=worker_env(), stdout=subprocess.PIPE, text=True
    )
    assert controller.stdout is not None
    pids = json.loads(controller.stdout.readline())
    try:
        time.sleep(0.5)
        controller.kill()
        controller.wait()

        assert process_gone(pids["worker"], END_S)
        assert process_gone(pids["child"], END_S)
    finally:
        controller.stdout.close()
        for pid in pids.values():
            if not process_gone(pid, 0.01):
                os.kill(pid, signal.SIGKILL)


def test_worker_killed_takes_its_forked_children_along(tmp_path):
    with worker_process(tmp_path) as worker:
        child = worker.client.fork("proxy", 0, ["sleep", "300"])
        worker.process.kill()
        worker.process.wait()

        assert process_gone(child, END_S)


def test_leash_that_broke_is_held_again_and_release_lets_go(tmp_path):
    with worker_process(tmp_path, "--leash-grace", "1") as worker:
        worker.leash._held["test/0"].sock.shutdown(2)
        time.sleep(2.0)
        alive = worker.process.poll() is None

        worker.leash.release("test/0")

        assert alive
        assert worker.process.wait(END_S) == 1
        assert "controller has been gone" in worker.log.read_text()


def test_worker_never_leashed_ends_after_startup_timeout(tmp_path):
    with worker_process(tmp_path, "--startup-timeout", "0.5", leash=False) as worker:
        assert worker.process.wait(END_S) == 1
        assert "no controller held it" in worker.log.read_text()


def test_worker_ends_when_parent_pid_is_gone(tmp_path):
    parent = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    with worker_process(tmp_path, "--parent-pid", str(parent.pid)) as worker:
        time.sleep(0.5)
        alive = worker.process.poll() is None
        parent.kill()
        parent.wait()

        assert alive
        assert worker.process.wait(END_S) == 1


def test_worker_of_foreign_token_cannot_be_leashed(tmp_path):
    with worker_process(tmp_path) as worker:
        stranger = Leash(RunIdentity(worker.identity.run_id, "other"))

        with pytest.raises(RequestRefusedError, match="401"):
            stranger.hold("x", worker.client.stream_address())


def test_run_worker_in_a_thread_leaves_the_process_alive(tmp_path):
    code = textwrap.dedent(
        """
        import sys, threading
        from pathlib import Path
        from areal.infra.rpc import rpc_server
        from areal.infra.rpc.client import WorkerClient
        from areal.infra.rpc.identity import RunIdentity
        from areal.infra.rpc.stream import Leash
        from tests.rpc_fakes import wait_address, worker_command

        directory, identity = Path(sys.argv[1]), RunIdentity.new()
        options = rpc_server.parse_options(worker_command(directory, identity, "--leash-grace", "0.5")[3:])
        codes = []
        thread = threading.Thread(target=lambda: codes.append(rpc_server.run_worker(options, exits=False)))
        thread.start()
        client = WorkerClient(wait_address(directory), identity)
        leash = Leash(identity)
        leash.hold("x", client.stream_address())
        client.create("c", "tests.rpc_fakes.Counter", 1)
        assert client.call("c", "add") == 2
        leash.close()
        thread.join(10)
        print("codes", codes)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env=worker_env(), capture_output=True, text=True, timeout=60
    )

    assert done.stdout.strip() == "codes [1]", done.stderr


MAIN_SCRIPT = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    from tests.rpc_fakes import worker_process

    print("imported as", __name__)

    def tripled(value):
        return 3 * value

    class Mine:
        def __call__(self, value):
            return value

    if __name__ == "__main__":
        with worker_process(Path(sys.argv[1])) as worker:
            worker.client.create("c", "tests.rpc_fakes.Counter")
            print("result", worker.client.call("c", "apply", tripled, 5))
            back = worker.client.call("c", "echo", tripled, Mine)[0]
            print("same", back[0] is tripled, back[1] is Mine)
    """
)


def test_function_of_the_main_script_runs_in_the_worker(tmp_path):
    script = tmp_path / "main_script.py"
    script.write_text(MAIN_SCRIPT, encoding="utf-8")

    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], env=worker_env(), capture_output=True, text=True, timeout=60
    )

    assert done.stdout.splitlines() == ["imported as __main__", "result 15", "same True True"], done.stderr
    assert "imported as __mp_main__" in (tmp_path / "worker.log").read_text()


@pytest.mark.parametrize(("index", "procid", "expected"), [("4", None, 4), (None, "3", 3), ("-1", "2", 2)])
def test_parse_options_takes_index_or_slurm_procid(tmp_path, monkeypatch, index, procid, expected):
    command = worker_command(tmp_path, RunIdentity("r", "t"))[3:]
    command[command.index("--worker-index") + 1] = index or "-1"
    if procid is not None:
        monkeypatch.setenv("SLURM_PROCID", procid)

    options = rpc_server.parse_options([*command, "--unknown", "x", "--etcd3-addr", "h:1"])

    assert (options.index, options.role, options.run_id) == (expected, "test", "r")
    assert options.name_resolve == NameResolveConfig(
        type="nfs", nfs_record_root=str(tmp_path / "names"), etcd3_addr="h:1"
    )


def test_parse_options_without_index_is_a_value_error(tmp_path, monkeypatch):
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    command = worker_command(tmp_path, RunIdentity("r", "t"))[3:]
    command[command.index("--worker-index") + 1] = "-1"

    with pytest.raises(ConfigError, match="SLURM_PROCID"):
        rpc_server.parse_options(command)


def test_worker_that_cannot_start_says_why(tmp_path):
    command = worker_command(tmp_path, RunIdentity("r", "t"))
    (tmp_path / "token").unlink()

    done = subprocess.run(command, env=worker_env(), capture_output=True, text=True, timeout=60)

    assert done.returncode == 1
    assert "token" in done.stderr
