"""How a worker is started: its command line and its environment, the same for every backend that starts processes."""

from __future__ import annotations

import os
import re
import shlex
import sys

from areal.api.config.scheduling import SchedulingSpec
from areal.infra.run_context import RunContext
from areal.infra.scheduler import process_tree
from areal.infra.scheduler.exceptions import WorkerConfigurationError
from areal.infra.scheduler.handles import WorkerHandle
from areal.utils import environ

RPC_SERVER = "areal.infra.rpc.rpc_server"
MARKER = process_tree.MARK
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)
_PYTHON = re.compile(r"python[\d.]*")


def split_command(spec: SchedulingSpec, where: str) -> list[str]:
    """Words of ``spec.cmd``; a leading ``python`` becomes this interpreter.

    Raises:
        WorkerConfigurationError: no command, unbalanced quotes, or it sets the port.
    """
    if not spec.cmd or not spec.cmd.strip():
        raise WorkerConfigurationError(f"{where}.cmd={spec.cmd!r} must be a command, such as 'python -m {RPC_SERVER}'")
    try:
        words = shlex.split(spec.cmd)
    except ValueError as exc:
        raise WorkerConfigurationError(f"{where}.cmd={spec.cmd!r} cannot be split into words: {exc}") from exc
    if any(word == "--port" or word.startswith("--port=") for word in words):
        raise WorkerConfigurationError(f"{where}.cmd={spec.cmd!r} must not contain --port; ports are assigned")
    if _PYTHON.fullmatch(words[0]):
        words[0] = sys.executable
    return words


def worker_flags(context: RunContext, role: str, index: int | None) -> list[str]:
    """Arguments of the RPC server; ``index=None`` leaves the index to ``SLURM_PROCID``."""
    store = context.name_resolve
    flags = {
        "--role": role,
        "--worker-index": index,
        "--experiment-name": context.experiment_name,
        "--trial-name": context.trial_name,
        "--fileroot": context.fileroot,
        "--run-id": context.identity.run_id,
        "--token-file": context.token_path,
        "--name-resolve-type": store.type,
        "--nfs-record-root": store.nfs_record_root,
        "--etcd3-addr": store.etcd3_addr,
        "--redis-addr": store.redis_addr,
        "--ray-actor-name": store.ray_actor_name,
        "--host": context.host,
        "--port": 0,
        "--startup-timeout": context.startup_timeout_s,
    }
    return [word for flag, value in flags.items() if value is not None for word in (flag, str(value))]


def make_handle(
    context: RunContext, role: str, index: int, spec: SchedulingSpec, cores: int | None = None
) -> WorkerHandle:
    """The handle of a worker that is about to be started for the first time; ``cores``: see ``worker_env``.

    Raises:
        WorkerConfigurationError: its command cannot be used.
    """
    command = split_command(spec, f"role {role!r}: scheduling_spec")
    handle = WorkerHandle(
        role=role,
        index=index,
        spec=spec,
        command=command + worker_flags(context, role, index),
        env=worker_env(spec, cores),
        log_path=context.log_dir / f"{role}-{index}.log",
    )
    mark(context, handle)
    return handle


def mark(context: RunContext, handle: WorkerHandle) -> None:
    """Give the worker's environment the mark of this incarnation, by which all its descendants are known."""
    handle.env[MARKER] = f"{context.identity.run_id}/{handle.id}/{handle.incarnation}"


def worker_env(spec: SchedulingSpec, cores: int | None = None) -> dict[str, str]:
    """Variables to add to a worker's inherited environment: threads, then the spec's own, which win.

    A thread variable that is set outside stays; else it follows ``spec.cpu``, at most ``cores`` (those of the machine).
    """
    count = str(min(spec.cpu, cores or spec.cpu))
    threads = {name: environ.get_env(name) or count for name in THREAD_VARIABLES}
    return {
        "TOKENIZERS_PARALLELISM": environ.get_env("TOKENIZERS_PARALLELISM") or "true",
        **threads,
        **{name: str(value) for name, value in spec.env_vars.items()},
    }


def python_path(first: str | None = None) -> str:
    """``PYTHONPATH`` with which a child process imports what this one can, user scripts included.

    Args:
        first: paths that come before, from the worker's own variables.
    """
    entries = [*(first or "").split(os.pathsep), os.getcwd(), *(os.path.abspath(entry) for entry in sys.path if entry)]
    return os.pathsep.join(dict.fromkeys(entry for entry in entries if entry))
