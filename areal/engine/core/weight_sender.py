"""The trainer's side of a weight update on one rank: hands out the engine's full tensors by three ways.

In: calls that every rank gets (gathering full tensors is a collective; the first rank alone sends). Out: a manifest of
shared memory, a Hugging Face directory, or broadcasts. Used by ``areal.trainer.role_worker``, and by
``connected_weights`` for scripts that hold the engine themselves.
"""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from areal.api.io_struct import ParamSpec, SaveLoadMeta
from areal.engine.core.hf_checkpoint import HfDirectory
from areal.engine.core.lora_layout import adapter_pairs
from areal.engine.core.shared_weights import WeightManifest, WeightWriter
from areal.engine.core.weight_groups import Membership, WeightGroupLostError, enter_group, open_store
from areal.engine.core.weight_heads import head_names
from areal.engine.core.weight_sync import ParamRecord
from areal.engine.core.weight_wire import send_buckets
from areal.utils import environ
from areal.utils.errors import EngineError

if TYPE_CHECKING:
    from areal.api.engine_api import TrainEngine
    from areal.engine.core.weight_sources import WeightGroup

_Result = TypeVar("_Result")
_DIRECTORY = re.compile(r"weight_update_v\d+")


class WeightSender:
    """What one rank does.

    Args:
        engine: of this rank.
        first: whether this rank sends; asked late, when process groups exist.
    """

    def __init__(self, engine: TrainEngine, first: Callable[[], bool]) -> None:
        self._engine, self._first = engine, first
        self._writer: WeightWriter | None = None
        self._store: Any = None
        self._member: Membership | None = None
        self._given_up: set[str] = set()
        self._joining: str | None = None
        self._lock = threading.Lock()

    def write_shared(self, version: int, keep: int | None = None) -> WeightManifest | None:
        """Write the weights where samplers can map them, not into the buffer whose descriptor is ``keep``; every rank
        calls, the first one gets the manifest.
        """
        if not self._first():
            self._join()
            return None
        self._writer = self._writer or WeightWriter()
        writer = self._writer
        return self._send(lambda pairs: writer.write(pairs, version, keep))

    def write_directory(self, path: str) -> list[ParamRecord] | None:
        """Write a Hugging Face directory, whole or not at all; every rank calls, the first one says what is in it.

        An engine that publishes its adapter alone writes peft's directory.
        """
        save: Any = self._engine.save
        adapter = getattr(self._engine, "sends_adapter", False)
        save(SaveLoadMeta(path, "hf", with_optim=False, merged=not adapter))
        if not self._first():
            return None
        if adapter:
            return [ParamRecord.of(name, tensor) for name, tensor in adapter_pairs(path)]
        directory = HfDirectory(path)
        shown = head_names(directory.shapes)
        return [ParamRecord.of(name, tensor, head=name in shown) for name, tensor in directory.tensors()]

    def keep_only(self, path: str) -> None:
        """Remove the directories of other versions beside ``path``; first rank."""
        kept = Path(path)
        for other in kept.parent.glob("weight_update_v*"):
            if other.name != kept.name and _DIRECTORY.fullmatch(other.name):
                shutil.rmtree(other, ignore_errors=True)

    def remove_directory(self, path: str) -> None:
        """Remove one; first rank."""
        if _DIRECTORY.fullmatch(Path(path).name):
            shutil.rmtree(path, ignore_errors=True)

    # -- broadcasts ----------------------------------------------------------------------------------------------------

    def specs(self) -> list[ParamSpec] | None:
        """Name, shape and dtype of every tensor, in the order they are sent; every rank calls."""
        if not self._first():
            self._join()
            return None

        def describe(pairs: Iterator[tuple[str, Tensor]]) -> list[ParamSpec]:
            return [ParamSpec(name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in pairs]

        return self._send(describe)

    def records(self) -> list[ParamRecord] | None:
        """What a broadcast would send; every rank calls, the first one gets it."""
        if not self._first():
            self._join()
            return None
        return self._send(lambda pairs: [ParamRecord.of(name, tensor) for name, tensor in pairs])

    def open_store(self, host: str | None, timeout_s: float) -> tuple[str, int, str]:
        """Let receivers meet this rank at (host, port), with the returned backend; first rank."""
        host = host or environ.get_env("MASTER_ADDR") or "127.0.0.1"
        self._store = open_store(host, timeout_s)
        return host, self._store.port, "nccl" if self._engine.device.type == "cuda" else "gloo"

    def join_group(self, group: WeightGroup) -> None:
        """Become its rank 0; returns when every receiver has joined. The group before it is left."""
        if self._store is None:
            raise EngineError(f"weight group {group.name}: open_store comes first")
        with self._lock:
            if group.name in self._given_up:
                self._store = None
                raise WeightGroupLostError(f"weight group {group.name} was given up before anybody joined")
            self._joining = group.name
        try:  # as a client of its own store, so that the store ends, for everybody, as soon as it is dropped here
            member = enter_group(group, aborted=lambda: group.name in self._given_up)
        except BaseException:
            self._store = None
            raise
        finally:
            self._joining = None
        with self._lock:
            old, self._member = self._member, member
        if old is not None:
            old.abort()

    def leave_group(self, name: str) -> None:
        """Leave the group ``name`` or give up joining it, from any thread; a send under way fails."""
        self._given_up.add(name)
        with self._lock:
            if self._joining == name:
                self._store = None  # whoever waits at it stops waiting, this rank too
            member = self._member
            if member is None or member.group.name != name:
                return
            self._member = None
        member.abort()

    def send(
        self,
        name: str,
        buckets: Sequence[Sequence[ParamSpec]],
        pairs: Sequence[tuple[str, Tensor]] | None = None,
    ) -> list[ParamRecord] | None:
        """Broadcast the weights in the group ``name``; every rank calls, the first one says what it sent.

        Args:
            name: of the group.
            buckets: what was announced.
            pairs: tensors to send instead of the engine's; then the first rank calls alone.

        Raises:
            WeightSyncError: a receiver is gone, or the tensors are not those of ``buckets``; the group was left.
        """
        if not self._first():
            self._join()
            return None
        member = self._member
        if member is None or member.group.name != name:
            self._join()
            raise WeightGroupLostError(f"weight group {name} was left before anything was sent")
        try:
            if pairs is not None:
                return send_buckets(member, pairs, buckets)
            return self._send(lambda own: send_buckets(member, own, buckets))
        except BaseException:
            self.leave_group(name)
            raise

    # -- every rank ----------------------------------------------------------------------------------------------------

    def _send(self, work: Callable[[Iterator[tuple[str, Tensor]]], _Result]) -> _Result:
        """Do ``work`` on the tensors; if it fails, the rest is still gathered, for the other ranks."""
        pairs = iter(self._engine.named_full_tensors())
        try:
            return work(pairs)
        except Exception:
            for _ in pairs:
                pass
            raise

    def _join(self) -> None:
        for _ in self._engine.named_full_tensors():
            pass

    def close(self) -> None:
        """Free the memory and leave the group. Safe to call twice."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._member is not None:
            self.leave_group(self._member.group.name)
        self._store = None
