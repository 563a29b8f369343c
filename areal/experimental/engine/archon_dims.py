"""Parallel dimensions of the Archon engine: which sizes fit together, and the device meshes they give.

In: the sizes of a backend string such as ``archon:d2p1t2e4``. Out: device meshes and process groups by name. Called by
the Archon engine and by the functions that shard its models.

Ranks are ordered with ``pp`` slowest and ``tp`` fastest. Experts add no ranks: expert parallelism regroups the ranks
that hold different rows (``dp_shard``), slices of rows (``cp``) and, with ``etp=1``, tensor shards (``tp``).

::

    name              dimensions of the mesh                      used for
    pp cp tp          themselves                                  stages, sequence slices, tensor shards
    dp                dp_shard                                    rows; each rank has its own
    dp_shard_cp       dp_shard x cp                               FSDP shards of weights that are not experts
    dp_cp             the same ranks                              sums of losses and loss weights
    pp_cp_tp          pp x cp x tp                                ranks that share rows
    with ep > 1, dp_shard is split into dp_shard_mod_ep x dp_shard_in_ep
    ep                dp_shard_in_ep x cp, and x tp when etp=1    experts; each rank has its own
    ep_tp             ep, tp (two-dimensional; only when etp=tp)  experts, each cut over tp
    dp_shard_mod_ep   itself                                      FSDP shards of the experts
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Shard

from areal.utils.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from areal.api.alloc_mode import ParallelStrategy

__all__ = ["ArchonParallelDims", "ExpertLayout", "expert_layout"]


@dataclass(frozen=True)
class ArchonParallelDims:
    """Sizes of every parallel dimension, checked; meshes are made when one is first asked for.

    Attributes:
        dp_replicate: always 1; there are no replicas of sharded weights.
        dp_shard: ranks with different rows; negative: what the other sizes leave of ``world_size``.
        cp: ranks that each hold a slice of every row's tokens.
        tp: ranks that each hold a shard of every projection.
        pp: pipeline stages' ranks.
        ep: ranks that each hold different experts.
        etp: ranks that each hold a shard of every expert; 1 or ``tp``.
        world_size: all ranks.
        device_type: ``cuda`` or ``cpu``.

    Raises:
        ConfigError: sizes that do not fit together (a ``ValueError``); the message names them and the rule.
    """

    dp_replicate: int = 1
    dp_shard: int = -1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    world_size: int = 1
    device_type: str = "cuda"

    def __post_init__(self) -> None:
        for name in ("cp", "tp", "pp", "ep", "etp", "world_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be >= 1")
        if self.dp_replicate != 1:
            raise ConfigError(f"dp_replicate={self.dp_replicate} must be 1: weights are sharded, never replicated")
        if self.dp_shard < 0:
            object.__setattr__(self, "dp_shard", self.world_size // (self.cp * self.tp * self.pp))
        if self.dp_shard * self.cp * self.tp * self.pp != self.world_size:
            raise ConfigError(
                f"dp_shard={self.dp_shard}, cp={self.cp}, tp={self.tp}, pp={self.pp}: dp_shard * cp * tp * pp must "
                f"equal world_size={self.world_size}"
            )
        if self.etp not in (1, self.tp):
            raise ConfigError(f"etp={self.etp} must be 1 or tp={self.tp}")
        if self.ep > 1:
            self._check_experts()

    def _check_experts(self) -> None:
        inner = "cp" if self.etp == self.tp else "cp * tp"
        sizes = f"ep={self.ep} with dp_shard={self.dp_shard}, cp={self.cp}, tp={self.tp}, etp={self.etp}"
        if self.ep % self._ranks_inside_ep:
            raise ConfigError(f"{sizes}: ep must be a multiple of {inner}={self._ranks_inside_ep}")
        ranks = self.dp_shard * self._ranks_inside_ep
        if ranks % self.ep:
            raise ConfigError(f"{sizes}: ep must divide dp_shard * {inner}={ranks}")

    @classmethod
    def from_strategy(cls, strategy: ParallelStrategy, device_type: str) -> ArchonParallelDims:
        """Dimensions of a backend string. Raises ConfigError: as the class does."""
        return cls(
            dp_shard=strategy.data_parallel_size,
            cp=strategy.context_parallel_size,
            tp=strategy.tensor_parallel_size,
            pp=strategy.pipeline_parallel_size,
            ep=strategy.expert_parallel_size,
            etp=strategy.expert_tensor_parallel_size,
            world_size=strategy.world_size,
            device_type=device_type,
        )

    @property
    def _ranks_inside_ep(self) -> int:
        """Ranks of one row that hold different experts, for one value of ``dp_shard_in_ep``."""
        return self.cp if self.etp == self.tp else self.cp * self.tp

    @property
    def mesh_sizes(self) -> dict[str, int]:
        """Name and size of every dimension of the mesh, slowest first; sizes of 1 are kept."""
        if self.ep == 1:
            return {"pp": self.pp, "dp_shard": self.dp_shard, "cp": self.cp, "tp": self.tp}
        in_ep = self.ep // self._ranks_inside_ep
        return {
            "pp": self.pp,
            "dp_shard_mod_ep": self.dp_shard // in_ep,
            "dp_shard_in_ep": in_ep,
            "cp": self.cp,
            "tp": self.tp,
        }

    def get_mesh(self, name: str) -> DeviceMesh | None:
        """The mesh called ``name``; None where this layout has none of that name. Every rank must make the first call.

        Raises:
            EngineError: ``torch.distributed`` is not started, or with another number of ranks.
        """
        return _meshes_of(self).get(name)

    def get_group(self, name: str) -> dist.ProcessGroup | None:
        """The ranks of mesh ``name``, this one included; None where this layout has none of that name.

        Raises:
            EngineError: as :meth:`get_mesh`.
            ValueError: the mesh has two dimensions, so there is no one group.
        """
        mesh = self.get_mesh(name)
        if mesh is None:
            return None
        if mesh.ndim > 1:
            raise ValueError(f"mesh {name!r} has dimensions {mesh.mesh_dim_names}; ask for the group of one of them")
        group: dist.ProcessGroup = mesh.get_group()
        return group

    @property
    def is_data_head(self) -> bool:
        """Whether this rank owns its rows: it is the first of those that share them. Every rank must make this call."""
        return dist.get_rank(self.get_group("pp_cp_tp")) == 0

    @property
    def is_pipeline_head(self) -> bool:
        """Whether this rank speaks for its stages when weights are published; one rank does for each value of ``pp``.

        Every rank must make this call.
        """
        return all(dist.get_rank(self.get_group(name)) == 0 for name in ("dp", "cp", "tp"))

    @property
    def dp_enabled(self) -> bool:
        """Ranks have different rows."""
        return self.dp_shard > 1

    dp_shard_enabled = dp_enabled

    @property
    def fsdp_enabled(self) -> bool:
        """Weights are sharded over ``dp_shard_cp``."""
        return self.dp_shard * self.cp > 1

    dp_cp_enabled = fsdp_enabled

    @property
    def cp_enabled(self) -> bool:
        """Rows are cut into slices of tokens."""
        return self.cp > 1

    @property
    def tp_enabled(self) -> bool:
        """Projections are cut."""
        return self.tp > 1

    @property
    def pp_enabled(self) -> bool:
        """Layers are spread over pipeline ranks."""
        return self.pp > 1

    @property
    def ep_enabled(self) -> bool:
        """Experts are spread over ranks."""
        return self.ep > 1

    @property
    def etp_enabled(self) -> bool:
        """Experts are cut over ``tp``."""
        return self.etp > 1

    @property
    def fsdp_gradient_divide_factor(self) -> int:
        """Number of ranks over which gradients are averaged, also those of experts that fewer ranks share."""
        return self.dp_shard * self.cp

    @property
    def seq_len_divisor(self) -> int:
        """Packed rows have a multiple of this many tokens."""
        return 2 * self.tp * self.cp

    @property
    def context_and_model_parallel_size(self) -> int:
        """Ranks that share rows."""
        return self.cp * self.tp * self.pp


@dataclass(frozen=True)
class ExpertLayout:
    """How the experts of a mixture-of-experts layer are spread.

    Attributes:
        strategy: ``replicate``: as all other weights; ``tensor``: every expert is cut; ``expert``: every rank has its
            own experts; ``expert_token_split``: the same, and tensor-parallel ranks, which share a row's tokens out
            between the layers, each dispatch their own; ``expert_tensor``: ranks have their own experts, which are cut.
        mesh: name of the mesh whose dimensions the placements are for; None for ``replicate``.
        w1_w3: placements of gate and up projections ``[E, hidden, dim]``, one for each dimension of the mesh.
        w2: placements of down projections ``[E, dim, hidden]``.
    """

    strategy: Literal["replicate", "tensor", "expert", "expert_token_split", "expert_tensor"]
    mesh: str | None
    w1_w3: tuple[Placement, ...]
    w2: tuple[Placement, ...]


def expert_layout(dims: ArchonParallelDims) -> ExpertLayout:
    """How ``dims`` spreads experts; FSDP shards come on top."""
    if dims.ep == 1 and dims.tp == 1:
        return ExpertLayout("replicate", None, (), ())
    if dims.ep == 1:
        return ExpertLayout("tensor", "tp", (Shard(1),), (Shard(2),))
    if dims.tp == 1:
        return ExpertLayout("expert", "ep", (Shard(0),), (Shard(0),))
    if dims.etp == 1:
        return ExpertLayout("expert_token_split", "ep", (Shard(0),), (Shard(0),))
    return ExpertLayout("expert_tensor", "ep_tp", (Shard(0), Shard(1)), (Shard(0), Shard(2)))


# Engines of one layout share meshes and groups: a group costs memory and sockets, and DTensor remembers meshes for the
# life of a process.
_cache: dict[tuple[dist.ProcessGroup, ArchonParallelDims], dict[str, DeviceMesh]] = {}


def _meshes_of(dims: ArchonParallelDims) -> dict[str, DeviceMesh]:
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is None:
        raise EngineError(f"{dims}: meshes need torch.distributed; call create_process_group first")
    if dist.get_world_size() != dims.world_size:
        raise EngineError(f"world_size={dims.world_size}, but torch.distributed has {dist.get_world_size()} ranks")
    for key in [key for key in _cache if key[0] is not world]:
        del _cache[key]  # of a world that was left
    if (world, dims) not in _cache:
        _cache[world, dims] = _build_meshes(dims)
    return _cache[world, dims]


def _build_meshes(dims: ArchonParallelDims) -> dict[str, DeviceMesh]:
    sizes = dims.mesh_sizes
    root = init_device_mesh(dims.device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    meshes = {name: root[name] for name in sizes}

    def flatten(name: str, *dimensions: str) -> None:
        meshes[name] = root[dimensions]._flatten(name)

    rows = ("dp_shard",) if dims.ep == 1 else ("dp_shard_mod_ep", "dp_shard_in_ep")
    flatten("dp", *rows)
    flatten("dp_shard_cp", *rows, "cp")
    flatten("dp_cp", *rows, "cp")
    flatten("pp_cp_tp", "pp", "cp", "tp")
    if dims.ep > 1 and dims.etp == dims.tp:
        flatten("ep", "dp_shard_in_ep", "cp")
        meshes["ep_tp"] = DeviceMesh._concatenate([meshes["ep"], root["tp"]])
    elif dims.ep > 1:
        flatten("ep", "dp_shard_in_ep", "cp", "tp")
    return meshes
