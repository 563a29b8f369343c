"""Experts in Hugging Face checkpoints: one matrix for each expert there, one tensor for all of them here.

In: ``layers.3.moe.experts.w1`` ``[E, hidden, dim]``. Out: ``model.layers.3.mlp.experts.0.gate_proj.weight``
``[hidden, dim]`` and so on, as views; and back. Called by ``state_dict.py``.

transformers keeps experts fused in memory (``experts.gate_up_proj``, ``experts.down_proj``). Those names are read, but
never written.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

from areal.utils.errors import CheckpointError

__all__ = ["is_expert_key", "join_experts", "split_experts"]

HF_PROJECTION = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
OWN_WEIGHT = {hf: own for own, hf in HF_PROJECTION.items()}

_OWN = re.compile(r"layers\.(\d+)\.moe\.experts\.(w[123])")
_ONE_EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
_FUSED = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up_proj|down_proj)")


def split_experts(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """Checkpoint names and matrices of one of our tensors ``[E, ...]``, as views; empty if it holds no experts."""
    found = _OWN.fullmatch(name)
    if found is None:
        return []
    prefix, projection = f"model.layers.{found[1]}.mlp.experts", HF_PROJECTION[found[2]]
    return [(f"{prefix}.{expert}.{projection}.weight", matrix) for expert, matrix in enumerate(tensor)]


def is_expert_key(key: str) -> bool:
    """Whether a checkpoint name is that of one expert's matrix, or of fused experts."""
    return _ONE_EXPERT.fullmatch(key) is not None or _FUSED.fullmatch(key) is not None


def join_experts(tensors: Mapping[str, Tensor], num_experts: int | None = None) -> dict[str, Tensor]:
    """Our tensors, made from all expert tensors of a checkpoint; single matrices are copied, fused ones are views.

    Args:
        tensors: by checkpoint name; every name passes :func:`is_expert_key`.
        num_experts: experts that each layer has; None: as the highest number of any layer says.

    Raises:
        CheckpointError: an expert is missing.
    """
    joined: dict[str, Tensor] = {}
    matrices: dict[str, dict[int, Tensor]] = defaultdict(dict)
    for key, tensor in tensors.items():
        if single := _ONE_EXPERT.fullmatch(key):
            matrices[f"layers.{single[1]}.moe.experts.{OWN_WEIGHT[single[3]]}"][int(single[2])] = tensor
        elif fused := _FUSED.fullmatch(key):
            prefix = f"layers.{fused[1]}.moe.experts"
            if fused[2] == "gate_up_proj":
                joined[f"{prefix}.w1"], joined[f"{prefix}.w3"] = tensor.chunk(2, dim=1)
            else:
                joined[f"{prefix}.w2"] = tensor
    if num_experts is None:
        num_experts = 1 + max((max(experts) for experts in matrices.values()), default=-1)
    wanted = range(num_experts)
    for name, experts in matrices.items():
        missing = [expert for expert in wanted if expert not in experts]
        if missing or len(experts) > len(wanted):
            raise CheckpointError(
                f"{name}: the checkpoint has {len(experts)} experts of {len(wanted)}; missing: {missing[:5]}. Read all "
                "files of the checkpoint, or correct num_experts"
            )
        joined[name] = torch.stack([experts[expert] for expert in wanted])
    return joined
