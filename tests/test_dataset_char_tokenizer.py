"""One character, one token; the saved form is what AutoTokenizer loads beside any model config."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from areal.dataset.char_tokenizer import CHARACTERS, VOCAB_SIZE, build_char_tokenizer
from areal.utils.errors import DataError
from areal.utils.hf_utils import apply_chat_template, load_hf_processor_and_tokenizer, load_hf_tokenizer
from tests.fakes import tiny_config

TEXT = "12+34=46\n a? (x), b:c / 9*8."


def test_char_tokenizer_round_trip_inserts_and_loses_nothing():
    tokenizer = build_char_tokenizer()
    ids = tokenizer.encode(TEXT)
    assert len(ids) == len(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.decode(tokenizer.encode(CHARACTERS)) == CHARACTERS
    assert len(set(tokenizer.encode(CHARACTERS))) == len(CHARACTERS)


def test_char_tokenizer_special_ids_and_size_are_fixed():
    tokenizer = build_char_tokenizer()
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.unk_token_id) == (
        0,
        1,
        2,
        3,
    )
    assert len(tokenizer) == VOCAB_SIZE == 32
    assert tokenizer.decode([8, 10, 1]) == "46<eos>"
    assert tokenizer.encode("4Z6") == tokenizer.encode("46")


@pytest.mark.parametrize("arch", ["qwen2", "qwen3", "llama"])
def test_char_tokenizer_auto_tokenizer_beside_model_config_encodes_alike(tmp_path, arch):
    tokenizer = build_char_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    tiny_config(arch).save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert (tmp_path / "tokenizer.json").exists()
    assert loaded.encode(TEXT) == tokenizer.encode(TEXT)
    assert loaded.decode(loaded.encode(TEXT)) == TEXT
    assert (loaded.pad_token_id, loaded.eos_token_id) == (0, 1)
    messages = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    assert apply_chat_template(loaded, messages, tokenize=False) == "1+1=2<eos>"


def test_apply_chat_template_returns_plain_ids():
    tokenizer = build_char_tokenizer()
    ids = apply_chat_template(tokenizer, [{"role": "user", "content": "1+1="}], add_generation_prompt=True)
    assert type(ids) is list
    assert ids == tokenizer.encode("1+1=")


def test_apply_chat_template_without_template_says_what_to_do():
    tokenizer = build_char_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="has no chat template"):
        apply_chat_template(tokenizer, [])


def test_load_hf_tokenizer_caches_until_the_files_change(tmp_path):
    build_char_tokenizer().save_pretrained(tmp_path)
    first = load_hf_tokenizer(tmp_path)
    assert load_hf_tokenizer(str(tmp_path)) is first
    changed = build_char_tokenizer()
    changed.chat_template = "{{ messages[0]['content'] }}!"
    changed.save_pretrained(tmp_path)
    assert load_hf_tokenizer(tmp_path).chat_template == changed.chat_template


def test_load_hf_tokenizer_without_pad_falls_back_to_eos(tmp_path):
    tokenizer = build_char_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    assert load_hf_tokenizer(tmp_path).pad_token_id == 1


def test_load_hf_tokenizer_missing_path_names_it(tmp_path):
    with pytest.raises(DataError, match="nothing-here"):
        load_hf_tokenizer(tmp_path / "nothing-here")


def test_load_hf_processor_and_tokenizer_text_model_has_no_processor(tmp_path):
    build_char_tokenizer().save_pretrained(tmp_path)
    processor, tokenizer = load_hf_processor_and_tokenizer(tmp_path)
    assert processor is None
    assert tokenizer.eos_token_id == 1
