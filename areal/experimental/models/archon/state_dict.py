"""Names of Archon parameters in Hugging Face checkpoints, and back.

In: a state dict, or one parameter, under Archon's names. Out: the same tensors under the names of the checkpoint, which
may alias the input. Called to load and save checkpoints and to send weights to inference servers.

Only experts change shape (``moe/state_dict.py``); every other tensor keeps it. A critic's ``score`` has no name there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

from areal.experimental.models.archon.base import ModelArgs
from areal.experimental.models.archon.moe.state_dict import is_expert_key, join_experts, split_experts
from areal.utils import logging

logger = logging.getLogger("ArchonStateDict")

EMBEDDING, HEAD = "tok_embeddings.weight", "output.weight"

# Archon's module -> the checkpoint's; parameters of modules in a layer follow its prefix.
MODEL_MODULES = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
LAYER_MODULES = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "moe.router.gate": "mlp.gate",
}
MODEL_MODULES_OF_HF = {hf: own for own, hf in MODEL_MODULES.items()}
LAYER_MODULES_OF_HF = {hf: own for own, hf in LAYER_MODULES.items()}

_OWN_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_HF_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_WRAPPERS = ("._checkpoint_wrapped_module", "._orig_mod")  # activation checkpointing, torch.compile


class StateDictAdapter:
    """Translates the state dicts of one model; ``args`` say whether it is tied or a critic."""

    def __init__(self, args: ModelArgs) -> None:
        self.args = args

    def to_hf(self, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All tensors that the checkpoint of ``state_dict`` holds, in its order."""
        return {key: x for name, tensor in state_dict.items() for key, x in self.convert_single_to_hf(name, tensor)}

    def convert_single_to_hf(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        """The checkpoint's tensors of one parameter; empty for what it does not hold.

        Args:
            name: Archon's name; parts that wrappers add to it are ignored.
            tensor: the whole parameter.
        """
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        if name == HEAD and self.args.tied:
            return []
        experts = split_experts(name, tensor)
        if experts:
            return experts
        key = _hf_name(name)
        return [] if key is None else [(key, tensor)]

    def from_hf(self, hf_state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same tensors under Archon's names.

        The head of a tied model is its embedding when the checkpoint does not hold one. Names that the model has no
        use for are left out, with a warning but for rotary frequencies and the language head of a critic.
        """
        experts = {}
        if self.args.moe is not None:
            experts = {key: tensor for key, tensor in hf_state_dict.items() if is_expert_key(key)}
        state_dict: dict[str, Tensor] = {}
        unknown = []
        for key, tensor in hf_state_dict.items():
            if key in experts:
                continue
            name = _own_name(key)
            if name is not None and not (name == HEAD and self.args.is_critic):
                state_dict[name] = tensor
            elif name is None and not key.endswith("rotary_emb.inv_freq"):
                unknown.append(key)
        if self.args.moe is not None:
            state_dict.update(join_experts(experts, self.args.moe.num_experts))
        if self.args.tied and HEAD not in state_dict and EMBEDDING in state_dict:
            state_dict[HEAD] = state_dict[EMBEDDING]
        if unknown:
            logger.warning("no place in the model for %d checkpoint tensor(s): %s", len(unknown), unknown[:5])
        return state_dict


def _hf_name(name: str) -> str | None:
    """Checkpoint name of one of our names; None if there is none."""
    in_layer = _OWN_LAYER.fullmatch(name)
    if in_layer is None:
        return _renamed(name, MODEL_MODULES)
    inner = _renamed(in_layer[2], LAYER_MODULES)
    return None if inner is None else f"model.layers.{in_layer[1]}.{inner}"


def _own_name(key: str) -> str | None:
    """Our name of a checkpoint name; None if there is none."""
    in_layer = _HF_LAYER.fullmatch(key)
    if in_layer is None:
        return _renamed(key, MODEL_MODULES_OF_HF)
    inner = _renamed(in_layer[2], LAYER_MODULES_OF_HF)
    return None if inner is None else f"layers.{in_layer[1]}.{inner}"


def _renamed(name: str, modules: Mapping[str, str]) -> str | None:
    module, _, parameter = name.rpartition(".")
    return f"{modules[module]}.{parameter}" if module in modules else None
