"""Names in etcd 3: keys ``areal/<name>``; an entry with a time to live has a lease of its own.

Speaks etcd's HTTP gateway through ``etcd3gw`` (extra ``etcd``, imported on first use). Checks and writes that belong
together are one transaction.
"""

from __future__ import annotations

import base64
import contextlib
import math
import os
from collections.abc import Iterator
from typing import Any

from areal.utils.errors import NameEntryExistsError, NameEntryNotFoundError
from areal.utils.name_resolve.base import split_address, unreachable
from areal.utils.optional import import_extra

_PREFIX = "areal/"
_TIMEOUT_S = 3.0


class EtcdBackend:
    """Keys of the etcd at ``address`` (host:port)."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._host, self._port = split_address("etcd3_addr", address)
        self._leases: dict[str, Any] = {}  # of the entries that this process put
        self._connection: tuple[int, Any] | None = None  # process id, client

    def put(self, name: str, value: str, *, replace: bool, keepalive_ttl: float | None) -> None:
        """Write one entry."""
        with self._errors() as client:
            lease = None if keepalive_ttl is None else client.lease(ttl=math.ceil(keepalive_ttl))
            if replace:
                client.put(_key(name), value.encode(), lease)
            elif not client.create(_key(name), value.encode(), lease):
                if lease is not None:
                    lease.revoke()
                raise NameEntryExistsError(f"name {name!r} is already registered in etcd at {self.address}")
        if lease is None:
            self._leases.pop(name, None)
        else:
            self._leases[name] = lease

    def renew(self, name: str, value: str, keepalive_ttl: float) -> bool:
        """Give the entry its full time again."""
        del keepalive_ttl  # the lease has it
        lease = self._leases.get(name)
        if lease is None:
            return False
        with self._errors() as client:
            found = client.get(_key(name), metadata=True)
            if not found or int(found[0][1].get("lease", 0)) != lease.id or found[0][0].decode() != value:
                return False
            return bool(lease.refresh() > 0)

    def get(self, name: str) -> str:
        """Read one entry."""
        with self._errors() as client:
            values = client.get(_key(name))
        if not values:
            raise self._missing(name)
        return str(values[0].decode())

    def remove(self, name: str, *, only: str | None = None) -> None:
        """Remove one entry."""
        with self._errors() as client:
            lease = self._leases.pop(name, None)
            if only is None:
                removed = client.delete(_key(name))
            else:
                removed = client.transaction(_remove_if(_key(name), only.encode())).get("succeeded", False)
            if lease is not None:
                lease.revoke()
        if not removed:
            raise self._missing(name)

    def list_below(self, root: str) -> list[str]:
        """Names of ``root`` and below."""
        with self._errors() as client:
            found = client.get_prefix(_key(f"{root}/" if root else ""))
            if root:
                found += client.get(_key(root), metadata=True)
        return [entry["key"].decode().removeprefix(_PREFIX) for _, entry in found]

    def close(self) -> None:
        """Close the connections; leases of entries that stay run out."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection[1].session.close()

    def _client(self) -> Any:
        """The client of this process; a forked child must not share its parent's connections."""
        if self._connection is None or self._connection[0] != os.getpid():
            client = import_extra("etcd3gw", "etcd").client(host=self._host, port=self._port, timeout=_TIMEOUT_S)
            client.session.trust_env = False  # machines of the cluster are not behind an HTTP proxy
            self._connection = (os.getpid(), client)
        return self._connection[1]

    @contextlib.contextmanager
    def _errors(self) -> Iterator[Any]:
        errors = import_extra("etcd3gw.exceptions", "etcd")
        requests = import_extra("requests.exceptions", "etcd")
        try:
            yield self._client()
        except (errors.Etcd3Exception, requests.RequestException) as exc:
            cause = getattr(exc, "detail_text", None) or exc
            raise unreachable("etcd3", "etcd3_addr", self.address, cause, "start it there (etcd)") from exc

    def _missing(self, name: str) -> NameEntryNotFoundError:
        return NameEntryNotFoundError(f"name {name!r} is not registered in etcd at {self.address}")


def _key(name: str) -> bytes:
    """As bytes, because etcd3gw would encode text as Latin-1."""
    return (_PREFIX + name).encode()


def _remove_if(key: bytes, value: bytes) -> dict[str, Any]:
    """Transaction that deletes ``key`` if it has ``value``."""
    encoded = base64.b64encode(key).decode()
    expected = {"key": encoded, "target": "VALUE", "value": base64.b64encode(value).decode()}
    return {
        "compare": [{**expected, "result": "EQUAL"}],
        "success": [{"request_delete_range": {"key": encoded}}],
        "failure": [],
    }
