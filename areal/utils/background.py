"""Runs slow writes behind the training loop: one thread, jobs in order, at most one outstanding per key.

In: jobs that own everything they write (a snapshot). Out: nothing, or the error of an earlier job at the next call.
Called by ``areal/utils/saver.py``. Every rank submits the same jobs in the same order, so a job may contain collectives
on a group that nobody else uses meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from areal.utils.errors import CheckpointError
from areal.utils.threads import release_thread_pool


class BackgroundWriter:
    """One writer thread. A failed job is reported once, by the next ``wait``, ``submit`` or ``close``."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._jobs: dict[str, tuple[str, Future[None]]] = {}

    def submit(self, key: str, what: str, job: Callable[[], None]) -> None:
        """Start ``job`` after the jobs submitted before; waits for the previous job of the same ``key``.

        Args:
            key: whose snapshot it is (an engine's name); bounds the host memory to one snapshot per key.
            what: shown in the error if the job fails, such as the checkpoint's directory.
            job: runs in the writer thread.

        Raises:
            CheckpointError: an earlier job failed; this one was not started.
        """
        self.wait(key)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint-writer")
        self._jobs[key] = (what, self._pool.submit(_run, job))

    def wait(self, key: str | None = None) -> None:
        """Return when no job of ``key`` (None: no job at all) is outstanding.

        Raises:
            CheckpointError: one of the finished jobs failed; the message holds the original one.
        """
        for name, (what, job) in list(self._jobs.items()):
            if key is not None and name != key and not job.done():
                continue
            del self._jobs[name]
            error = job.exception()
            if error is not None:
                raise CheckpointError(f"{what}, written in the background, failed: {error}") from error

    def close(self) -> None:
        """Finish all jobs and end the thread; safe to call twice. Raises like ``wait``."""
        try:
            self.wait()
        finally:
            if self._pool is not None:
                self._pool.shutdown(wait=True)
                self._pool = None


def _run(job: Callable[[], None]) -> None:
    try:
        job()
    finally:
        release_thread_pool()  # its idle OpenMP threads would slow the training threads down
