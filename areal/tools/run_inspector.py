"""``areal status`` and ``areal stack``: look at a run from outside, through its log directory.

The controller is asked over its status server. If it does not answer, files tell what they can, and a signal still gets
its stacks. Exit codes: 0 shown; 1 a controller runs but did not tell; 2 no controller runs, or no such run.
"""

from __future__ import annotations

import http.client
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal.infra.run_status import RunStatus, from_json, to_json
from areal.infra.service.controller_file import (
    FILE_NAME,
    STACKS_NAME,
    ControllerRecord,
    ControllerSignalError,
    process_state,
    read_record,
    send_stack_signal,
)
from areal.tools.status_table import print_status
from areal.utils.errors import ArealError, DataError, NetworkError
from areal.utils.network import split_hostport

RUN_FILES = (FILE_NAME, "manifest.json", "stats.jsonl")  # any of them marks the log directory of a run
_SETTLED_S = 0.3  # a stack file that has not grown for so long is complete
_POLL_S = 0.05


class NoAnswerError(NetworkError):
    """The controller did not answer within the time."""


@dataclass
class LastStep:
    """The newest line of ``stats.jsonl``; ``when`` is in seconds since 1970."""

    step: int
    when: float


def status(run: Path, *, as_json: bool, timeout_s: float) -> int:
    """Print what ``run`` is doing, or what its files say."""
    try:
        log_dir = find_run(run)
        record = read_record(log_dir)
    except ArealError as exc:
        return _complain(f"areal status: {exc}")
    if record is None or not record.is_running:
        return _print_ended(log_dir, record, as_json=as_json)
    try:
        found = from_json(_ask(record, "/status", timeout_s))
    except (NoAnswerError, DataError) as exc:
        return _print_silent(log_dir, record, str(exc), as_json=as_json)
    if as_json:
        _print_json({"running": True, "log_dir": str(log_dir), **_plain(found)})
    else:
        print_status(found, log_dir)
    return 0


def stack(run: Path, *, timeout_s: float) -> int:
    """Print the stacks of the controller and of every worker of ``run``."""
    try:
        log_dir = find_run(run)
        record = read_record(log_dir)
    except ArealError as exc:
        return _complain(f"areal stack: {exc}")
    if record is None or not record.is_running:
        return _print_ended(log_dir, record, as_json=False)
    try:
        others_s = max(0.1, 0.7 * timeout_s)
        _say(_ask(record, f"/stack?timeout={others_s:g}", timeout_s).decode(errors="replace"))
        return 0
    except NoAnswerError as exc:
        _say(f"{exc}; asking by SIGUSR1")
    shown = _print_signalled(log_dir, record, timeout_s)
    for worker, address in record.workers.items():
        shown = _print_worker(worker, address, record, timeout_s) or shown
    return 0 if shown else 1


def find_run(path: Path) -> Path:
    """The log directory that ``path`` is, or the only one below the fileroot ``path``.

    Raises:
        DataError: there is none, or more than one.
    """
    if _is_run(path):
        return path
    found = [trial for trial in sorted(path.glob("logs/*/*/*")) if _is_run(trial)]
    if len(found) == 1:
        return found[0]
    if not found:
        raise DataError(
            f"{path} is neither the log directory of a run (none of {', '.join(RUN_FILES)} is in it) nor a fileroot "
            "with one"
        )
    raise DataError(f"{path} holds {len(found)} runs; name one:\n" + "\n".join(f"  {trial}" for trial in found))


def _is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in RUN_FILES)


def _ask(record: ControllerRecord, path: str, timeout_s: float) -> bytes:
    """GET from the status server.

    Raises:
        NoAnswerError: no answer in time, or a refusal.
    """
    if not record.is_here:
        raise NoAnswerError(f"the controller runs on {record.host} and answers there only; call the command there")
    try:
        return _get(record.address, path, {"Authorization": f"Bearer {record.token}"}, timeout_s)
    except (OSError, http.client.HTTPException) as exc:
        raise NoAnswerError(
            f"the controller (pid {record.pid}) did not answer: {str(exc) or type(exc).__name__}"
        ) from exc


def _get(address: str, path: str, headers: dict[str, str], timeout_s: float) -> bytes:
    host, port = split_hostport(address)
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        body = response.read()
    finally:
        connection.close()
    if response.status != http.client.OK:
        raise OSError(f"status {response.status}: {body.decode(errors='replace')[:500]}")
    return body


def _print_signalled(log_dir: Path, record: ControllerRecord, timeout_s: float) -> bool:
    """Stacks that the signal handler of the controller writes; works while every thread of it is stuck."""
    file = log_dir / STACKS_NAME
    before = file.stat().st_size if file.exists() else 0
    try:
        if process_state(record.pid) == "T":
            raise ControllerSignalError(f"the controller (pid {record.pid}) is stopped; SIGCONT lets it go on")
        send_stack_signal(record)
    except ControllerSignalError as exc:
        _complain(f"areal stack: {exc}")
        return False
    text = _wait_for_growth(file, before, timeout_s)
    if not text:
        _complain(f"areal stack: pid {record.pid} wrote nothing to {file} within {timeout_s:g} s")
        return False
    _say(f"=== controller, pid {record.pid} ===\n{text}\n(also in {file})")
    return True


def _wait_for_growth(file: Path, before: int, timeout_s: float) -> str:
    deadline = time.monotonic() + timeout_s
    size, since = before, time.monotonic()
    while (now := time.monotonic()) < deadline:
        current = file.stat().st_size if file.exists() else before
        if current != size:
            size, since = current, now
        elif size > before and now - since >= _SETTLED_S:
            break
        time.sleep(_POLL_S)
    if size <= before:
        return ""
    with file.open("rb") as stream:
        stream.seek(before)
        return stream.read().decode(errors="replace")


def _print_worker(worker: str, address: str, record: ControllerRecord, timeout_s: float) -> bool:
    """Ask a worker itself, since the controller cannot."""
    headers = {"Authorization": f"Bearer {record.worker_token}", "X-Areal-Run": record.run_id}
    try:
        text = _get(address, "/stack", headers, timeout_s).decode(errors="replace")
    except (OSError, ValueError, http.client.HTTPException) as exc:
        _complain(f"areal stack: worker {worker} at {address}: {str(exc) or type(exc).__name__}")
        return False
    _say(f"=== worker {worker} ===\n{text}")
    return True


def _print_ended(log_dir: Path, record: ControllerRecord | None, *, as_json: bool) -> int:
    last = _last_step(log_dir)
    if as_json:
        killed = record is not None
        _print_json({"running": False, "log_dir": str(log_dir), "killed": killed, **_step_fields(last)})
        return 2
    _say("\n".join(_ended_lines(log_dir, record, last)))
    return 2


def _ended_lines(log_dir: Path, record: ControllerRecord | None, last: LastStep | None) -> Iterator[str]:
    yield f"no controller of {log_dir} is running"
    if record is not None:
        yield f"it was killed: pid {record.pid} on {record.host}, started {_clock(record.started)}, left {FILE_NAME}"
    yield _last_line(last)
    if (log_dir / "main.log").is_file():
        yield f"log: {log_dir / 'main.log'}, last written {_clock((log_dir / 'main.log').stat().st_mtime)}"


def _print_silent(log_dir: Path, record: ControllerRecord, why: str, *, as_json: bool) -> int:
    last = _last_step(log_dir)
    if as_json:
        _print_json({"running": True, "log_dir": str(log_dir), "pid": record.pid, "error": why, **_step_fields(last)})
    else:
        _say(f"{_last_line(last)}\ntry: areal stack {log_dir}")
    _complain(f"areal status: {why}")
    return 1


def _last_step(log_dir: Path) -> LastStep | None:
    from areal.utils.stats_logger.jsonl import read_stats  # its package loads torch, which a running run does not need

    try:
        rows = read_stats(log_dir)
    except FileNotFoundError:
        return None
    return LastStep(int(rows[-1]["global_step"]), float(rows[-1].get("time", 0.0))) if rows else None


def _last_line(last: LastStep | None) -> str:
    return "no step was finished" if last is None else f"last step: {last.step}, finished {_clock(last.when)}"


def _step_fields(last: LastStep | None) -> dict[str, Any]:
    step, when = (None, None) if last is None else (last.step, last.when)
    return {"last_step": step, "last_step_time": when}


def _plain(found: RunStatus) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(to_json(found))
    return plain


def _print_json(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")


def _say(text: str) -> None:
    sys.stdout.write(text.rstrip("\n") + "\n")
    sys.stdout.flush()


def _complain(text: str) -> int:
    sys.stderr.write(text.rstrip("\n") + "\n")
    return 2


def _clock(when: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when))
