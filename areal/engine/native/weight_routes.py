"""Weight routes of the native server: updates from disk, shared memory or a group, and the groups.

One update at a time; each runs in a thread, so that the event loop answers meanwhile. Made by ``server``, which lets
every call end though its client left: a cancelled one would free the turn while its thread goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from areal.engine.core.shared_weights import host_identity
from areal.engine.native import wire
from areal.engine.native.requests import InvalidRequestError
from areal.utils.errors import WeightSyncError

if TYPE_CHECKING:
    from areal.engine.core.weight_sources import WeightGroup, WeightSource
    from areal.engine.native.engine import NativeEngine

_UPDATE = ("weight_version", "commit", "abort_all_requests", "flush_cache", "torch_empty_cache")


class WeightRoutes:
    """``table``: path -> coroutine from a JSON object to a JSON object."""

    def __init__(self, engine: NativeEngine) -> None:
        self.engine = engine
        self._updating = asyncio.Lock()
        self._groups: dict[str, WeightGroup] = {}
        self.table: dict[str, Callable[[dict[str, Any]], Awaitable[Any]]] = {
            "/update_weights_from_disk": self._update_disk,
            "/update_weights_from_shm": self._update_shm,
            "/update_weights_from_distributed": self._update_broadcast,
            "/commit_weights": self._commit,
            "/discard_weights": self._discard,
            "/update_weight_version": self._rename,
            "/init_weights_update_group": self._join,
            "/destroy_weights_update_group": self._leave,
        }

    async def _update_disk(self, body: dict[str, Any]) -> Any:
        wire.refuse_unknown(body, ("model_path", *_UPDATE, "load_format", "keep_pause"))
        return await self._update(body, lambda version: wire.read_disk(body, version))

    async def _update_shm(self, body: dict[str, Any]) -> Any:
        wire.refuse_unknown(body, ("host", "pid", "fd", "size_bytes", "params", *_UPDATE))
        host = wire.take(body, "host", str)
        if host != host_identity():
            raise InvalidRequestError(
                f"host={host!r} is not this one, {host_identity()!r}: shm needs one host, disk not"
            )
        return await self._update(body, lambda version: wire.read_manifest(body, version))

    async def _update_broadcast(self, body: dict[str, Any]) -> Any:
        wire.refuse_unknown(body, ("names", "dtypes", "shapes", "group_name", "bucket_lengths", *_UPDATE))
        group = self._group(body)
        return await self._update(body, lambda version: wire.read_broadcast(body, version, group))

    async def _update(self, body: dict[str, Any], read: Callable[[int], WeightSource]) -> Any:
        commit, abort = wire.take(body, "commit", bool, True), wire.take(body, "abort_all_requests", bool, False)
        async with self._updating:
            version = wire.take_version(body, "weight_version", self.engine.get_version())
            source = read(version)
            if abort:
                self.engine.abort()
            try:
                records = await asyncio.to_thread(self.engine.stage_source, source, version)
                if commit:
                    await asyncio.to_thread(self.engine.commit_weights, version)
            except (OSError, ValueError) as exc:  # a directory or file that is not there, or is none
                raise WeightSyncError(f"weights v{version}: {exc}") from exc
        message = f"weights v{version} are {'in service' if commit else 'staged'}"
        return {"success": True, "message": message, "num_paused_requests": 0, "records": wire.write_records(records)}

    async def _commit(self, body: dict[str, Any]) -> Any:
        version = wire.take_version(body, "weight_version")
        async with self._updating:
            await asyncio.to_thread(self.engine.commit_weights, version)
        return {"success": True, "message": f"weights v{version} are in service"}

    async def _discard(self, _: dict[str, Any]) -> Any:
        async with self._updating:
            await asyncio.to_thread(self.engine.discard_weights)
        return {"success": True, "message": "nothing is staged"}

    async def _rename(self, body: dict[str, Any]) -> Any:
        version = wire.take_version(body, "new_version")
        async with self._updating:
            await asyncio.to_thread(self.engine.set_version, version)
        return {"success": True, "message": f"the weights in service are called v{version}"}

    async def _join(self, body: dict[str, Any]) -> Any:
        group = wire.read_group(body)
        if group.name in self._groups:
            raise InvalidRequestError(f"group_name={group.name!r}: this server is in that group already")
        async with self._updating:
            await asyncio.to_thread(self.engine.join_group, group)
            self._groups[group.name] = group
        return {"success": True, "message": f"rank {group.rank} of {group.world_size} in {group.name}"}

    async def _leave(self, body: dict[str, Any]) -> Any:
        group = self._group(body)
        del self._groups[group.name]
        await asyncio.to_thread(self.engine.leave_group, group)  # not behind an update: it may be what ends one
        return {"success": True, "message": f"left {group.name}"}

    def _group(self, body: Mapping[str, Any]) -> WeightGroup:
        name = wire.take(body, "group_name", str)
        if name not in self._groups:
            known = ", ".join(self._groups) or "none"
            raise InvalidRequestError(
                f"group_name={name!r} was not joined (joined: {known}): init_weights_update_group"
            )
        return self._groups[name]
