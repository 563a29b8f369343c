"""A tiny Qwen3-MoE model."""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig

from tests.fakes import VOCAB


def tiny_moe(seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Two layers of four experts, two of them per token; float32, eval mode, reproducible weights."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "bos_token_id": None,
        "initializer_range": 0.2,
    }
    config = Qwen3MoeConfig(**{**settings, **overrides})
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    torch.set_rng_state(state)
    return model.eval()


def save_tiny_moe(path: str | os.PathLike[str], seed: int = 0, **overrides: Any) -> str:
    """Save it under its checkpoint names; returns the path."""
    tiny_moe(seed, **overrides).save_pretrained(path)
    return str(path)
