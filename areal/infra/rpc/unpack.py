"""The tree of a message back to Python values. Called by ``serialization`` only; every tag is checked.

Raises WireError, or any error of the standard library, which the caller turns into one.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from areal.infra.rpc import heavy
from areal.infra.rpc.code_ref import find_attribute, import_ours, load_code
from areal.infra.rpc.errors import WireError
from areal.infra.rpc.pack import MAX_DEPTH, PLAIN

MAX_NODES = 50_000_000  # values of one message
MAX_INT_DIGITS = 100_000  # hexadecimal
_LEAVES = PLAIN | {bytes}


class Unpacker:
    """Rebuilds the value of one message.

    Args:
        buffers: its buffers.
        tensors: its parked tensors.
    """

    def __init__(self, buffers: Sequence[memoryview], tensors: Sequence[Any]) -> None:
        self._buffers = buffers
        self._parked = tensors
        self._tensors: dict[int, Any] = {}
        self._nodes = 0

    def unpack(self, node: Any, depth: int) -> Any:
        """The value of ``node``."""
        kind = type(node)
        if kind in _LEAVES:
            return node
        if depth > MAX_DEPTH + 2:
            raise WireError(f"message is nested deeper than {MAX_DEPTH} levels")
        if kind is list:
            return self._items(node, depth)
        if kind is not dict or len(node) != 1:
            raise WireError(f"a {kind.__name__} stands where a value or a tag was expected")
        ((tag, content),) = node.items()
        handler = _HANDLERS.get(tag)
        if handler is None:
            raise WireError(f"unknown tag {tag!r}; the sender may be of another version")
        return handler(self, content, depth)

    def buffer(self, number: Any) -> memoryview:
        """Buffer by its number."""
        if type(number) is not int or not 0 <= number < len(self._buffers):
            raise WireError(f"buffer {number!r} does not exist; the message has {len(self._buffers)}")
        return self._buffers[number]

    def _items(self, node: Any, depth: int) -> list[Any]:
        if type(node) is not list:
            raise WireError(f"a {type(node).__name__} stands where a list was expected")
        self._nodes += len(node)
        if self._nodes > MAX_NODES:
            raise WireError(f"message has more than {MAX_NODES} values")
        if _LEAVES.issuperset(map(type, node)):
            return node
        return [self.unpack(item, depth + 1) for item in node]

    def _mapping(self, content: Any, depth: int) -> dict[str, Any]:
        self._nodes += len(content)
        return {_text(key): self.unpack(item, depth + 1) for key, item in content.items()}

    def _pairs(self, content: Any, depth: int) -> dict[Any, Any]:
        flat = self._items(content, depth)
        if len(flat) % 2:
            raise WireError("a dictionary has a key without value")
        return dict(zip(flat[::2], flat[1::2], strict=True))

    def _enum(self, content: Any, depth: int) -> Any:
        reference, name = content
        kind = _our_type(reference)
        if not issubclass(kind, enum.Enum) or name not in kind.__members__:
            raise WireError(f"{reference!r} has no member {name!r}")
        return kind[name]

    def _marked(self, content: Any, depth: int) -> Any:
        reference, base_node = content
        kind, base_value = _our_type(reference), self.unpack(base_node, depth + 1)
        if issubclass(kind, enum.Enum) or not isinstance(base_value, int | float | str):
            raise WireError(f"{reference!r} is no marked scalar")
        if not issubclass(kind, type(base_value)):
            raise WireError(f"{reference!r} does not derive from {type(base_value).__name__}")
        return kind(base_value)

    def _dataclass(self, content: Any, depth: int) -> Any:
        reference, packed = content
        kind = _our_type(reference)
        declared = _declared_fields(kind)
        values = self._mapping(packed, depth)
        if values.keys() != declared.keys():
            raise WireError(
                f"{reference!r}: fields {sorted(values.keys() ^ declared.keys())} are missing or unknown; both "
                "processes must run the same version"
            )
        made: Any = kind(**{name: value for name, value in values.items() if declared[name]})
        for name, value in values.items():
            object.__setattr__(made, name, value)  # as it was sent, whatever the constructor derives
        return made

    def _inline_tensor(self, content: Any, depth: int) -> Any:
        dtype, shape, number = content
        view = self.buffer(number)
        if number not in self._tensors:
            self._tensors[number] = heavy.tensor_from(view, _text(dtype), shape)
        return self._tensors[number]

    def _parked_tensor(self, content: Any, depth: int) -> Any:
        if type(content) is not int or not 0 <= content < len(self._parked):
            raise WireError(f"parked tensor {content!r} does not exist")
        return self._parked[content]

    def _heavy(self, unpack: Callable[[Any, Callable[[Any], memoryview]], Any], content: Any, depth: int) -> Any:
        return unpack(content, self.buffer)

    def _plain(self, build: Callable[[Any], Any], content: Any, depth: int) -> Any:
        return build(content)

    def _collection(self, build: Callable[[list[Any]], Any], content: Any, depth: int) -> Any:
        return build(self._items(content, depth))

    def _bytes(self, content: Any, depth: int) -> bytes:
        return bytes(self.buffer(content))

    def _path(self, content: Any, depth: int) -> pathlib.Path:
        return pathlib.Path(_text(self.unpack(content, depth + 1)))


def _text(value: Any) -> str:
    if type(value) is not str:
        raise WireError(f"a {type(value).__name__} stands where a string was expected")
    return value


def _long_int(content: Any) -> int:
    if len(_text(content)) > MAX_INT_DIGITS:
        raise WireError(f"an integer has more than {MAX_INT_DIGITS} digits")
    return int(content, 16)


def _surrogates(content: Any) -> str:
    return str(content, "utf-8", "surrogatepass")


def _our_type(reference: Any) -> Any:
    module, _, name = _text(reference).partition(":")
    found = find_attribute(import_ours(module), name)
    if not isinstance(found, type) or f"{found.__module__}:{found.__qualname__}" != reference:
        raise WireError(f"{reference!r} is no class of that module")
    return found


def _declared_fields(kind: Any) -> dict[str, bool]:
    """Names of a data class's fields, and whether its constructor takes them."""
    if not dataclasses.is_dataclass(kind):
        raise WireError(f"{kind!r} is no data class")
    return {field.name: field.init for field in dataclasses.fields(kind)}


def _bind(method: Any, first: Any) -> Callable[[Unpacker, Any, int], Any]:
    def handler(self: Unpacker, content: Any, depth: int) -> Any:
        return method(self, first, content, depth)

    return functools.wraps(method)(handler)


_HANDLERS: dict[Any, Callable[[Unpacker, Any, int], Any]] = {
    "m": Unpacker._mapping,
    "d": Unpacker._pairs,
    "t": _bind(Unpacker._collection, tuple),
    "s": _bind(Unpacker._collection, set),
    "f": _bind(Unpacker._collection, frozenset),
    "b": Unpacker._bytes,
    "i": _bind(Unpacker._plain, _long_int),
    "u": _bind(Unpacker._plain, _surrogates),
    "/": Unpacker._path,
    "e": Unpacker._enum,
    "v": Unpacker._marked,
    "o": Unpacker._dataclass,
    "c": _bind(Unpacker._plain, load_code),
    "T": Unpacker._inline_tensor,
    "p": Unpacker._parked_tensor,
    **{tag: _bind(Unpacker._heavy, function) for tag, function in heavy.UNPACK.items()},
}
