"""Names of Archon parameters in Hugging Face checkpoints, and back.

In: a state dict, or one parameter, under Archon's names. Out: the same tensors under the names of the checkpoint, which
may alias the input. Called to load and save checkpoints and to send weights to inference servers.

Only experts change shape (``moe/state_dict.py``); every other tensor keeps it. A critic's ``score`` has no name there.

Composite checkpoints (a language model beside a vision tower, say) have ``model.language_model.`` where others have
``model.``. Both are read; which one is written depends on the checkpoint that the model comes from.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from safetensors import SafetensorError, safe_open
from torch import Tensor

from areal.experimental.models.archon.base import ModelArgs
from areal.experimental.models.archon.moe.state_dict import is_expert_key, join_experts, split_experts
from areal.utils import logging
from areal.utils.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.checkpoint import HuggingFaceStorageReader

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

_MODEL_PREFIX, _COMPOSITE_PREFIX = "model.", "model.language_model."
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_OWN_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_HF_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_WRAPPERS = ("._checkpoint_wrapped_module", "._orig_mod")  # activation checkpointing, torch.compile


class StateDictAdapter:
    """Translates the state dicts of one model. A family with other names overrides the tables.

    Args:
        args: of the model; they say whether it is tied or a critic.
        hf_path: directory of the checkpoint that the model comes from; its names are written. None, or no directory of
            safetensors files: plain names are.
    """

    model_modules: ClassVar[Mapping[str, str]] = MODEL_MODULES
    layer_modules: ClassVar[Mapping[str, str]] = LAYER_MODULES

    def __init__(self, args: ModelArgs, hf_path: str | os.PathLike[str] | None = None) -> None:
        """Raises CheckpointError: the files at ``hf_path`` are damaged."""
        self.args = args
        self._files = _files_by_key(Path(hf_path)) if hf_path is not None else {}
        self._composite = any(key.startswith(_COMPOSITE_PREFIX) for key in self._files)
        self._model_modules_of_hf = {hf: own for own, hf in self.model_modules.items()}
        self._layer_modules_of_hf = {hf: own for own, hf in self.layer_modules.items()}

    @property
    def fqn_to_index_mapping(self) -> dict[str, int] | None:
        """Number of the file of each tensor, from 1, by checkpoint name; None for a checkpoint without index."""
        numbers = {file: number for number, file in enumerate(sorted(set(self._files.values())), start=1)}
        if not numbers.keys() - {_WEIGHTS}:
            return None
        return {key: numbers[file] for key, file in self._files.items()}

    def get_hf_storage_reader(self, path: str | os.PathLike[str]) -> HuggingFaceStorageReader:
        """Lets ``torch.distributed.checkpoint.load`` read the safetensors files of ``path``, by checkpoint name."""
        from torch.distributed.checkpoint import HuggingFaceStorageReader

        return HuggingFaceStorageReader(os.fspath(path))

    def to_hf(self, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All tensors that the checkpoint of ``state_dict`` holds, in its order."""
        return {key: x for name, tensor in state_dict.items() for key, x in self.convert_single_to_hf(name, tensor)}

    def convert_single_to_hf(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        """The checkpoint's tensors of one parameter; empty for what it does not hold.

        Args:
            name: Archon's name; parts that wrappers add to it are ignored.
            tensor: the whole parameter.
        """
        name = plain_name(name)
        if name == HEAD and self.args.tied:
            return []
        experts = split_experts(name, tensor)
        if experts:
            return [(self._maybe_composite_hf_key(key), matrix) for key, matrix in experts]
        key = self._hf_name(name)
        return [] if key is None else [(self._maybe_composite_hf_key(key), tensor)]

    def from_hf(self, hf_state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same tensors under Archon's names.

        The head of a tied model is its embedding when the checkpoint does not hold one. Names that the model has no
        use for are left out, with a warning but for rotary frequencies and the language head of a critic.
        """
        experts: dict[str, Tensor] = {}
        state_dict: dict[str, Tensor] = {}
        unknown = []
        for key, tensor in hf_state_dict.items():
            plain = _plain_hf_key(key)
            if self.args.moe is not None and is_expert_key(plain):
                experts[plain] = tensor
                continue
            name = self._own_name(plain)
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

    def _maybe_composite_hf_key(self, key: str) -> str:
        """``key``, as a composite checkpoint has it if the model comes from one."""
        if self._composite and key.startswith(_MODEL_PREFIX):
            return _COMPOSITE_PREFIX + key.removeprefix(_MODEL_PREFIX)
        return key

    def _hf_name(self, name: str) -> str | None:
        """Checkpoint name of one of our names; None if there is none."""
        in_layer = _OWN_LAYER.fullmatch(name)
        if in_layer is None:
            return _renamed(name, self.model_modules)
        inner = _renamed(in_layer[2], self.layer_modules)
        return None if inner is None else f"model.layers.{in_layer[1]}.{inner}"

    def _own_name(self, key: str) -> str | None:
        """Our name of a plain checkpoint name; None if there is none."""
        in_layer = _HF_LAYER.fullmatch(key)
        if in_layer is None:
            return _renamed(key, self._model_modules_of_hf)
        inner = _renamed(in_layer[2], self._layer_modules_of_hf)
        return None if inner is None else f"layers.{in_layer[1]}.{inner}"


def plain_name(name: str) -> str:
    """``name`` without the parts that wrappers of modules add to it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _files_by_key(path: Path) -> dict[str, str]:
    """File that holds each tensor of a checkpoint, by checkpoint name; empty where there are no safetensors files."""
    try:
        if (path / _INDEX).is_file():
            files: dict[str, str] = json.loads((path / _INDEX).read_text(encoding="utf-8"))["weight_map"]
            return files
        if (path / _WEIGHTS).is_file():
            with safe_open(path / _WEIGHTS, "pt") as file:
                return dict.fromkeys(file.keys(), _WEIGHTS)
    except (OSError, ValueError, KeyError, SafetensorError) as exc:
        raise CheckpointError(f"{path} is no complete checkpoint: its names cannot be read ({exc})") from exc
    return {}


def _plain_hf_key(key: str) -> str:
    """``key`` as a checkpoint of the language model alone has it."""
    if key.startswith(_COMPOSITE_PREFIX):
        return _MODEL_PREFIX + key.removeprefix(_COMPOSITE_PREFIX)
    return key


def _renamed(name: str, modules: Mapping[str, str]) -> str | None:
    module, _, parameter = name.rpartition(".")
    return f"{modules[module]}.{parameter}" if module in modules else None
