"""Tiny real models, tokenizers and instant samplers shared by the tests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from areal.api.io_struct import ModelRequest, ModelResponse

VOCAB = 64
_CONFIGS = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "llama": LlamaConfig}


def tiny_config(arch: str = "qwen2", **overrides: Any) -> Any:
    """Config of a two-layer model of a few thousand parameters."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "bos_token_id": None,
        "initializer_range": 0.2,
    }
    if arch == "qwen3":
        settings["head_dim"] = 8
    settings.update(overrides)
    return _CONFIGS[arch](**settings)


def tiny_model(arch: str = "qwen2", seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A float32 model in eval mode with reproducible random weights, biases included."""
    generator_state = torch.get_rng_state()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(arch, **overrides), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.2)
    torch.set_rng_state(generator_state)
    return model.eval()


def char_tokenizer() -> Any:
    """The character-level tokenizer of the quickstart."""
    from areal.dataset.char_tokenizer import build_char_tokenizer

    return build_char_tokenizer()


def save_tiny_model(path: str | os.PathLike[str], arch: str = "qwen2", seed: int = 0, **overrides: Any) -> str:
    """Save a tiny model and the character tokenizer as a Hugging Face directory; returns the path."""
    Path(path).mkdir(parents=True, exist_ok=True)
    tiny_model(arch, seed, **overrides).save_pretrained(path)
    char_tokenizer().save_pretrained(path)
    return str(path)


class InstantEngine:
    """A sampler that answers at once with fixed tokens; records what it was asked."""

    def __init__(self, reply: tuple[int, ...] = (5, 6, 1), version: int = 0) -> None:
        self.reply = reply
        self.version = version
        self.requests: list[ModelRequest] = []

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        self.requests.append(req)
        tokens = list(self.reply)
        return ModelResponse(
            input_tokens=list(req.input_ids),
            output_tokens=tokens,
            output_logprobs=[-0.5] * len(tokens),
            output_versions=[self.version] * len(tokens),
            stop_reason="stop",
            tokenizer=req.tokenizer,
        )

    def get_version(self) -> int:
        return self.version

    def set_version(self, version: int) -> None:
        self.version = version
