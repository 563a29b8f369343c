"""The program of one pool worker: receives pickled calls over a socket, answers with results. Standard library only.

Started by ``process_pool`` as a plain script (``python -P process_worker.py FD``), so that it costs one bare
interpreter: neither this package nor the user's script is imported, until a call needs them. Messages, all pickled with
the length in front (:mod:`multiprocessing.connection`):

* parent, once: ``{"sys_path": [...], "main_path": str | None, "main_module": str | None, "parent": pid}``
* parent, per call: ``(needs_main, pickled (function, args, kwargs))``
* worker, per call: ``("ok", pickled result)`` or ``("error", pickled exception or None, type name, text, traceback
text)``
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import pickle
import runpy
import signal
import sys
import threading
import time
import traceback
import types
from multiprocessing.connection import Connection
from typing import Any

_PR_SET_PDEATHSIG = 1
WORKER_FLAG = "_areal_pool_worker"  # attribute of ``sys``: tells the pool that it must not start pools in here


def serve(connection: Connection) -> None:
    """Answer calls until the parent closes the connection."""
    setup = connection.recv()
    sys.path[:] = setup["sys_path"]
    _die_with_parent(setup["parent"])
    setattr(sys, WORKER_FLAG, True)
    main_loaded = False
    while True:
        try:
            needs_main, payload = connection.recv()
        except (EOFError, OSError):
            return
        try:
            if needs_main and not main_loaded:
                _load_main(setup["main_path"], setup["main_module"])
                main_loaded = True
            function, args, kwargs = pickle.loads(payload)
            answer: tuple[Any, ...] = ("ok", pickle.dumps(function(*args, **kwargs)))
        except BaseException as exc:  # noqa: BLE001 - SystemExit too: it is the call's result
            answer = ("error", _pickled(exc), type(exc).__name__, str(exc), traceback.format_exc())
        connection.send(answer)


def _pickled(error: BaseException) -> bytes | None:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)  # an exception with a constructor of its own may pickle and then not load
    except Exception:  # noqa: BLE001 - any failure means: send the text only
        return None
    return data


def _load_main(path: str | None, module: str | None) -> None:
    """Make the names of the parent's main script importable, without running what its main guard protects."""
    if module is not None:
        main = importlib.import_module(module)
    else:
        assert path is not None
        main = types.ModuleType("__mp_main__")
        main.__dict__.update(runpy.run_path(path, run_name="__mp_main__"))
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main


def _die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent is gone; elsewhere than on Linux a thread watches for it."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()
    if os.getppid() != parent:
        os._exit(1)


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        serve(Connection(int(sys.argv[1])))
