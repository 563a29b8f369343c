"""Starts one inference server and returns when it serves.

    interpreter looked at ─► flags, port ─► process ─► health ─► endpoints ─► probe generation ─► RunningServer
                                  ▲             │
                                  └─ port taken ┘

In: a :class:`LaunchOrder`. Out: an address and the process behind it, or an error with the end of the server's log.
The server listens on loopback, wants the protocol's token where it can, and ends with this process. Called by
``server_sampler`` and by remote engines.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal.api.config.server_args import (
    SGLANG_MODULE,
    VLLM_MODULE,
    ServerFlags,
    ServerPlace,
    command,
    sglang_flags,
    vllm_flags,
)
from areal.engine.inference.readiness import wait_until_ready
from areal.engine.inference.server_env import inspect_environment
from areal.infra.launcher.inference_server import ServerProcess, ServerStartError, server_environment
from areal.infra.rpc.identity import write_token
from areal.infra.scheduler.launch import python_path
from areal.utils import environ, logging, network

if TYPE_CHECKING:
    from areal.api.config.inference import NativeConfig
    from areal.engine.inference.protocol import ServerProtocol
    from areal.engine.inference.server_env import ServerEnvironment

logger = logging.getLogger("InferenceServer")

HOST = "127.0.0.1"
NATIVE_MODULE = "areal.engine.native.server"
_PORT_TRIES = 5
_FAILED_GRACE_S = 2.0
_PORT_TAKEN = ("address already in use", "eaddrinuse")
_ENGINE = Path(__file__).resolve().parent.parent
_GUARD = "areal_token_guard.TokenGuard"
_SHIM = Path(__file__).resolve().parent / "sglang_shim"


@dataclass(frozen=True)
class LaunchOrder:
    """What one server is to be.

    Attributes:
        backend: ``vllm``, ``sglang`` or ``native``.
        section: its config section.
        model_path: Hugging Face directory.
        log_path: file for its output.
        tensor, pipeline: devices along each.
        dtype: compute dtype where the section's is not written.
        index: number of the server, added to its seed.
        timeout_s: limit of the whole start.
        env: further environment, which wins.
        unwritten: see ``ServerPlace``.
    """

    backend: str
    section: Any
    model_path: str
    log_path: Path
    tensor: int = 1
    pipeline: int = 1
    dtype: str | None = None
    index: int = 0
    timeout_s: float = 300.0
    env: dict[str, str] = field(default_factory=dict)
    unwritten: list[str] | None = None

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.backend}/{self.index}"


@dataclass(frozen=True)
class RunningServer:
    """A server that serves.

    Attributes:
        address: ``host:port``.
        process: what runs it.
    """

    address: str
    process: ServerProcess


def launch_server(order: LaunchOrder, protocol: ServerProtocol) -> RunningServer:
    """Start a server and wait until it serves.

    Raises:
        ServerStartError: it ended, was not ready in time or is unfit; nothing of it is left.
    """
    with tempfile.TemporaryDirectory(prefix="areal-server-") as private:  # only this user can look into it
        return _launch(order, protocol, private)


def _launch(order: LaunchOrder, protocol: ServerProtocol, private: str) -> RunningServer:
    deadline = time.monotonic() + order.timeout_s
    installed = inspect_environment(order.backend, getattr(order.section, "python", ""))
    if installed.remark:
        _log_once(installed.remark)
    guard = _guard(order.backend, protocol.token, private) if protocol.token else ServerFlags({})
    tries = 0
    while True:
        port, hold = reserve_port()
        process = _process(order, installed, port, hold, guard)
        try:
            process.start()
            address = network.format_hostport(HOST, port)
            wait_until_ready(process, address, protocol, max(0.0, deadline - time.monotonic()))
        except BaseException as exc:
            process.stop(grace_s=_FAILED_GRACE_S)
            tries += 1
            if tries == _PORT_TRIES or not isinstance(exc, ServerStartError) or not _port_was_taken(process):
                raise
            logger.warning(f"{order.name}: port {port} was taken meanwhile; trying another one")
            continue
        logger.info(f"{order.name} serves {order.model_path} at {address}")
        return RunningServer(address, process)


def reserve_port() -> tuple[int, socket.socket]:
    """A port that is free and stays ours while the returned socket lives.

    The socket takes the port's UDP side: the server needs the TCP side only, and every search for a free port, here
    and in other processes, wants both. So no two servers can be given one port while neither listens yet.
    """
    while True:
        port = network.find_free_port()
        hold = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            hold.bind(("", port))
        except OSError:
            hold.close()
            continue
        return port, hold


def import_path(backend: str, device: str) -> str:
    """Folder that goes on the ``PYTHONPATH`` of a server; empty: none. Never the package's own root: it would shadow
    the server's packages.
    """
    if backend == "vllm":
        return str(_ENGINE / "vllm_ext")
    return str(_SHIM) if backend == "sglang" and device == "cpu" else ""


def cache_path(order: LaunchOrder) -> Path:
    """Where this server compiles to: its own directory, found again when it is restarted."""
    identity = str(order.log_path.absolute()).encode()
    return Path(environ.cache_dir()) / "servers" / hashlib.sha256(identity).hexdigest()[:16]


def _port_was_taken(process: ServerProcess) -> bool:
    text = process.log_tail().lower()
    return any(sign in text for sign in _PORT_TAKEN)


def _guard(backend: str, token: str, private: str) -> ServerFlags:
    """What has a server refuse who does not know ``token``, which no command line shows.

    Nothing for SGLang: it takes a key in its arguments only, and writes all of them into its log.
    """
    if backend == "native":
        path = Path(private) / "token"
        write_token(path, token)
        return ServerFlags({"token_file": str(path)})
    if backend == "vllm":
        return ServerFlags({"middleware": _GUARD}, {"VLLM_API_KEY": token})
    return ServerFlags({})


def _process(
    order: LaunchOrder, installed: ServerEnvironment, port: int, hold: socket.socket, guard: ServerFlags
) -> ServerProcess:
    place = ServerPlace(
        host=HOST,
        port=port,
        tensor=order.tensor,
        pipeline=order.pipeline,
        device=installed.device,
        dtype=order.dtype,
        index=order.index,
        model=read_model(order.model_path),
        unwritten=order.unwritten,
    )
    module, flags = _COMMANDS[order.backend](order, place)
    for change in flags.changes:
        _log_once(f"{order.backend}.{change}")
    caches = cache_path(order)
    env = {
        **({"HF_HUB_OFFLINE": "1"} if Path(order.model_path).is_dir() else {}),
        "TOKENIZERS_PARALLELISM": "true",
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "VLLM_CACHE_ROOT": str(caches / "vllm"),
        "PYTHONSAFEPATH": "1",  # the working directory may hold folders named like the server's packages
        "PYTHONPATH": import_path(order.backend, installed.device),
        **_without_chosen(flags.env),
        **guard.env,
        **order.env,
    }
    words = command(installed.python, module, flags.args | guard.args)
    environment = server_environment(env)
    return ServerProcess(words, env=environment, log_path=order.log_path, name=order.name, hold=hold)


def _without_chosen(env: dict[str, str]) -> dict[str, str]:
    """``env`` without what the worker's own environment says about vLLM on CPUs."""
    return {name: env[name] for name in env if not (name.startswith("VLLM_CPU_") and environ.get_env(name))}


def _vllm(order: LaunchOrder, place: ServerPlace) -> tuple[str, ServerFlags]:
    flags = vllm_flags(dataclasses.replace(order.section, model=order.model_path), place)
    return VLLM_MODULE, flags


def _sglang(order: LaunchOrder, place: ServerPlace) -> tuple[str, ServerFlags]:
    flags = sglang_flags(dataclasses.replace(order.section, model_path=order.model_path), place)
    return SGLANG_MODULE, flags


def _native(order: LaunchOrder, place: ServerPlace) -> tuple[str, ServerFlags]:
    section: NativeConfig = order.section
    args = dataclasses.asdict(section) | {"model_path": order.model_path, "host": place.host, "port": place.port}
    args["dtype"] = section.dtype or order.dtype
    args["no_share_prefill"] = not args.pop("share_prefill")
    return NATIVE_MODULE, ServerFlags(args, {"PYTHONPATH": python_path()})


_COMMANDS: dict[str, Callable[[LaunchOrder, ServerPlace], tuple[str, ServerFlags]]] = {
    "native": _native,
    "sglang": _sglang,
    "vllm": _vllm,
}


def read_model(path: str) -> dict[str, Any]:
    """Content of the model's ``config.json``; empty if it cannot be read here."""
    try:
        content = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


_logged: set[str] = set()


def _log_once(text: str) -> None:
    if text not in _logged:
        _logged.add(text)
        logger.info(text)
