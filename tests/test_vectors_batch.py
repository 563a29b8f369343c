"""Vectors of packing: allocation, split, pack, pad."""

from __future__ import annotations

import pytest
import torch

from areal.api.cli_args import MicroBatchSpec
from areal.utils.batch import align_sequences, pack, pad_to_multiple, split_micro_batches
from areal.utils.data import pad_mb_list, split_padded_tensor_dict_into_mb_list
from areal.utils.seqpack import UNLIMITED_TOKENS, get_allocate_fn
from tests.vector_files import load_vector

REFERENCE_QUANTUM = 256  # the padding quantum that the vectors were made with; ours is the device's (1 on a CPU)

ALLOCATION = load_vector("microbatch_allocation")


@pytest.mark.parametrize("case", ALLOCATION["outputs"])
def test_microbatch_allocation_matches_vector(case):
    algorithm, capacity, minimum, divisor = case.split("_")
    capacity = UNLIMITED_TOKENS if capacity == "capnone" else int(capacity[3:])

    groups = get_allocate_fn(algorithm)(ALLOCATION["inputs"]["lens"], capacity, int(minimum[3:]), int(divisor[3:]))

    assert sorted(sorted(g) for g in groups) == ALLOCATION["outputs"][case]


def _padded(ids, lens):
    mask = torch.arange(ids.shape[1])[None] < torch.tensor(lens)[:, None]
    return {"input_ids": ids, "attention_mask": mask}


def test_split_pack_pad_matches_vector():
    vector = load_vector("split_pack_pad")
    expected = vector["outputs"]
    data = _padded(torch.tensor(vector["inputs"]["input_ids"]), vector["inputs"]["lens"])
    spec = MicroBatchSpec(max_tokens_per_mb=vector["config"]["max_tokens_per_mb"])

    parts = split_micro_batches(pack(data), spec)
    padded = [pad_to_multiple(p.batch, REFERENCE_QUANTUM) for p in parts]

    assert [r for p in parts for r in p.indices] == expected["forward_indices"]
    assert [p.batch.n_tokens for p in parts] == expected["group_lens"]
    assert [p.batch.tokens["input_ids"].tolist() for p in parts] == expected["packed_input_ids"]
    assert [p.batch.tokens["position_ids"].tolist() for p in parts] == expected["packed_position_ids"]
    assert [p.batch.cu_seqlens.tolist() for p in parts] == expected["cu_seqlens"]
    assert [b.cu_seqlens.tolist() for b, _ in padded] == expected["padded_cu_seqlens"]
    assert [extra for _, extra in padded] == expected["padding_lengths"]
    assert [b.n_tokens for b, _ in padded] == expected["padded_to_lengths"]


def test_split_pack_pad_by_1x_names_matches_vector():
    vector = load_vector("split_pack_pad")
    expected = vector["outputs"]
    data = _padded(torch.tensor(vector["inputs"]["input_ids"]), vector["inputs"]["lens"])

    mbs = split_padded_tensor_dict_into_mb_list(data, MicroBatchSpec(max_tokens_per_mb=8))
    mbs = pad_mb_list(mbs, batch_align_to=REFERENCE_QUANTUM)

    assert mbs.forward_indices == expected["forward_indices"]
    assert mbs.backward_indices == expected["backward_indices"]
    assert mbs.group_lens == expected["group_lens"]
    assert mbs.padding_lengths == expected["padding_lengths"]
    assert mbs.padded_to_lengths == expected["padded_to_lengths"]
    assert [item.padded_mb["cu_seqlens"].tolist() for item in mbs] == expected["padded_cu_seqlens"]
    assert [item.orig_mb["input_ids"].tolist() for item in mbs] == expected["packed_input_ids"]


def test_pad_with_seq_align_matches_vector():
    vector = load_vector("pad_with_seq_align")
    expected = vector["outputs"]
    data = _padded(torch.tensor([[1, 2, 3, 4, 5], [6, 7, 0, 0, 0]]), vector["inputs"]["lens"])

    aligned = align_sequences(pack(data), vector["config"]["seq_align_to"])
    padded, extra = pad_to_multiple(aligned, REFERENCE_QUANTUM)

    assert padded.cu_seqlens.tolist() == expected["cu_seqlens"]
    assert padded.tokens["input_ids"][:13].tolist() == expected["first_13_ids"]
    assert padded.tokens["position_ids"][:13].tolist() == expected["first_13_pos"]
    assert (extra, aligned.n_tokens, padded.max_seqlen) == (
        expected["pad_length"],
        expected["aligned_total"],
        expected["max_seqlen"],
    )
