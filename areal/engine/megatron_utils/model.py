"""Builds megatron's GPT model, or the stages of it that this rank holds.

In: ``ModelShape``, ``MegatronDims`` and the engine's config. Out: ``StageModel`` objects whose forward pass ends with
hidden states, on the engine's device, with undefined weights. Called by the Megatron engine, inside
``device.runs_on``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from areal.engine.core.checkpoint import rng_state, set_rng_state
from areal.engine.core.value_head import VALUE_HEAD
from areal.engine.megatron_utils.names import cut_dimension
from areal.engine.megatron_utils.quantization import fp8_settings
from areal.engine.megatron_utils.shape import ModelShape, split_layers
from areal.engine.megatron_utils.spec import choose_spec, layer_specs

if TYPE_CHECKING:
    from areal.api.cli_args import TrainEngineConfig
    from areal.engine.megatron_utils.parallel import MegatronDims

__all__ = ["StageModel", "build_stages", "transformer_config"]


class StageModel(GPTModel):
    """One stage; the last one ends with the final norm, as log-probs and values are computed outside from its head."""

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states

    @property
    def head_weight(self) -> Tensor:
        """Weight of the head: this rank's rows of the vocabulary, or the whole value head. Of the last stage only."""
        score = getattr(self, "score", None)
        weight: Tensor
        if score is not None:
            weight = score.weight
        elif self.share_embeddings_and_output_weights:
            weight = self.shared_embedding_or_output_weight()
        else:
            weight = self.output_layer.weight
        return weight


def transformer_config(
    config: TrainEngineConfig, shape: ModelShape, dims: MegatronDims, dtype: torch.dtype, device: torch.device
) -> TransformerConfig:
    """megatron's settings for a model of ``dtype``."""
    megatron, moe, on_cpu = config.megatron, shape.moe, device.type == "cpu"
    te = choose_spec(device, dtype) == "te"
    settings: dict[str, Any] = {
        "num_layers": shape.n_layers,
        "hidden_size": shape.dim,
        "num_attention_heads": shape.n_heads,
        "num_query_groups": shape.n_kv_heads,
        "kv_channels": shape.head_dim,
        "ffn_hidden_size": shape.ffn_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": shape.norm_eps,
        "activation_func": F.silu,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "add_qkv_bias": shape.qkv_bias,
        "qk_layernorm": shape.qk_norm,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "perform_initialization": False,
        "use_cpu_initialization": on_cpu,
        # Every rotated dimension of queries and keys is multiplied by the factor, which is all of them.
        "softmax_scale": shape.rope.attention_factor**2 * shape.head_dim**-0.5,
        "tensor_model_parallel_size": dims.tp,
        "sequence_parallel": dims.tp > 1,
        "context_parallel_size": dims.cp,
        "pipeline_model_parallel_size": dims.pp,
        "virtual_pipeline_model_parallel_size": dims.vpp if dims.vpp > 1 else None,
        "pipeline_dtype": dtype,
        "variable_seq_lengths": dims.pp > 1 and dims.vpp == 1,  # see ``pipeline.py``
        "expert_model_parallel_size": dims.ep,
        "expert_tensor_parallel_size": dims.etp,
        "deterministic_mode": megatron.use_deterministic_algorithms,
        # Kernels of Transformer Engine and Apex.
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": te,
        "bias_activation_fusion": te,
        "bias_dropout_fusion": te,
        "apply_rope_fusion": te,
    }
    if on_cpu:
        settings |= {"batch_p2p_comm": False, "batch_p2p_sync": False}
    if dims.pp > 1:
        settings["pipeline_model_parallel_layout"] = _layout(split_layers(shape, dims))
    if config.gradient_checkpointing and config.optimizer is not None:
        settings |= _recomputation(config)
    if moe is not None:
        settings |= {
            "num_moe_experts": moe.num_experts,
            "moe_router_topk": moe.top_k,
            "moe_ffn_hidden_size": moe.ffn_dim,
            "moe_layer_freq": [int(kind) for kind in moe.layers],
            # Softmax over the chosen experts is softmax over all of them, scaled to sum 1.
            "moe_router_pre_softmax": not moe.normalized,
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_router_dtype": megatron.moe_router_dtype,
            "moe_token_dispatcher_type": megatron.moe_token_dispatcher_type,
            "moe_grouped_gemm": te,
            "moe_permute_fusion": megatron.moe_permute_fusion,
        }
    else:
        settings["moe_token_dispatcher_type"] = "alltoall"  # the default refuses sequences of different lengths
    if megatron.fp8_config is not None:
        settings |= fp8_settings(megatron.fp8_config)
    return TransformerConfig(**settings)


def build_stages(
    transformer: TransformerConfig, shape: ModelShape, dims: MegatronDims, device: torch.device
) -> list[StageModel]:
    """The stages of this rank in the order of the pipeline; every rank must call."""
    state = rng_state()
    model_parallel_cuda_manual_seed(0, force_reset_rng=True)  # of dropout between tensor-parallel ranks; there is none
    set_rng_state(state)
    rank = parallel_state.get_pipeline_model_parallel_rank()
    counts = split_layers(shape, dims)
    stages = []
    for virtual in range(dims.vpp):
        number = virtual * dims.pp + rank
        first = sum(counts[:number])
        layers = [shape.has_experts(first + index) for index in range(counts[number])]
        is_first, is_last = number == 0, number == dims.stages - 1
        stage = StageModel(
            transformer,
            layer_specs(transformer, choose_spec(device, transformer.params_dtype), layers),
            shape.vocab_size,
            shape.max_positions,
            pre_process=is_first,
            post_process=is_last,
            share_embeddings_and_output_weights=shape.tied,
            position_embedding_type="rope",
            vp_stage=virtual if dims.vpp > 1 else None,
        )
        stage.rotary_pos_emb.inv_freq = torch.tensor(shape.rope.inv_freq, dtype=torch.float32, device=device)
        if is_last and shape.is_critic:
            del stage.output_layer
            weight = torch.empty(1, shape.dim, dtype=transformer.params_dtype, device=device)
            stage.score = nn.Module()
            stage.score.weight = nn.Parameter(weight)
            assert VALUE_HEAD == "score.weight"
        for name, parameter in stage.named_parameters():
            _mark_cut(name, parameter)
        stages.append(stage)
    return stages


def _mark_cut(name: str, parameter: nn.Parameter) -> None:
    """Say which parameters are parts, as megatron does while it initialises them: gradient norms count by it."""
    dim = cut_dimension(name)
    if dim is not None and not hasattr(parameter, "tensor_model_parallel"):
        set_tensor_model_parallel_attributes(parameter, True, dim, 1)


def _layout(counts: list[int]) -> list[list[str]]:
    """Stages in megatron's words."""
    stages = [["decoder"] * count for count in counts]
    stages[0].insert(0, "embedding")
    stages[-1].append("loss")
    return stages


def _recomputation(config: TrainEngineConfig) -> dict[str, Any]:
    megatron = config.megatron
    settings: dict[str, Any] = {"recompute_granularity": megatron.recompute_granularity}
    if megatron.recompute_granularity == "full":
        settings |= {
            "recompute_method": megatron.recompute_method,
            "recompute_num_layers": megatron.recompute_num_layers,
        }
    elif megatron.recompute_modules is not None:
        settings["recompute_modules"] = list(megatron.recompute_modules)
    return settings
