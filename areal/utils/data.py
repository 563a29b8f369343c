"""Public 1.x names of the data utilities: thin adapters over ``areal.utils.batch`` and ``areal.utils.functional``.

For user scripts and workflows written for 1.x; code of this package imports the modules below instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from areal.utils.batch.mb_list import (
    MicroBatchItem,
    MicroBatchList,
    amend_position_ids,
    pack_tensor_dict,
    pad_mb_list,
    pad_packed_tensor_dict,
    split_padded_tensor_dict_into_mb_list,
    unpack_sequence,
    unpad_logits,
    unsqueeze_mb_list,
)
from areal.utils.batch.padded import (
    TrajBatchMeta,
    batched_call,
    collate_samples_to_list,
    concat_batch,
    concat_padded_tensors,
    get_batch_size,
    make_dummy_eval_item,
    pad_sequences_to_tensors,
    split_and_unpad_tensor,
    split_batch,
)
from areal.utils.functional.kl import KL_ESTIMATORS, kl_estimate
from areal.utils.functional.normalization import normalize

if TYPE_CHECKING:
    import torch.distributed as dist

    from areal.api.config.ppo import NormConfig

__all__ = [
    "KLEstimator",
    "MicroBatchItem",
    "MicroBatchList",
    "Normalization",
    "TrajBatchMeta",
    "amend_position_ids",
    "batched_call",
    "collate_samples_to_list",
    "concat_batch",
    "concat_padded_tensors",
    "cycle_dataloader",
    "get_batch_size",
    "make_dummy_eval_item",
    "pack_tensor_dict",
    "pad_mb_list",
    "pad_packed_tensor_dict",
    "pad_sequences_to_tensors",
    "split_and_unpad_tensor",
    "split_batch",
    "split_padded_tensor_dict_into_mb_list",
    "tensor_container_to",
    "unpack_sequence",
    "unpad_logits",
    "unsqueeze_mb_list",
]


class Normalization:
    """``normalize`` for padded input, where a group is ``group_size`` consecutive rows unless ``group_id`` is given."""

    def __init__(self, config: NormConfig) -> None:
        self.config = config

    def __call__(
        self,
        x: Tensor,
        loss_mask: Tensor | None = None,
        high_precision: bool = True,
        reduce_group: dist.ProcessGroup | None = None,
        group_id: Tensor | None = None,
    ) -> Tensor:
        """Normalise ``[n]`` or ``[n, S]``; returns float32, and ``x`` unchanged where the mask is all zero.

        Args:
            x: rewards or token values.
            loss_mask: same shape, 1 on elements that count.
            high_precision: accepted for 1.x; sums are always float64.
            reduce_group: ranks that batch statistics are summed over.
            group_id: ``[n]`` int64, instead of consecutive rows.
        """
        del high_precision
        if group_id is None:
            group_id = torch.arange(x.shape[0], device=x.device) // self.config.group_size
        ids = group_id.view(-1, *[1] * (x.dim() - 1)).expand_as(x)
        result = normalize(x, loss_mask, ids, self.config, reduce_group)
        return result if loss_mask is None else torch.where((loss_mask != 0).any(), result, x.float())


class KLEstimator:
    """``kl_estimate`` with its kind and clamp fixed; ``ValueError`` for an unknown kind."""

    def __init__(self, kl_estimator: str = "k1", apply_clamp: bool = True) -> None:
        if kl_estimator not in KL_ESTIMATORS:
            raise ValueError(f"kl_estimator={kl_estimator!r} is unknown; allowed: {', '.join(KL_ESTIMATORS)}")
        self.kind, self.apply_clamp = kl_estimator, apply_clamp

    def __call__(self, log_probs: Tensor, log_probs_base: Tensor) -> Tensor:
        return kl_estimate(log_probs, log_probs_base, self.kind, self.apply_clamp)


def cycle_dataloader(dataloader: Iterable[Any], num_cycles: int = -1) -> Iterator[Any]:
    """Yield batches of ``num_cycles`` epochs (-1: for ever), telling the sampler each epoch's number.

    Raises:
        ValueError: an epoch yields no batch, which would spin for ever.
    """
    epoch = 0
    while epoch != num_cycles:
        set_epoch = getattr(getattr(dataloader, "sampler", None), "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        empty = True
        for batch in dataloader:
            empty = False
            yield batch
        if empty:
            raise ValueError("the dataloader yields no batch: the dataset is smaller than a batch and drop_last is on")
        epoch += 1


def tensor_container_to(data: Any, *args: Any, **kwargs: Any) -> Any:
    """``Tensor.to`` on every tensor of nested dicts, lists and tuples."""
    if isinstance(data, Tensor):
        return data.to(*args, **kwargs)
    if isinstance(data, dict):
        return {key: tensor_container_to(value, *args, **kwargs) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return type(data)(tensor_container_to(value, *args, **kwargs) for value in data)
    return data
