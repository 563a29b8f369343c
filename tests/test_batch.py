"""Packing, splitting and restoring batches."""

from __future__ import annotations

import pytest
import torch

from areal.api.cli_args import MicroBatchSpec
from areal.utils.batch import (
    PackedBatch,
    allocate_rows,
    pack,
    pad_packed,
    pad_to_multiple,
    restore_order,
    roll_packed,
    scatter_rows,
    split_like,
    split_micro_batches,
    unpack_tokens,
)
from areal.utils.errors import DataError
from areal.utils.seqpack import PackingError


def trajectory(lens, *, first_token=1, **extra):
    width = max(lens)
    mask = torch.arange(width)[None] < torch.tensor(lens)[:, None]
    ids = torch.arange(len(lens) * width).view(len(lens), width) + first_token
    return {"input_ids": ids, "attention_mask": mask, "rewards": torch.arange(float(len(lens))), **extra}


def test_pack_drops_padding_and_restarts_positions():
    batch = pack([trajectory([3, 2]), trajectory([4], first_token=100)])

    assert batch.lens == [3, 2, 4]
    assert batch.cu_seqlens.tolist() == [0, 3, 5, 9]
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.tokens["input_ids"].tolist() == [1, 2, 3, 4, 5, 100, 101, 102, 103]
    assert batch.tokens["position_ids"].tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3]
    assert batch.sequences["rewards"].tolist() == [0.0, 1.0, 0.0]
    assert batch.seq_ids.tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 2]


def test_pack_sorts_fields_into_tokens_sequences_lists_and_scalars():
    images = [{"pixel_values": torch.zeros(1)}, {"pixel_values": torch.ones(1)}]
    data = trajectory([2, 1], versions=torch.tensor([[3, 4], [5, -1]]), multi_modal_input=images, weight=0.5)

    batch = pack(data)

    assert batch.tokens["versions"].tolist() == [3, 4, 5]
    assert batch.lists["multi_modal_input"] == images
    assert batch.scalars == {"weight": 0.5}


def test_pack_token_with_id_zero_inside_the_mask_is_kept():
    data = {"input_ids": torch.tensor([[0, 0, 7, 0]]), "attention_mask": torch.tensor([[1, 1, 1, 0]])}

    assert pack(data).tokens["input_ids"].tolist() == [0, 0, 7]


def test_pack_bad_input_raises_naming_the_key():
    with pytest.raises(DataError, match="empty list"):
        pack([])
    with pytest.raises(DataError, match="'attention_mask'"):
        pack({"input_ids": torch.ones(1, 1)})
    with pytest.raises(ValueError, match="'extra'"):
        pack([trajectory([2]), trajectory([2], extra=1)])


def test_split_per_sequence_fields_go_with_their_rows():
    batch = pack(trajectory([5, 2, 6, 3], note=["a", "b", "c", "d"]))

    parts = split_micro_batches(batch, MicroBatchSpec(max_tokens_per_mb=8))

    assert [p.indices for p in parts] == [[0, 3], [1, 2]]
    assert [p.batch.sequences["rewards"].tolist() for p in parts] == [[0.0, 3.0], [1.0, 2.0]]
    assert [p.batch.lists["note"] for p in parts] == [["a", "d"], ["b", "c"]]
    assert [p.batch.cu_seqlens.tolist() for p in parts] == [[0, 5, 8], [0, 2, 8]]


def test_split_then_restore_returns_the_input_order():
    batch = pack(trajectory([5, 2, 6, 3, 1, 4]))
    parts = split_micro_batches(batch, MicroBatchSpec(n_mbs=3, packing_algorithm="kk"))

    rows = restore_order([unpack_tokens(p.batch.tokens["input_ids"], p.batch.lens) for p in parts], parts)
    flat = scatter_rows([p.batch.tokens["input_ids"] for p in parts], parts)

    assert torch.equal(torch.cat(rows), batch.tokens["input_ids"])
    assert torch.equal(flat, batch.tokens["input_ids"])


def test_split_one_part_is_the_batch_itself():
    batch = pack(trajectory([5, 2]))

    (part,) = split_micro_batches(batch, MicroBatchSpec())

    assert part.batch is batch


def test_allocate_rows_granularity_keeps_neighbours_together():
    groups = allocate_rows([5, 1, 1, 1, 4, 4], MicroBatchSpec(n_mbs=2, granularity=2))

    assert all(g[i] % 2 == 0 and g[i + 1] == g[i] + 1 for g in groups for i in range(0, len(g), 2))
    with pytest.raises(PackingError, match="granularity=2"):
        allocate_rows([1, 2, 3], MicroBatchSpec(granularity=2))


def test_roll_packed_stays_inside_each_sequence():
    batch = pack(trajectory([3, 1, 2]))
    ids = torch.tensor([1, 2, 3, 4, 5, 6])

    assert roll_packed(ids, batch.cu_seqlens).tolist() == [2, 3, 0, 0, 6, 0]
    assert roll_packed(ids, batch.cu_seqlens, shift=1, fill=-1).tolist() == [-1, 1, 2, -1, -1, 5]
    assert roll_packed(ids, batch.cu_seqlens, shift=-2).tolist() == [3, 0, 0, 0, 0, 0]


def test_pad_packed_and_split_like_undo_packing():
    trajectories = [trajectory([3, 2]), trajectory([4], first_token=100)]
    batch = pack(trajectories)

    restored = split_like(batch.tokens["input_ids"], batch.lens, trajectories)
    wide = pad_packed(batch.tokens["input_ids"], batch.lens, width=5, value=-1)

    for part, source in zip(restored, trajectories, strict=True):
        assert torch.equal(part, source["input_ids"] * source["attention_mask"])
    assert wide.tolist() == [[1, 2, 3, -1, -1], [4, 5, -1, -1, -1], [100, 101, 102, 103, -1]]


def test_pad_to_multiple_of_one_adds_nothing():
    batch = pack(trajectory([3, 2]))

    assert pad_to_multiple(batch, 1) == (batch, 0)


def test_pad_to_fixed_length_shorter_than_the_batch_raises():
    with pytest.raises(DataError, match="cannot be padded to 4"):
        pad_to_multiple(pack(trajectory([3, 2])), 1, pad_to=4)


def test_select_and_slice_keep_fields_consistent():
    batch = pack(trajectory([3, 2, 4]))

    chosen, middle = batch.select([2, 0]), batch.slice(1, 3)

    assert isinstance(chosen, PackedBatch)
    assert chosen.lens == [4, 3]
    assert chosen.tokens["input_ids"].tolist() == [9, 10, 11, 12, 1, 2, 3]
    assert chosen.sequences["rewards"].tolist() == [2.0, 0.0]
    assert middle.cu_seqlens.tolist() == [0, 2, 6]
    assert middle.seq_ids.tolist() == [0, 0, 1, 1, 1, 1]


def test_as_loss_input_holds_every_field():
    batch = pack(trajectory([3, 2], weight=0.5))

    data = batch.as_loss_input()

    assert data["max_seqlen"] == 3
    assert data["weight"] == 0.5
    assert {"input_ids", "position_ids", "rewards", "cu_seqlens", "lens"} <= data.keys()
