"""First values of a few tensors: the check of servers that keep no records but can be asked what they hold.

In: on the trainer's side the tensors that were sent, on the other one what a server answered. Out: an error that names
the parameter. Read by ``areal.engine.inference.server_weights``, compared by ``weight_transfer``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from areal.utils.errors import WeightSyncError

if TYPE_CHECKING:
    from torch import Tensor

    from areal.engine.core.weight_sync import ParamRecord

HEAD = 64
"""Values of a tensor that are compared, at most: enough that one missed update of a few bfloat16 matrices shows."""
_LARGEST = 1 << 23  # elements: servers copy a whole tensor to show some of it
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_OF_THE_MODEL = ("model.norm.weight", "model.embed_tokens.weight")
_OF_A_LAYER = ("input_layernorm.weight", "self_attn.k_proj.weight", "mlp.up_proj.weight")
_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class ServerHeads:
    """What a server holds.

    Attributes:
        dtype: of its weights; empty: it does not say.
        values: first ones of each tensor that it was asked for, as many as it gave.
    """

    dtype: str
    values: dict[str, tuple[float, ...]]


def head_names(shapes: Mapping[str, Sequence[int]]) -> list[str]:
    """Tensors to ask for: of the first layer, the last one and the model, as far as they are small.

    Args:
        shapes: of every tensor of the version, by checkpoint name.
    """
    layers = sorted({int(match[1]) for name in shapes if (match := _LAYER.match(name)) is not None})
    names = list(_OF_THE_MODEL)
    for layer in dict.fromkeys((*layers[:1], *layers[-1:])):
        names += [f"model.layers.{layer}.{part}" for part in _OF_A_LAYER]
    return [name for name in names if name in shapes and math.prod(shapes[name]) <= _LARGEST and _found(name, shapes)]


def _found(name: str, shapes: Mapping[str, Sequence[int]]) -> bool:
    """Whether a server that packs query, key and value finds the keys: it takes heads for a part of the hidden size."""
    query = shapes.get(name.replace("k_proj", "q_proj"), ()) if "k_proj" in name else ()
    return "k_proj" not in name or (len(query) == 2 and query[0] == query[1])


def head_of(tensor: Tensor) -> tuple[float, ...]:
    """Its first values."""
    return tuple(tensor.detach().reshape(-1)[:HEAD].float().tolist())


def compare_heads(sent: Sequence[ParamRecord], found: ServerHeads, version: int) -> None:
    """Check that a server holds what was sent, cast to its dtype: bit by bit, without a tolerance.

    Args:
        sent: records whose ``head`` is known where the server may have been asked.
        found: its answer; where it names no dtype, the values must fit one of the usual ones.

    Raises:
        WeightSyncError: names the first parameter that differs.
    """
    heads = {record.name: record.head for record in sent}
    wrong = min(
        (
            [name for name, values in found.values.items() if not _equal(heads.get(name, ()), values, dtype)]
            for dtype in ([found.dtype] if found.dtype in _DTYPES else _DTYPES)
        ),
        key=len,
    )
    if not wrong:
        return
    name = wrong[0]
    raise WeightSyncError(
        f"weights v{version}: {name} was sent with the first values {_brief(heads[name])}, but the server holds "
        f"{_brief(found.values[name])}"
    )


def _equal(sent: Sequence[float], found: Sequence[float], dtype: str) -> bool:
    count = min(len(sent), len(found))  # of what either side does not tell, nothing can be said
    cast = torch.tensor(sent[:count], dtype=torch.float32).to(getattr(torch, dtype)).float()
    return torch.equal(cast, torch.tensor(found[:count], dtype=torch.float32))


def _brief(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.9g}" for value in values[:4])
