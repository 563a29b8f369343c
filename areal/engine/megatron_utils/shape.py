"""What the Megatron engine must know of a model: sizes and options from its Hugging Face config.

In: a config of type qwen2, qwen3, qwen3_moe or llama. Out: ``ModelShape``, or an error before anything is built. Called
by the Megatron engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from transformers import PretrainedConfig

from areal.models.rope import RopeArgs
from areal.utils.errors import ConfigError, UnsupportedFeatureError

if TYPE_CHECKING:
    from areal.engine.megatron_utils.parallel import MegatronDims

__all__ = ["MODEL_TYPES", "ModelShape", "MoeShape", "split_layers"]

MODEL_TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe")


@dataclass(frozen=True)
class MoeShape:
    """Mixture of experts.

    Attributes:
        num_experts: experts of a layer.
        top_k: experts that each token visits.
        ffn_dim: width of one expert.
        normalized: scores of the chosen experts are scaled to sum 1.
        layers: for each layer, whether it has experts.
    """

    num_experts: int
    top_k: int
    ffn_dim: int
    normalized: bool
    layers: tuple[bool, ...]

    @classmethod
    def from_hf_config(cls, config: PretrainedConfig) -> Self | None:
        """The experts that ``config`` describes; None for a dense model.

        Raises:
            UnsupportedFeatureError: the score of one chosen expert, scaled to sum 1, is 1 whatever the router says.
        """
        if not (getattr(config, "num_experts", None) or 0):
            return None
        step, dense = config.decoder_sparse_step, set(config.mlp_only_layers or ())
        layers = tuple(
            step > 0 and (layer + 1) % step == 0 and layer not in dense for layer in range(config.num_hidden_layers)
        )
        if not any(layers):
            return None
        if config.num_experts_per_tok == 1 and config.norm_topk_prob:
            raise UnsupportedFeatureError(
                f"backend megatron: {config.model_type} with num_experts_per_tok=1 and norm_topk_prob=true is not "
                "supported: the router would get no gradient; set norm_topk_prob=false or train it with backend fsdp"
            )
        return cls(
            num_experts=config.num_experts,
            top_k=config.num_experts_per_tok,
            ffn_dim=config.moe_intermediate_size,
            normalized=bool(config.norm_topk_prob),
            layers=layers,
        )


@dataclass(frozen=True)
class ModelShape:
    """Sizes and options of one model.

    Attributes:
        dim: width of the hidden states.
        n_layers, n_heads, n_kv_heads, head_dim: ``n_heads`` is a multiple of ``n_kv_heads``.
        ffn_dim: width of a dense feed-forward block.
        rope: of ``head_dim / 2`` rotated pairs.
        qkv_bias: query, key and value projections have a bias.
        qk_norm: queries and keys are normalised per head.
        tied: the output head is the embedding matrix; a critic has no such head.
        init_std: standard deviation of freshly made weights.
        is_critic: one value per token instead of logits.
    """

    model_type: str
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_dim: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope: RopeArgs
    qkv_bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    init_std: float = 0.02
    moe: MoeShape | None = None
    is_critic: bool = False

    @classmethod
    def from_hf_config(cls, config: PretrainedConfig, *, is_critic: bool, disable_dropout: bool) -> Self:
        """Sizes of ``config``.

        Raises:
            UnsupportedFeatureError: another model type, or something that this engine does not compute.
        """
        kind = config.model_type
        if kind not in MODEL_TYPES:
            raise UnsupportedFeatureError(
                f"backend megatron: model type {kind!r} is not supported; supported: {', '.join(MODEL_TYPES)}. Train "
                "it with backend fsdp"
            )
        _refuse(config, disable_dropout)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        rope = RopeArgs.from_hf_config(config, head_dim)
        if 2 * len(rope.inv_freq) != head_dim:
            raise UnsupportedFeatureError(
                f"backend megatron: {kind} rotates {2 * len(rope.inv_freq)} of {head_dim} dimensions of a head; all "
                "of them must be rotated. Train it with backend fsdp"
            )
        return cls(
            model_type=kind,
            dim=config.hidden_size,
            n_layers=config.num_hidden_layers,
            n_heads=config.num_attention_heads,
            n_kv_heads=config.num_key_value_heads or config.num_attention_heads,
            head_dim=head_dim,
            ffn_dim=config.intermediate_size,
            vocab_size=config.vocab_size,
            max_positions=config.max_position_embeddings,
            norm_eps=config.rms_norm_eps,
            rope=rope,
            qkv_bias=kind == "qwen2",
            qk_norm=kind in ("qwen3", "qwen3_moe"),
            tied=bool(config.tie_word_embeddings) and not is_critic,
            init_std=config.initializer_range,
            moe=MoeShape.from_hf_config(config),
            is_critic=is_critic,
        )

    def __post_init__(self) -> None:
        if self.n_heads % self.n_kv_heads:
            raise ConfigError(
                f"num_attention_heads={self.n_heads} must be a multiple of num_key_value_heads={self.n_kv_heads}"
            )

    @property
    def has_dense_layers(self) -> bool:
        """Whether some layer has no experts."""
        return self.moe is None or not all(self.moe.layers)

    def has_experts(self, layer: int) -> bool:
        """Whether layer ``layer``, counted from 0, is a mixture of experts."""
        return self.moe is not None and self.moe.layers[layer]


def split_layers(shape: ModelShape, dims: MegatronDims) -> list[int]:
    """Layers of every stage, so that the rank with most parameters has as few as possible; at least one each.

    The first stage has the embedding too, the last one the final norm and the head.
    """
    stages, layer = dims.stages, _layer_sizes(shape, dims)
    table = shape.vocab_size * shape.dim // dims.tp
    head = shape.dim if shape.is_critic else table
    n = shape.n_layers
    sums = [0]
    for size in layer:
        sums.append(sums[-1] + size)

    def cost(stage: int, first: int, last: int) -> int:
        return sums[last] - sums[first] + (table if stage == 0 else 0) + (head if stage == stages - 1 else 0)

    best: list[tuple[int, list[int]] | None] = [None] * (n + 1)
    best[0] = (0, [])
    for stage in range(stages):
        following: list[tuple[int, list[int]] | None] = [None] * (n + 1)
        for last in range(stage + 1, n - (stages - stage - 1) + 1):
            for first in range(stage, last):
                before = best[first]
                if before is None:
                    continue
                worst = max(before[0], cost(stage, first, last))
                found = following[last]
                if found is None or worst < found[0]:
                    following[last] = (worst, [*before[1], last - first])
        best = following
    chosen = best[n]
    assert chosen is not None, f"{n} layers do not fill {stages} stages"
    return chosen[1]


def _layer_sizes(shape: ModelShape, dims: MegatronDims) -> list[int]:
    """Parameters of every layer that one rank holds."""
    attention = shape.dim * shape.head_dim * 2 * (shape.n_heads + shape.n_kv_heads) // dims.tp
    sizes = []
    for index in range(shape.n_layers):
        if shape.has_experts(index):
            assert shape.moe is not None
            experts = shape.moe.num_experts * 3 * shape.dim * shape.moe.ffn_dim // (dims.ep * dims.etp)
            block = experts + shape.moe.num_experts * shape.dim  # the router is whole on every rank
        else:
            block = 3 * shape.dim * shape.ffn_dim // dims.tp
        sizes.append(attention + block + 2 * shape.dim)
    return sizes


def _refuse(config: PretrainedConfig, disable_dropout: bool) -> None:
    """What configs of these types can ask for and the engine does not compute."""
    refused = {
        "hidden_act": getattr(config, "hidden_act", "silu") not in ("silu", "swish"),
        "attention_bias": bool(getattr(config, "attention_bias", False)),
        "mlp_bias": bool(getattr(config, "mlp_bias", False)),
        "use_sliding_window": bool(getattr(config, "use_sliding_window", False)),
        "attention_dropout": bool(getattr(config, "attention_dropout", 0.0)) and not disable_dropout,
    }
    for name, asked in refused.items():
        if asked:
            hint = "set disable_dropout=true" if name == "attention_dropout" else "train it with backend fsdp"
            raise UnsupportedFeatureError(
                f"backend megatron: {config.model_type} with {name}={getattr(config, name)!r} is not supported; {hint}"
            )
