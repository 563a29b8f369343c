"""Preference pairs: hh-rlhf in its published layouts, plain files in three forms, and what is left out."""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from areal.dataset import get_custom_dataset
from areal.dataset.char_tokenizer import build_char_tokenizer
from areal.dataset.preference import common_prefix
from areal.utils.errors import DataError

PAIRS = [
    {"chosen": "1+1=2", "rejected": "1+1=30"},
    {"chosen": "2*3=6", "rejected": "2*3=5"},
]


@pytest.fixture
def tokenizer():
    return build_char_tokenizer()


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def load(path: Path | str, kind: str, tokenizer: Any = None, split: str = "train", **kwargs: Any) -> Any:
    return get_custom_dataset(split, path=str(path), type=kind, tokenizer=tokenizer, **kwargs)


def test_hhrlhf_rw_rows_are_both_texts_with_the_end_token(tmp_path, tokenizer):
    write(tmp_path / "hh-rlhf" / "train.jsonl", PAIRS)

    dataset = load(tmp_path / "hh-rlhf", "rw", tokenizer)

    assert dataset.column_names == ["chosen_ids", "rejected_ids"]
    for row, pair in zip(dataset, PAIRS, strict=True):
        assert row["chosen_ids"] == [*tokenizer.encode(pair["chosen"]), tokenizer.eos_token_id]
        assert row["rejected_ids"] == [*tokenizer.encode(pair["rejected"]), tokenizer.eos_token_id]


def test_hhrlhf_dpo_masks_begin_after_the_longest_common_prefix(tmp_path, tokenizer):
    write(tmp_path / "hh-rlhf" / "train.jsonl", PAIRS)

    row = load(tmp_path / "hh-rlhf", "dpo", tokenizer)[0]

    assert row["chosen_loss_mask"] == [0, 0, 0, 0, 1, 1]  # "1+1=", then "2" and the end token
    assert row["rejected_loss_mask"] == [0, 0, 0, 0, 1, 1, 1]
    assert common_prefix([1, 2, 3], [1, 2]) == 2
    assert common_prefix([1], [2]) == 0


def test_hhrlhf_published_directory_gives_every_part_or_the_chosen_one(tmp_path, tokenizer):
    root = tmp_path / "hh-rlhf"
    write(root / "harmless-base" / "train.jsonl.gz", PAIRS[:1])
    write(root / "helpful-base" / "train.jsonl.gz", PAIRS)

    assert len(load(root, "rw", tokenizer)) == 3
    assert len(load(root, "rw", tokenizer, dataset_kwargs={"subset": "harmless-base"})) == 1
    with pytest.raises(DataError, match="unknown dataset_kwargs part"):
        load(root, "rw", tokenizer, dataset_kwargs={"part": "helpful-base"})


def test_hhrlhf_other_types_and_missing_data_are_refused(tmp_path, tokenizer):
    write(tmp_path / "hh-rlhf" / "train.jsonl", PAIRS)
    with pytest.raises(DataError, match="it has rw, dpo"):
        load(tmp_path / "hh-rlhf", "sft", tokenizer)
    with pytest.raises(DataError, match="needs a tokenizer"):
        load(tmp_path / "hh-rlhf", "dpo")
    with pytest.raises(DataError, match=r"no file test\.jsonl"):
        load(tmp_path / "hh-rlhf", "dpo", tokenizer, split="test")
    with pytest.raises(DataError, match="row 0 lacks column rejected"):
        load(write(tmp_path / "hh-rlhf.jsonl", [{"chosen": "1"}]), "rw", tokenizer)


@pytest.mark.parametrize(
    "row",
    [
        {"chosen": "1+1=2", "rejected": "1+1=30"},
        {"prompt": "1+1=", "chosen": "2", "rejected": "30"},
        {
            "prompt": "1+1=",
            "chosen": [{"role": "assistant", "content": "2"}],
            "rejected": [{"role": "assistant", "content": "30"}],
        },
        {
            "chosen": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}],
            "rejected": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "30"}],
        },
        {"chosen_ids": [5, 14, 5, 18, 6, 1], "rejected_ids": [5, 14, 5, 18, 7, 4, 1]},
    ],
)
def test_pair_file_forms_give_the_same_row(tmp_path, tokenizer, row):
    (loaded,) = load(write(tmp_path / "mine.jsonl", [row]), "dpo", tokenizer)

    assert loaded == {
        "chosen_ids": [5, 14, 5, 18, 6, 1],
        "rejected_ids": [5, 14, 5, 18, 7, 4, 1],
        "chosen_loss_mask": [0, 0, 0, 0, 1, 1],
        "rejected_loss_mask": [0, 0, 0, 0, 1, 1, 1],
    }


def test_pair_file_own_masks_are_kept(tmp_path):
    row = {
        "chosen_ids": [5, 6, 7],
        "rejected_ids": [5, 8],
        "chosen_loss_mask": [0, 0, 1],
        "rejected_loss_mask": [0, 1],
    }

    assert list(load(write(tmp_path / "mine.jsonl", [row]), "dpo")) == [row]
    row["rejected_loss_mask"] = [0, 1, 1]
    with pytest.raises(DataError, match="row 0: rejected_ids and rejected_loss_mask differ in length"):
        load(write(tmp_path / "mine.jsonl", [row]), "dpo")


def test_pair_file_pairs_that_say_nothing_are_left_out_and_counted(tmp_path, tokenizer, caplog):
    rows = [
        {"chosen_ids": [5, 6], "rejected_ids": [5, 7]},
        {"chosen_ids": [5, 6], "rejected_ids": [5, 6]},  # equal
        {"chosen_ids": [5, 6], "rejected_ids": []},  # empty
        {"chosen_ids": [5, 6], "rejected_ids": [5]},  # nothing after the common prefix
    ]
    file = write(tmp_path / "mine.jsonl", rows)

    with caplog.at_level(logging.WARNING):
        dpo = load(file, "dpo", tokenizer)

    assert [row["rejected_ids"] for row in dpo] == [[5, 7]]
    assert "left out 3 of 4 pairs" in caplog.text
    assert [row["rejected_ids"] for row in load(file, "rw", tokenizer)] == [[5, 7], [5]]
    with pytest.raises(DataError, match="no pair of 1 has two sides"):
        load(write(tmp_path / "mine.jsonl", rows[1:2]), "rw")


def test_pair_file_max_length_holds_for_both_sides(tmp_path, tokenizer):
    file = write(tmp_path / "mine.jsonl", PAIRS)  # 6 and 7 tokens, 6 and 6 tokens

    assert [len(row["rejected_ids"]) for row in load(file, "rw", tokenizer, max_length=6)] == [6]
    with pytest.raises(DataError, match="all 2 rows are longer than max_length=5"):
        load(file, "dpo", tokenizer, max_length=5)


def test_pair_file_of_mixed_forms_names_the_row(tmp_path, tokenizer):
    rows = [PAIRS[0], {"chosen": ["1"], "rejected": "2"}]
    with pytest.raises(DataError, match="row 1: chosen is a list"):
        load(write(tmp_path / "mine.jsonl", rows), "rw", tokenizer)
    rows = [{"chosen": [{"role": "user"}], "rejected": []}]
    with pytest.raises(DataError, match="row 0: chosen: messages must be a list"):
        load(write(tmp_path / "mine.jsonl", rows), "rw", tokenizer)
