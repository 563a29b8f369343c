"""Conversations as supervised rows: the loss is on the assistant's turns, whatever the chat template does."""

from __future__ import annotations

import json
from typing import Any

import pytest

from areal.dataset import get_custom_dataset
from areal.dataset.char_tokenizer import build_char_tokenizer
from areal.utils.errors import DataError

TALK = [
    {"role": "user", "content": "1+1="},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2="},
    {"role": "assistant", "content": "4"},
]
# Headers, an end token, then a newline that belongs to the template; the shape of most published templates.
CHATML = (
    "{%- for m in messages -%}{{ m['role'][0] | replace('u', 'x') }}\n{{ m['content'] }}{{ eos_token }}{{ '\n' }}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ 'a\n' }}{%- endif -%}"
)
MARKED = (
    "{%- for m in messages -%}{%- if m['role'] == 'assistant' -%}"
    "{% generation %}{{ m['content'] }}{{ eos_token }}{% endgeneration %}"
    "{%- else -%}{{ m['content'] }}{%- endif -%}{%- endfor -%}"
)
# Reasoning is shown in the last answer only, so a part of a conversation is no prefix of the whole.
LAST_ONLY = (
    "{%- for m in messages -%}{%- if m['role'] == 'assistant' and loop.last -%}{{ 'nnn' }}{%- endif -%}"
    "{{ m['content'] }}{%- if m['role'] == 'assistant' -%}{{ eos_token }}{%- endif -%}{%- endfor -%}"
)
# Says how many messages there are, before everything else.
COUNTING = "{{ messages | length }}{%- for m in messages -%}{{ m['content'] }}{%- endfor -%}"


def learnt(messages: list[dict[str, Any]], tmp_path: Any, template: str | None = None) -> tuple[str, list[str]]:
    """The text of a row, and the stretches of it that have loss."""
    tokenizer = build_char_tokenizer()
    if template is not None:
        tokenizer.chat_template = template
    file = tmp_path / "talk.jsonl"
    file.write_text(json.dumps({"messages": messages}) + "\n")
    (row,) = get_custom_dataset("train", path=str(file), type="sft", tokenizer=tokenizer)
    assert len(row["input_ids"]) == len(row["loss_mask"])
    parts, open_part = [], []
    for token, mask in zip([*row["input_ids"], 0], [*row["loss_mask"], 0], strict=True):
        if mask:
            open_part.append(token)
        elif open_part:
            parts.append(tokenizer.decode(open_part))
            open_part = []
    return tokenizer.decode(row["input_ids"]), parts


def test_chat_sft_loss_is_on_every_assistant_turn_and_nothing_else(tmp_path):
    text, parts = learnt(TALK, tmp_path)

    assert text == "1+1=2<eos>2+2=4<eos>"
    assert parts == ["2<eos>", "4<eos>"]


def test_chat_sft_template_text_after_the_end_of_a_turn_has_no_loss(tmp_path):
    text, parts = learnt(TALK, tmp_path, CHATML)

    assert text == "x\n1+1=<eos>\na\n2<eos>\nx\n2+2=<eos>\na\n4<eos>\n"
    assert parts == ["2<eos>", "4<eos>"]


def test_chat_sft_first_turn_of_the_assistant_answers_nothing_and_has_no_loss(tmp_path):
    assert learnt([{"role": "assistant", "content": "9"}, *TALK[:2]], tmp_path, CHATML)[1] == ["2<eos>"]


def test_chat_sft_generation_marks_of_a_template_are_used(tmp_path):
    assert learnt(TALK, tmp_path, MARKED)[1] == ["2<eos>", "4<eos>"]


def test_chat_sft_template_that_changes_the_last_answer_still_finds_the_turns(tmp_path):
    text, parts = learnt(TALK, tmp_path, LAST_ONLY)

    assert text == "1+1=2<eos>2+2=nnn4<eos>"
    assert parts == ["2<eos>", "nnn4<eos>"]


def test_chat_sft_template_that_rewrites_the_beginning_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"row 0: the chat template renders the first 1 messages differently"):
        learnt(TALK, tmp_path, COUNTING)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (TALK[:3], "the last message must be the assistant's"),
        ([], "messages must be a list"),
        ([{"role": "assistant"}], "messages must be a list"),
    ],
)
def test_chat_sft_bad_conversation_names_the_row(messages, message, tmp_path):
    with pytest.raises(DataError, match=f"row 0: {message}"):
        learnt(messages, tmp_path)
