"""Decoder-only transformer in plain PyTorch: the parts that all Archon families share.

In: token ids ``[1, L]`` of one packed row, their positions and the bounds of the sequences. Out: logits ``[1, L, V]``,
or values ``[1, L, 1]`` of a critic. Built from ``ModelArgs``; the families (``qwen2.py``, ``qwen3.py``, ``llama.py``)
only choose options. Called by the Archon engine, which shards the modules from outside.

Every submodule of the model may be None: a pipeline stage keeps a part, takes hidden states ``[1, L, dim]`` instead of
tokens when it has no embedding, and returns hidden states when it has no head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig

from areal.experimental.models.archon.attention import AttentionType, PackedAttention
from areal.models.rope import RopeArgs
from areal.utils.errors import ConfigError, UnsupportedFeatureError

if TYPE_CHECKING:
    from areal.models.tree import TreeAttention


@dataclass(frozen=True)
class MoEArgs:
    """Mixture of experts, in the terms of ``Qwen3MoeConfig``.

    Attributes:
        num_experts: experts of a layer.
        top_k: experts that each token visits.
        hidden_dim: width of one expert.
        norm_topk_prob: scores of the chosen experts are scaled to sum 1.
        decoder_sparse_step: every n-th layer has experts; 0 or less: none has.
        mlp_only_layers: layers that stay dense all the same.
        router_dtype: the router's matrix product runs in it; None: in the model's dtype.
    """

    num_experts: int
    top_k: int
    hidden_dim: int
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    router_dtype: torch.dtype | None = torch.float32

    @classmethod
    def from_hf_config(cls, config: PretrainedConfig) -> Self | None:
        """The experts that ``config`` describes; None for a dense model."""
        num_experts = getattr(config, "num_experts", None) or 0
        if num_experts < 1:
            return None
        return cls(
            num_experts=num_experts,
            top_k=config.num_experts_per_tok,
            hidden_dim=config.moe_intermediate_size,
            norm_topk_prob=config.norm_topk_prob,
            decoder_sparse_step=config.decoder_sparse_step,
            mlp_only_layers=tuple(config.mlp_only_layers or ()),
        )

    def applies_to(self, layer: int) -> bool:
        """Whether layer ``layer``, counted from 0, has experts."""
        step = self.decoder_sparse_step
        return step > 0 and (layer + 1) % step == 0 and layer not in self.mlp_only_layers


@dataclass(frozen=True)
class ModelArgs:
    """Shape and options of one model.

    Attributes:
        dim: width of the hidden states.
        n_layers, n_heads, n_kv_heads, head_dim: ``n_heads`` is a multiple of ``n_kv_heads``.
        hidden_dim: width of a dense feed-forward block.
        qkv_bias: query, key and value projections have a bias.
        qk_norm: queries and keys are normalised per head.
        tied: the output head is the embedding matrix; a critic has no such head.
        max_seq_len: rows of the first rope cache; it grows when a longer sequence comes.
        init_std: standard deviation of freshly made weights.
        is_critic: one value per token instead of logits.
        attn_type: see ``attention.PackedAttention``.
    """

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    hidden_dim: int
    rope: RopeArgs
    norm_eps: float = 1e-6
    qkv_bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    max_seq_len: int = 32768
    init_std: float = 0.02
    moe: MoEArgs | None = None
    is_critic: bool = False
    attn_type: AttentionType = "sdpa"

    def __post_init__(self) -> None:
        if self.n_heads % self.n_kv_heads:
            raise ConfigError(f"n_heads={self.n_heads} must be a multiple of n_kv_heads={self.n_kv_heads}")
        if self.tied and self.is_critic:
            raise ConfigError("tied=True needs a language head, which is_critic=True replaces; set tied=False")

    @classmethod
    def from_hf_config(
        cls, config: PretrainedConfig, *, is_critic: bool = False, attn_type: AttentionType = "sdpa"
    ) -> Self:
        """The same model in Archon's terms.

        Raises:
            UnsupportedFeatureError: the config asks for something that Archon models do not compute.
        """
        _refuse_unsupported(config)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            dim=config.hidden_size,
            n_layers=config.num_hidden_layers,
            n_heads=config.num_attention_heads,
            n_kv_heads=config.num_key_value_heads or config.num_attention_heads,
            head_dim=head_dim,
            vocab_size=config.vocab_size,
            hidden_dim=config.intermediate_size,
            rope=RopeArgs.from_hf_config(config, head_dim),
            norm_eps=config.rms_norm_eps,
            tied=bool(config.tie_word_embeddings) and not is_critic,
            max_seq_len=config.max_position_embeddings,
            init_std=config.initializer_range,
            moe=MoEArgs.from_hf_config(config),
            is_critic=is_critic,
            attn_type=attn_type,
        )

    def has_experts(self, layer: int) -> bool:
        """Whether layer ``layer``, counted from 0, is a mixture of experts."""
        return self.moe is not None and self.moe.applies_to(layer)


def rope_cache(rope: RopeArgs, length: int, device: torch.device | str | None = None) -> Tensor:
    """Cosines and sines of positions 0 to ``length - 1``.

    Returns: float32 ``[length, 2 * R]`` with R rotated dimensions: R cosines, then R sines. Both halves of the R hold
        the same angles, because dimension i is rotated together with dimension i + R / 2.
    """
    inv_freq = torch.tensor(rope.inv_freq, dtype=torch.float32, device=device)
    angles = torch.arange(length, dtype=torch.float32, device=device)[:, None] * inv_freq
    angles = torch.cat((angles, angles), dim=-1)
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * rope.attention_factor


def apply_rope(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate the leading R dimensions of each head, in the dtype of ``x``.

    Args:
        x: ``[1, L, H, D]``.
        rope: ``[1, L, 2 * R]``, rows of :func:`rope_cache` at the tokens' positions.
    """
    cos, sin = rope.to(x.dtype)[..., None, :].chunk(2, dim=-1)
    width = cos.shape[-1]
    rotated, rest = x[..., :width], x[..., width:]
    first, second = rotated.chunk(2, dim=-1)
    turned = rotated * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


class RMSNorm(nn.Module):
    """``weight * x / rms(x)``; the division is done in float32."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """``[..., dim]`` to the same shape and dtype."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


class FeedForward(nn.Module):
    """SwiGLU: ``w2(silu(w1 x) * w3 x)``."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[1, L, dim]`` to ``[1, L, dim]``."""
        return cast(Tensor, self.w2(F.silu(self.w1(x)) * self.w3(x)))


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.head_dim = args.head_dim
        self.wq = nn.Linear(args.dim, args.n_heads * args.head_dim, bias=args.qkv_bias)
        self.wk = nn.Linear(args.dim, args.n_kv_heads * args.head_dim, bias=args.qkv_bias)
        self.wv = nn.Linear(args.dim, args.n_kv_heads * args.head_dim, bias=args.qkv_bias)
        self.wo = nn.Linear(args.n_heads * args.head_dim, args.dim, bias=False)
        self.q_norm = RMSNorm(args.head_dim, args.norm_eps) if args.qk_norm else None
        self.k_norm = RMSNorm(args.head_dim, args.norm_eps) if args.qk_norm else None
        self.inner = PackedAttention(args.attn_type)

    def forward(
        self, x: Tensor, rope: Tensor, cu_seqlens: Tensor, max_seqlen: int, *, tree: TreeAttention | None = None
    ) -> Tensor:
        """``[1, L, dim]`` to ``[1, L, dim]``; see ``ArchonModel.forward`` for the rest."""
        # -1 heads: tensor parallelism leaves each rank a share of them.
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.wq, self.wk, self.wv))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rope(q, rope), apply_rope(k, rope)
        trees = {} if tree is None else {"tree_attn_meta": tree}
        out = self.inner(q, k, v, cu_seqlens, max_seqlen, **trees)
        return cast(Tensor, self.wo(out.flatten(-2)))


class Block(nn.Module):
    """One layer: attention, then a feed-forward block or a mixture of experts, each on normalised input.

    Args:
        args: of the model.
        moe: the layer's experts; None: a dense ``feed_forward``.
    """

    def __init__(self, args: ModelArgs, moe: nn.Module | None) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(args.dim, args.norm_eps)
        self.attention = Attention(args)
        self.ffn_norm = RMSNorm(args.dim, args.norm_eps)
        self.feed_forward = FeedForward(args.dim, args.hidden_dim) if moe is None else None
        self.moe = moe

    def forward(
        self, x: Tensor, rope: Tensor, cu_seqlens: Tensor, max_seqlen: int, tree: TreeAttention | None = None
    ) -> Tensor:
        """``[1, L, dim]`` to ``[1, L, dim]``; see ``ArchonModel.forward`` for the rest."""
        x = x + self.attention(self.attention_norm(x), rope, cu_seqlens, max_seqlen, tree=tree)
        feed_forward = self.moe if self.feed_forward is None else self.feed_forward
        assert feed_forward is not None
        return x + cast(Tensor, feed_forward(self.ffn_norm(x)))


class ArchonModel(nn.Module):
    """A whole model, or the part of it that a pipeline stage keeps.

    Attributes:
        moe_class: set by families with experts; it is built from the ``ModelArgs``.
        head_outside: set by an engine that computes log-probs or values from hidden states and ``head_weight``:
            :meth:`forward` then ends with the final norm.
    """

    moe_class: ClassVar[type[nn.Module] | None] = None
    head_outside = False

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.args = args
        self.tok_embeddings: nn.Embedding | None = nn.Embedding(args.vocab_size, args.dim)
        self.layers = nn.ModuleDict({str(i): Block(args, self._experts_of(i)) for i in range(args.n_layers)})
        self.norm: RMSNorm | None = RMSNorm(args.dim, args.norm_eps)
        self.output = None if args.is_critic else nn.Linear(args.dim, args.vocab_size, bias=False)
        self.score = nn.Linear(args.dim, 1, bias=False) if args.is_critic else None
        self.rope_cache: Tensor
        self.register_buffer("rope_cache", rope_cache(args.rope, args.max_seq_len), persistent=False)
        self.tie_weights()

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int | Tensor,
        tree_attn_meta: TreeAttention | None = None,
    ) -> Tensor:
        """Logits, values or, without a head, hidden states of one packed row.

        Args:
            tokens: int64 ``[1, L]``; hidden states ``[1, L, dim]`` when the model has no ``tok_embeddings``.
            positions: int64 ``[1, L]``, counted from 0 in each sequence.
            cu_seqlens: int32 ``[K + 1]`` or ``[1, K + 1]``, from 0 to L; a repeated value is an empty sequence.
            max_seqlen: tokens of the longest sequence; a tensor ``[1]`` on a GPU costs a host sync.
            tree_attn_meta: the row is this tree of sequences; its bounds say nothing.

        Returns: ``[1, L, vocab_size]``, ``[1, L, 1]`` of a critic or ``[1, L, dim]``, in the model's dtype.
        """
        x = tokens if self.tok_embeddings is None else self.tok_embeddings(tokens)
        bounds, longest = cu_seqlens.flatten(), int(max_seqlen)
        rope = self._rope_rows(positions, longest).to(x.dtype)
        trees = () if tree_attn_meta is None else (tree_attn_meta,)
        for layer in self.layers.values():
            x = layer(x, rope, bounds, longest, *trees)
        for head in (self.norm,) if self.head_outside else (self.norm, self.output, self.score):
            if head is not None:
                x = head(x)
        return x

    @property
    def head_weight(self) -> Tensor:
        """Weight of the language head, ``[V, dim]`` or this rank's rows, or of the value head, ``[1, dim]``; under FSDP
        valid from forward to backward.
        """
        head = self.score if self.output is None else self.output
        assert head is not None
        weight = head.weight
        return weight.to_local() if isinstance(weight, DTensor) else weight

    @torch.no_grad()
    def init_weights(self) -> None:
        """Fill every parameter: matrices from a normal distribution, norms with 1, biases with 0."""
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(mean=0.0, std=self.args.init_std)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)

    def init_buffers(self, device: torch.device | str) -> None:
        """Compute the buffers on ``device``: after the model left the meta device, or got another dtype."""
        self.rope_cache = rope_cache(self.args.rope, self.args.max_seq_len, device)
        for layer in self.layers.values():
            moe: Any = layer.moe
            if moe is not None:
                moe.init_buffers(device)

    def tie_weights(self) -> None:
        """Make the head the embedding matrix where the model says so; again after parameters were replaced."""
        if self.args.tied and self.output is not None and self.tok_embeddings is not None:
            self.output.weight = self.tok_embeddings.weight

    def _experts_of(self, layer: int) -> nn.Module | None:
        if not self.args.has_experts(layer):
            return None
        if self.moe_class is None:
            raise UnsupportedFeatureError(f"{type(self).__name__} has no experts, but its ModelArgs.moe asks for them")
        return self.moe_class(self.args)

    def _rope_rows(self, positions: Tensor, longest: int) -> Tensor:
        """Rows ``[1, L, 2 * R]`` of the cache, which grows when a sequence is longer than it."""
        if longest > self.rope_cache.shape[0]:
            self.rope_cache = rope_cache(self.args.rope, longest, self.rope_cache.device)
        return self.rope_cache[positions]


def _refuse_unsupported(config: PretrainedConfig) -> None:
    """Options of a config that would be silently wrong if they were ignored."""
    layer_types = getattr(config, "layer_types", None)
    windows = layer_types is None or "sliding_attention" in layer_types
    found = {
        "hidden_act": config.hidden_act != "silu" and config.hidden_act,
        "attention_bias": getattr(config, "attention_bias", None),
        "mlp_bias": getattr(config, "mlp_bias", None),
        "attention_dropout": getattr(config, "attention_dropout", None),
        "sliding_window": windows and getattr(config, "sliding_window", None),
    }
    for key, value in found.items():
        if value:
            raise UnsupportedFeatureError(
                f"{config.model_type}: {key}={value!r} is not supported by Archon models. Train this model with the "
                "FSDP engine"
            )
