"""``areal status`` and ``areal stack`` on runs of other processes: busy, stuck, stopped, killed, ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from areal.cli import main
from areal.infra.service.controller_file import FILE_NAME, process_state
from tests.timing import wait_until

ROOT = Path(__file__).parents[1]
STEPS = [{"global_step": step, "time": 1.7e9 + step, "stats": {}} for step in range(3)]


@contextlib.contextmanager
def run_in_child(log_dir: Path, how: str) -> Iterator[subprocess.Popen[str]]:
    """A run whose main thread hangs as ``how`` says; see tests/status_child.py."""
    command = [sys.executable, "-m", "tests.status_child", str(log_dir), how]
    child = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline() == "ready\n"
        yield child
    finally:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()


@pytest.fixture(scope="module")
def waiting_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The log directory of a run that waits for its episodes, the only one below its fileroot."""
    log_dir = tmp_path_factory.mktemp("root") / "logs" / "user" / "exp" / "trial"
    with run_in_child(log_dir, "waits"):
        yield log_dir


def write_steps(log_dir: Path) -> None:
    log_dir.mkdir(parents=True, exist_ok=True)
    (log_dir / "stats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in STEPS))


def test_status_of_a_running_run_shows_what_it_waits_for(waiting_run, capsys):
    assert main(["status", str(waiting_run)]) == 0
    printed = capsys.readouterr().out
    assert "exp/trial" in printed
    assert "step 3 of 10, rollout for" in printed
    assert "1,234 tokens/s" in printed
    assert "waiting for 4 of 4 groups: 4 running, capacity 0, bound v0" in printed
    assert "signal SIGKILL" in printed


def test_status_as_json_of_a_fileroot_with_one_run(waiting_run, capsys):
    assert main(["status", str(waiting_run.parents[3]), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["running"], found["log_dir"], found["step"], found["total_steps"]) == (True, str(waiting_run), 3, 10)
    assert found["rollouts"][0]["running"] == 4
    assert [worker["state"] for worker in found["workers"]] == ["alive", "failed"]


def test_stack_of_a_running_run_shows_threads_episodes_and_workers(waiting_run, capsys):
    assert main(["stack", str(waiting_run)]) == 0
    printed = capsys.readouterr().out
    assert printed.index("Thread MainThread") < printed.index("=== episodes of rollout ===")
    assert "4 tasks at:" in printed
    assert "endless_episode" in printed
    assert "=== worker rollout/0 ===\nstack of a worker" in printed


def test_stack_of_a_main_thread_in_a_sleep_is_answered(tmp_path, capsys):
    with run_in_child(tmp_path, "sleeps"):
        assert main(["stack", str(tmp_path), "--timeout", "30"]) == 0
    printed = capsys.readouterr().out
    assert "stuck_in_sleep" in printed
    assert "SIGUSR1" not in printed


def test_stack_of_a_process_without_a_free_thread_comes_by_signal(tmp_path, capsys):
    with run_in_child(tmp_path, "holds-gil") as child:
        wait_until(lambda: process_state(child.pid) == "S")
        assert main(["stack", str(tmp_path), "--timeout", "1.5"]) == 0
        assert main(["status", str(tmp_path), "--timeout", "0.5"]) == 1
        assert child.poll() is None
    captured = capsys.readouterr()
    assert "asking by SIGUSR1" in captured.out
    assert "in stuck_with_the_gil" in captured.out
    assert f"try: areal stack {tmp_path}" in captured.out
    assert f"(pid {child.pid}) did not answer: timed out" in captured.err


def test_stack_of_a_stopped_controller_says_that_it_is_stopped(tmp_path, capsys):
    with run_in_child(tmp_path, "waits") as child:
        child.send_signal(signal.SIGSTOP)
        wait_until(lambda: process_state(child.pid) == "T")
        assert main(["stack", str(tmp_path), "--timeout", "0.5"]) == 1
    assert f"(pid {child.pid}) is stopped" in capsys.readouterr().err


def test_status_of_a_killed_controller_tells_the_last_step(tmp_path, capsys):
    write_steps(tmp_path)
    with run_in_child(tmp_path, "waits") as child:
        pass
    assert main(["status", str(tmp_path)]) == 2
    printed = capsys.readouterr().out
    assert f"it was killed: pid {child.pid}" in printed
    assert "last step: 2, finished " + time.strftime("%Y-%m-%d", time.localtime(1.7e9)) in printed
    assert main(["status", str(tmp_path), "--json"]) == 2
    assert json.loads(capsys.readouterr().out) == {
        "running": False,
        "log_dir": str(tmp_path),
        "killed": True,
        "last_step": 2,
        "last_step_time": 1.7e9 + 2,
    }


def test_status_and_stack_of_a_run_that_ended_exit_with_2(tmp_path, capsys):
    write_steps(tmp_path)
    with run_in_child(tmp_path, "waits") as child:
        child.stdin.close()
        child.wait(30)
    assert not (tmp_path / FILE_NAME).exists()
    for command in ("status", "stack"):
        assert main([command, str(tmp_path)]) == 2
        printed = capsys.readouterr().out
        assert f"no controller of {tmp_path} is running" in printed
        assert "killed" not in printed
        assert "last step: 2" in printed


def test_foreign_process_with_the_recorded_id_is_never_signalled(waiting_run, tmp_path, capsys):
    """The record of a controller that died, whose id the system gave to a process that SIGUSR1 would end."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        record: dict[str, Any] = json.loads((waiting_run / FILE_NAME).read_text())
        record |= {"pid": other.pid, "address": "127.0.0.1:9"}
        (tmp_path / FILE_NAME).write_text(json.dumps(record))
        assert main(["stack", str(tmp_path), "--timeout", "0.2"]) == 2
        assert other.poll() is None
        other.communicate(b"\n")
    assert "it was killed" in capsys.readouterr().out


def test_path_without_a_run_or_with_several_is_refused(tmp_path, capsys):
    assert main(["status", str(tmp_path)]) == 2
    assert "neither the log directory of a run" in capsys.readouterr().err
    for trial in ("one", "two"):
        write_steps(tmp_path / "logs" / "user" / "exp" / trial)
    assert main(["stack", str(tmp_path)]) == 2
    assert "holds 2 runs; name one" in capsys.readouterr().err


def test_status_imports_no_torch(waiting_run):
    code = (
        "import sys; from areal.cli import main; "
        f"code = main(['status', {str(waiting_run)!r}]); print(code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=os.environ)
    assert done.stdout.splitlines()[-1] == "0 False"
