"""Stops the workers when this process ends: at exit, and on SIGINT, SIGTERM and SIGHUP.

``protect(owner)`` is called by a scheduler before it starts its first worker, ``release(owner)`` when it is closed.
Handlers are installed in the main thread only, call the one that was there before, and are taken out again. SIGKILL is
not for here: the workers and the guardian watch this process themselves.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
from types import FrameType
from typing import Any, Protocol

from areal.utils import logging

logger = logging.getLogger("Scheduler")

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_GRACE_S = 3.0  # of workers after a signal; then they are killed


class WorkerOwner(Protocol):
    """Who has workers."""

    def stop_all(self, grace_s: float) -> None:
        """Stop every worker; after ``grace_s`` seconds by force."""
        ...

    def close(self) -> None:
        """Stop what is left and remove files of the run that only its processes need."""
        ...


_owners: list[tuple[int, WorkerOwner]] = []  # (pid that owns, owner): a forked child inherits the list, not the workers
_previous: dict[int, Any] = {}
_in_handler = False


def protect(owner: WorkerOwner) -> None:
    """Have ``owner``'s workers stopped when this process ends; repeating it does nothing."""
    if any(known is owner for _, known in _owners):
        return
    if not _owners:
        atexit.register(_stop_owners, _GRACE_S, close=True)
    _owners.append((os.getpid(), owner))
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            present = signal.getsignal(number)
            if number not in _previous and present not in (signal.SIG_IGN, None):
                _previous[number] = present
                signal.signal(number, _handle)


def release(owner: WorkerOwner) -> None:
    """Undo ``protect``; the last one restores the signal handlers, where nobody replaced ours."""
    _owners[:] = [entry for entry in _owners if entry[1] is not owner]
    if _owners:
        return
    atexit.unregister(_stop_owners)
    if not _in_handler and threading.current_thread() is threading.main_thread():
        for number, previous in list(_previous.items()):
            if signal.getsignal(number) is _handle:  # else someone came after us, and may call us still
                signal.signal(number, previous)
                del _previous[number]


def _stop_owners(grace_s: float, *, close: bool) -> None:
    for pid, owner in reversed(_owners[:]):
        if pid == os.getpid():
            try:
                owner.stop_all(grace_s)
                if close:
                    owner.close()
            except Exception:  # noqa: BLE001 - the other owners' workers must end too
                logger.exception("workers could not be stopped cleanly")


def _handle(number: int, frame: FrameType | None) -> None:
    """Stop the workers, then do what the process would have done without us. A second signal skips the grace."""
    global _in_handler
    again, _in_handler = _in_handler, True
    previous = _previous.get(number, signal.SIG_DFL)
    try:
        if any(pid == os.getpid() for pid, _ in _owners):
            logger.info("%s: stopping the workers, if there are any", signal.Signals(number).name)
            _stop_owners(0.0 if again else _GRACE_S, close=not callable(previous))
    finally:
        _in_handler = again
    if callable(previous):
        previous(number, frame)
    elif previous is signal.SIG_DFL:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
