"""The client's side of the tensor stream (see ``frames``): connections, a pool of them, and the leash of workers."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from areal.infra.rpc import frames
from areal.infra.rpc.errors import RequestRefusedError, RPCConnectionError, RPCTimeoutError, WireError
from areal.infra.rpc.identity import RunIdentity, get_identity
from areal.utils import logging
from areal.utils.network import split_hostport

logger = logging.getLogger("RPCClient")

IO_TIMEOUT_S = 120.0
CONNECT_TIMEOUT_S = 10.0
_IDLE_PER_PEER = 8
_LEASH_CHECK_S = 0.25


class StreamConnection:
    """One authenticated connection to a stream server; used by one thread at a time."""

    def __init__(self, address: str, identity: RunIdentity, purpose: str = frames.DATA) -> None:
        self.address = address
        try:
            self.sock = socket.create_connection(split_hostport(address), timeout=CONNECT_TIMEOUT_S)
        except OSError as exc:
            raise RPCConnectionError(f"{address}: no stream connection ({exc}); its process may have ended") from exc
        self.sock.settimeout(None)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        frames.set_timeouts(self.sock, IO_TIMEOUT_S)
        frames.keep_alive(self.sock)
        try:
            self.request(frames.HELLO, {"token": identity.token, "run_id": identity.run_id, "purpose": purpose})
        except BaseException:
            self.close()
            raise

    def request(self, code: int, meta: Any, body: Sequence[memoryview] = ()) -> Any:
        """Send one frame and return the reply's meta; the reply must have no body."""
        return self._exchange(code, meta, body, ())

    def read(self, code: int, wanted: Sequence[tuple[str, int, memoryview]]) -> list[int]:
        """GET or TAKE: fill each view with the bytes from ``start`` of tensor ``id``.

        Returns:
            the size received for each, -1 where the tensor is lost.
        """
        meta = [[key, start, view.nbytes] for key, start, view in wanted]
        sizes: list[int] = self._exchange(code, meta, (), [view for _, _, view in wanted])
        return sizes

    def stale(self) -> bool:
        """Whether the other side has closed it, or sent something that nobody asked for."""
        return bool(select.select([self.sock], [], [], 0)[0])

    def close(self) -> None:
        """Close it; safe to repeat."""
        self.sock.close()

    def _exchange(self, code: int, meta: Any, body: Sequence[memoryview], into: Sequence[memoryview]) -> Any:
        try:
            frames.send_frame(self.sock, code, meta, body)
            reply = frames.receive_head(self.sock)
            if reply is None:
                raise ConnectionResetError("the other side closed the connection")
            status, answer, body_size = reply
            if status != frames.OK:
                raise RequestRefusedError(f"{self.address}: {answer}")
            self._receive_bodies(answer, body_size, into)
        except BlockingIOError as exc:  # the kernel's limit on one read or write
            raise RPCTimeoutError(f"{self.address}: nothing moved on the stream for {IO_TIMEOUT_S:g} s") from exc
        except RequestRefusedError:
            raise
        except OSError as exc:
            raise RPCConnectionError(f"{self.address}: the stream broke ({exc}); its process may have ended") from exc
        return answer

    def _receive_bodies(self, sizes: Any, body_size: int, into: Sequence[memoryview]) -> None:
        received = sum(size for size in sizes if size > 0) if into else 0
        matching = not into or (
            len(sizes) == len(into) and all(size in (-1, view.nbytes) for size, view in zip(sizes, into, strict=True))
        )
        if received != body_size or not matching:
            raise WireError(f"{self.address}: the stream answered other sizes than were asked for")
        for size, view in zip(sizes if into else (), into, strict=True):
            if size > 0:
                frames.receive_into(self.sock, view)


class StreamPool:
    """Idle connections of this process, by peer. Thread-safe; a forked child starts with none."""

    def __init__(self) -> None:
        self._idle: dict[tuple[str, RunIdentity, str], list[StreamConnection]] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def connection(
        self, address: str, identity: RunIdentity | None = None, purpose: str = frames.DATA
    ) -> Iterator[StreamConnection]:
        """A connection for one ``with`` block; it is kept for the next unless an error passes through."""
        key = (address, identity or get_identity(), purpose)
        used = self._take(key) or StreamConnection(*key)
        try:
            yield used
        except BaseException:
            used.close()
            raise
        with self._lock:
            idle = self._idle.setdefault(key, [])
            if len(idle) < _IDLE_PER_PEER:
                idle.append(used)
                return
        used.close()

    def _take(self, key: tuple[str, RunIdentity, str]) -> StreamConnection | None:
        while True:
            with self._lock:
                idle = self._idle.get(key)
                found = idle.pop() if idle else None
            if found is None or not found.stale():
                return found
            found.close()

    def close(self, address: str | None = None) -> None:
        """Close the idle connections to one peer, or all."""
        with self._lock:
            keys = [key for key in self._idle if address in (None, key[0])]
            connections = [connection for key in keys for connection in self._idle.pop(key)]
        for connection in connections:
            connection.close()

    def forget_after_fork(self) -> None:
        """Drop what belongs to the parent."""
        self._lock = threading.Lock()
        self.close()


class Leash:
    """Holds one open connection to each worker; a worker whose leash is lost ends itself a moment later.

    So no worker outlives a controller that was killed. A thread holds a leash again whose connection broke. Children
    forked from this process drop their copies.
    """

    def __init__(self, identity: RunIdentity | None = None) -> None:
        self._identity = identity or get_identity()
        self._addresses: dict[str, str] = {}
        self._held: dict[str, StreamConnection] = {}
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        os.register_at_fork(after_in_child=self._forget_after_fork)

    def hold(self, worker_id: str, stream_address: str) -> None:
        """Hold a worker, or the one that took its place.

        Raises:
            RPCConnectionError: it cannot be reached.
        """
        connection = StreamConnection(stream_address, self._identity, frames.LEASH)
        with self._lock:
            self._addresses[worker_id] = stream_address
            before, self._held[worker_id] = self._held.get(worker_id), connection
            if self._thread is None:
                self._thread = threading.Thread(target=self._keep, name="rpc-leash", daemon=True)
                self._thread.start()
        if before is not None:
            before.close()

    def release(self, worker_id: str) -> None:
        """Let a worker go; unknown ids are fine."""
        with self._lock:
            self._addresses.pop(worker_id, None)
            connection = self._held.pop(worker_id, None)
        if connection is not None:
            connection.close()

    def close(self) -> None:
        """Let every worker go."""
        self._closed.set()
        for worker_id in list(self._addresses):
            self.release(worker_id)

    def _keep(self) -> None:
        while not self._closed.wait(_LEASH_CHECK_S):
            with self._lock:
                lost = [
                    (worker_id, address, held)
                    for worker_id, address in self._addresses.items()
                    if (held := self._held.get(worker_id)) is None or held.stale()
                ]
            for worker_id, address, held in lost:
                self._renew(worker_id, address, held)

    def _renew(self, worker_id: str, address: str, before: StreamConnection | None) -> None:
        try:
            connection: StreamConnection | None = StreamConnection(address, self._identity, frames.LEASH)
        except (RPCConnectionError, RequestRefusedError) as exc:
            if before is not None:
                logger.info(f"the leash of worker {worker_id} at {address} broke: {exc}")
            connection = None
        with self._lock:
            wanted = self._addresses.get(worker_id) == address and self._held.get(worker_id) is before
            if wanted and connection is not None:
                self._held[worker_id] = connection
            elif wanted:
                self._held.pop(worker_id, None)
        if before is not None and wanted:
            before.close()
        if connection is not None and not wanted:
            connection.close()

    def _forget_after_fork(self) -> None:
        self._lock = threading.RLock()
        self._closed.set()
        for connection in self._held.values():
            connection.close()
        self._held.clear()


stream_pool = StreamPool()
os.register_at_fork(after_in_child=stream_pool.forget_after_fork)
