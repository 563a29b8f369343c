"""Layers of megatron's GPT model: from Transformer Engine for bfloat16 on a GPU that has it, else from plain PyTorch.

In: a ``TransformerConfig``. Out: the specs of the layers of one stage. The portable layers are megatron's own parallel
linears with our norm and attention: attention over packed sequences, with context parallelism by gathering keys and
values. They run on any device. Called by ``model.py``.
"""

from __future__ import annotations

import weakref
from itertools import pairwise
from typing import Any, Literal

import megatron.core.transformer.moe.moe_utils as moe_utils
import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from areal.engine.core.distributed import current_device, gather_rows, group_rank, group_size
from areal.engine.megatron_utils.device import uses_transformer_engine
from areal.engine.megatron_utils.packed_cp import held_positions
from areal.models.transformers.varlen_attention import varlen_attention_forward

__all__ = ["PackedAttention", "RMSNorm", "choose_spec", "layer_specs"]

SpecName = Literal["te", "portable"]


def choose_spec(device: torch.device, dtype: torch.dtype) -> SpecName:
    """Transformer Engine's layers where they can run."""
    return "te" if uses_transformer_engine(device, dtype) else "portable"


def layer_specs(config: TransformerConfig, name: SpecName, experts: list[bool]) -> TransformerBlockSubmodules:
    """Specs of the layers of a stage.

    Args:
        experts: for each of its layers, whether it is a mixture of experts.
    """
    build = _te_layer if name == "te" else _portable_layer
    kinds: dict[bool, ModuleSpec] = {kind: build(config, kind) for kind in set(experts)}
    return TransformerBlockSubmodules(layer_specs=[kinds[kind] for kind in experts], layer_norm=_final_norm(name))


def _final_norm(name: SpecName) -> Any:
    if name == "portable":
        return RMSNorm
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm


def _te_layer(config: TransformerConfig, experts: bool) -> ModuleSpec:
    return get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts if experts else None,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
    )


def _portable_layer(config: TransformerConfig, experts: bool) -> ModuleSpec:
    if experts:
        # The router multiplies with Transformer Engine's product unless this is None, and has no such name at all
        # without the package. It holds for the process: the product of torch is as exact or more so.
        moe_utils.te_general_gemm = None
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if experts else None,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        normalization="RMSNorm",
    )
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    attention = layer.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return spec


class RMSNorm(nn.Module):
    """``weight * x / rms(x)``; the division is done in float32. Takes what megatron's builder passes."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        weight = torch.empty(hidden_size, dtype=config.params_dtype, device=_parameter_device(config))
        self.weight = nn.Parameter(weight)
        # Between the layers every tensor-parallel rank has a share of the tokens, hence a part of the gradient.
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """``[..., hidden_size]`` to the same shape and dtype."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


class PackedAttention(nn.Module):
    """Causal attention of packed sequences with grouped keys and values."""

    def __init__(self, config: TransformerConfig, *args: Any, pg_collection: Any = None, **kwargs: Any) -> None:
        super().__init__()
        self.scale = config.softmax_scale or config.kv_channels**-0.5
        self.group = pg_collection.cp if config.context_parallel_size > 1 else None

    def forward(  # noqa: PLR0913 - megatron's signature
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """``[L / c, heads, D]`` each to ``[L / c, H * D]``; sequences as ``packed_seq_params`` bounds them."""
        assert packed_seq_params is not None, "rows are packed"
        bounds = packed_seq_params.cu_seqlens_q
        if self.group is not None:
            out = self._with_all_keys(query, key, value, bounds)
        else:
            q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
            out, _ = varlen_attention_forward(self, q, k, v, None, scaling=self.scale, cu_seq_lens_q=bounds)
        return out.reshape(query.shape[0], -1)

    def _with_all_keys(self, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> Tensor:
        """Attention of this rank's queries to the keys and values of all ranks, sequence by sequence."""
        plan = _plan_of(bounds, group_size(self.group), group_rank(self.group))
        k, v = (gather_rows(x, self.group).index_select(0, plan.natural) for x in (k, v))
        outputs = []
        grouped = q.shape[1] != k.shape[1]
        for rows, mask, bound in zip(q.split(plan.own_lens), plan.masks, plan.bounds, strict=True):
            own, keys, values = (x.transpose(0, 1)[None] for x in (rows, k[bound], v[bound]))
            out = F.scaled_dot_product_attention(
                own, keys, values, attn_mask=mask, scale=self.scale, enable_gqa=grouped
            )
            outputs.append(out[0].transpose(0, 1))
        return torch.cat(outputs)


class _Plan:
    """How one packed row is spread over context-parallel ranks; made once per micro-batch and used by every layer.

    Attributes:
        natural: int64 ``[L]``, where each token of the row is among those that the ranks have, one after the other.
        bounds: of each sequence.
        own_lens: tokens of each sequence on this rank.
        masks: for each sequence which keys ``[n]`` each of this rank's queries ``[n / c]`` sees, bool.
    """

    def __init__(self, bounds: Tensor, cp: int, rank: int) -> None:
        device, host = bounds.device, bounds.cpu().long()
        by_rank = [held_positions(host, cp, other) for other in range(cp)]
        self.natural = torch.cat(by_rank).argsort().to(device)
        ends = host.tolist()
        self.bounds = [slice(start, end) for start, end in pairwise(ends)]
        self.own_lens = [n // cp for n in host.diff().tolist()]
        self.masks = []
        for rows, bound in zip(by_rank[rank].split(self.own_lens), self.bounds, strict=True):
            self.masks.append((rows[:, None] >= torch.arange(bound.start, bound.stop)[None, :]).to(device))


_last: tuple[weakref.ref[Tensor], int, int, _Plan] | None = None


def _plan_of(bounds: Tensor, cp: int, rank: int) -> _Plan:
    """The plan of the last bounds seen: all layers of a micro-batch share one tensor object."""
    global _last
    if _last is None or _last[0]() is not bounds or _last[1:3] != (cp, rank):
        _last = (weakref.ref(bounds), cp, rank, _Plan(bounds, cp, rank))
    return _last[3]


def _parameter_device(config: TransformerConfig) -> torch.device | None:
    return None if config.use_cpu_initialization else current_device()
