"""Frames of the raw tensor stream: exact byte counts over one TCP connection, straight between sockets and memory.

::

    frame    = code u8, 3 zero bytes, u32 meta size, u64 body size | meta (MessagePack) | body
    request  = HELLO {token, run_id, purpose} | GET / TAKE [[id, start, bytes], ...] | PUT [id, type, shape] + body
               | FREE [id, ...]
    reply    = OK or ERROR; GET and TAKE answer the sizes (-1: lost) and the bytes of all, TAKE then frees them

Both sides use blocking sockets in threads: one system call moves a whole tensor, so a busy interpreter elsewhere in the
process does not slow it. Used by ``stream`` (the client's side) and ``stream_server``.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from typing import Any

import msgspec

from areal.infra.rpc.errors import WireError

HELLO, GET, TAKE, PUT, FREE = 1, 2, 3, 4, 5
OK, ERROR = 0, 1
DATA, CALL, LEASH = "data", "call", "leash"  # purposes: what a connection puts stays / goes with it; a sign of life

MAX_META_BYTES = 4 << 20
_HEAD = struct.Struct("<BxxxIQ")
_MAX_RECEIVE = 1 << 30

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


def send_frame(sock: socket.socket, code: int, meta: Any, body: Sequence[memoryview] = ()) -> None:
    """Write one frame; the bodies go out without a copy."""
    packed = _encode(meta)
    head = _HEAD.pack(code, len(packed), sum(part.nbytes for part in body)) + packed
    sock.sendall(head)
    for part in body:
        sock.sendall(part)


def receive_head(sock: socket.socket, limit: int = MAX_META_BYTES) -> tuple[int, Any, int] | None:
    """Read code, meta and body size of the next frame; None when the other side closed between frames.

    Raises:
        WireError: malformed, or meta above ``limit`` bytes.
        OSError: the connection broke.
    """
    head = bytearray(_HEAD.size)
    first = sock.recv_into(head)
    if first == 0:
        return None
    receive_into(sock, memoryview(head)[first:])
    code, meta_size, body_size = _HEAD.unpack(head)
    if meta_size > limit:
        raise WireError(f"stream frame announces {meta_size} bytes of meta, more than {limit}")
    packed = bytearray(meta_size)
    receive_into(sock, memoryview(packed))
    try:
        return code, _decode(packed), body_size
    except (msgspec.DecodeError, RecursionError) as exc:
        raise WireError(f"malformed stream frame: {exc}") from exc


def receive_into(sock: socket.socket, view: memoryview) -> None:
    """Fill ``view`` exactly.

    Raises:
        ConnectionResetError: the other side closed before.
    """
    done = 0
    while done < view.nbytes:
        count = sock.recv_into(view[done:], min(view.nbytes - done, _MAX_RECEIVE), socket.MSG_WAITALL)
        if count == 0:
            raise ConnectionResetError("the other side closed the connection in the middle of a frame")
        done += count


def set_timeouts(sock: socket.socket, seconds: float) -> None:
    """Limit each blocking read and write in the kernel, so that the socket stays a blocking one."""
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def keep_alive(sock: socket.socket) -> None:
    """Have the kernel notice a vanished machine in about ten seconds."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 4), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
