"""Experts spread over ranks: each holds some of them (``ep``), or a shard of each (``etp``, or ``tp`` without ``ep``).

In: a model on the meta device, after tensor parallelism. Out: the same modules with DTensor parameters in the layout of
``archon_dims.expert_layout``. Called by ``parallelize.py``.

Where a rank has a shard of each expert, the tokens that tensor parallelism has spread are brought together before the
router, and the partial outputs are summed and spread again after the experts. With ``etp=1`` that is not needed: every
rank routes its own tokens, and tensor-parallel ranks are ranks of ``ep`` like the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate

from areal.engine.core.distributed import gather_rows, reduce_rows
from areal.experimental.engine.archon_dims import expert_layout
from areal.experimental.models.archon.moe.exchange import ExpertExchange
from areal.experimental.models.archon.moe.layer import MoE
from areal.experimental.models.archon.tensor_parallel import distribute_parameter
from areal.utils.errors import ConfigError

if TYPE_CHECKING:
    from areal.experimental.engine.archon_dims import ArchonParallelDims
    from areal.experimental.models.archon.base import ArchonModel, ModelArgs, MoEArgs

__all__ = ["apply_expert_parallel", "check_expert_parallel", "expert_layers"]


def check_expert_parallel(args: ModelArgs, dims: ArchonParallelDims) -> None:
    """Refuse experts that ``dims`` cannot share equally.

    Raises:
        ConfigError: names the sizes and the rule.
    """
    experts = args.moe
    if experts is None:
        if dims.ep > 1:
            raise ConfigError(f"e{dims.ep}: the model has no experts; leave e out")
        return
    if experts.num_experts % dims.ep:
        raise ConfigError(f"e{dims.ep} does not divide num_experts={experts.num_experts}; choose another e")
    shards = dims.tp if dims.ep == 1 else dims.etp
    if experts.hidden_dim % shards:
        raise ConfigError(
            f"each expert is cut into {shards} shards (t, or etp), which do not divide its width "
            f"moe_intermediate_size={experts.hidden_dim}; choose another t"
        )
    _check_cut_inside(args, experts, dims)


def _check_cut_inside(args: ModelArgs, experts: MoEArgs, dims: ArchonParallelDims) -> None:
    """Ranks that hold the same experts share them out whole, or cut each of them evenly."""
    ranks = dims.mesh_sizes.get("dp_shard_mod_ep", 1)
    if dims.ep == 1 or experts.num_experts % (dims.ep * ranks) == 0:
        return
    sizes = {"hidden_size": args.dim}
    if dims.etp == 1:
        sizes["moe_intermediate_size"] = experts.hidden_dim
    for name, size in sizes.items():
        if size % ranks:
            raise ConfigError(
                f"e{dims.ep}: {ranks} ranks hold the same experts, and neither their number (of num_experts="
                f"{experts.num_experts}) nor {name}={size} divides by {ranks}; choose another d or e"
            )


def apply_expert_parallel(model: ArchonModel, dims: ArchonParallelDims) -> None:
    """Distribute the experts and routers of every layer in place; sends nothing."""
    layout = expert_layout(dims)
    if layout.mesh is None:
        return
    mesh = dims.get_mesh(layout.mesh)
    assert mesh is not None
    for moe in expert_layers(model):
        if dims.tp_enabled:
            tp_mesh = dims.get_mesh("tp")
            assert tp_mesh is not None
            distribute_parameter(moe.router.gate, "weight", tp_mesh, Replicate())
        for name, placements in (("w1", layout.w1_w3), ("w2", layout.w2), ("w3", layout.w1_w3)):
            distribute_parameter(moe.experts, name, mesh, *placements)
        if dims.ep_enabled:
            group = dims.get_group("ep")
            assert group is not None
            moe.exchange = ExpertExchange(moe.experts, group)
        if dims.tp_enabled and layout.strategy != "expert_token_split":
            _bring_tokens_together(moe, dims.get_group("tp"))


def expert_layers(model: ArchonModel) -> list[MoE]:
    """The mixtures of experts of ``model``."""
    return [cast(MoE, layer.moe) for layer in model.layers.values() if layer.moe is not None]


def _bring_tokens_together(moe: nn.Module, group: dist.ProcessGroup | None) -> None:
    def gather(module: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
        return (gather_rows(args[0][0], group)[None],)

    def scatter(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return reduce_rows(output[0], group)[None]

    moe.register_forward_pre_hook(gather)
    moe.register_forward_hook(scatter)
