"""Sequence parallelism: which models and attentions can have their tokens spread over ranks, and how they are switched.

In: a Hugging Face causal LM and the sizes of the layout. Out: the same model with an attention that exchanges tokens
for heads (``areal/models/transformers/parallel_attention.py``). Called by ``fsdp_utils/parallel.py`` before sharding.
"""

from __future__ import annotations

from transformers import PreTrainedModel

from areal.models.transformers.parallel_attention import PREFIX, register_parallel_attention
from areal.utils.errors import ConfigError, UnsupportedFeatureError


def check_heads(model: PreTrainedModel, sequence_size: int, tensor_size: int) -> None:
    """Refuse head counts that the layout cannot divide.

    Raises:
        ConfigError: names the counts and sizes that would fit.
    """
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    for name, count in (("num_attention_heads", heads), ("num_key_value_heads", kv_heads)):
        if count % tensor_size:
            raise ConfigError(
                f"t{tensor_size} does not divide {name}={count} of {type(model).__name__}; "
                f"choose t from {_divisors(heads, kv_heads)}"
            )
    own, own_kv = heads // tensor_size, kv_heads // tensor_size
    if own % sequence_size:
        raise ConfigError(
            f"c{sequence_size} does not divide the {own} attention heads of a rank (num_attention_heads={heads}, "
            f"t{tensor_size}); choose c from {_divisors(own)}"
        )
    if own_kv % sequence_size and sequence_size % own_kv:
        raise ConfigError(
            f"c{sequence_size} neither divides the {own_kv} key-value heads of a rank (num_key_value_heads={kv_heads}, "
            f"t{tensor_size}) nor is a multiple of them; choose another c"
        )


def use_parallel_attention(model: PreTrainedModel) -> None:
    """Wrap the model's attention so that it works on slices of packed rows.

    Raises:
        UnsupportedFeatureError: the model does not take its attention from transformers' registry, or the attention
            needs masks that only the whole row gives.
    """
    inner = model.config._attn_implementation
    if not model._supports_attention_backend:
        raise UnsupportedFeatureError(
            f"{type(model).__name__} does not take its attention from transformers' registry, so t and c cannot be "
            "used with it; use d only"
        )
    if inner == "flex_attention" or inner.startswith("paged"):
        raise UnsupportedFeatureError(
            f"attn_impl={inner} does not work with t or c; choose flash_attention_2, sdpa or eager"
        )
    name = register_parallel_attention(inner)
    model.set_attn_implementation(name)
    assert model.config._attn_implementation.startswith(PREFIX)


def _divisors(*counts: int) -> str:
    return ", ".join(str(n) for n in range(1, min(counts) + 1) if all(count % n == 0 for count in counts))
