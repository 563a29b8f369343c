"""Frequencies of rotary position embeddings, read from Hugging Face configs.

In: a config. Out: ``RopeArgs``. Called by the engines whose models are no Hugging Face modules: Archon, Megatron.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from areal.utils.errors import UnsupportedFeatureError

__all__ = ["RopeArgs"]

# Frequencies that depend on the length of the batch: training and generation would not agree on them.
_LENGTH_DEPENDENT = ("dynamic", "longrope")


@dataclass(frozen=True)
class RopeArgs:
    """Rotary position embedding, after any scaling.

    Attributes:
        inv_freq: radians per position of each rotated pair; twice its length is the number of rotated dimensions.
        attention_factor: cosines and sines are multiplied by it (YaRN).
    """

    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0

    @classmethod
    def unscaled(cls, dim: int, theta: float) -> Self:
        """``theta ** (-2i / dim)`` for each pair i of ``dim`` rotated dimensions."""
        inv_freq = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim))
        return cls(tuple(inv_freq.tolist()))

    @classmethod
    def from_hf_config(cls, config: PretrainedConfig, head_dim: int) -> Self:
        """What transformers computes from ``config.rope_parameters``.

        Raises:
            UnsupportedFeatureError: the frequencies would depend on the length of the batch.
        """
        parameters = config.rope_parameters
        kind = parameters["rope_type"]
        if kind == "default":
            return cls.unscaled(head_dim, parameters["rope_theta"])
        if kind in _LENGTH_DEPENDENT or kind not in ROPE_INIT_FUNCTIONS:
            known = sorted({"default", *ROPE_INIT_FUNCTIONS} - set(_LENGTH_DEPENDENT))
            raise UnsupportedFeatureError(
                f"{config.model_type}: rope_type={kind!r} is not supported; supported: "
                f"{', '.join(known)}. Train this model with the FSDP engine"
            )
        inv_freq, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        return cls(tuple(inv_freq.tolist()), float(factor))
