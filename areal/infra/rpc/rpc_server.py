"""The program of a worker process: ``python -m areal.infra.rpc.rpc_server --role R --worker-index I ...``.

It serves (``server``), registers its address under the worker's name, and ends when nobody wants it any more::

    serving -- SIGTERM, SIGINT --------------------------------> objects destroyed, children ended, exit 0 (within 5 s)
        |---- leash lost for leash_grace_s, or never held -----> the same, exit 1
        '---- the process --parent-pid is gone ----------------> the same, exit 1

Started by the schedulers; :func:`run_worker` does the same inside a thread of another program.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from areal.api.config.cluster import NameResolveConfig
from areal.infra.rpc.identity import RunIdentity, get_identity, read_token, set_identity
from areal.infra.rpc.server import WorkerServer
from areal.utils import environ, logging, name_resolve, names
from areal.utils.errors import ArealError, ConfigError

logger = logging.getLogger("RPCServer")

_WATCH_S = 0.1
_DESTROY_S = 2.5  # of all objects together; one that is in the middle of a call is left as it is
_CHILDREN_S = 1.0
_EXIT_S = 4.2  # after which the process ends, whatever hangs


@dataclass
class WorkerOptions:
    """What a worker must know; see the command line's help."""

    role: str
    index: int
    experiment_name: str
    trial_name: str
    run_id: str
    token_file: str
    name_resolve: NameResolveConfig
    fileroot: str = ""
    host: str = "127.0.0.1"
    port: int = 0
    parent_pid: int | None = None
    startup_timeout_s: float = 120.0
    leash_grace_s: float = 2.0


def parse_options(argv: Sequence[str] | None = None) -> WorkerOptions:
    """Options of a command line; unknown ones are ignored.

    Raises:
        ConfigError: no worker index (a ValueError).
    """
    parser = argparse.ArgumentParser(prog="python -m areal.infra.rpc.rpc_server", description="One worker of a run.")
    for flag in ("--role", "--experiment-name", "--trial-name", "--run-id", "--token-file"):
        parser.add_argument(flag, required=True)
    parser.add_argument("--worker-index", type=int, default=-1, help="-1: SLURM_PROCID")
    parser.add_argument("--fileroot", default="")
    parser.add_argument("--name-resolve-type", default="nfs")
    for flag in ("--nfs-record-root", "--etcd3-addr", "--redis-addr", "--ray-actor-name"):
        parser.add_argument(flag)
    parser.add_argument("--host", default="127.0.0.1", help="address to bind and to be found under")
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    parser.add_argument("--parent-pid", type=int, help="end when this process is gone")
    parser.add_argument("--startup-timeout", type=float, default=120.0, help="seconds to wait for the first leash")
    parser.add_argument("--leash-grace", type=float, default=2.0, help="seconds from a lost leash to the end")
    args, _ = parser.parse_known_args(argv)
    index = args.worker_index if args.worker_index >= 0 else environ.get_int_env("SLURM_PROCID", -1)
    if index < 0:
        raise ConfigError(f"--worker-index={args.worker_index} and SLURM_PROCID is not set; give an index >= 0")
    store = {key: getattr(args, key) for key in ("nfs_record_root", "etcd3_addr", "redis_addr", "ray_actor_name")}
    return WorkerOptions(
        role=args.role,
        index=index,
        experiment_name=args.experiment_name,
        trial_name=args.trial_name,
        run_id=args.run_id,
        token_file=args.token_file,
        name_resolve=NameResolveConfig(
            type=args.name_resolve_type, **{key: value for key, value in store.items() if value is not None}
        ),
        fileroot=args.fileroot,
        host=args.host,
        port=args.port,
        parent_pid=args.parent_pid,
        startup_timeout_s=args.startup_timeout,
        leash_grace_s=args.leash_grace,
    )


class WorkerProcess:
    """One worker's life. ``run`` blocks; ``end`` may be called from any thread.

    Args:
        exits: end the whole process at the end, as a worker that has the process for itself does.
    """

    def __init__(self, options: WorkerOptions, identity: RunIdentity, *, exits: bool) -> None:
        self.options = options
        self.server = WorkerServer(
            identity, role=options.role, index=options.index, host=options.host, port=options.port
        )
        self.exit_code = 0
        self._exits = exits
        self._ending = threading.Event()
        self._ended = threading.Event()
        self._once = threading.Lock()  # taken by the first who ends it, never given back
        self._signal: int | None = None
        self._keys: list[str] = []

    def run(self) -> int:
        """Serve until the end; returns the exit code."""
        threading.Thread(target=self._watch, name="rpc-watch", daemon=True).start()
        self.server.serve_forever(lambda: threading.Thread(target=self._register, daemon=True).start())
        self._ended.wait(_EXIT_S)
        return self.exit_code

    def note_signal(self, number: int, _: object) -> None:
        """Signal handler. It may interrupt anything, itself too, and takes no lock; the watching thread acts on it."""
        self._signal = number

    def end(self, code: int, reason: str) -> None:
        """Destroy the objects, end the children and stop serving; returns at once."""
        if not self._once.acquire(blocking=False):
            return
        self.exit_code = code
        self._ending.set()
        threading.Thread(target=self._end, args=(code, reason), name="rpc-end", daemon=True).start()

    def _end(self, code: int, reason: str) -> None:
        logger.info(f"worker {self.options.role}/{self.options.index} ends: {reason}")
        if self._exits:
            timer = threading.Timer(_EXIT_S, os._exit, (code,))
            timer.daemon = True
            timer.start()
        self.server.begin_end()
        self._destroy_objects()
        self.server.children.stop_all(_CHILDREN_S)
        for key in self._keys:
            with contextlib.suppress(ArealError, OSError):
                name_resolve.delete(key)
        if self._exits:
            name_resolve.reset()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)  # not sys.exit: threads of engines must not keep a worker alive
        self.server.stop()
        self._ended.set()

    def _destroy_objects(self) -> None:
        """Newest first, on the engine thread; if that is busy for too long, without them."""
        loop = self.server._loop
        if loop is None or not self.server.objects:
            return
        waiting = asyncio.run_coroutine_threadsafe(self.server.lane.run(self._destroy_all, _DESTROY_S), loop)
        try:
            waiting.result(_DESTROY_S)
        except (TimeoutError, ArealError) as exc:
            logger.warning(f"objects were not destroyed within {_DESTROY_S:g} s: {exc}")

    def _destroy_all(self) -> None:
        for name, hosted in reversed(list(self.server.objects.items())):
            if callable(getattr(hosted, "destroy", None)):
                try:
                    hosted.destroy()
                except Exception:  # noqa: BLE001 - the others must be destroyed too
                    logger.exception(f"object {name!r} failed in destroy()")

    def _register(self) -> None:
        options, address = self.options, self.server.address
        keys = [
            names.worker(options.experiment_name, options.trial_name, options.role, options.index),
            f"runs/{options.run_id}/workers/{options.role}/{options.index}",
        ]
        try:
            for key in keys:
                name_resolve.add(key, address, replace=True)
                self._keys.append(key)
        except (ArealError, OSError) as exc:
            logger.error(f"worker {options.role}/{options.index} cannot register its address: {exc}")
            self.end(1, "its address could not be registered")
            return
        logger.info(f"worker {options.role}/{options.index} of run {options.run_id} serves at {address}")

    def _watch(self) -> None:
        """End when nobody wants this worker any more."""
        options = self.options
        parent = None if options.parent_pid is None else _Parent(options.parent_pid)
        waited_s = 0.0
        while not self._ending.wait(_WATCH_S):
            waited_s += _WATCH_S
            lost_s = self.server.stream.leash_lost_s()
            if self._signal is not None:
                self.end(0, signal.Signals(self._signal).name)
            elif parent is not None and parent.gone():
                self.end(1, f"its parent process {options.parent_pid} is gone")
            elif lost_s is not None and lost_s > options.leash_grace_s:
                self.end(1, f"its controller has been gone for {lost_s:.1f} s")
            elif waited_s > options.startup_timeout_s and not self.server.stream.leashed:
                self.end(1, f"no controller held it within {options.startup_timeout_s:g} s")


class _Parent:
    """Tells whether a process has ended, even when its number is used again."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._is_parent = os.getppid() == pid
        self._started = _start_time(pid)

    def gone(self) -> bool:
        """Whether it has ended."""
        if self._is_parent:
            return os.getppid() != self._pid
        return self._started is None or _start_time(self._pid) != self._started


def _start_time(pid: int) -> str | None:
    """When the process began, in the kernel's units; None when there is none, or it is a zombie."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else fields[19]


def run_worker(
    options: WorkerOptions, identity: RunIdentity | None = None, *, exits: bool = True, own_names: bool = True
) -> int:
    """Serve in the calling thread until the worker ends; returns the exit code.

    Args:
        identity: run and token; None reads the token file.
        exits: end the whole process with the worker. False where the process has other work.
        own_names: set up name_resolve from the options; False keeps what this process has.
    """
    identity = identity or RunIdentity(options.run_id, read_token(options.token_file))
    if own_names:
        name_resolve.reconfigure(options.name_resolve)
    worker = WorkerProcess(options, identity, exits=exits)
    if exits:
        set_identity(identity)
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, worker.note_signal)
    else:
        _set_identity_if_none(identity)
    return worker.run()


def _set_identity_if_none(identity: RunIdentity) -> None:
    try:
        get_identity()
    except ArealError:
        set_identity(identity)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a worker as the command line says; returns the exit code."""
    faulthandler.enable()
    try:
        return run_worker(parse_options(argv))
    except ArealError as exc:
        logger.error(f"worker not started: {exc}")
        raise


if __name__ == "__main__":
    sys.exit(main())
