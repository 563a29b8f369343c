"""The stream's server side: a thread per connection that reads and writes the tensors of this process's store.

::

    accepted -- HELLO --> data | call | leash -- closed --> gone
                  '-- wrong token, other run, 5 s without a word --> closed

A *leash* connection carries nothing; while one is open, somebody still wants this process. ``rpc_server`` asks
:meth:`StreamServer.leash_lost_s` how long there has been none.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from typing import Any

from areal.infra.rpc import frames, heavy
from areal.infra.rpc.errors import WireError
from areal.infra.rpc.identity import RunIdentity
from areal.infra.rpc.store import TensorStore
from areal.utils import logging

logger = logging.getLogger("RPCServer")

MAX_CONNECTIONS = 1024
MAX_PUT_BYTES = 16 << 30  # of one tensor
_HELLO_TIMEOUT_S = 5.0
_HELLO_BYTES = 4096
_FRAME_TIMEOUT_S = 120.0  # without progress inside a frame


class StreamServer:
    """Serves ``store`` on a port of its own."""

    def __init__(self, identity: RunIdentity, store: TensorStore, host: str) -> None:
        self.max_put_bytes = MAX_PUT_BYTES
        self._identity = identity
        self._store = store
        self._host = host
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._leashes = 0
        self._leash_lost_at: float | None = None
        self._listener: socket.socket | None = None
        self._said: set[str] = set()
        self.port = 0

    def start(self) -> None:
        """Listen, and answer in background threads."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        self._listener = socket.create_server((self._host, 0), family=family, backlog=128)
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(self._listener,), name="rpc-stream", daemon=True).start()

    def stop(self) -> None:
        """Close the port and every connection."""
        listener, self._listener = self._listener, None
        with self._lock:
            connections = list(self._connections)
        for sock in ([listener] if listener else []) + connections:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        if listener is not None:
            listener.close()

    def leash_lost_s(self) -> float | None:
        """Seconds since the last leash was lost; None while there is one, or none was ever seen."""
        with self._lock:
            return None if self._leash_lost_at is None else time.monotonic() - self._leash_lost_at

    @property
    def leashed(self) -> bool:
        """Whether a leash is open, or was."""
        with self._lock:
            return self._leashes > 0 or self._leash_lost_at is not None

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, peer = listener.accept()
            except OSError:
                return
            with self._lock:
                full = len(self._connections) >= MAX_CONNECTIONS
                if not full:
                    self._connections.add(sock)
            if full:
                self._say_once("full", f"more than {MAX_CONNECTIONS} stream connections; {peer} is refused")
                sock.close()
                continue
            threading.Thread(target=self._serve, args=(sock, peer), name=f"rpc-stream-{peer[1]}", daemon=True).start()

    def _serve(self, sock: socket.socket, peer: Any) -> None:
        purpose = None
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            frames.set_timeouts(sock, _HELLO_TIMEOUT_S)
            purpose = self._greet(sock, peer)
            if purpose is not None:
                frames.keep_alive(sock)
                frames.set_timeouts(sock, _FRAME_TIMEOUT_S)
                idle = select.poll()
                idle.register(sock, select.POLLIN)
                while idle.poll() and self._answer(sock, purpose):  # waits between frames, for days if it must
                    pass
        except WireError as exc:
            self._say_once("malformed", f"stream connection of {peer} closed: {exc}")
        except OSError as exc:
            logger.debug(f"stream connection of {peer} ended: {exc}")
        finally:
            self._ended(sock, purpose)

    def _greet(self, sock: socket.socket, peer: Any) -> str | None:
        """Check who it is; returns the purpose, or None after a refusal."""
        frame = frames.receive_head(sock, _HELLO_BYTES)
        if frame is None:
            return None
        code, meta, body_size = frame
        if code != frames.HELLO or not isinstance(meta, dict) or body_size:
            raise WireError("the first frame must say hello")
        token, run_id, purpose = (str(meta.get(key, "")) for key in ("token", "run_id", "purpose"))
        refusal = None
        if run_id != self._identity.run_id:
            refusal = f"409: this worker belongs to another run than {run_id!r}"
        elif not self._identity.matches_token(token):
            refusal = "401: wrong token"
        elif purpose not in (frames.DATA, frames.CALL, frames.LEASH):
            refusal = f"400: unknown purpose {purpose!r}"
        if refusal is not None:
            self._say_once(refusal[:3], f"stream connection of {peer} refused: {refusal}")
            frames.send_frame(sock, frames.ERROR, refusal)
            return None
        if purpose == frames.LEASH:
            with self._lock:
                self._leashes += 1
                self._leash_lost_at = None
        frames.send_frame(sock, frames.OK, None)
        return purpose

    def _ended(self, sock: socket.socket, purpose: str | None) -> None:
        with self._lock:
            self._connections.discard(sock)
            if purpose == frames.LEASH:
                self._leashes -= 1
                if self._leashes == 0:
                    self._leash_lost_at = time.monotonic()
        self._store.remove_of(sock)
        sock.close()

    def _answer(self, sock: socket.socket, purpose: str) -> bool:
        """Serve one frame; False when the connection is done."""
        frame = frames.receive_head(sock)
        if frame is None:
            return False
        code, meta, body_size = frame
        if code == frames.PUT:
            return self._put(sock, meta, body_size, purpose)
        if body_size or not isinstance(meta, list):
            raise WireError(f"frame {code} has a body or no list")
        if code in (frames.GET, frames.TAKE):
            self._send(sock, meta, take=code == frames.TAKE)
        elif code == frames.FREE:
            frames.send_frame(sock, frames.OK, self._store.remove(str(key) for key in meta))
        else:
            raise WireError(f"unknown frame {code}")
        return True

    def _send(self, sock: socket.socket, meta: list[Any], *, take: bool) -> None:
        views = []
        for item in meta:
            if not (isinstance(item, list) and [type(part) for part in item] == [str, int, int]):
                raise WireError("a get frame must list id, start and size")
            views.append(self._store.view(*item))
        sizes = [-1 if view is None else view.nbytes for view in views]
        frames.send_frame(sock, frames.OK, sizes, [view for view in views if view is not None])
        if take:
            self._store.remove(item[0] for item in meta)

    def _put(self, sock: socket.socket, meta: Any, body_size: int, purpose: str) -> bool:
        if not (isinstance(meta, list) and len(meta) == 3 and all(isinstance(text, str) for text in meta[:2])):
            raise WireError("a put frame must give id, type and shape")
        key, dtype, shape = meta
        if heavy.tensor_size(dtype, shape) != body_size:
            raise WireError(f"a {dtype} tensor of shape {shape} does not have {body_size} bytes")
        if body_size > self.max_put_bytes:
            refusal = f"413: a tensor of {body_size} bytes is above the limit of {self.max_put_bytes} bytes"
            self._say_once("413", refusal)
            frames.send_frame(sock, frames.ERROR, refusal)
            return False
        if key in self._store:
            frames.send_frame(sock, frames.ERROR, f"409: there is a tensor {key!r} already")
            return False
        tensor, view = heavy.empty_tensor(dtype, shape)
        frames.receive_into(sock, view)
        self._store.add(tensor, key=key, owner=sock if purpose == frames.CALL else None)
        frames.send_frame(sock, frames.OK, None)
        return True

    def _say_once(self, kind: str, text: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            logger.warning(text)
