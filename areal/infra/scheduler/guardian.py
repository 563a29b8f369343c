"""A small process beside a controller that ends what the controller leaves behind when it is killed.

Workers end by themselves when their controller is gone. What cannot is left to the guardian: a worker that is stopped
or hangs, and processes of user code. Started by the local scheduler with a pipe as its standard input; when that closes
without a word, or the parent is another one, it waits a moment for the workers, kills what still carries the run's
mark, and removes the run's token. Usage: ``python -m areal.infra.scheduler.guardian RUN_ID PARENT_PID TOKEN_FILE``
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from areal.infra.scheduler import process_tree

_CHECK_S = 0.25
_DISMISSED = b"d"
_DISMISS_S = 3.0
_PATIENCE_S = 5.5  # workers end within 5 s of losing their controller; all must be gone within 10 s


class Guardian:
    """The controller's side; ``env`` is the environment of the process."""

    def __init__(self, run_id: str, token_path: Path, env: Mapping[str, str]) -> None:
        self._process: subprocess.Popen[bytes] = subprocess.Popen(
            [sys.executable, "-m", "areal.infra.scheduler.guardian", run_id, str(os.getpid()), str(token_path)],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def dismiss(self) -> None:
        """Nothing is left to guard; returns when it has ended."""
        try:
            self._process.communicate(_DISMISSED, timeout=_DISMISS_S)
        except (subprocess.TimeoutExpired, OSError):
            self._process.kill()
            self._process.wait()


def guard(run_id: str, parent: int, token_path: Path) -> None:
    """Wait for the end of the controller, then for that of its workers, then end the rest."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it outlives whatever ends the controller
    while os.getppid() == parent:
        if select.select([0], [], [], _CHECK_S)[0]:
            if os.read(0, 1) == _DISMISSED:
                return
            break
    deadline = time.monotonic() + _PATIENCE_S
    while process_tree.find_marked([run_id]) and time.monotonic() < deadline:
        time.sleep(_CHECK_S)
    process_tree.kill_marked([run_id])
    token_path.unlink(missing_ok=True)


if __name__ == "__main__":
    guard(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
