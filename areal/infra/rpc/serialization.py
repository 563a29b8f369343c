"""Typed messages: Python values to bytes and back, without pickle.

::

    "AR" version 0 | u32 header size | header (MessagePack) | padding | buffer | padding | buffer ...
    header = [tree, [buffer sizes], [parked tensors]]

Plain values stand in the tree as they are and lists as arrays; everything else is a map of one entry, a tag and its
content. Bytes and tensors are buffers, aligned so that they can be used in place. Large tensors may be *parked*: the
sender puts them aside for the raw stream and the message holds only their id, type and shape.

Called by client and server for every call. A message from outside can make :func:`decode` raise :class:`WireError`,
import modules (functions and classes are names), and nothing else.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from areal.infra.rpc.errors import WireError
from areal.infra.rpc.pack import Packer
from areal.infra.rpc.unpack import Unpacker

__all__ = ["MAX_HEADER_BYTES", "Message", "Parked", "WireError", "decode", "encode"]

MAX_HEADER_BYTES = 64 << 20
MAX_BUFFERS = 1_000_000
_MAGIC = b"AR\x01\x00"
_PREFIX = struct.Struct("<4sI")
_ALIGNMENT = 16
_ZEROS = bytes(_ALIGNMENT)
_to_msgpack = msgspec.msgpack.Encoder().encode
_from_msgpack = msgspec.msgpack.Decoder().decode


@dataclass(frozen=True)
class Parked:
    """A tensor of a message that travels by the stream: its id there, type name and shape."""

    key: str
    dtype: str
    shape: tuple[int, ...]


@dataclass
class Message:
    """One encoded value. ``header`` includes magic, size and padding; ``buffers`` still refer to the value's memory."""

    header: bytes
    buffers: list[memoryview]

    def parts(self) -> list[bytes | memoryview]:
        """What to write, in order."""
        return list(self._parts())

    def _parts(self) -> Iterator[bytes | memoryview]:
        yield self.header
        for buffer in self.buffers:
            yield buffer
            if padding := -buffer.nbytes % _ALIGNMENT:
                yield _ZEROS[:padding]

    @property
    def nbytes(self) -> int:
        """Size of the whole message."""
        return len(self.header) + sum(_padded(buffer.nbytes) for buffer in self.buffers)

    def __bytes__(self) -> bytes:
        return b"".join(self._parts()) if self.buffers else self.header


def encode(value: Any, *, park: Callable[[Any], Parked] | None = None) -> Message:
    """Encode a value.

    Args:
        value: see the module docstring of ``pack`` for the types.
        park: called with each large tensor, once; it puts the tensor aside and says under which id. None: inline.

    Raises:
        WireError: a part of the value cannot travel; the message says which and what to do.
    """
    try:
        packer = Packer(park)
        tree = packer.pack(value, 0)
        header = _to_msgpack([tree, [b.nbytes for b in packer.buffers], packer.parked])
    except (OverflowError, UnicodeEncodeError):  # long integers or lone surrogates: rare, so they are looked for now
        packer = Packer(None if park is None else _reparking(park, packer.parked), exact=True)
        tree = packer.pack(value, 0)
        header = _to_msgpack([tree, [b.nbytes for b in packer.buffers], packer.parked])
    except RecursionError as exc:
        raise WireError("the value is nested too deeply to be sent; flatten it") from exc
    if len(header) > MAX_HEADER_BYTES:
        raise WireError(
            f"the value has {len(header)} bytes outside tensors and arrays, more than {MAX_HEADER_BYTES}; send long "
            "lists of numbers as tensors, or in parts"
        )
    size = _PREFIX.size + len(header)
    return Message(_PREFIX.pack(_MAGIC, len(header)) + header + _ZEROS[: -size % _ALIGNMENT], packer.buffers)


def decode(
    data: bytes | bytearray | memoryview, *, fetch: Callable[[Sequence[Parked]], Sequence[Any]] | None = None
) -> Any:
    """Decode one message. Tensors and arrays use the memory of ``data`` where it is writable, else a copy.

    Args:
        data: the whole message.
        fetch: gets the parked tensors, all at once; errors it raises pass through.

    Raises:
        WireError: the message is malformed, over a limit, or names something this process does not have.
    """
    header, body = _split(data)
    try:
        tree, sizes, parked = _from_msgpack(header)
        buffers = _slices(body, sizes)
        wanted = [Parked(str(key), str(dtype), tuple(map(_extent, shape))) for key, dtype, shape in parked]
    except WireError:
        raise
    except Exception as exc:  # noqa: BLE001 - whatever is wrong with it, it is the sender's message that is malformed
        raise WireError(f"malformed message header ({type(exc).__name__}: {exc})") from exc
    if wanted and fetch is None:
        raise WireError(f"the message refers to {len(wanted)} tensors of a stream, and there is no stream here")
    tensors = fetch(wanted) if wanted and fetch is not None else ()
    try:
        return Unpacker(buffers, tensors).unpack(tree, 0)
    except WireError:
        raise
    except Exception as exc:  # noqa: BLE001 - as above
        raise WireError(f"malformed message ({type(exc).__name__}: {exc})") from exc


def _reparking(park: Callable[[Any], Parked], before: list[Any]) -> Callable[[Any], Parked]:
    """The tensors of a second pass are those of the first, in the same order: nothing is parked twice."""
    done = iter(before)

    def again(tensor: Any) -> Parked:
        entry = next(done, None)
        return park(tensor) if entry is None else Parked(*entry)

    return again


def _split(data: bytes | bytearray | memoryview) -> tuple[memoryview, memoryview]:
    view = memoryview(data).cast("B")
    if view.nbytes < _PREFIX.size:
        raise WireError(f"message of {view.nbytes} bytes is shorter than its prefix")
    magic, size = _PREFIX.unpack_from(view)
    if magic != _MAGIC:
        raise WireError(f"message starts with {magic!r}, not {_MAGIC!r}: another protocol or version")
    start = _PREFIX.size + size
    if size > MAX_HEADER_BYTES or _padded(start) > view.nbytes:
        raise WireError(f"message header of {size} bytes is cut off or above {MAX_HEADER_BYTES}")
    return view[_PREFIX.size : start], view[_padded(start) :]


def _slices(body: memoryview, sizes: Any) -> list[memoryview]:
    if not isinstance(sizes, list) or len(sizes) > MAX_BUFFERS:
        raise WireError(f"message must list at most {MAX_BUFFERS} buffers")
    total = sum(_padded(_extent(size)) for size in sizes)
    if total != body.nbytes:
        raise WireError(f"message announces {total} bytes of buffers and has {body.nbytes}")
    slices, start = [], 0
    for size in sizes:
        slices.append(body[start : start + size])
        start += _padded(size)
    return slices


def _extent(size: Any) -> int:
    if type(size) is not int or not 0 <= size < 1 << 62:
        raise WireError(f"size {size!r} must be an integer >= 0")
    return size


def _padded(size: int) -> int:
    return size + -size % _ALIGNMENT
