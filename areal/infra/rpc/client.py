"""Calls to the objects of one worker, from any thread or event loop.

A remote exception is raised here as the same type where that is known; the remote traceback is a note of it. Large
tensors of arguments and results take the stream, unseen by the caller. Used by schedulers, controllers and workers that
talk to each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn
from urllib.parse import quote

from areal.infra.rpc import frames, heavy, serialization
from areal.infra.rpc.errors import (
    EngineCallError,
    RequestRefusedError,
    RPCConnectionError,
    RPCTimeoutError,
    TensorLostError,
    WireError,
    unpack_exception,
)
from areal.infra.rpc.http1 import Body, HttpPeer, Response
from areal.infra.rpc.identity import RunIdentity, get_identity
from areal.infra.rpc.outgoing import Outgoing
from areal.infra.rpc.serialization import Parked
from areal.infra.rpc.stream import stream_pool
from areal.utils.errors import SchedulerError
from areal.utils.network import format_hostport, split_hostport

CALL_TIMEOUT_S = 7200.0
CONTROL_TIMEOUT_S = 60.0  # of requests that are answered at once
_TRIES = 4
_FIRST_DELAY_S = 0.2  # doubles with each further try
_LOOP_DECODE_BYTES = 256 << 10  # larger results are decoded beside the event loop


class WorkerClient:
    """The worker at ``address`` (``host:port``); thread-safe.

    Args:
        identity: run and token; None takes the process's own.
    """

    def __init__(self, address: str, identity: RunIdentity | None = None) -> None:
        self.address = address
        self._identity = identity or get_identity()
        self._http = HttpPeer(
            address, {"Authorization": f"Bearer {self._identity.token}", "X-Areal-Run": self._identity.run_id}
        )
        self._stream_address: str | None = None

    def call(
        self, object_name: str, method: str, /, *args: Any, timeout_s: float = CALL_TIMEOUT_S, **kwargs: Any
    ) -> Any:
        """Call a method of a hosted object and return its result.

        Args:
            timeout_s: limit of the whole call; if it has not begun by then, it never will.

        Raises:
            RPCConnectionError: the worker cannot be reached. Methods marked idempotent are tried again before.
            RPCTimeoutError: no answer in time.
            RequestRefusedError: no such object or method, wrong run or token, too large.
            WireError: an argument cannot travel.
            Exception: what the method raised.
        """
        target = _target(object_name, method)
        outgoing = self._outgoing(args, kwargs)
        headers = {**target, "X-Areal-Timeout": f"{timeout_s:g}"}
        for attempt in range(_TRIES):
            try:
                with outgoing.sent() as body:
                    response = self._http.request("POST", "/call", headers, body, timeout_s)
                    outgoing.settle(response)
                break
            except RPCConnectionError:
                if attempt == _TRIES - 1 or not _may_repeat(self._http, target, attempt):
                    raise
        return self._result(response, f"{self.address} {object_name}.{method}")

    async def acall(
        self, object_name: str, method: str, /, *args: Any, timeout_s: float = CALL_TIMEOUT_S, **kwargs: Any
    ) -> Any:
        """``call`` on the running event loop; cancelling it ends the wait at once, not the remote method."""
        target = _target(object_name, method)
        outgoing = self._outgoing(args, kwargs)
        headers = {**target, "X-Areal-Timeout": f"{timeout_s:g}"}
        for attempt in range(_TRIES):
            try:
                response = await outgoing.exchange("/call", headers, timeout_s)
                break
            except RPCConnectionError:
                if attempt == _TRIES - 1 or not await asyncio.to_thread(_may_repeat, self._http, target, attempt):
                    raise
        return await self._aresult(response, f"{self.address} {object_name}.{method}")

    def create(self, object_name: str, class_path: str, /, *args: Any, **kwargs: Any) -> None:
        """Make an object of class ``pkg.module.Class`` on the worker's engine thread.

        Raises: as ``call``; ImportError or AttributeError if there is no such class on the worker.
        """
        outgoing = self._outgoing(args, kwargs)
        with outgoing.sent() as body:
            response = self._http.request(
                "POST", "/create_engine", _creation(object_name, class_path), body, CALL_TIMEOUT_S
            )
            outgoing.settle(response)
        self._result(response, f"{self.address} {class_path}()")

    async def acreate(self, object_name: str, class_path: str, /, *args: Any, **kwargs: Any) -> None:
        """``create`` on the running event loop."""
        outgoing = self._outgoing(args, kwargs)
        response = await outgoing.exchange("/create_engine", _creation(object_name, class_path), CALL_TIMEOUT_S)
        await self._aresult(response, f"{self.address} {class_path}()")

    def health(self, timeout_s: float = 2.0) -> dict[str, Any]:
        """Who the worker is and what it is doing."""
        return self._json("GET", "/health", timeout_s=timeout_s)

    def alloc_ports(self, count: int) -> list[int]:
        """Ports of the worker's machine that are free and were given to nobody else by it."""
        ports: list[int] = self._json("POST", "/alloc_ports", {"count": count})["ports"]
        return ports

    def set_env(self, env: Mapping[str, str]) -> None:
        """Set environment variables of the worker's process."""
        self._json("POST", "/set_env", {"env": dict(env)})

    def configure(self, config: Any = None, *, rank: int = 0, seed: int = 0) -> None:
        """Give the worker its configuration; its generators are seeded before it makes its first object."""
        message = serialization.encode([[], {"config": config, "rank": rank, "seed": seed}])
        self._request("POST", "/configure", {}, message.parts())

    def fork(self, role: str, index: int, command: Sequence[str], env: Mapping[str, str] | None = None) -> int:
        """Start a process next to the worker, which ends with it; returns its id."""
        body = {"role": role, "worker_index": index, "raw_cmd": list(command), "env": dict(env or {})}
        return int(self._json("POST", "/fork", body)["pid"])

    def kill_forked(self, role: str, index: int) -> None:
        """End a process that ``fork`` started."""
        self._json("POST", "/kill_forked_worker", {"role": role, "worker_index": index})

    def stack(self) -> str:
        """Python stacks of all threads of the worker."""
        return self._request("GET", "/stack", {}).body.decode()

    def stats(self) -> dict[str, Any]:
        """What the worker's objects say of themselves (``status()``), by name, and its tensors."""
        found: dict[str, Any] = self._result(self._request("GET", "/stats", {}), f"{self.address} stats")
        return found

    def close(self) -> None:
        """Close the connections; calls that wait fail with RPCConnectionError."""
        self._http.close()
        if self._stream_address is not None:
            stream_pool.close(self._stream_address)

    def stream_address(self) -> str:
        """``host:port`` of the worker's tensor stream."""
        if self._stream_address is None:
            host, _ = split_hostport(self.address)
            self._stream_address = format_hostport(host, int(self.health(CONTROL_TIMEOUT_S)["stream_port"]))
        return self._stream_address

    def _outgoing(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Outgoing:
        return Outgoing(self._http, self._identity, self.stream_address, args, kwargs)

    def _request(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: Body = (),
        timeout_s: float = CONTROL_TIMEOUT_S,
    ) -> Response:
        """A request that is answered at once."""
        response = self._http.request(method, path, headers, body, timeout_s)
        return _checked(response, f"{self.address} {path}")

    def _json(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout_s: float = CONTROL_TIMEOUT_S
    ) -> dict[str, Any]:
        data = () if body is None else (json.dumps(body).encode(),)
        parsed: dict[str, Any] = json.loads(self._request(method, path, {}, data, timeout_s).body)
        return parsed

    def _result(self, response: Response, where: str) -> Any:
        def fetch(wanted: Sequence[Parked]) -> list[Any]:
            return _take(self.stream_address(), self._identity, wanted)

        return serialization.decode(_checked(response, where).body, fetch=fetch)

    async def _aresult(self, response: Response, where: str) -> Any:
        if response.status == 200 and len(response.body) <= _LOOP_DECODE_BYTES:
            with contextlib.suppress(_NeedsStreamError):
                return serialization.decode(response.body, fetch=_refuse_stream)
        return await asyncio.to_thread(self._result, response, where)


class _NeedsStreamError(Exception):
    """A result has tensors on the stream, which a coroutine must not read itself."""


def _refuse_stream(wanted: Sequence[Parked]) -> NoReturn:
    raise _NeedsStreamError


def _take(address: str, identity: RunIdentity, wanted: Sequence[Parked]) -> list[Any]:
    """Read the tensors of a result from the stream; the worker forgets them."""
    made = [heavy.empty_tensor(parked.dtype, parked.shape) for parked in wanted]
    views = [(parked.key, 0, view) for parked, (_, view) in zip(wanted, made, strict=True)]
    with stream_pool.connection(address, identity) as connection:
        sizes = connection.read(frames.TAKE, views)
    if min(sizes) < 0:
        raise TensorLostError(f"worker {address} does not have the tensors of its result any more; call again")
    return [tensor for tensor, _ in made]


def _target(object_name: str, method: str) -> dict[str, str]:
    return {"X-Areal-Object": quote(object_name, safe="/"), "X-Areal-Method": quote(method)}


def _creation(object_name: str, class_path: str) -> dict[str, str]:
    return {"X-Areal-Object": quote(object_name, safe="/"), "X-Areal-Class": quote(class_path, safe=":")}


def _may_repeat(http: HttpPeer, target: Mapping[str, str], attempt: int) -> bool:
    """Wait a little, then ask the worker whether the method may be sent again; False when it does not answer."""
    for further in range(attempt, _TRIES):
        time.sleep(_FIRST_DELAY_S * 2**further)
        try:
            answer = http.request("GET", "/method", target, (), CONTROL_TIMEOUT_S)
        except SchedulerError as exc:
            if isinstance(exc.__cause__, ConnectionRefusedError):
                return False  # nobody listens there any more
            continue
        return answer.status == 200 and bool(json.loads(answer.body)["idempotent"])
    return False


def _checked(response: Response, where: str) -> Response:
    """The response of a request that succeeded."""
    if response.status == 500:
        _raise_remote(response, where)
    if response.status != 200:
        _raise_refusal(response, where)
    return response


def _raise_remote(response: Response, where: str) -> NoReturn:
    try:
        packed = serialization.decode(response.body)
    except WireError as exc:
        text = bytes(response.body[:500]).decode(errors="replace")
        raise EngineCallError(f"{where} failed with HTTP 500: {text}") from exc
    raise unpack_exception(packed, where)


def _raise_refusal(response: Response, where: str) -> NoReturn:
    try:
        parsed = json.loads(response.body)
        text = f"{parsed['error']}: {parsed['detail']}"
    except (ValueError, KeyError, TypeError):
        text = bytes(response.body[:200]).decode(errors="replace")
    if response.status == 504:
        raise RPCTimeoutError(f"{where}: {text}")
    error = RequestRefusedError(f"{where} refused the request with {response.status} ({text})")
    error.status = response.status
    raise error
