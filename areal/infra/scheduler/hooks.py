"""What a backend of ``BaseScheduler`` supplies."""

from __future__ import annotations

import abc

from areal.infra.scheduler.handles import WorkerHandle


class WorkerHooks(abc.ABC):
    """What a backend supplies. All are called from several threads."""

    @abc.abstractmethod
    def _start(self, handles: list[WorkerHandle]) -> None:
        """Start the workers and return at once; called with those of one role, or one that is restarted.

        A handle with ``beside`` belongs next to that worker, on the same devices. May set ``gpus`` and ``backend``.
        Raise WorkerCreationError (or a subclass) when nothing could be started.
        """

    @abc.abstractmethod
    def _stop(self, handles: list[WorkerHandle], grace_s: float) -> None:
        """End the workers and all their descendants, in this order; by force after ``grace_s`` seconds.

        Returns when they are gone. Workers that have ended, failed or were never started are fine.
        """

    @abc.abstractmethod
    def _poll(self, handle: WorkerHandle) -> str | None:
        """How the worker ended ("exit code 3", "signal SIGKILL"), None while it has not; called often."""

    @abc.abstractmethod
    def _pending(self, handle: WorkerHandle) -> str | None:
        """Why the worker has not been started yet; None when it was. Raises an ArealError when it never will be."""
