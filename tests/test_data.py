"""Public 1.x names of the data utilities."""

from __future__ import annotations

import pytest
import torch

from areal.api.cli_args import MicroBatchSpec
from areal.utils import data as public
from areal.utils.errors import DataError


def padded(lens, **extra):
    width = max(lens)
    mask = torch.arange(width)[None] < torch.tensor(lens)[:, None]
    ids = torch.arange(1, len(lens) * width + 1).view(len(lens), width)
    return {"input_ids": ids, "attention_mask": mask, "rewards": torch.arange(float(len(lens))), **extra}


def test_concat_padded_tensors_pads_right_and_keeps_mask_zero():
    batch = public.concat_padded_tensors([padded([2], tag=["a"]), padded([3], tag=["b"])], pad_value=9)

    assert batch["input_ids"].tolist() == [[1, 2, 9], [1, 2, 3]]
    assert batch["attention_mask"].tolist() == [[True, True, False], [True, True, True]]
    assert batch["tag"] == ["a", "b"]
    assert public.concat_padded_tensors([]) == {}


def test_concat_padded_tensors_different_keys_raises():
    with pytest.raises(ValueError, match="'tag'"):
        public.concat_padded_tensors([padded([2]), padded([2], tag=["a"])])


def test_batched_call_splits_and_trims_results():
    trajectories = [padded([2, 1]), padded([4])]

    doubled = public.batched_call(lambda batch: batch["input_ids"] * 2, trajectories)

    assert [d.tolist() for d in doubled] == [(t["input_ids"] * 2).tolist() for t in trajectories]


def test_split_and_unpad_tensor_copies_what_is_not_per_row():
    batch = {**padded([2, 3]), "weights": torch.ones(5), "name": ["x"]}

    parts = public.split_and_unpad_tensor(batch, n_trajs=2)

    assert [p["input_ids"].shape for p in parts] == [(1, 2), (1, 3)]
    assert all(p["weights"].shape == (5,) and p["name"] == ["x"] for p in parts)


def test_pad_sequences_mask_comes_from_lengths_not_from_token_values():
    batch = public.pad_sequences_to_tensors(
        [{"input_ids": [7, 0, 0], "reward": 1.0}, {"input_ids": [5], "reward": 0.0}]
    )

    assert batch["attention_mask"].tolist() == [[True, True, True], [True, False, False]]
    assert batch["input_ids"].tolist() == [[7, 0, 0], [5, 0, 0]]
    assert batch["reward"].tolist() == [1.0, 0.0]


def test_collate_samples_to_list_adds_a_mask_of_ones():
    (row,) = public.collate_samples_to_list([{"input_ids": [1, 2], "loss_mask": [0, 1], "multi_modal_input": {"k": 1}}])

    assert row["input_ids"].tolist() == [[1, 2]]
    assert row["attention_mask"].tolist() == [[True, True]]
    assert row["multi_modal_input"] == [{"k": 1}]


def test_get_batch_size_reads_each_form():
    assert public.get_batch_size(padded([1, 2, 3])) == 3
    assert public.get_batch_size(public.pack_tensor_dict(padded([1, 2]))) == 2
    assert public.get_batch_size({"multi_modal_input": [{}, {}]}) == 2
    assert public.get_batch_size({"x": torch.zeros(4, 1)}) == 4
    assert public.get_batch_size({}) == 0


def test_pack_and_pad_packed_tensor_dict_add_one_fake_sequence():
    packed = public.pack_tensor_dict(public.amend_position_ids(padded([3, 2, 5])))

    result, extra, _, _ = public.pad_packed_tensor_dict(packed, 16)

    assert packed["cu_seqlens"].tolist() == [0, 3, 5, 10]
    assert "attention_mask" not in packed
    assert result["cu_seqlens"].tolist() == [0, 3, 5, 10, 16]
    assert result["max_seqlen"] == 6
    assert result["position_ids"][10:].tolist() == [0, 1, 2, 3, 4, 5]
    assert extra == 6


def test_mb_list_per_sequence_fields_go_with_their_rows():
    mbs = public.split_padded_tensor_dict_into_mb_list(padded([5, 2, 6, 3]), MicroBatchSpec(max_tokens_per_mb=8))

    assert [mb["rewards"].tolist() for mb in mbs.mbs] == [[0.0, 3.0], [1.0, 2.0]]
    with pytest.raises(DataError, match="pad_mb_list"):
        list(mbs)


def test_mb_list_pad_to_maximum_and_unsqueeze():
    mbs = public.split_padded_tensor_dict_into_mb_list(padded([5, 2]), MicroBatchSpec(n_mbs=2, max_tokens_per_mb=8))

    mbs = public.unsqueeze_mb_list(public.pad_mb_list(mbs, pad_to_maximum=True))
    items = list(mbs)

    assert [i.padding_length for i in items] == [3, 6]
    assert all(i.padded_mb["input_ids"].shape == (1, 8) for i in items)
    assert public.unpad_logits(torch.zeros(8, 2), items[0].padding_length).shape == (5, 2)
    assert [len(s) for s in public.unpack_sequence(items[0].orig_mb["input_ids"], items[0].old_cu_seqlens)] == [5]


def test_cycle_dataloader_tells_the_epoch_and_refuses_an_empty_loader():
    class Loader(list):
        class sampler:  # noqa: N801 - mimics a dataloader attribute
            epochs: list[int] = []

            @classmethod
            def set_epoch(cls, epoch):
                cls.epochs.append(epoch)

    loader = Loader([1, 2])

    assert list(public.cycle_dataloader(loader, 2)) == [1, 2, 1, 2]
    assert loader.sampler.epochs == [0, 1]
    with pytest.raises(ValueError, match="no batch"):
        next(public.cycle_dataloader([]))


def test_kl_estimator_unknown_name_raises():
    with pytest.raises(ValueError, match="k1, k2, k3"):
        public.KLEstimator("k4")


def test_tensor_container_to_converts_nested_tensors():
    moved = public.tensor_container_to({"a": [torch.ones(1), "x"], "b": (torch.ones(1),)}, torch.float64)

    assert moved["a"][0].dtype == moved["b"][0].dtype == torch.float64
    assert moved["a"][1] == "x"


def test_make_dummy_eval_item_is_one_masked_token():
    item = public.make_dummy_eval_item(padded([3]))

    assert item["input_ids"].tolist() == [[0]]
    assert item["attention_mask"].tolist() == [[False]]
