"""The local scheduler: workers are child processes of the controller on this machine.

Each worker has a session of its own (a Ctrl-C in the terminal reaches the controller only), its devices, its log
``{role}-{index}.log``, and the controller's import paths. All end with the controller, however it ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence

from areal.infra.run_context import RunContext
from areal.infra.scheduler import launch, process_tree
from areal.infra.scheduler.base import BaseScheduler
from areal.infra.scheduler.exceptions import GPUAllocationError
from areal.infra.scheduler.guardian import Guardian
from areal.infra.scheduler.handles import WorkerHandle
from areal.utils import environ, logging

logger = logging.getLogger("Scheduler")

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_POLL_S = 0.05
_KILLED_WAIT_S = 2.0


class LocalScheduler(BaseScheduler):
    """Starts workers on this machine.

    Args:
        context: the run.
        gpu_devices: devices to hand out, as in ``CUDA_VISIBLE_DEVICES``; None takes those that this process sees.
    """

    def __init__(self, context: RunContext, *, gpu_devices: Sequence[int | str] | None = None) -> None:
        self._devices = None if gpu_devices is None else [str(device) for device in gpu_devices]
        self._used: dict[str, WorkerHandle] = {}
        self._next = 0
        self._guardian: Guardian | None = None
        self._lock = threading.RLock()  # re-entrant: signal handlers stop workers too
        super().__init__(context, cores=os.cpu_count())

    @property
    def n_gpus_per_node(self) -> int:
        return len(self._all_devices())

    def close(self) -> None:
        """Stop every worker and everything of this scheduler."""
        super().close()
        with self._lock:
            guardian, self._guardian = self._guardian, None
        if guardian is not None:
            guardian.dismiss()

    # --- hooks --------------------------------------------------------------------------------------------------
    def _start(self, handles: list[WorkerHandle]) -> None:
        self._assign_devices(handles)
        outside = environ.environ_copy()
        with self._lock:
            if self._guardian is None:
                env = {**outside, "PYTHONPATH": launch.python_path()}
                self._guardian = Guardian(self.context.identity.run_id, self.context.token_path, env)
        for handle in handles:
            environment = {
                **outside,
                _VISIBLE: ",".join(handle.gpus),
                **handle.env,
                "PYTHONPATH": launch.python_path(handle.env.get("PYTHONPATH")),
            }
            with handle.log_path.open("ab") as log:
                handle.backend = subprocess.Popen(
                    [*handle.command, "--parent-pid", str(os.getpid())],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            logger.info("worker %s: pid %d, devices %s", handle.id, handle.backend.pid, handle.gpus or "none")

    def _stop(self, handles: list[WorkerHandle], grace_s: float) -> None:
        marks = {handle.env[launch.MARKER] for handle in handles}
        started = [handle for handle in handles if handle.backend is not None]
        if grace_s > 0:
            for handle in started:
                if handle.backend.poll() is None:
                    handle.backend.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + grace_s
            while time.monotonic() < deadline and any(handle.backend.poll() is None for handle in started):
                time.sleep(_POLL_S)
        process_tree.kill_marked(marks)
        for handle in started:
            if handle.backend.poll() is None:
                handle.backend.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):  # it cannot be interrupted in a driver
                    handle.backend.wait(timeout=_KILLED_WAIT_S)
        with self._lock:
            self._used = {name: user for name, user in self._used.items() if user not in handles}

    def _poll(self, handle: WorkerHandle) -> str | None:
        process = handle.backend
        return None if process is None or process.poll() is None else describe_exit(process.returncode)

    def _pending(self, handle: WorkerHandle) -> str | None:
        return None if handle.backend is not None else "its process is being started"

    # --- devices ------------------------------------------------------------------------------------------------
    def _all_devices(self) -> list[str]:
        if self._devices is None:
            self._devices = visible_devices()
        return self._devices

    def _assign_devices(self, handles: list[WorkerHandle]) -> None:
        """Give each worker free devices, in turn; a forked worker has those of the one beside it."""
        wanted = sum(handle.spec.gpu for handle in handles if handle.beside is None)
        devices = self._all_devices() if wanted else []
        with self._lock:
            free = [name for name in devices if self._used.get(name) in (None, *handles)]
            if wanted > len(free):
                raise self._too_many(handles, wanted, len(free))
            first = next((i for i, name in enumerate(free) if devices.index(name) >= self._next), 0)
            queue = free[first:] + free[:first]
            for handle in handles:
                if handle.beside is not None:
                    handle.gpus = handle.beside.gpus
                elif not handle.gpus or not set(handle.gpus) <= set(queue):  # a restarted worker keeps its own
                    handle.gpus, queue = queue[: handle.spec.gpu], queue[handle.spec.gpu :]
                    if handle.gpus:
                        self._next = (devices.index(handle.gpus[-1]) + 1) % len(devices)
                if handle.beside is None:
                    self._used.update(dict.fromkeys(handle.gpus, handle))

    def _too_many(self, handles: list[WorkerHandle], wanted: int, free: int) -> GPUAllocationError:
        role, others = handles[0].role, sorted({user.role for user in self._used.values()})
        taken = f", {', '.join(others)} have the rest" if others else ""
        return GPUAllocationError(
            f"role {role!r}: {len(handles)} workers with scheduling_spec.gpu={handles[0].spec.gpu} need {wanted} "
            f"devices; {free} of {len(self._all_devices())} are free on this machine{taken}. Use fewer workers or "
            "devices each, or share another role's (scheduling_strategy.type=colocation)"
        )


def describe_exit(code: int) -> str:
    """An exit status in words: "exit code 3", "signal SIGKILL"."""
    if code >= 0:
        return f"it ended with exit code {code}"
    try:
        return f"it was ended by signal {signal.Signals(-code).name}"
    except ValueError:
        return f"it was ended by signal {-code}"


def visible_devices() -> list[str]:
    """Devices of this machine that this process may use."""
    listed = environ.get_env(_VISIBLE)
    if listed is not None:
        return [name.strip() for name in listed.split(",") if name.strip() and name.strip() != "-1"]
    import torch

    return [str(index) for index in range(torch.cuda.device_count())]
