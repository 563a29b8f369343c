"""The status server over real HTTP, and the record of the controller beside it."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import stat
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from areal.infra.run_status import (
    ErrorStatus,
    RolloutStatus,
    RunStatus,
    WorkerStatus,
    executor_status,
    from_json,
)
from areal.infra.service import controller_file, prometheus, status_server
from areal.infra.service.controller_file import FILE_NAME, ControllerSignalError, read_record, send_stack_signal
from areal.infra.service.status_server import StatusServer, StatusServerError
from areal.utils.errors import DataError
from tests.rollout_fakes import FunctionWorkflow, config, executor, loader
from tests.test_run_status import Gate, in_background
from tests.timing import wait_until

SAMPLE = re.compile(r"([a-z_]+)(\{((?:[a-z_]+=\"(?:[^\"\\\n]|\\[\\\"n])*\",?)*)\})? (-?[0-9.e+-]+)")


def full_status() -> RunStatus:
    return RunStatus(
        experiment='ex"p\\\n',
        trial="t",
        run_id="r1",
        started=1000.0,
        time=1100.0,
        phase="rollout",
        phase_since=1099.0,
        step=4,
        total_steps=9,
        version=4,
        tokens_per_s=12.5,
        rollouts=[RolloutStatus("rollout", running=3, staleness={0: 4, 2: 1}, counts={"trained": 8, "lost": 1})],
        workers=[WorkerStatus("rollout", 0, last_seen=1098.5, version=4, engine_busy_s=0.25), WorkerStatus("a", 1)],
        last_error=ErrorStatus("ValueError", "x", 1050.0),
    )


@pytest.fixture
def server(tmp_path: Path) -> Any:
    made = StatusServer(tmp_path, "r1", full_status, lambda: "stack of rollout/0")
    made.start()
    yield made
    made.close()


def get(server: StatusServer, path: str, token: str | None = None, method: str = "GET") -> tuple[int, str, Any]:
    host, _, port = server.record.address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=20)
    connection.request(method, path, headers={"Authorization": f"Bearer {token or server.record.token}"})
    response = connection.getresponse()
    body = response.read().decode()
    connection.close()
    return response.status, body, response.headers


def parse(page: str) -> dict[str, float]:
    """Samples of a page; every line must be a HELP, a TYPE or a sample of the metric announced last."""
    samples: dict[str, float] = {}
    seen: set[str] = set()
    current = kind = ""
    assert page.endswith("\n")
    for line in page.splitlines():
        if line.startswith("# HELP "):
            current = line.split(" ", 3)[2]
            assert current not in seen
            seen.add(current)
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert (name, kind in ("gauge", "counter", "histogram")) == (current, True)
        else:
            match = SAMPLE.fullmatch(line)
            assert match, line
            suffixes = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
            assert match[1] in [current + suffix for suffix in suffixes]
            assert f"{match[1]}{match[2] or ''}" not in samples
            samples[f"{match[1]}{match[2] or ''}"] = float(match[4])
    return samples


def test_status_with_the_token_is_json_of_the_snapshot(server):
    code, body, headers = get(server, "/status")
    assert code == 200
    assert headers["Content-Type"].startswith("application/json")
    assert from_json(body.encode()) == full_status()


@pytest.mark.parametrize("path", ["/status", "/metrics", "/stack", "/nowhere"])
def test_request_with_a_bad_token_is_401(server, path):
    for token in ("wrong", server.record.token + "x", server.record.token[:-1]):
        code, body, _ = get(server, path, token)
        assert code == 401
        assert json.loads(body)["error"] == "unauthorized"
        assert server.record.token not in body


def test_unknown_path_and_method_are_refused(server):
    assert get(server, "/nowhere")[0] == 404
    assert get(server, "/status", method="POST")[0] == 405
    assert get(server, "/stack?timeout=soon")[0] == 400


def test_metrics_page_is_prometheus_text(server):
    code, page, headers = get(server, "/metrics")
    samples = parse(page)
    assert code == 200
    assert headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert samples['areal_run_info{experiment="ex\\"p\\\\\\n",trial="t",run_id="r1"}'] == 1
    assert samples["areal_step"] == 4
    assert samples["areal_tokens_per_second"] == 12.5
    assert samples['areal_phase_seconds{phase="rollout"}'] == 1
    assert samples['areal_rollout_groups{rollout="rollout",state="running"}'] == 3
    assert samples['areal_rollout_groups_total{rollout="rollout",end="trained"}'] == 8
    assert samples['areal_rollout_staleness_versions_bucket{rollout="rollout",le="0"}'] == 4
    assert samples['areal_rollout_staleness_versions_bucket{rollout="rollout",le="2"}'] == 5
    assert samples['areal_rollout_staleness_versions_bucket{rollout="rollout",le="+Inf"}'] == 5
    assert samples['areal_rollout_staleness_versions_sum{rollout="rollout"}'] == 2
    assert samples['areal_worker_up{role="rollout",index="0"}'] == 1
    assert samples['areal_worker_silent_seconds{role="rollout",index="0"}'] == 1.5
    assert 'areal_worker_silent_seconds{role="a",index="1"}' not in samples


def test_metrics_of_an_empty_status_leave_unknown_values_out():
    samples = parse(prometheus.render(RunStatus("e", "t")))
    assert "areal_step" not in samples
    assert samples["areal_steps_planned"] == 0


def test_stack_shows_controller_threads_then_workers(server):
    _, body, _ = get(server, "/stack")
    assert body.index("Thread MainThread") < body.index("stack of rollout/0")
    assert "test_stack_shows_controller_threads_then_workers" in body


def test_stack_with_workers_that_hang_still_shows_the_controller(tmp_path):
    release = threading.Event()
    made = StatusServer(tmp_path, "r1", full_status, lambda: str(release.wait(60)))
    made.start()
    code, body, _ = get(made, "/stack?timeout=0.2")
    release.set()
    made.close()
    assert code == 200
    assert "Thread MainThread" in body
    assert "did not arrive within 0.2 s" in body


def test_stack_with_workers_that_fail_says_so(tmp_path):
    def stacks() -> str:
        raise ConnectionError("rollout/0 refused")

    made = StatusServer(tmp_path, "r1", full_status, stacks)
    made.start()
    _, body, _ = get(made, "/stack")
    made.close()
    assert "no other stacks: ConnectionError: rollout/0 refused" in body


def test_snapshot_that_hangs_or_raises_is_an_error_of_that_request_only(tmp_path, monkeypatch):
    monkeypatch.setattr(status_server, "SNAPSHOT_LIMIT_S", 0.2)
    release = threading.Event()
    answers = [lambda: release.wait(60), lambda: 1 / 0, full_status]
    made = StatusServer(tmp_path, "r1", lambda: answers.pop(0)(), str)
    made.start()
    codes = [get(made, "/status")[0] for _ in range(3)]
    release.set()
    made.close()
    assert codes == [503, 500, 200]


def test_status_of_a_running_executor_while_it_generates(tmp_path):
    gate = Gate()
    with executor(config(4, eta=1)) as made:
        server = StatusServer(
            tmp_path, "r1", lambda: RunStatus("e", "t", time=time.time(), rollouts=[executor_status(made)]), str
        )
        server.start()
        thread = in_background(made.next_batch, loader(32, 4), FunctionWorkflow(gate.episode))
        wait_until(lambda: executor_status(made).running == 8)
        during = from_json(get(server, "/status")[1].encode())
        gate.opened.set()
        thread.join(30)
        wait_until(lambda: executor_status(made).running == 0)
        after = from_json(get(server, "/status")[1].encode())
        server.close()
    assert during.rollouts[0].running == 8
    assert during.waiting.reason.startswith("waiting for 4 of 4 groups")
    assert (after.rollouts[0].in_step, after.rollouts[0].ready, after.waiting) == (4, 4, None)


def test_close_removes_the_record_and_the_thread(tmp_path):
    made = StatusServer(tmp_path, "r1", full_status, str)
    made.start()
    record = read_record(tmp_path)
    assert record == made.record
    assert stat.S_IMODE((tmp_path / FILE_NAME).stat().st_mode) == 0o600
    assert (record.pid, record.is_here, record.is_running) == (os.getpid(), True, True)
    assert record.address.startswith("127.0.0.1:")
    made.close()
    made.close()
    assert not (tmp_path / FILE_NAME).exists()
    assert "status-server" not in [thread.name for thread in threading.enumerate()]
    with pytest.raises(ConnectionRefusedError):
        get(made, "/status")


def test_close_leaves_the_record_of_a_later_controller(tmp_path):
    first = StatusServer(tmp_path, "r1", full_status, str)
    second = StatusServer(tmp_path, "r2", full_status, str)
    first.start()
    second.start()
    first.close()
    assert read_record(tmp_path).run_id == "r2"
    second.close()
    assert read_record(tmp_path) is None


def test_start_in_a_directory_that_cannot_be_written_is_an_error(tmp_path):
    made = StatusServer(tmp_path / "missing", "r1", full_status, str)
    with pytest.raises(StatusServerError, match="missing"):
        made.start()
    assert "status-server" not in [thread.name for thread in threading.enumerate()]


def test_signal_makes_this_process_write_its_stacks(server, tmp_path):
    send_stack_signal(read_record(tmp_path))
    file = tmp_path / controller_file.STACKS_NAME
    wait_until(lambda: "test_signal_makes_this_process_write_its_stacks" in file.read_text())


def test_signal_after_close_does_not_end_the_process(tmp_path):
    made = StatusServer(tmp_path, "r1", full_status, str)
    made.start()
    made.close()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert list(tmp_path.iterdir()) == []


def test_signal_handler_of_the_script_is_left_alone(tmp_path):
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        made = StatusServer(tmp_path, "r1", full_status, str)
        made.start()
        with pytest.raises(ControllerSignalError, match="handler of the script"):
            send_stack_signal(made.record)
        made.close()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_signal_goes_to_no_process_of_another_birth(server, tmp_path):
    record = read_record(tmp_path)
    record.birth += "0"
    assert not record.is_running
    with pytest.raises(ControllerSignalError, match="belongs to another process"):
        send_stack_signal(record)
    record.host = "elsewhere.example"
    assert record.is_running  # nobody here can know better
    with pytest.raises(ControllerSignalError, match=r"runs on elsewhere\.example"):
        send_stack_signal(record)


def test_record_that_is_damaged_or_of_another_format_is_refused(tmp_path):
    assert read_record(tmp_path) is None
    (tmp_path / FILE_NAME).write_text("{")
    with pytest.raises(DataError, match=r"controller\.json"):
        read_record(tmp_path)
    record = controller_file.own_record("r", "127.0.0.1:1", "t")
    record.format = 99
    controller_file.write_record(tmp_path, record)
    with pytest.raises(DataError, match="format 99"):
        read_record(tmp_path)
