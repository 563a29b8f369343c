"""Names in Redis: keys ``areal/<name>`` of database 0, whose values are the plain text; a time to live is Redis's own.

Steps that read and then write are Lua scripts, hence atomic. Needs the extra ``redis``, imported on first use.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator
from typing import Any

from areal.utils.errors import NameEntryExistsError, NameEntryNotFoundError
from areal.utils.name_resolve.base import split_address, unreachable
from areal.utils.optional import import_extra

_PREFIX = "areal/"
_CONNECT_TIMEOUT_S = 2.0
_ANSWER_TIMEOUT_S = 3.0
_SCAN_COUNT = 1000  # keys that the server looks at per round trip

_RENEW = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('PEXPIRE', KEYS[1], ARGV[2]) end return 0"
_REMOVE = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"


class RedisBackend:
    """Keys of the Redis at ``address`` (host:port)."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._host, self._port = split_address("redis_addr", address)

    def put(self, name: str, value: str, *, replace: bool, keepalive_ttl: float | None) -> None:
        """Write one entry."""
        lifetime = None if keepalive_ttl is None else _milliseconds(keepalive_ttl)
        with self._errors():
            written = self._client.set(_PREFIX + name, value, px=lifetime, nx=not replace)
        if not written:
            raise NameEntryExistsError(f"name {name!r} is already registered in Redis at {self.address}")

    def renew(self, name: str, value: str, keepalive_ttl: float) -> bool:
        """Give the entry its full time again."""
        with self._errors():
            return bool(self._client.eval(_RENEW, 1, _PREFIX + name, value, _milliseconds(keepalive_ttl)))

    def get(self, name: str) -> str:
        """Read one entry."""
        with self._errors():
            value = self._client.get(_PREFIX + name)
        if value is None:
            raise self._missing(name)
        return str(value)

    def remove(self, name: str, *, only: str | None = None) -> None:
        """Remove one entry."""
        key = _PREFIX + name
        with self._errors():
            removed = self._client.delete(key) if only is None else self._client.eval(_REMOVE, 1, key, only)
        if not removed:
            raise self._missing(name)

    def list_below(self, root: str) -> list[str]:
        """Names of ``root`` and below."""
        pattern = re.sub(r"([*?\[\]\\^-])", r"\\\1", f"{_PREFIX}{root}/" if root else _PREFIX) + "*"
        with self._errors():
            keys = set(self._client.scan_iter(match=pattern, count=_SCAN_COUNT))
            if root and self._client.exists(_PREFIX + root):
                keys.add(_PREFIX + root)
        return [key.removeprefix(_PREFIX) for key in keys]

    def close(self) -> None:
        """Close the connections."""
        client = self.__dict__.pop("_client", None)
        if client is not None:
            client.close()

    @functools.cached_property
    def _client(self) -> Any:
        redis = import_extra("redis", "redis")
        no_pause = import_extra("redis.backoff", "redis").NoBackoff()
        once_for_a_lost_connection = import_extra("redis.retry", "redis").Retry(
            no_pause, 1, supported_errors=(redis.exceptions.ConnectionError,)
        )
        return redis.Redis(
            self._host,
            self._port,
            protocol=2,  # works with every server; protocol 3 adds nothing here
            decode_responses=True,
            socket_connect_timeout=_CONNECT_TIMEOUT_S,
            socket_timeout=_ANSWER_TIMEOUT_S,
            retry=once_for_a_lost_connection,
        )

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        errors = import_extra("redis.exceptions", "redis")
        try:
            yield
        except errors.RedisError as exc:
            remedy = "start it there (redis-server)"
            raise unreachable("redis", "redis_addr", self.address, exc, remedy) from exc

    def _missing(self, name: str) -> NameEntryNotFoundError:
        return NameEntryNotFoundError(f"name {name!r} is not registered in Redis at {self.address}")


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))
