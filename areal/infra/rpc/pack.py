"""Python values to the tree of a message. Called by ``serialization`` only.

Types: None, bool, int, float, str, bytes, list, tuple, dict with any keys, set, frozenset, Path; enums and data classes
of ``areal``; functions and classes by name; tensors, torch types and devices; numpy arrays and scalars; PIL images;
Hugging Face tokenizers and processors. Subclasses of containers and scalars travel as their base type, except our
marked defaults. A process handle (``Popen``) becomes None.
"""

from __future__ import annotations

import dataclasses
import enum
import pathlib
import subprocess
from collections.abc import Callable
from typing import Any

from areal.infra.rpc import heavy
from areal.infra.rpc.code_ref import is_code, pack_code
from areal.infra.rpc.errors import WireError

MAX_DEPTH = 100
PARK_BYTES = 64 << 10  # tensors above this are parked
INLINE_BYTES = 8 << 20  # and all further ones once a message holds this much
SHORT_BYTES = 256  # bytes up to this stay in the tree

PLAIN = frozenset((type(None), bool, int, float, str))
_INT_LOW, _INT_HIGH = -(1 << 63), (1 << 64) - 1
_SCALARS = (int, float, str)


class Packer:
    """Builds one tree and collects its buffers.

    Args:
        park: see ``serialization.encode``.
        exact: look at every integer and string for those that MessagePack cannot hold.
    """

    def __init__(self, park: Callable[[Any], Any] | None, *, exact: bool = False) -> None:
        self.buffers: list[memoryview] = []
        self.parked: list[tuple[str, str, tuple[int, ...]]] = []
        self._park = park
        self._exact = exact
        self._inline_bytes = 0
        self._tensors: dict[int, dict[str, Any]] = {}

    def pack(self, value: Any, depth: int) -> Any:
        """The node for ``value``."""
        kind = type(value)
        if kind in PLAIN:
            return value if not self._exact else _pack_exact(value)
        if depth > MAX_DEPTH:
            raise WireError(f"a value is nested deeper than {MAX_DEPTH} levels (or contains itself); flatten it")
        if kind is dict:
            return self._pack_dict(value, depth)
        if kind is list:
            return self._pack_items(value, depth)
        if kind is tuple:
            return {"t": self._pack_items(value, depth)}
        if kind is bytes:
            return value if len(value) <= SHORT_BYTES else {"b": self.add_buffer(memoryview(value))}
        return self._pack_object(value, depth)

    def add_buffer(self, buffer: memoryview) -> int:
        """Append a buffer of bytes; returns its number."""
        self.buffers.append(buffer)
        self._inline_bytes += buffer.nbytes
        return len(self.buffers) - 1

    def _pack_items(self, items: Any, depth: int) -> list[Any]:
        if not self._exact and PLAIN.issuperset(map(type, items)):
            return items if type(items) is list else list(items)
        return [self.pack(item, depth + 1) for item in items]

    def _pack_dict(self, value: dict[Any, Any], depth: int) -> dict[str, Any]:
        if not self._exact and all(type(key) is str for key in value):
            return {"m": {key: self.pack(item, depth + 1) for key, item in value.items()}}
        pairs: list[Any] = []
        for key, item in value.items():
            pairs += (self.pack(key, depth + 1), self.pack(item, depth + 1))
        return {"d": pairs}

    def _pack_object(self, value: Any, depth: int) -> Any:
        if isinstance(value, enum.Enum):
            return {"e": [_our_name(type(value)), value.name]}
        if heavy.is_tensor(value):
            return self._pack_tensor(value)
        packed = heavy.pack(value, self.add_buffer)
        if packed is not None:
            return packed
        if is_code(value):
            return {"c": pack_code(value)}
        if dataclasses.is_dataclass(value):
            return self._pack_dataclass(value, depth)
        if isinstance(value, pathlib.PurePath):
            return {"/": self.pack(str(value), depth + 1)}
        if isinstance(value, subprocess.Popen):
            return None
        return self._pack_subclass(value, depth)

    def _pack_subclass(self, value: Any, depth: int) -> Any:
        if isinstance(value, set | frozenset):
            return {"s" if isinstance(value, set) else "f": [self.pack(item, depth + 1) for item in value]}
        if isinstance(value, bytearray | memoryview):
            return self.pack(bytes(value), depth)
        if isinstance(value, dict):
            return self._pack_dict(dict(value), depth)
        if isinstance(value, list):
            return self._pack_items(list(value), depth)
        if isinstance(value, tuple):
            return self.pack(tuple(value), depth)
        if isinstance(value, bytes):
            return self.pack(bytes(value), depth)
        for scalar in _SCALARS:
            if isinstance(value, scalar):
                base_value = self.pack(scalar(value), depth + 1)
                ours = type(value).__module__.startswith("areal.")
                return {"v": [_our_name(type(value)), base_value]} if ours else base_value
        raise WireError(
            f"a value of type {type(value).__module__}.{type(value).__qualname__} cannot be sent to another process; "
            "send plain values, tensors, or a data class of areal"
        )

    def _pack_dataclass(self, value: Any, depth: int) -> dict[str, Any]:
        name = _our_name(type(value))
        fields = {f.name: self.pack(getattr(value, f.name), depth + 1) for f in dataclasses.fields(value)}
        return {"o": [name, fields]}

    def _pack_tensor(self, tensor: Any) -> dict[str, Any]:
        """Inline or parked; a tensor that occurs twice travels once."""
        node = self._tensors.get(id(tensor))
        if node is None:
            node = self._tensors[id(tensor)] = self._place_tensor(tensor)
        return node

    def _place_tensor(self, tensor: Any) -> dict[str, Any]:
        size = tensor.numel() * tensor.element_size()
        large = size > PARK_BYTES or (size > 0 and self._inline_bytes + size > INLINE_BYTES)
        if self._park is not None and large:
            parked = self._park(tensor)
            self.parked.append((parked.key, parked.dtype, parked.shape))
            return {"p": len(self.parked) - 1}
        dtype, shape, view = heavy.tensor_bytes(tensor)
        return {"T": [dtype, shape, self.add_buffer(view)]}


def _our_name(kind: type) -> str:
    if not kind.__module__.startswith("areal.") or "<" in kind.__qualname__:
        raise WireError(
            f"{kind.__module__}.{kind.__qualname__} cannot be sent to another process: of data classes and enums only "
            "those of areal can; send a dict"
        )
    return f"{kind.__module__}:{kind.__qualname__}"


def _pack_exact(value: Any) -> Any:
    if type(value) is int and not _INT_LOW <= value <= _INT_HIGH:
        return {"i": f"{value:x}"}
    if type(value) is str:
        try:
            value.encode()
        except UnicodeEncodeError:
            return {"u": value.encode("utf-8", "surrogatepass")}
    return value
