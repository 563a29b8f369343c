"""Where a receiver finds one version's weights: shared memory, a directory, or a collective that it joins.

Made by publishers on the trainer's side, sent to rollout workers, opened there (embedded engine) or handed on to an
inference server in its own terms.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from areal.api.io_struct import ParamSpec
from areal.engine.core.shared_weights import WeightManifest
from areal.engine.core.weight_sync import ParamRecord


@dataclass
class WeightGroup:
    """A collective group: the trainer's first rank is rank 0, samplers are the others.

    Attributes:
        name: of the group; new for every membership.
        host, port: where rank 0 keeps the store.
        world_size: ranks of the group.
        rank: of whoever this object was made for (a server's first rank; its others follow).
        backend: ``gloo`` or ``nccl``.
        torch_helper: built with torch's group helper, as SGLang does, and every tensor is broadcast alone; else built
            directly, and small tensors of a bucket travel as one.
        stage: pipeline stage whose parameters travel in it.
        timeout_s: of every collective.
    """

    name: str
    host: str
    port: int
    world_size: int
    rank: int = 0
    backend: Literal["gloo", "nccl"] = "gloo"
    torch_helper: bool = False
    stage: int = 0
    timeout_s: float = 600.0


@dataclass
class XcclSource:
    """A version that rank 0 is about to broadcast, bucket by bucket, in this order."""

    version: int
    group: WeightGroup
    buckets: list[list[ParamSpec]]

    @property
    def timeout_s(self) -> float:
        """Limit of receiving it."""
        return self.group.timeout_s


@dataclass
class DiskSource:
    """A complete Hugging Face directory, what was written into it, and the limit of reading it (None: the reader's).

    One with an adapter says under which name servers offer it.
    """

    version: int
    path: str
    records: list[ParamRecord] = field(default_factory=list)
    timeout_s: float | None = None
    adapter: str = ""


WeightSource = WeightManifest | XcclSource | DiskSource
