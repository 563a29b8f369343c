"""Tensor parallelism of Hugging Face causal LMs as DTensors: one plan for each family that is known to fit it.

In: a model and the ``tp`` mesh. Out: the same model; projections hold a share of their columns or rows, the embedding
and the head a share of the vocabulary (a value head is whole on every rank), and between the layers (norms included)
each rank holds a share of the tokens.
Called by ``fsdp_utils/parallel.py`` before FSDP shards what is left.

A layer's input is gathered once for attention and once for the MLP, whose results are reduced and scattered again; the
gradients of norms are summed over the ranks. The head's forward is never called: log-probs are made from its weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import PreTrainedModel

from areal.engine.core.value_head import has_value_head
from areal.utils.errors import ConfigError, UnsupportedFeatureError

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class Family:
    """How a model family differs from Llama.

    Attributes:
        norms: names of the norms of a layer.
        head_norm_dim: dimension of the heads in what query and key norms see; None where there are none.
    """

    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    head_norm_dim: int | None = None


_GEMMA_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
# By ``config.model_type``. Each entry is compared with one process in tests/torchrun/test_fsdp_layouts.py.
FAMILIES = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(),
    "qwen3": Family(head_norm_dim=2),
    "gemma": Family(),
    "gemma2": Family(_GEMMA_NORMS),
    "gemma3_text": Family(_GEMMA_NORMS, head_norm_dim=1),
}


def check_tensor_parallel(config: PretrainedConfig, size: int) -> None:
    """Refuse models without a plan and sizes that do not divide; heads are checked by ``ulysses.check_heads``.

    Raises:
        UnsupportedFeatureError: the family has no plan.
        ConfigError: ``t`` does not divide the vocabulary or the MLP.
    """
    if config.model_type not in FAMILIES:
        raise UnsupportedFeatureError(
            f"tensor parallelism (t{size}) has no plan for model_type={config.model_type}; it has one for "
            f"{', '.join(FAMILIES)}. Use d and c for this model"
        )
    for name in ("vocab_size", "intermediate_size"):
        count = getattr(config, name)
        if count % size:
            raise ConfigError(f"t{size} does not divide {name}={count}; choose another t")


def apply_tensor_parallel(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Distribute ``model`` over ``mesh`` in place; works on meta tensors and sends nothing."""
    check_tensor_parallel(model.config, mesh.size())
    base, tied = model.base_model, model.config.tie_word_embeddings
    parallelize_module(base, mesh, _plan(base, FAMILIES[model.config.model_type]), src_data_rank=None)
    # FSDP hooks onto what a unit returns and wants it to be no view of another tensor.
    base.embed_tokens.register_forward_hook(lambda module, inputs, output: output.clone())
    if has_value_head(model):
        _distribute(model.score, "weight", mesh, Replicate())
    elif tied:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
    else:
        _distribute(model.get_output_embeddings(), "weight", mesh, Shard(0))
    missing = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    assert not missing, f"tensor-parallel plan of {model.config.model_type} forgets {missing[:3]}"


def _plan(base: nn.Module, family: Family) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {
        "embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(use_local_output=True),
    }
    for index in range(len(base.layers)):
        layer = f"layers.{index}"
        plan |= {f"{layer}.{name}": SequenceParallel(use_local_output=True) for name in family.norms}
        plan[f"{layer}.self_attn"] = PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
        )
        plan[f"{layer}.mlp"] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            plan[f"{layer}.{name}"] = ColwiseParallel()
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            plan[f"{layer}.{name}"] = RowwiseParallel(output_layouts=Shard(1))
        if family.head_norm_dim is not None:
            for name in ("q_norm", "k_norm"):
                plan[f"{layer}.self_attn.{name}"] = SequenceParallel(
                    sequence_dim=family.head_norm_dim, use_local_output=True
                )
    return plan


def _distribute(module: nn.Module, name: str, mesh: DeviceMesh, placement: Any) -> None:
    parameter = getattr(module, name)
    shard = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
    setattr(module, name, nn.Parameter(shard, requires_grad=parameter.requires_grad))
