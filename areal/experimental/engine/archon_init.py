"""Fresh weights that do not depend on how they are spread over ranks.

In: a model whose parameters have memory. Out: the same parameters, filled. Called by the Archon engine for
``init_from_scratch``.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import torch

from areal.engine.core.lora import is_adapter
from areal.engine.core.tensor_parts import local_part, own_index
from areal.utils.ranks import gather_json

if TYPE_CHECKING:
    import torch.distributed as dist

    from areal.experimental.engine.archon_checkpoint import ArchonLayout

__all__ = ["init_weights"]


@torch.no_grad()
def init_weights(layout: ArchonLayout, group: dist.ProcessGroup | None) -> None:
    """Matrices from a normal distribution, norms with 1, biases with 0; every rank must call.

    The random numbers of a parameter follow from its name and the seed of the first rank.
    """
    seed = torch.initial_seed() if group is None else gather_json(torch.initial_seed(), group)[0]
    for name, parameter in layout.named_parameters():
        if is_adapter(name):  # they have their fresh values
            continue
        own = local_part(parameter)
        if parameter.dim() == 1:
            own.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        source = layout.copies.get(name, name)
        generator = torch.Generator().manual_seed((seed + zlib.crc32(source.encode())) % 2**63)
        whole = torch.empty(parameter.shape).normal_(std=layout.args.init_std, generator=generator)
        own.copy_(whole[own_index(parameter)])
