"""Tensor parallelism: projections hold a share of their columns or rows, the vocabulary is shared out too; a value head
is whole on every rank.

In: a model, or the part of a pipeline stage, on the meta device. Out: the same modules with DTensor parameters. Called
by ``parallelize.py`` before expert parallelism and FSDP, which take what is left.

Between the layers, norms included, each rank has a share of the tokens. A layer's input is gathered once for attention
and once for the feed-forward block, whose results are reduced and scattered again; the gradients of norms are summed
over the ranks. The head's forward is never called: log-probs are made from its weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from areal.utils.errors import ConfigError

if TYPE_CHECKING:
    from areal.experimental.models.archon.base import ArchonModel, ModelArgs

__all__ = ["apply_tensor_parallel", "check_tensor_parallel", "distribute_parameter"]


def check_tensor_parallel(args: ModelArgs, tp: int) -> None:
    """Refuse sizes that ``tp`` ranks cannot share equally.

    Raises:
        ConfigError: names the size and the rule.
    """
    sizes = {
        "num_attention_heads": args.n_heads,
        "num_key_value_heads": args.n_kv_heads,
        "vocab_size": args.vocab_size,
    }
    if not all(args.has_experts(layer) for layer in range(args.n_layers)):
        sizes["intermediate_size"] = args.hidden_dim
    for name, size in sizes.items():
        if size % tp:
            raise ConfigError(f"t{tp} does not divide {name}={size} of the model; choose another t")


def apply_tensor_parallel(model: ArchonModel, mesh: DeviceMesh) -> None:
    """Distribute all but the experts' layers over ``mesh`` in place; sends nothing."""
    parallelize_module(model, mesh, _plan(model), src_data_rank=None)
    for unit_end in (model.tok_embeddings, model.norm):
        if unit_end is not None:
            # FSDP hooks onto what a unit returns and wants it to be no view of another tensor.
            unit_end.register_forward_hook(lambda module, inputs, output: output.clone())
    if model.output is not None:
        distribute_parameter(model.output, "weight", mesh, Shard(0))
    if model.score is not None:
        distribute_parameter(model.score, "weight", mesh, Replicate())
    model.tie_weights()


def distribute_parameter(module: nn.Module, name: str, mesh: DeviceMesh, *placements: Placement) -> None:
    """Make one parameter a DTensor; each rank keeps its own part of what it has."""
    parameter = getattr(module, name)
    part = distribute_tensor(parameter.detach(), mesh, placements, src_data_rank=None)
    setattr(module, name, nn.Parameter(part, requires_grad=parameter.requires_grad))


def _plan(model: ArchonModel) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {}
    if model.tok_embeddings is not None:
        plan["tok_embeddings"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    if model.norm is not None:
        plan["norm"] = SequenceParallel(use_local_output=True)
    for key, layer in model.layers.items():
        prefix = f"layers.{key}"
        columns = ["attention.wq", "attention.wk", "attention.wv"]
        rows = ["attention.wo"]
        for norm in ("attention_norm", "ffn_norm"):
            plan[f"{prefix}.{norm}"] = SequenceParallel(use_local_output=True)
        plan[f"{prefix}.attention"] = PrepareModuleInput(
            input_layouts=(Shard(1), None, None, None), desired_input_layouts=(Replicate(), None, None, None)
        )
        for norm in ("q_norm", "k_norm"):
            if getattr(layer.attention, norm) is not None:
                plan[f"{prefix}.attention.{norm}"] = SequenceParallel(sequence_dim=2, use_local_output=True)
        if layer.feed_forward is not None:
            plan[f"{prefix}.feed_forward"] = PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            )
            columns += ["feed_forward.w1", "feed_forward.w3"]
            rows += ["feed_forward.w2"]
        plan |= {f"{prefix}.{name}": ColwiseParallel() for name in columns}
        plan |= {f"{prefix}.{name}": RowwiseParallel(output_layouts=Shard(1)) for name in rows}
    return plan
