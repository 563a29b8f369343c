"""What a run tells about itself while it runs: the status server, and stacks written when a wait fails.

    hooks, executors, workers ──snapshot──► RunStatus ──► status server ──► areal status, Prometheus
    a wait that timed out ──write_stacks──► {log_dir}/stacks-<time>.txt, named in the error

Started by a trainer before it builds its engines, so that a run that waits for its workers can be looked at as well;
closed by ``RunHooks``. Never ends a run: whatever fails here is a warning.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal.infra.run_status import ErrorStatus, RolloutStatus, RunStatus, WorkerStatus, executor_status
from areal.infra.service import controller_file
from areal.infra.service.status_server import StatusServer
from areal.infra.service.worker_overview import WorkerOverview
from areal.utils import fs, logging, network
from areal.utils.errors import ArealError
from areal.utils.stacks import thread_stacks

if TYPE_CHECKING:
    from areal.infra.rollout.executor import WorkflowExecutor
    from areal.infra.rpc.identity import RunIdentity
    from areal.trainer.hooks import RunHooks

logger = logging.getLogger("Diagnostics")

STACKS_EVERY_S = 60.0  # a caller that polls with short limits must not fill the disk
STACKS_FILES = 50  # of one run
STACKS_LIMIT_S = 15.0  # longest wait for the workers' stacks
REFRESH_EVERY_S = 5.0


class RunDiagnostics:
    """Status server and stack files of one run; only rank 0 has a server.

    Args:
        log_dir: of the run.
        hooks: know the step and the phase; close this with the run.
        executors: their waits report here when they fail.
        workers: status of every worker; may ask them, and is never called in a thread that trains.
        stacks: text per worker id; may ask the workers.
    """

    def __init__(
        self,
        log_dir: Path,
        hooks: RunHooks,
        executors: Iterable[WorkflowExecutor] = (),
        workers: Callable[[], list[WorkerStatus]] = list,
        stacks: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self._log_dir = log_dir
        self._hooks = hooks
        self._executors: list[WorkflowExecutor] = []
        self._workers = workers
        self._stacks = stacks
        self._identity: RunIdentity | None = None
        self._run_id = network.new_run_id()
        self._server: StatusServer | None = None
        self._error: ErrorStatus | None = None
        self._files = 0
        self._last_file = self._last_refresh = float("-inf")
        self._lock = threading.Lock()
        for executor in executors:
            self.watch(executor)

    def identify(self, identity: RunIdentity) -> None:
        """Use the run's id, and let ``areal stack`` ask the workers itself when the controller cannot; before start."""
        self._identity = identity
        self._run_id = identity.run_id

    def watch(self, executor: WorkflowExecutor) -> None:
        """Show ``executor``, and write stacks when one of its waits fails."""
        self._executors.append(executor)
        executor.waiter.on_timeout = self.write_stacks

    def start(self) -> None:
        """Serve until the hooks close; a server that does not start is a warning."""
        self._hooks.diagnostics = self
        if self._hooks.rank != 0:
            return
        server = StatusServer(self._log_dir, self._run_id, self.snapshot, self._worker_stacks)
        try:
            server.start()
        except (ArealError, OSError) as exc:
            logger.warning(f"areal status and areal stack will not see this run: {exc}")
            return
        self._server = server
        self.refresh()

    def close(self) -> None:
        """Stop serving and let go of everything that was watched; safe to call twice."""
        with self._lock:  # nothing writes the server's file after it is gone
            server, self._server = self._server, None
        if server is not None:
            server.close()
        for executor in self._executors:
            executor.waiter.on_timeout = None
        self._executors, self._workers, self._stacks = [], list, dict
        self._hooks.diagnostics = None

    def note_error(self, error: BaseException) -> None:
        """Show ``error`` as the last one."""
        self._error = ErrorStatus.of(error)

    def refresh(self) -> None:
        """Soon record where the workers are, so that they can be asked even if the controller is stuck; once a step."""
        now = time.monotonic()
        if self._identity is None or now - self._last_refresh < REFRESH_EVERY_S:
            return
        self._last_refresh = now
        threading.Thread(target=self._record_workers, args=(self._identity,), name="refresh", daemon=True).start()

    def snapshot(self) -> RunStatus:
        """What the run is doing now; reads only, from any thread."""
        hooks, config = self._hooks, self._hooks.config
        rollouts = [executor_status(executor) for executor in self._executors]
        record = self._server.record if self._server is not None else None
        return RunStatus(
            experiment=config.experiment_name,
            trial=config.trial_name,
            run_id=self._run_id,
            pid=record.pid if record is not None else 0,
            host=record.host if record is not None else "",
            started=record.started if record is not None else 0.0,
            time=time.time(),
            phase=hooks.phase,
            phase_since=hooks.phase_since,
            step=hooks.global_step,
            total_steps=hooks.plan.total_steps,
            version=rollouts[0].version if rollouts else None,
            tokens_per_s=hooks.tokens_per_s,
            rollouts=rollouts,
            workers=self._workers(),
            last_error=self._last_error(rollouts),
        )

    def write_stacks(self, why: str) -> str | None:
        """Write the stacks of the controller, its episodes and every worker to ``{log_dir}/stacks-<time>.txt``.

        Returns:
            The file; None if one was written a moment ago, there are many already, or it cannot be written.
        """
        with self._lock:
            now = time.monotonic()
            if now - self._last_file < STACKS_EVERY_S or self._files >= STACKS_FILES:
                return None
            self._last_file, self._files = now, self._files + 1
        stamp = time.strftime("%Y%m%d-%H%M%S")
        path = self._log_dir / f"stacks-{stamp}-{self._files}.txt"
        text = f"{why}\n\n=== controller ===\n{thread_stacks()}\n{self._bounded_worker_stacks()}"
        try:
            fs.atomic_write_text(path, text)
        except OSError as exc:
            logger.warning(f"{path}: {exc}")
            return None
        return str(path)

    def _record_workers(self, identity: RunIdentity) -> None:
        addresses = {worker.id: worker.address for worker in self._workers() if worker.address is not None}
        with self._lock:
            record = self._server.record if self._server is not None else None
            if record is None or addresses == record.workers:
                return
            record.workers, record.worker_token = addresses, identity.token
            try:
                controller_file.write_record(self._log_dir, record)
            except OSError as exc:
                logger.warning(f"{self._log_dir / controller_file.FILE_NAME}: {exc}")

    def _last_error(self, rollouts: list[RolloutStatus]) -> ErrorStatus | None:
        errors = [error for error in (self._error, *(rollout.last_error for rollout in rollouts)) if error is not None]
        return max(errors, key=lambda error: error.when, default=None)

    def _worker_stacks(self) -> str:
        """Episodes of each executor, then every worker."""
        parts = [("episodes of " + executor.probe.name, executor.probe.tasks()) for executor in self._executors]
        parts += [(f"worker {worker}", text) for worker, text in self._stacks().items()]
        return "\n".join(f"=== {title} ===\n{text}" for title, text in parts)

    def _bounded_worker_stacks(self) -> str:
        """The same, or what went wrong; a worker that hangs must not keep the error from its reader."""
        found: list[str] = []

        def ask() -> None:
            try:
                found.append(self._worker_stacks())
            except Exception as exc:  # noqa: BLE001 - part of the report
                found.append(f"(no stacks of the workers: {type(exc).__name__}: {exc})")

        thread = threading.Thread(target=ask, name="worker-stacks", daemon=True)
        thread.start()
        thread.join(STACKS_LIMIT_S)
        return found[0] if found else f"(the stacks of the workers did not arrive within {STACKS_LIMIT_S:g} s)"


def start_diagnostics(hooks: RunHooks, scheduler: Any, executors: Iterable[WorkflowExecutor] = ()) -> RunDiagnostics:
    """Diagnostics of a run whose workers ``scheduler`` hosts, started.

    Args:
        hooks: of the run.
        scheduler: offers ``worker_ids()`` (those of processes), ``client``, ``worker_failure``, and the ``context`` of
            the run, None where there are no worker processes.
        executors: those that stand already; ``watch`` takes further ones.
    """
    overview = WorkerOverview(scheduler, scheduler.worker_ids)
    diagnostics = RunDiagnostics(hooks.log_dir, hooks, executors, overview.statuses, overview.stacks)
    if scheduler.context is not None:
        diagnostics.identify(scheduler.context.identity)
    diagnostics.start()
    return diagnostics
