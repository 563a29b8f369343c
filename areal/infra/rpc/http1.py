"""A small HTTP/1.1 client for one peer: persistent connections and no work beyond what a call needs.

One pool of plain sockets serves blocking callers in any thread and coroutines on any event loop. Answers must carry a
Content-Length, as those of our server do. Called by ``client``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from areal.infra.rpc.errors import RPCConnectionError, RPCTimeoutError
from areal.infra.rpc.frames import keep_alive
from areal.utils.network import split_hostport

CONNECT_TIMEOUT_S = 10.0
_HEAD_LIMIT = 64 << 10
_CHUNK = 64 << 10
_JOIN_BYTES = 32 << 10  # a small body goes out in one packet with its head

Body = Sequence[bytes | memoryview]


@dataclass
class Response:
    """Status and body of an answer."""

    status: int
    body: bytes | bytearray


class HttpPeer:
    """Requests to ``address``; thread-safe. ``headers`` go with every request."""

    def __init__(self, address: str, headers: Mapping[str, str]) -> None:
        self.address = address
        self._fixed = _lines({"Host": address, **headers})
        self._idle: list[socket.socket] = []
        self._busy: set[socket.socket] = set()
        self._pid = os.getpid()
        self._closed = False
        self._lock = threading.Lock()

    def request(
        self, method: str, path: str, headers: Mapping[str, str], body: Body = (), timeout_s: float | None = None
    ) -> Response:
        """Send one request and read the answer.

        Raises:
            RPCConnectionError: no connection, or it broke.
            RPCTimeoutError: no answer within ``timeout_s``.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        sock = self._take() or self._connect(timeout_s)
        with self._exchange(sock, path, timeout_s) as answer:
            for part in self._outgoing(method, path, headers, body):
                sock.settimeout(_left(deadline))
                sock.sendall(part)
            while (into := answer.missing()) is not None:
                sock.settimeout(_left(deadline))
                answer.received(sock.recv_into(into))
        return answer.response()

    async def arequest(
        self, method: str, path: str, headers: Mapping[str, str], body: Body = (), timeout_s: float | None = None
    ) -> Response:
        """The same on the running event loop; cancelling it closes the connection."""
        loop = asyncio.get_running_loop()
        sock = self._take()
        if sock is None:
            sock = await asyncio.to_thread(self._connect, timeout_s)
        with self._exchange(sock, path, timeout_s) as answer:
            sock.setblocking(False)
            async with asyncio.timeout(timeout_s):
                for part in self._outgoing(method, path, headers, body):
                    await loop.sock_sendall(sock, part)
                while (into := answer.missing()) is not None:
                    answer.received(await loop.sock_recv_into(sock, into))
        return answer.response()

    def close(self) -> None:
        """Close all connections; requests that wait on one fail."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            busy = list(self._busy)
        for sock in idle:
            sock.close()
        for sock in busy:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _take(self) -> socket.socket | None:
        """An idle connection that is still open."""
        with self._lock:
            if self._pid != os.getpid():  # a forked child: the connections are its parent's
                self._pid, self._idle, self._busy = os.getpid(), [], set()
            while self._idle:
                sock = self._idle.pop()
                if not _readable(sock):
                    return sock
                sock.close()
        return None

    def _connect(self, timeout_s: float | None) -> socket.socket:
        limit = CONNECT_TIMEOUT_S if timeout_s is None else min(timeout_s, CONNECT_TIMEOUT_S)
        try:
            sock = socket.create_connection(split_hostport(self.address), limit)
        except OSError as exc:
            raise RPCConnectionError(
                f"worker {self.address}: no connection ({exc}); it may have ended, see its log"
            ) from exc
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(sock)
        return sock

    def _outgoing(self, method: str, path: str, headers: Mapping[str, str], body: Body) -> Iterator[bytes | memoryview]:
        size = sum(memoryview(part).nbytes for part in body)
        head = f"{method} {path} HTTP/1.1\r\n{self._fixed}{_lines(headers)}Content-Length: {size}\r\n\r\n"
        if size <= _JOIN_BYTES:
            yield b"".join((head.encode("latin-1"), *body))
        else:
            yield head.encode("latin-1")
            yield from body

    @contextlib.contextmanager
    def _exchange(self, sock: socket.socket, path: str, timeout_s: float | None) -> Iterator[_Answer]:
        """One request and its answer; afterwards the connection is idle again, or closed after an error."""
        answer = _Answer()
        with self._lock:
            self._busy.add(sock)
        reusable = False
        try:
            yield answer
            reusable = not answer.closing
        except TimeoutError as exc:
            raise RPCTimeoutError(f"worker {self.address}: no answer to {path} within {timeout_s} s") from exc
        except (OSError, ValueError) as exc:
            raise RPCConnectionError(
                f"worker {self.address}: the connection broke during {path} ({type(exc).__name__}: {exc}); the worker "
                "may have ended, see its log"
            ) from exc
        finally:
            with self._lock:
                self._busy.discard(sock)
                reusable = reusable and not self._closed
                if reusable:
                    self._idle.append(sock)
            if not reusable:
                sock.close()


class _Answer:
    """An answer that arrives in pieces."""

    def __init__(self) -> None:
        self.closing = False
        self._status = 0
        self._chunk = bytearray(_CHUNK)
        self._head = b""
        self._body: bytearray | None = None
        self._done = 0

    def missing(self) -> memoryview | None:
        """Where the next bytes go; None when the answer is complete."""
        if self._body is None:
            return memoryview(self._chunk)
        return memoryview(self._body)[self._done :] if self._done < len(self._body) else None

    def received(self, count: int) -> None:
        """Note that ``count`` bytes were put there."""
        if count == 0:
            raise ConnectionResetError("closed in the middle of its answer" if self._head else "closed, no answer")
        if self._body is not None:
            self._done += count
            return
        self._head += memoryview(self._chunk)[:count]
        end = self._head.find(b"\r\n\r\n")
        if end >= 0:
            self._status, size, self.closing = _parse_head(self._head[:end])
            rest = self._head[end + 4 :]
            if len(rest) > size:
                raise ValueError("the answer is longer than it announced")
            self._body = bytearray(size)
            self._body[: len(rest)] = rest
            self._done = len(rest)
        elif len(self._head) > _HEAD_LIMIT:
            raise ValueError("the head of the answer is too long")

    def response(self) -> Response:
        """The complete answer."""
        assert self._body is not None
        return Response(self._status, self._body)


def _parse_head(head: bytes) -> tuple[int, int, bool]:
    """Status, body size, and whether the connection closes."""
    line, *fields = head.split(b"\r\n")
    version, status, *_ = line.split(b" ", 2)
    if not version.startswith(b"HTTP/1."):
        raise ValueError(f"the answer is no HTTP/1: {line[:40]!r}")
    size, closing = -1, False
    for header in fields:
        name, _, value = header.partition(b":")
        name = name.lower()
        if name == b"content-length":
            size = int(value)
        elif name == b"connection":
            closing = value.strip().lower() == b"close"
    if size < 0:
        raise ValueError("the answer has no Content-Length")
    return int(status), size, closing


def _lines(headers: Mapping[str, str]) -> str:
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items())


def _left(deadline: float | None) -> float | None:
    if deadline is None:
        return None
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _readable(sock: socket.socket) -> bool:
    """Whether the other side has closed an idle connection."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))
