"""The objects that a worker hosts: made, looked up and called by name.

``prepare_*`` decide on the event loop whether a request can be run at all (:class:`Refusal` if not: nothing has
happened); the returned work runs later in a lane and always gives a :class:`Reply`. Called by ``routes``.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from areal.api.remote import ObjectRef, RemoteSpec, remote_spec
from areal.infra.rpc import heavy, serialization
from areal.infra.rpc.errors import TensorLostError, WireError, pack_exception
from areal.infra.rpc.serialization import Parked
from areal.infra.rpc.store import RESULT_LIFE_S, TensorStore
from areal.utils.dynamic_import import import_from_string


class Refusal(Exception):
    """A request that is answered with a 4xx or 504 and changed nothing."""

    def __init__(self, status: int, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.kind = kind


@dataclass
class Reply:
    """A message to send back; ``failed``: it describes an exception."""

    body: bytes
    failed: bool = False


class Hosting:
    """Objects by name, and how requests act on them."""

    def __init__(self, store: TensorStore) -> None:
        self.objects: dict[str, Any] = {}
        self.before_create: Callable[[], None] = lambda: None
        self._store = store
        self._creating: set[str] = set()
        self._lock = threading.Lock()

    def find(self, name: str, method: str) -> tuple[Callable[..., Any], RemoteSpec]:
        """A method that may be called, and its mark.

        Raises:
            Refusal: 404 without such an object, 400 without such a method or mark.
        """
        if name not in self.objects:
            known = ", ".join(self.objects) or "none"
            raise Refusal(404, "unknown object", f"no object {name!r} here; there are: {known}")
        kind = type(self.objects[name])
        spec = None if method.startswith("_") else remote_spec(kind, method)
        if spec is None:
            exists = callable(getattr(kind, method, None))
            reason = "is not marked @remote" if exists else "does not exist"
            raise Refusal(400, "unknown method", f"{kind.__name__}.{method} of object {name!r} {reason}")
        return getattr(self.objects[name], method), spec

    def arguments(self, body: bytes | bytearray) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments of a call; references to objects are replaced.

        Raises:
            Refusal: 400, the message is malformed.
        """
        if not body:
            return [], {}
        try:
            decoded = serialization.decode(body, fetch=self._claim)
            args, kwargs = decoded
            if type(args) is not list or type(kwargs) is not dict or any(type(key) is not str for key in kwargs):
                raise WireError("the body must hold a list and a dictionary of arguments")
        except (WireError, TensorLostError, ValueError, TypeError) as exc:
            raise Refusal(400, "malformed message", str(exc)) from exc
        return self._resolve(args), self._resolve(kwargs)

    def reserve(self, name: str) -> None:
        """Keep ``name`` for an object that is being made.

        Raises:
            Refusal: 400, it is taken.
        """
        with self._lock:
            if not name or name in self.objects or name in self._creating:
                raise Refusal(400, "duplicate name", f"an object {name!r} exists here already")
            self._creating.add(name)

    def release(self, name: str) -> None:
        """End a reservation."""
        with self._lock:
            self._creating.discard(name)

    def create(self, name: str, class_path: str, body: bytes | bytearray) -> Reply | Refusal:
        """Make an object; runs on the engine thread."""
        try:
            args, kwargs = self.arguments(body)
        except Refusal as refusal:
            return refusal
        try:
            self.before_create()
            kind = import_from_string(class_path)
            if not isinstance(kind, type):
                raise TypeError(f"{class_path} is a {type(kind).__name__}, not a class")
            self.objects[name] = kind(*args, **kwargs)
        except BaseException as exc:  # noqa: BLE001 - the caller's to see, SystemExit too
            return failure(exc)
        return Reply(self.encode_result(None))

    def call(
        self, method: Callable[..., Any], body: bytes | bytearray, loop: asyncio.AbstractEventLoop
    ) -> Reply | Refusal:
        """Run a method to its end and encode the result; runs on the engine thread or in the pool."""
        try:
            args, kwargs = self.arguments(body)
        except Refusal as refusal:
            return refusal
        try:
            result = method(*args, **kwargs)
            if inspect.iscoroutine(result):
                result = asyncio.run_coroutine_threadsafe(result, loop)
            if isinstance(result, concurrent.futures.Future):
                result = result.result()
            return Reply(self.encode_result(result))
        except BaseException as exc:  # noqa: BLE001 - the caller's to see, SystemExit too
            return failure(exc)

    def encode_result(self, result: Any) -> bytes:
        """A message of its own memory: the object may change its tensors as soon as the next call runs."""
        return bytes(serialization.encode(result, park=self._park))

    def _park(self, tensor: Any) -> Parked:
        plain = heavy.plain_tensor(tensor)
        if plain.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
            plain = plain.clone()
        key = self._store.add(plain, life_s=RESULT_LIFE_S)
        return Parked(key, heavy.dtype_name(plain.dtype), tuple(plain.shape))

    def _claim(self, wanted: Sequence[Parked]) -> list[Any]:
        """The tensors that the caller has sent ahead."""
        tensors = [self._store.take(parked.key) for parked in wanted]
        for parked, tensor in zip(wanted, tensors, strict=True):
            if (parked.dtype, parked.shape) != (heavy.dtype_name(tensor.dtype), tuple(tensor.shape)):
                raise WireError(
                    f"tensor {parked.key} was sent as {tensor.dtype} {tuple(tensor.shape)}, not as {parked}"
                )
        return tensors

    def _resolve(self, value: Any) -> Any:
        kind = type(value)
        if kind is ObjectRef:
            if value.name not in self.objects:
                raise Refusal(404, "unknown object", f"no object {value.name!r} here, which an argument refers to")
            return self.objects[value.name]
        if kind is dict:
            return {key: self._resolve(item) for key, item in value.items()}
        if kind is list or kind is tuple:
            resolved = [self._resolve(item) for item in value]
            return resolved if kind is list else tuple(resolved)
        return value


def failure(error: BaseException) -> Reply:
    """Reply that makes the client raise ``error``."""
    return Reply(bytes(serialization.encode(pack_exception(error))), failed=True)
