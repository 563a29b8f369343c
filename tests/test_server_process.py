"""A server process: its log, how it ended, and that nothing of it outlives whoever started it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from areal.infra.launcher.inference_server import ServerProcess, ServerStartError, server_environment
from areal.utils.environ import temporary_env
from tests.server_programs import PROGRAM, alive, kill_quietly, server_pids, wait_for

REPOSITORY = Path(__file__).resolve().parent.parent


def make_process(directory: Path, *words: str) -> ServerProcess:
    env = server_environment({"FAKE_SERVER_PIDS": str(directory / "pids")})
    command = [sys.executable, "-S", *words]
    return ServerProcess(command, env=env, log_path=directory / "logs" / "server.log", name="fake/0")


def started_server(directory: Path, mode: str) -> ServerProcess:
    process = make_process(directory, str(PROGRAM), mode)
    process.start()
    assert wait_for(lambda: (directory / "pids").exists() and len(server_pids(directory)) == 2)
    return process


def test_ended_server_that_exits_says_its_code_and_its_last_words(tmp_path: Path) -> None:
    process = make_process(tmp_path, "-c", "import sys; print('first'); print('no such model'); sys.exit(7)")

    process.start()
    assert wait_for(lambda: process.ended() is not None)

    assert process.ended() == "exit code 7"
    assert process.log_tail(lines=1) == "no such model"
    process.stop()


def test_ended_server_killed_by_a_signal_names_it(tmp_path: Path) -> None:
    process = make_process(tmp_path, "-c", "import os; os.kill(os.getpid(), 9)")

    process.start()
    assert wait_for(lambda: process.ended() is not None)

    assert process.ended() == "signal SIGKILL"


def test_start_program_that_is_missing_ends_with_the_reason_in_the_log(tmp_path: Path) -> None:
    process = ServerProcess(["/no/such/program"], env={}, log_path=tmp_path / "log", name="fake/0")

    process.start()
    assert wait_for(lambda: process.ended() is not None)

    assert process.ended() == "exit code 127"
    assert "/no/such/program cannot be started" in process.log_tail()


def test_start_running_server_is_refused(tmp_path: Path) -> None:
    process = started_server(tmp_path, "silent")
    try:
        with pytest.raises(ServerStartError, match="runs already"):
            process.start()
    finally:
        process.stop()


def test_log_tail_second_start_leaves_out_the_first(tmp_path: Path) -> None:
    process = make_process(tmp_path, "-c", f"print(open({str(tmp_path / 'word')!r}).read())")
    for word in ("one", "two"):
        (tmp_path / "word").write_text(word, encoding="utf-8")
        process.start()
        assert wait_for(lambda: process.ended() is not None)

    assert process.log_tail() == "two"
    assert (tmp_path / "logs" / "server.log").read_text(encoding="utf-8") == "one\ntwo\n"


def test_stop_server_with_a_worker_in_another_session_leaves_neither(tmp_path: Path) -> None:
    process = started_server(tmp_path, "silent")
    pids = server_pids(tmp_path)

    process.stop()

    assert process.ended() == "stopped"
    assert not any(alive(pid) for pid in pids)
    process.stop()


def test_stop_server_that_ignores_the_request_kills_it_after_the_grace(tmp_path: Path) -> None:
    process = started_server(tmp_path, "stubborn")
    pids = server_pids(tmp_path)
    began = time.monotonic()

    process.stop(grace_s=0.5)

    assert 0.4 <= time.monotonic() - began < 20.0
    assert not any(alive(pid) for pid in pids)


def test_ended_server_whose_main_process_dies_takes_its_workers_along(tmp_path: Path) -> None:
    process = started_server(tmp_path, "silent")
    main, worker = server_pids(tmp_path)

    kill_quietly(main, signal.SIGKILL)

    assert wait_for(lambda: process.ended() is not None)
    assert process.ended() == "signal SIGKILL"
    assert not alive(worker)


def test_server_whose_supervisor_is_killed_ends(tmp_path: Path) -> None:
    process = started_server(tmp_path, "silent")
    main, worker = server_pids(tmp_path)
    try:
        kill_quietly(process.pid or 0, signal.SIGKILL)

        assert wait_for(lambda: not alive(main))
        assert process.ended() == "signal SIGKILL"
    finally:
        process.stop()
        kill_quietly(worker, signal.SIGKILL)


def test_server_whose_parent_is_killed_is_gone_with_all_it_started(tmp_path: Path) -> None:
    program = (
        "import time\nfrom pathlib import Path\nfrom tests.test_server_process import started_server\n"
        f"process = started_server(Path({str(tmp_path)!r}), 'stubborn')\nprint('up', flush=True)\ntime.sleep(600)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program], cwd=REPOSITORY, stdout=subprocess.PIPE, start_new_session=True
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"up\n"
    pids = server_pids(tmp_path)
    assert all(alive(pid) for pid in pids)

    parent.kill()
    parent.wait()
    parent.stdout.close()

    assert wait_for(lambda: not any(alive(pid) for pid in pids))


def test_server_environment_leaves_out_proxies_ranks_and_paths() -> None:
    with temporary_env(
        {
            "http_proxy": "http://p",
            "RANK": "3",
            "PYTHONPATH": "/x",
            "TORCHELASTIC_RUN_ID": "1",
            "CUDA_VISIBLE_DEVICES": "2",
        }
    ):
        env = server_environment({"OMP_NUM_THREADS": "4"})

    assert {"http_proxy", "RANK", "PYTHONPATH", "TORCHELASTIC_RUN_ID"}.isdisjoint(env)
    assert env["CUDA_VISIBLE_DEVICES"] == "2"
    assert env["OMP_NUM_THREADS"] == "4"
    assert env["PATH"]
