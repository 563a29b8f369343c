"""Names in a detached actor of the Ray cluster that this process belongs to, or else finds.

It finds the cluster by ``RAY_ADDRESS``, else on this machine. The actor, made by whoever comes first, hosts a
``MemoryBackend``. Needs the extra ``ray``, imported on first use.
"""

from __future__ import annotations

import socket
import threading
from typing import Any

from areal.utils import environ, logging
from areal.utils.errors import NetworkError
from areal.utils.name_resolve.base import unreachable
from areal.utils.name_resolve.memory import MemoryBackend
from areal.utils.network import split_hostport
from areal.utils.optional import import_extra

logger = logging.getLogger("NameResolve")

NAMESPACE = "areal"
_HEAD_NODE = "node:__internal_head__"
_CONNECT_TIMEOUT_S = 2.0
_START_TIMEOUT_S = 60.0  # the actor's process imports areal
_ANSWER_TIMEOUT_S = 5.0


class RayBackend:
    """Entries of the actor ``actor_name``."""

    def __init__(self, actor_name: str) -> None:
        self.actor_name = actor_name
        self._actor: Any = None
        self._job_id: str | None = None  # of the connection that the actor's handle belongs to
        self._lock = threading.Lock()

    def put(self, name: str, value: str, *, replace: bool, keepalive_ttl: float | None) -> None:
        """Write one entry."""
        self._call("put", name, value, replace=replace, keepalive_ttl=keepalive_ttl)

    def renew(self, name: str, value: str, keepalive_ttl: float) -> bool:
        """Give the entry its full time again."""
        return bool(self._call("renew", name, value, keepalive_ttl))

    def get(self, name: str) -> str:
        """Read one entry."""
        return str(self._call("get", name))

    def remove(self, name: str, *, only: str | None = None) -> None:
        """Remove one entry."""
        self._call("remove", name, only=only)

    def list_below(self, root: str) -> list[str]:
        """Names of ``root`` and below."""
        return list(self._call("list_below", root))

    def close(self) -> None:
        """Forget the actor; it stays, and so does the connection to Ray, which others may use."""
        self._actor = None

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        ray = import_extra("ray", "ray")
        errors = import_extra("ray.exceptions", "ray")
        try:
            with self._lock:
                actor = self._actor_of_this_connection(ray)
            return ray.get(getattr(actor, method).remote(*args, **kwargs), timeout=_ANSWER_TIMEOUT_S)
        except errors.RayTaskError as exc:
            raise exc.cause from None
        except (errors.RayError, ConnectionError, RuntimeError) as exc:
            if isinstance(exc, NetworkError):
                raise
            self._actor = None
            raise self._unreachable(exc) from exc

    def _actor_of_this_connection(self, ray: Any) -> Any:
        if not ray.is_initialized():  # a handle from before would make Ray start a cluster of its own
            self._connect(ray)
        job_id = ray.get_runtime_context().get_job_id()
        if self._actor is None or job_id != self._job_id:
            self._actor, self._job_id = self._find_actor(ray), job_id
        return self._actor

    def _find_actor(self, ray: Any) -> Any:
        remote = ray.remote(MemoryBackend).options(
            name=self.actor_name,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            resources={_HEAD_NODE: 0.001},  # the other nodes may leave
        )
        actor = remote.remote()
        ray.get(actor.list_below.remote(""), timeout=_START_TIMEOUT_S)
        return actor

    def _connect(self, ray: Any) -> None:
        address = environ.get_env("RAY_ADDRESS") or "auto"
        if ":" in address and "://" not in address:  # Ray itself would try for a minute
            try:
                socket.create_connection(split_hostport(address), timeout=_CONNECT_TIMEOUT_S).close()
            except (OSError, ValueError) as exc:
                raise self._unreachable(f"RAY_ADDRESS={address}: {exc}") from exc
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="error")

    def _unreachable(self, cause: object) -> NetworkError:
        remedy = "start Ray (ray start --head) or set RAY_ADDRESS to a running one"
        return unreachable("ray", "ray_actor_name", self.actor_name, cause, remedy)
