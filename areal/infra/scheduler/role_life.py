"""Starting, restarting and stopping the workers of a role: the order in which backend, table, monitor and logs act."""

from __future__ import annotations

from areal.infra.run_context import RunContext
from areal.infra.scheduler import exit_guard, launch, worker_logs
from areal.infra.scheduler.exceptions import WorkerCreationError
from areal.infra.scheduler.handles import RoleEntry, WorkerHandle, WorkerTable
from areal.infra.scheduler.hooks import WorkerHooks
from areal.infra.scheduler.monitor import WorkerMonitor
from areal.utils.errors import ArealError


class RoleLife:
    """The life of one scheduler's roles."""

    def __init__(self, hooks: WorkerHooks, context: RunContext, table: WorkerTable, monitor: WorkerMonitor) -> None:
        self._hooks = hooks
        self._context = context
        self._table = table
        self._monitor = monitor
        self._merger = worker_logs.LogMerger(context.log_dir / "merged.log")

    def launch(self, role: str, handles: list[WorkerHandle], target: RoleEntry | None) -> list[str]:
        """Start new workers, next to ``target``'s if given; returns their ids. Either all are started or none is left.

        Raises:
            WorkerCreationError: they cannot be started.
        """
        for handle in handles:
            handle.beside = target.handles[handle.index] if target is not None else None
            handle.begin()
        exit_guard.protect(self)
        self._table.add(RoleEntry(role, handles, target=target.name if target is not None else None))
        try:
            self._hooks._start(handles)
            self._check_wanted(handles)
        except BaseException as exc:
            self.end(role, 0.0)
            if isinstance(exc, OSError) and not isinstance(exc, ArealError):
                raise WorkerCreationError(f"workers of role {role!r} cannot be started: {exc}") from exc
            raise
        for handle in handles:
            self._merger.follow(handle.log_path, f"[{handle.id}]", handle.log_offset)
        self._monitor.watch(handles)
        return [handle.id for handle in handles]

    def restart(self, handle: WorkerHandle, grace_s: float) -> None:
        """Stop what is left of a worker and start it again."""
        hung = handle.failure is not None  # or gone: it would not notice a polite request
        self._monitor.forget([handle])
        self._hooks._stop([handle], 0.0 if hung else grace_s)
        self._monitor.stopped([handle])
        handle.incarnation += 1
        launch.mark(self._context, handle)
        handle.begin()
        try:
            self._hooks._start([handle])
            self._check_wanted([handle])
        except BaseException as exc:
            handle.end(f"it could not be started again: {exc}")
            raise
        self._monitor.watch([handle])

    def end(self, role: str | None, grace_s: float, *, reverse_order: bool = False) -> None:
        """Stop the workers of a role (None: of all) and of those that share its devices; newest role first."""
        for entry in self._table.take(role):
            if entry.shared:
                continue
            failed = [handle for handle in entry.handles if handle.failure is not None]
            self._monitor.forget(entry.handles)
            parts = [entry.handles[:0:-1], entry.handles[:1]] if reverse_order else [entry.handles]
            try:
                if failed:  # they have ended, or would not notice a polite request
                    self._hooks._stop(failed, 0.0)
                for part in parts:
                    self._hooks._stop([handle for handle in part if handle not in failed], grace_s)
            except BaseException:  # a signal: the table has forgotten them, so this is their last chance
                self._hooks._stop(entry.handles, 0.0)
                raise
            self._monitor.stopped(entry.handles)

    def _check_wanted(self, handles: list[WorkerHandle]) -> None:
        """Stop what was just started if its role was deleted meanwhile, by another thread or a signal handler."""
        if not all(self._table.holds(handle) for handle in handles):
            self._hooks._stop(handles, 0.0)
            raise WorkerCreationError(f"role {handles[0].role!r} was deleted while its workers were being started")

    def stop_all(self, grace_s: float) -> None:
        """Stop the workers of all roles."""
        self.end(None, grace_s)

    def close(self) -> None:
        """Write the rest of the logs and remove the run's token; no worker is left."""
        exit_guard.release(self)
        self._merger.close()
        self._context.close()
