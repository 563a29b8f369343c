"""``get_custom_dataset``: which path finds which builder, and what the rows look like."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace

import pytest

from areal.dataset import DATASETS, RowDataset, get_custom_dataset
from areal.dataset.arithmetic import ArithmeticSpace, permute
from areal.dataset.char_tokenizer import build_char_tokenizer
from areal.reward.arithmetic import arithmetic_reward_fn
from areal.utils.errors import ConfigError, DataError, UnsupportedFeatureError

QA = [{"question": "1+1=?", "answer": "1+1=<<1+1=2>>2\n#### 2"}, {"question": "What is 20+22?", "answer": "#### 42"}]


@pytest.fixture
def tokenizer():
    return build_char_tokenizer()


@pytest.fixture
def gsm8k_dir(tmp_path):
    folder = tmp_path / "gsm8k"
    folder.mkdir()
    for split, rows in (("train", QA), ("test", QA[:1])):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return folder


def load(path, split="train", **kwargs):
    return get_custom_dataset(split, path=str(path), **kwargs)


# --- gsm8k ---


def test_gsm8k_rl_rows_hold_one_user_message_and_the_answer(gsm8k_dir):
    dataset = load(gsm8k_dir, type="rl")
    assert len(dataset) == 2
    assert dataset.column_names == ["messages", "answer"]
    (message,) = dataset[0]["messages"]
    assert message["role"] == "user"
    assert message["content"].startswith("1+1=?\n")
    assert "\\boxed{}" in message["content"]
    assert dataset[0]["answer"] == QA[0]["answer"]
    assert len(load(gsm8k_dir, "test", type="rl")) == 1


def test_gsm8k_sft_rows_mask_the_question(gsm8k_dir, tokenizer):
    row = load(gsm8k_dir, type="sft", tokenizer=tokenizer)[1]
    n = len(tokenizer.encode(QA[1]["question"]))
    assert row["input_ids"] == tokenizer.encode(QA[1]["question"] + QA[1]["answer"]) + [tokenizer.eos_token_id]
    assert row["loss_mask"] == [0] * n + [1] * (len(row["input_ids"]) - n)


def test_gsm8k_single_jsonl_and_parquet_files_load_alike(gsm8k_dir, tmp_path):
    import pyarrow
    import pyarrow.parquet

    parquet = tmp_path / "gsm8k.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(QA), parquet)
    from_jsonl, from_parquet = load(gsm8k_dir / "train.jsonl"), load(parquet)
    assert list(from_jsonl) == list(from_parquet)
    assert from_jsonl.fingerprint == from_parquet.fingerprint


def test_gsm8k_hub_layout_with_parquet_shards_loads(tmp_path):
    import pyarrow
    import pyarrow.parquet

    main = tmp_path / "openai__gsm8k" / "main"
    main.mkdir(parents=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(QA), main / "train-00000-of-00001.parquet")
    assert len(load(tmp_path / "openai__gsm8k")) == 2


def test_gsm8k_max_length_drops_longer_rows(gsm8k_dir, tokenizer, caplog):
    n = len(tokenizer.encode(QA[0]["question"] + QA[0]["answer"])) + 1
    with caplog.at_level(logging.INFO):
        dataset = load(gsm8k_dir, type="sft", tokenizer=tokenizer, max_length=n - 1)
    assert len(dataset) == 1
    assert "dropped 1 of 2 rows" in caplog.text
    with pytest.raises(DataError, match="all 2 rows are longer than max_length=3"):
        load(gsm8k_dir, type="rl", tokenizer=tokenizer, max_length=3)
    with pytest.raises(DataError, match="max_length needs a tokenizer"):
        load(gsm8k_dir, type="rl", max_length=3)


def test_gsm8k_missing_split_and_columns_name_what_is_missing(gsm8k_dir, tmp_path):
    with pytest.raises(DataError, match=r"no file validation\.jsonl"):
        load(gsm8k_dir, "validation")
    (tmp_path / "gsm8k.jsonl").write_text('{"question": "1"}\n')
    with pytest.raises(DataError, match="row 0 lacks column answer"):
        load(tmp_path / "gsm8k.jsonl")


def test_gsm8k_unreachable_hub_says_so():
    with pytest.raises(DataError, match="is no local path, and the hub gave"):
        load("openai/gsm8k-not-there")


def test_gsm8k_published_rows_load(test_data, tokenizer):
    rl = load(test_data / "gsm8k", "test", type="rl")
    assert len(rl) == 1319
    assert rl[0]["answer"].endswith("#### 18")
    assert len(load(test_data / "gsm8k", "test", type="sft", tokenizer=tokenizer)) == 1319


# --- arithmetic ---


def test_arithmetic_stretches_of_one_seed_are_disjoint():
    def problems(split="train", **options):
        return {row["messages"][0]["content"] for row in load("arithmetic", split, type="rl", **options)}

    sft, rl = problems(size=3000), problems(start=3000, size=4000)
    evaluation = problems("test", size=512)
    assert (len(sft), len(rl), len(evaluation)) == (3000, 4000, 512)
    assert not sft & rl
    assert not (sft | rl) & evaluation
    assert len(problems()) == 90 * 90
    assert problems(size=100) != problems(size=100, seed=2)


def test_arithmetic_answers_are_right_for_every_operator():
    dataset = load("arithmetic", type="rl", ops="+-*", digits=3, size=300)
    for row in dataset:
        text = row["messages"][0]["content"]
        assert eval(text.rstrip("=")) == int(row["answer"])  # noqa: S307 - our own digits and operators
        assert arithmetic_reward_fn(text, row["answer"] + "<eos>", [], [], **row) == 1.0
    assert {c for row in dataset for c in row["messages"][0]["content"] if not c.isdigit()} == {"+", "-", "*", "="}


def test_arithmetic_sft_prompt_tokens_are_those_of_the_rl_prompt(tokenizer):
    sft = load("arithmetic", type="sft", tokenizer=tokenizer, size=5)
    rl = load("arithmetic", type="rl", size=5)
    for supervised, row in zip(sft, rl, strict=True):
        prompt = tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, return_dict=False)
        assert supervised["input_ids"] == prompt + tokenizer.encode(row["answer"]) + [tokenizer.eos_token_id]
        assert supervised["loss_mask"] == [0] * len(prompt) + [1] * (len(row["answer"]) + 1)


def test_arithmetic_operands_have_the_asked_digits():
    space = ArithmeticSpace("+", digits=2, low=10, seed=1)
    operands = {x for i in range(len(space)) for x in space.problem(i)[::2]}
    assert operands == set(range(10, 100))


@pytest.mark.parametrize("size", [1, 2, 3, 100, 1000])
def test_permute_is_a_bijection(size):
    assert sorted(permute(i, size, seed=9) for i in range(size)) == list(range(size))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ops": "/"}, "ops='/'"),
        ({"digits": 0}, "digits=0"),
        ({"size": 0}, "size=0"),
        ({"size": 9000}, "lie outside its 8100 problems"),
        ({"start": 8000, "size": 200}, "lie outside"),
        ({"sizes": 3}, "unknown dataset_kwargs sizes"),
        ({"type": "rw"}, "type='rw' is not offered"),
        ({"split": "test"}, "needs dataset_kwargs.size"),
    ],
)
def test_arithmetic_bad_settings_are_named(options, message):
    split = options.pop("split", "train")
    with pytest.raises(DataError, match=message):
        load("arithmetic", split, **options)


# --- plain files, saved datasets ---


def test_jsonl_rl_rows_pass_other_columns_on(tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt": "hi", "target": 3}\n\n{"messages": [{"role": "user", "content": "yo"}], "target": 4}\n')
    dataset = load(file, type="rl")
    assert dataset[0] == {"target": 3, "messages": [{"role": "user", "content": "hi"}]}
    assert dataset[1]["target"] == 4


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{nonsense", ":1: not valid JSON"),
        ("[1]", "expected a JSON object"),
        ('{"target": 1}', "needs a column messages"),
        ('{"messages": "hi"}', "messages must be a list"),
        ('{"messages": [], "completions": 1}', "column 'completions' cannot be a keyword argument"),
        ('{"messages": [], "my col": 1}', "column 'my col'"),
    ],
)
def test_jsonl_bad_rl_rows_are_named(tmp_path, line, message):
    file = tmp_path / "mine.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(DataError, match=message):
        load(file, type="rl")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "1+1=", "completion": "2"},
        {"messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]},
        {"input_ids": [5, 14, 5, 18, 6, 1], "loss_mask": [0, 0, 0, 0, 1, 1]},
    ],
)
def test_jsonl_sft_forms_give_the_same_row(tmp_path, tokenizer, row):
    file = tmp_path / "mine.jsonl"
    file.write_text(json.dumps(row) + "\n")
    (loaded,) = load(file, type="sft", tokenizer=tokenizer)
    assert loaded == {"input_ids": [5, 14, 5, 18, 6, 1], "loss_mask": [0, 0, 0, 0, 1, 1]}


def test_jsonl_path_that_merely_contains_a_known_name_loads_plainly(tmp_path):
    folder = tmp_path / "gsm8k-arithmetic-runs"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}], "x": 1}\n')
    assert load(folder)[0]["x"] == 1
    (tmp_path / "arithmetic.jsonl").write_text('{"prompt": "hi"}\n')
    assert load(tmp_path / "arithmetic.jsonl")[0]["messages"][0]["content"] == "hi"


def test_saved_dataset_returns_as_is_and_lists_its_splits(tmp_path):
    import datasets

    one = datasets.Dataset.from_list([{"input_ids": [1, 2], "loss_mask": [0, 1]}, {"input_ids": [1], "loss_mask": [1]}])
    one.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": one}).save_to_disk(tmp_path / "split")
    assert load(tmp_path / "one", type="sft")[0]["input_ids"] == [1, 2]
    assert len(load(tmp_path / "one", type="sft", max_length=1)) == 1
    assert len(load(tmp_path / "split", type="sft")) == 2
    with pytest.raises(DataError, match="no split 'test'; it has train"):
        load(tmp_path / "split", "test")


# --- registry ---


def test_unknown_dataset_lists_the_supported_ones():
    with pytest.raises(ValueError, match="'nope': supported are arithmetic, gsm8k, hh-rlhf, reasoning_gym, a .jsonl"):
        load("nope")


@pytest.mark.parametrize("path", ["hiyouga/geometry3k", "x/clevr_count_70k_train", "TIGER/ViRL39K"])
def test_dataset_of_a_later_version_is_refused_by_name(path):
    with pytest.raises(UnsupportedFeatureError, match="not available in this version"):
        load(path)


def test_get_custom_dataset_reads_the_config_section():
    config = SimpleNamespace(path="arithmetic", type="rl", split="train", max_length=None, dataset_kwargs={"size": 4})
    assert len(get_custom_dataset(dataset_config=config)) == 4
    assert get_custom_dataset("test", config)[0] != get_custom_dataset("train", config)[0]  # the argument wins


def test_own_builder_is_found_by_name_and_its_failure_is_named(monkeypatch):
    monkeypatch.setattr(DATASETS, "_entries", dict(DATASETS._entries))
    DATASETS.register("my_words", lambda request: RowDataset([{"messages": []}], request.path))
    DATASETS.register("broken_one", lambda request: 1 / 0)
    assert len(load("data/my_words")) == 1
    with pytest.raises(DataError, match=r"broken_one.*division by zero"):
        load("broken_one")


def test_row_dataset_slices_and_describes_itself():
    dataset = RowDataset([{"a": i} for i in range(4)], "x")
    assert isinstance(dataset[1:3], RowDataset)
    assert list(dataset[1:3]) == [{"a": 1}, {"a": 2}]
    assert repr(dataset) == "RowDataset('x', 4 rows, columns=['a'])"
    assert dataset.fingerprint != dataset[1:3].fingerprint


# --- reasoning_gym ---


def test_reasoning_gym_missing_package_names_the_extra(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"areal\[reasoning-gym\]"):
        load("reasoning_gym/chain_sum")


@pytest.mark.parametrize("task", ["basic_arithmetic", "chain_sum", "countdown"])
def test_reasoning_gym_task_rows_score_with_the_task_scorer(task, tokenizer):
    pytest.importorskip("reasoning_gym", reason="the extra areal[reasoning-gym] is not installed")
    from areal.reward.reasoning_gym import reasoning_gym_reward_fn

    dataset = load(f"reasoning_gym/{task}", type="rl", size=3)
    row = dataset[0]
    assert (len(dataset), row["task"]) == (3, task)
    right = f"so \\boxed{{{row['answer']}}}<|im_end|>"
    assert reasoning_gym_reward_fn("", right, [], [], **row) == 1.0
    assert reasoning_gym_reward_fn("", "\\boxed{", [], [], **row) == 0.0
    assert list(load(f"reasoning_gym/{task}", type="rl", size=3)) == list(dataset)
    assert list(load(f"reasoning_gym/{task}", "test", type="rl", size=3)) != list(dataset)
    assert len(load(f"reasoning_gym/{task}", type="sft", size=2, tokenizer=tokenizer)) == 2


def test_reasoning_gym_unknown_task_lists_near_names():
    pytest.importorskip("reasoning_gym", reason="the extra areal[reasoning-gym] is not installed")
    with pytest.raises(DataError, match="did you mean 'chain_sum'"):
        load("reasoning_gym/chain_summ")
    with pytest.raises(DataError, match="refuses dataset_kwargs"):
        load("reasoning_gym/chain_sum", nonsense=3)
