"""What runs on a Ray node: an actor whose process hosts one worker server, and two small tasks of the scheduler.

Made by ``areal.infra.scheduler.ray``. Ray sees only ``started``, ``ended`` and ``stop``; every other call reaches the
server directly. The run's token comes as an argument of the actor, so that nodes need no shared folder for it and it
never stands in a command line.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

from areal.infra.rpc.identity import RunIdentity, set_identity
from areal.infra.rpc.rpc_server import WorkerProcess, parse_options
from areal.infra.scheduler import process_tree, worker_logs
from areal.utils import environ, logging, name_resolve
from areal.utils.errors import SchedulerError
from areal.utils.optional import import_extra

logger = logging.getLogger("RayScheduler")

_TICK_S = 0.02


class WorkerActor:
    """One worker; its process ends with it.

    Args:
        token: of the run.
        flags: command line of the worker server; without ``--host`` it binds the address of its Ray node.
        log_path: where this process writes from now on.
        beside: facts of the worker whose devices this one uses without having any of its own.
    """

    def __init__(self, token: str, flags: list[str], log_path: str, beside: dict[str, Any] | None = None) -> None:
        ray = import_extra("ray", "ray")
        runtime = ray.get_runtime_context()
        own = [str(device) for device in runtime.get_accelerator_ids().get("GPU", [])]
        self._gpus = own or (list(beside["gpus"]) if beside else [])
        self._node_id, self._node = runtime.get_node_id(), ray.util.get_node_ip_address()
        self._log_path = log_path
        environ.set_env({"CUDA_VISIBLE_DEVICES": ",".join(self._gpus)})  # Ray leaves it alone for those without devices
        _write_to(Path(log_path))

        options = parse_options(["--host", self._node, *flags])
        identity = RunIdentity(options.run_id, token)
        set_identity(identity)
        name_resolve.reconfigure(options.name_resolve)
        self._worker = WorkerProcess(options, identity, exits=False)
        self._error: BaseException | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="worker", daemon=True)
        self._thread.start()

    def started(self) -> dict[str, Any]:
        """Facts about the worker, once its server listens."""
        server = self._worker.server
        while not (server.port and server.stream.port):
            self._thread.join(_TICK_S)
            if not self._thread.is_alive():
                raise SchedulerError(self.ended())
        return {
            "address": server.address,
            "gpus": self._gpus,
            "pid": os.getpid(),
            "node": self._node,
            "node_id": self._node_id,
            "log_path": self._log_path,
        }

    def ended(self) -> str:
        """How the server ended; until then this waits, and when the process ends Ray answers in its place."""
        self._thread.join()
        return f"its server failed: {self._error!r}" if self._error else "its server ended"

    def stop(self) -> None:
        """Destroy the hosted objects and stop serving, within about 5 s; the scheduler ends the process then."""
        self._stopping = True
        self._worker.end(0, "its scheduler stops it")
        self._thread.join()

    def _run(self) -> None:
        try:
            code = self._worker.run()
        except BaseException as exc:  # noqa: BLE001 - ended() tells it
            logger.exception("the worker's server failed")
            self._error = exc
            return
        if not self._stopping:  # nobody wants it any more, and nobody may be there to end the process
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def read_log(path: str) -> str:
    """The end of a log of this node; empty when there is none."""
    return worker_logs.tail(Path(path))


def kill_marked(marks: set[str]) -> None:
    """End what workers that are gone left on this node."""
    process_tree.kill_marked(marks)


def _write_to(path: Path) -> None:
    """Have this process write its output to ``path``; if that cannot be, it stays in Ray's own files."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as exc:
        logger.warning(f"worker log {path} cannot be written ({exc}); its output is in Ray's session directory")
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
