"""Context parallelism: each rank has a slice of every row's tokens, and whole rows of some heads inside attention.

In: a model. Out: the same model with attention that exchanges tokens for heads. Called by ``parallelize.py``. Source:
DeepSpeed Ulysses, arXiv 2309.14509.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor, nn

from areal.models.transformers.parallel_attention import gather_heads, scatter_heads
from areal.utils.errors import ConfigError

if TYPE_CHECKING:
    from areal.experimental.models.archon.attention import PackedAttention
    from areal.experimental.models.archon.base import ArchonModel, ModelArgs

__all__ = ["UlyssesAttention", "apply_context_parallel", "check_context_parallel"]


class UlyssesAttention(nn.Module):
    """``inner`` on whole rows of a share of the heads; keys and values are repeated where there are too few heads.

    Args:
        inner: attention of whole rows.
        group: ranks in the order of their slices; every one must call.
    """

    def __init__(self, inner: PackedAttention, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.inner, self.group = inner, group

    def forward(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        """See ``PackedAttention``; queries, keys, values and the result are slices, the bounds are of whole rows."""
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        q, k, v = (x.transpose(1, 2) for x in scatter_heads(*heads_first, self.group))
        return gather_heads(self.inner(q, k, v, cu_seqlens, max_seqlen), self.group)


def apply_context_parallel(model: ArchonModel, group: dist.ProcessGroup) -> None:
    """Wrap the attention of every layer in place."""
    for layer in model.layers.values():
        layer.attention.inner = UlyssesAttention(layer.attention.inner, group)


def check_context_parallel(args: ModelArgs, cp: int, tp: int) -> None:
    """Refuse head counts that ``cp`` ranks cannot share, after ``tp`` ranks shared them.

    Raises:
        ConfigError: names the counts and the rule.
    """
    heads, kv_heads = args.n_heads // tp, args.n_kv_heads // tp
    if heads % cp:
        raise ConfigError(
            f"c{cp} does not divide the {heads} attention heads of a rank (num_attention_heads={args.n_heads}, t{tp}); "
            "choose another c"
        )
    if kv_heads % cp and cp % kv_heads:
        raise ConfigError(
            f"c{cp} neither divides the {kv_heads} key-value heads of a rank (num_key_value_heads={args.n_kv_heads}, "
            f"t{tp}) nor is a multiple of them; choose another c"
        )
