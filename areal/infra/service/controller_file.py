"""``controller.json``: where the controller of a run is, for commands that look at the run from outside.

Written by the status server into the log directory, readable by its owner only because it holds the token; removed when
the run closes. A file whose process is gone was left by a controller that was killed. The birth of the process (boot
and start time) is part of it, so that a process id which the system gave to someone else is never taken for ours.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec

from areal.utils import fs
from areal.utils.errors import DataError, InfrastructureError

FILE_NAME = "controller.json"
STACKS_NAME = "stacks-controller.txt"
FORMAT = 1
_START_TICKS = 19  # place of `starttime` in /proc/<pid>/stat, counted behind the name in brackets


class ControllerSignalError(InfrastructureError):
    """The controller could not be asked for its stacks by a signal."""


@dataclass
class ControllerRecord:
    """Content of the file.

    Attributes:
        address: ``host:port`` of the status server.
        token: bearer token of the status server.
        started: seconds since 1970.
        birth: tells this process from a later one with the same id.
        takes_signal: SIGUSR1 makes the process write its stacks.
        workers: address of each worker that has one.
        worker_token: bearer token of the workers; None where there are none.
    """

    run_id: str
    pid: int
    host: str
    birth: str
    address: str
    token: str
    started: float
    takes_signal: bool = False
    workers: dict[str, str] = field(default_factory=dict)
    worker_token: str | None = None
    format: int = FORMAT

    @property
    def is_here(self) -> bool:
        """Whether it names a process of this machine."""
        return self.host == socket.gethostname()

    @property
    def is_running(self) -> bool:
        """Whether its process lives; true where that cannot be known, on another machine."""
        return not self.is_here or (self.birth == process_birth(self.pid) and process_state(self.pid) != "Z")


def own_record(run_id: str, address: str, token: str) -> ControllerRecord:
    """The record of this process."""
    pid = os.getpid()
    return ControllerRecord(run_id, pid, socket.gethostname(), process_birth(pid), address, token, time.time())


def write_record(log_dir: Path, record: ControllerRecord) -> None:
    """Write the file, readable by its owner only."""
    fs.atomic_write_bytes(log_dir / FILE_NAME, json.dumps(asdict(record), indent=1).encode() + b"\n", mode=0o600)


def read_record(log_dir: Path) -> ControllerRecord | None:
    """The record of a log directory; None without a file.

    Raises:
        DataError: the file is damaged, or of another format.
    """
    path = log_dir / FILE_NAME
    try:
        record = msgspec.json.decode(path.read_bytes(), type=ControllerRecord)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as exc:
        raise DataError(f"{path}: not the record of a controller: {exc}") from exc
    if record.format != FORMAT:
        raise DataError(f"{path} has format {record.format}; this version reads {FORMAT}")
    return record


def remove_record(log_dir: Path, record: ControllerRecord) -> None:
    """Remove the file, unless another controller has written its own since."""
    with contextlib.suppress(OSError, DataError):
        found = read_record(log_dir)
        if found is not None and (found.pid, found.token) == (record.pid, record.token):
            (log_dir / FILE_NAME).unlink()


def process_birth(pid: int) -> str:
    """Boot id and start time of a process in clock ticks; empty if there is no such process."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}:{_stat_fields(pid)[_START_TICKS]}"
    except (OSError, IndexError):
        return ""


def process_state(pid: int) -> str:
    """Letter of the kernel for what the process does, such as ``T`` for stopped; empty if there is no such process."""
    try:
        return _stat_fields(pid)[0]
    except (OSError, IndexError):
        return ""


def send_stack_signal(record: ControllerRecord) -> None:
    """Make the controller append its stacks to ``stacks-controller.txt``, even if none of its threads answers.

    The signal reaches exactly the recorded process: it is held by a descriptor while its birth is compared.

    Raises:
        ControllerSignalError: it runs elsewhere, is gone, or would not survive the signal.
    """
    if not record.is_here:
        raise ControllerSignalError(f"the controller runs on {record.host}; call the command there")
    if not record.takes_signal:
        raise ControllerSignalError("SIGUSR1 had a handler of the script when the run began, so it is not ours to send")
    try:
        process = os.pidfd_open(record.pid)
    except OSError as exc:
        raise ControllerSignalError(f"the controller (pid {record.pid}) is gone: {exc.strerror}") from exc
    try:
        if process_birth(record.pid) != record.birth:
            raise ControllerSignalError(f"the controller is gone; its id {record.pid} belongs to another process now")
        if not _catches(record.pid, signal.SIGUSR1):
            raise ControllerSignalError(f"pid {record.pid} does not handle SIGUSR1, which would end it")
        signal.pidfd_send_signal(process, signal.SIGUSR1)
    except OSError as exc:
        raise ControllerSignalError(f"the controller (pid {record.pid}) cannot be signalled: {exc.strerror}") from exc
    finally:
        os.close(process)


def _catches(pid: int, number: int) -> bool:
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key == "SigCgt":
            return bool(int(value, 16) >> (number - 1) & 1)
    return False


def _stat_fields(pid: int) -> list[str]:
    """Fields of /proc/<pid>/stat from the state on; the name before them may hold spaces and brackets."""
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    return text.rpartition(")")[2].split()
