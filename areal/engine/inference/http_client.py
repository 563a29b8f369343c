"""HTTP to one inference server: a pool of connections, limits, retries, and errors that say what is wrong.

In: a :class:`ServerCall`. Out: the parsed reply, or a named error. Lives on the event loop that opened it; used by
``remote`` and by whoever starts servers.

    timeout, no connection, 5xx ──► again after a jittered pause, ``attempts`` times, on a new connection
    4xx                         ──► :class:`ServerRefusedError` with the server's own message, never again
    HTML, broken JSON           ──► :class:`ReplyError`
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from areal.engine.inference.protocol import ReplyError, ServerCall
from areal.utils.errors import ArealError, EngineError

if TYPE_CHECKING:
    import aiohttp

_CONNECT_S = 10.0  # limit of reaching the host, within the limit of the call
_KEEP_ALIVE_S = 3.0  # servers close idle connections after 5 s: ours must be gone before
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0
_EXCERPT = 300  # characters of a reply in an error message


class ServerUnavailableError(EngineError):
    """A server cannot be reached, or answers with an error of its own; the same call may succeed elsewhere."""


class ServerTimeoutError(ServerUnavailableError, TimeoutError):
    """A server did not answer within the limit of the call."""


class ServerRefusedError(ArealError, ValueError):
    """A server answered 4xx: the call is wrong, and would be again."""


def pause_before_retry(attempt: int) -> float:
    """Seconds to wait after failed attempt number ``attempt`` (from 0): doubling, jittered so that clients spread."""
    return min(_FIRST_PAUSE_S * float(2**attempt), _LONGEST_PAUSE_S) * random.uniform(0.5, 1.5)


class ServerHttp:
    """Calls to the server at ``address``.

    Args:
        address: ``host:port``, or an URL without a path.
        timeout_s: limit of one attempt of a call that brings none.
        attempts: tries of a call that may be repeated.
        headers: sent with every call.
    """

    def __init__(self, address: str, timeout_s: float, attempts: int, headers: Mapping[str, str] | None = None) -> None:
        self.base = (address if "://" in address else f"http://{address}").rstrip("/")
        self.address = self.base.partition("://")[2]
        self._timeout_s = timeout_s
        self._attempts = attempts
        self._headers = dict(headers or {})
        self._closed = False
        self._sessions: dict[bool, aiohttp.ClientSession] = {}  # True: each call takes a new connection

    async def close(self) -> None:
        """Close every connection; later calls raise ServerUnavailableError."""
        self._closed = True
        sessions, self._sessions = self._sessions, {}
        for session in sessions.values():
            await session.close()

    async def send(
        self, call: ServerCall, *, attempts: int | None = None, timeout_s: float | None = None, fresh: bool = False
    ) -> Any:
        """Make a call.

        Args:
            attempts: overrides the server's; ``once`` calls are never repeated.
            timeout_s: limit of one attempt of a call that brings none; default: the server's.
            fresh: on a new connection at once, as every further attempt: after an error a server drops the old one.

        Returns: parsed JSON; text for ``text/plain`` and for what is no JSON and has no type; None for an empty body
            and for a harmless refusal.
        Raises:
            ServerUnavailableError, ServerTimeoutError: after the last attempt.
            ServerRefusedError: 4xx.
            ReplyError: the reply is no JSON.
        """
        tries = 1 if call.once else (attempts or self._attempts)
        limit_s = call.timeout_s or timeout_s or self._timeout_s
        for attempt in range(tries):
            try:
                return await self._attempt(call, limit_s, fresh or attempt > 0)
            except ServerUnavailableError:
                if attempt == tries - 1:
                    raise
            except ServerRefusedError as exc:
                if not call.harmless or call.harmless not in str(exc):
                    raise
                return None
            await asyncio.sleep(pause_before_retry(attempt))
        raise AssertionError("unreachable: at least one attempt")

    async def _attempt(self, call: ServerCall, limit_s: float, fresh: bool) -> Any:
        import aiohttp

        where = f"{self.address} {call.method} {call.path.partition('?')[0]}"
        timeout = aiohttp.ClientTimeout(total=limit_s, sock_connect=min(_CONNECT_S, limit_s))
        try:
            async with self._opened(fresh).request(
                call.method, self.base + call.path, json=call.body, headers=self._headers, timeout=timeout
            ) as response:
                body = await response.read()
                kind = response.content_type if "Content-Type" in response.headers else ""
                return _read(where, response.status, kind, body)
        except aiohttp.ServerTimeoutError as exc:  # no connection in time
            raise ServerUnavailableError(f"{where}: no connection within {min(_CONNECT_S, limit_s):g} s") from exc
        except TimeoutError as exc:
            raise ServerTimeoutError(
                f"{where}: no answer within {limit_s:g} s; the server is stuck or overloaded, or the limit is too low "
                "(rollout.request_timeout for generation)"
            ) from exc
        except (aiohttp.ClientError, OSError) as exc:
            raise ServerUnavailableError(f"{where}: {type(exc).__name__}: {exc}") from exc

    def _opened(self, fresh: bool) -> aiohttp.ClientSession:
        if self._closed:
            raise ServerUnavailableError(f"{self.address}: the connections were closed")
        if fresh not in self._sessions:
            import aiohttp

            if fresh:
                connector = aiohttp.TCPConnector(limit=0, force_close=True)
            else:
                connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S)
            self._sessions[fresh] = aiohttp.ClientSession(connector=connector)
        return self._sessions[fresh]


def _read(where: str, status: int, content_type: str, body: bytes) -> Any:
    """The value of a reply."""
    if status >= 500:
        raise ServerUnavailableError(f"{where} answered {status}: {_message(body)}")
    if status >= 400:
        raise ServerRefusedError(f"{where} refused the call with {status}: {_message(body)}")
    if status >= 300:
        raise ReplyError(f"{where} answered {status}, a redirection: is this the address of an inference server?")
    if not body.strip():
        return None
    if content_type == "text/plain":
        return body.decode(errors="replace")
    if content_type == "text/html":
        raise ReplyError(f"{where} answered with a web page, not JSON: {_excerpt(body)}")
    try:
        return json.loads(body)
    except ValueError as exc:
        if not content_type:
            return body.decode(errors="replace")
        raise ReplyError(
            f"{where} answered {len(body)} bytes of {content_type} that are no JSON ({exc}): {_excerpt(body)}"
        ) from exc


def _message(body: bytes) -> str:
    """The server's own words in an error reply."""
    try:
        found = json.loads(body)
    except ValueError:
        return _excerpt(body)
    while isinstance(found, dict):
        inner = next((found[key] for key in ("error", "message", "detail") if found.get(key)), None)
        if inner is None:
            break
        found = inner
    return found if isinstance(found, str) else _excerpt(json.dumps(found).encode())


def _excerpt(body: bytes) -> str:
    text = body[:_EXCERPT].decode(errors="replace").strip()
    return repr(text) + (" ..." if len(body) > _EXCERPT else "")
