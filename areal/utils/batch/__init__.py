"""Pack, split, pad and restore batches of sequences; the only place that does.

A batch enters as right-padded trajectories ``[n, S]`` and lives inside as a ``PackedBatch`` (1-D tokens and
``cu_seqlens``).
Called by the train engines (micro-batches), the roles (one packed batch per step) and ``areal.utils.data`` (1.x names).
"""

from areal.utils.batch.pack import (
    PackedBatch,
    align_sequences,
    pack,
    pad_packed,
    pad_to_multiple,
    roll_packed,
    sequence_ids,
    unpack_tokens,
)
from areal.utils.batch.restore import restore_order, scatter_rows, split_like
from areal.utils.batch.split import MicroBatch, allocate_rows, split_micro_batches

__all__ = [
    "MicroBatch",
    "PackedBatch",
    "align_sequences",
    "allocate_rows",
    "pack",
    "pad_packed",
    "pad_to_multiple",
    "restore_order",
    "roll_packed",
    "scatter_rows",
    "sequence_ids",
    "split_like",
    "split_micro_batches",
    "unpack_tokens",
]
