"""Tiny Hugging Face models and the same models in Archon's form."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from areal.experimental.models.archon.base import ArchonModel
from areal.experimental.models.archon.model_spec import get_model_spec
from areal.experimental.models.archon.state_dict import StateDictAdapter
from tests.fakes import VOCAB, tiny_model
from tests.moe_fakes import tiny_moe

LENGTHS = (5, 1, 17, 9)

# Every rope scaling reaches into the lengths above, so a wrong one changes the logits.
ROPE_SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "qwen2_untied": ("qwen2", {"tie_word_embeddings": False}),
    "qwen3": ("qwen3", {"tie_word_embeddings": False, "head_dim": 16}),
    "llama": ("llama", {"tie_word_embeddings": False}),
    "llama_tied_linear": ("llama", {"rope_parameters": ROPE_SCALINGS["linear"]}),
    "llama_yarn": ("llama", {"tie_word_embeddings": False, "rope_parameters": ROPE_SCALINGS["yarn"]}),
    "llama_llama3": ("llama", {"tie_word_embeddings": False, "rope_parameters": ROPE_SCALINGS["llama3"]}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe_mixed": ("qwen3_moe", {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]}),
}


def hf_model(family: str, **overrides: Any) -> PreTrainedModel:
    """A float32 model with eager attention, in eval mode; all weights are random, norms and biases included."""
    arch, settings = FAMILIES[family]
    settings = {**settings, **overrides}
    model = tiny_moe(**settings) if arch == "qwen3_moe" else tiny_model(arch, **settings)
    model.set_attn_implementation("eager")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    return model


def archon_model(hf: PreTrainedModel, **changes: Any) -> ArchonModel:
    """The same model with the same weights; ``changes`` are fields of its ``ModelArgs``."""
    spec = get_model_spec(hf.config.model_type)
    is_critic = changes.pop("is_critic", False)
    args = spec.model_args_class.from_hf_config(hf.config, is_critic=is_critic)
    model = spec.model_class(replace(args, **changes))
    model.load_state_dict(StateDictAdapter(model.args).from_hf(hf.state_dict()), strict=not model.args.is_critic)
    return model


def packed_row(lengths: tuple[int, ...] = LENGTHS) -> tuple[Tensor, Tensor, Tensor, int]:
    """Tokens ``[1, L]``, positions ``[1, L]``, cu_seqlens ``[K + 1]`` and the longest length."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(2, VOCAB, (1, sum(lengths)), generator=generator)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return tokens, positions, cu_seqlens, max(lengths)


def hf_logits(hf: PreTrainedModel, tokens: Tensor, lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    """Logits ``[1, L, V]`` of each sequence in a run of its own, one behind the other."""
    return torch.cat([hf(part).logits for part in tokens.split(list(lengths), dim=1)], dim=1)
