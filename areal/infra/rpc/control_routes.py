"""The control and data routes of a worker: health, ports, environment, stacks, statistics, child processes, tensors.

Bodies are JSON, or messages where tensors or configurations are in them. Made by ``server``, called by ``routes``.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import traceback
from typing import TYPE_CHECKING, Any

from aiohttp import web

from areal.infra.rpc import heavy, serialization
from areal.infra.rpc.errors import TensorLostError, WireError
from areal.infra.rpc.hosting import Refusal, Reply
from areal.infra.rpc.routes import Handler, Routes
from areal.infra.rpc.store import process_store
from areal.utils import environ
from areal.utils.errors import NetworkError, SchedulerError
from areal.utils.network import find_free_ports

if TYPE_CHECKING:
    from areal.infra.rpc.server import WorkerServer

MAX_PORTS = 1024  # of one request


class ControlRoutes:
    """Handlers of one server's own routes; ``table`` has them by method and path."""

    def __init__(self, server: WorkerServer, routes: Routes) -> None:
        self._server = server
        self._routes = routes
        self._ports: set[int] = set()
        self.table: dict[tuple[str, str], Handler] = {
            ("GET", "/health"): self._health,
            ("GET", "/stack"): self._stack,
            ("GET", "/stats"): self._stats,
            ("POST", "/alloc_ports"): self._alloc_ports,
            ("POST", "/set_env"): self._set_env,
            ("POST", "/configure"): self._configure,
            ("POST", "/fork"): self._fork,
            ("POST", "/kill_forked_worker"): self._kill_forked,
            ("PUT", "/data/"): self._put_data,
            ("GET", "/data/"): self._get_data,
            ("POST", "/data/batch"): self._data_batch,
            ("DELETE", "/data/clear"): self._clear_data,
        }

    async def _health(self, request: web.BaseRequest) -> web.Response:
        return web.json_response(
            {
                "status": "healthy",
                "run_id": self._server.identity.run_id,
                "role": self._server.role,
                "index": self._server.index,
                "pid": os.getpid(),
                "stream_port": self._server.stream.port,
                "engines": list(self._server.objects),
                "engine_busy_s": round(self._server.lane.busy_s, 3),
                "queue": self._server.lane.queued,
                "forked_children": self._server.children.names(),
            }
        )

    async def _stack(self, request: web.BaseRequest) -> web.Response:
        return web.Response(text=stacks_of_all_threads())

    async def _stats(self, request: web.BaseRequest) -> web.Response:
        return self._routes.message(await self._routes.in_codec(self._collect_stats))

    def _collect_stats(self) -> Reply:
        stats: dict[str, Any] = {"tensors": process_store().stats(), "engine_busy_s": self._server.lane.busy_s}
        for name, hosted in list(self._server.objects.items()):
            if callable(getattr(hosted, "status", None)):
                try:
                    stats[name] = hosted.status()
                except Exception as exc:  # noqa: BLE001 - one object's trouble must not hide the others
                    stats[name] = {"error": f"{type(exc).__name__}: {exc}"}
        return Reply(self._server.hosting.encode_result(stats))

    async def _alloc_ports(self, request: web.BaseRequest) -> web.Response:
        count = (await self._routes.json_body(request)).get("count")
        if type(count) is not int or not 0 < count <= MAX_PORTS:
            raise Refusal(400, "bad count", f"count={count!r} must be an integer from 1 to {MAX_PORTS}")
        try:
            ports = find_free_ports(count, exclude_ports=self._ports)
        except NetworkError as exc:
            raise Refusal(400, "no ports", str(exc)) from exc
        self._ports.update(ports)
        return web.json_response({"status": "success", "ports": ports, "host": self._server.advertised_host})

    async def _set_env(self, request: web.BaseRequest) -> web.Response:
        env = (await self._routes.json_body(request)).get("env")
        environ.set_env(_string_map(env, "env"))
        return web.json_response({"status": "success"})

    async def _configure(self, request: web.BaseRequest) -> web.Response:
        body = await self._routes.body(request)
        _, settings = await self._routes.in_codec(lambda: self._server.hosting.arguments(body))
        rank, seed = settings.get("rank"), settings.get("seed")
        if type(rank) is not int or type(seed) is not int or settings.keys() - {"config", "rank", "seed"}:
            raise Refusal(400, "malformed message", "configure takes rank and seed (integers) and config")
        self._server.seed = (seed, f"{self._server.role}{rank}")
        self._server.config = settings.get("config")
        return web.json_response({"status": "success"})

    async def _fork(self, request: web.BaseRequest) -> web.Response:
        body = await self._routes.json_body(request)
        role, index = _worker_name(body)
        command = body.get("raw_cmd")
        if not isinstance(command, list) or not command or not all(isinstance(word, str) for word in command):
            raise Refusal(400, "malformed message", "raw_cmd must be a list of words")
        env = _string_map(body.get("env") or {}, "env")
        try:
            pid = self._server.children.start(role, index, command, env)
        except SchedulerError as exc:
            raise Refusal(400, "not started", str(exc)) from exc
        return web.json_response({"status": "success", "host": self._server.advertised_host, "pid": pid})

    async def _kill_forked(self, request: web.BaseRequest) -> web.Response:
        role, index = _worker_name(await self._routes.json_body(request))
        if not await asyncio.to_thread(self._server.children.stop, role, index):
            raise Refusal(404, "unknown worker", f"no {role}/{index} was started next to this worker")
        return web.json_response({"status": "success"})

    async def _put_data(self, request: web.BaseRequest) -> web.Response:
        body = await self._routes.body(request)
        try:
            tensor = await self._routes.in_codec(lambda: serialization.decode(body))
        except WireError as exc:
            raise Refusal(400, "malformed message", str(exc)) from exc
        if not heavy.is_tensor(tensor):
            raise Refusal(400, "malformed message", "the body must be one tensor")
        process_store().add(tensor, key=request.path.removeprefix("/data/"))
        return web.json_response({"status": "success"})

    async def _get_data(self, request: web.BaseRequest) -> web.Response:
        return await self._send_tensors([request.path.removeprefix("/data/")], 404, single=True)

    async def _data_batch(self, request: web.BaseRequest) -> web.Response:
        return await self._send_tensors(_ids(await self._routes.json_body(request)), 400)

    async def _send_tensors(self, keys: list[str], missing_status: int, *, single: bool = False) -> web.Response:
        missing = [key for key in keys if key not in process_store()]
        if missing:
            raise Refusal(missing_status, "unknown tensor", f"not here: {', '.join(missing[:20])}")
        try:
            tensors = [process_store().tensor(key) for key in keys]
        except TensorLostError as exc:
            raise Refusal(missing_status, "unknown tensor", str(exc)) from exc
        value = tensors[0] if single else tensors
        return self._routes.message(Reply(await self._routes.in_codec(lambda: bytes(serialization.encode(value)))))

    async def _clear_data(self, request: web.BaseRequest) -> web.Response:
        count, _ = process_store().remove(_ids(await self._routes.json_body(request)))
        return web.json_response({"status": "success", "cleared_count": count, **process_store().stats()})


def stacks_of_all_threads() -> str:
    """Python stack of every thread of this process, as text."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        stack = "".join(traceback.format_stack(frame))
        parts.append(f"Thread {names.get(ident, '?')} ({ident}):\n{stack}")
    return "\n".join(parts)


def _string_map(value: Any, what: str) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(item, str) and "\0" not in item for item in value.values()):
        raise Refusal(400, "malformed message", f"{what} must map names to strings")
    if any(not key or "=" in key or "\0" in key for key in value):
        raise Refusal(400, "malformed message", f"{what} holds a name that no variable can have")
    return value


def _worker_name(body: dict[str, Any]) -> tuple[str, int]:
    role, index = body.get("role"), body.get("worker_index")
    if not isinstance(role, str) or not role or type(index) is not int or index < 0:
        raise Refusal(400, "malformed message", "role (text) and worker_index (integer >= 0) are needed")
    return role, index


def _ids(body: dict[str, Any]) -> list[str]:
    ids = body.get("shard_ids")
    if not isinstance(ids, list) or not all(isinstance(key, str) for key in ids):
        raise Refusal(400, "malformed message", "shard_ids must be a list of ids")
    return ids
