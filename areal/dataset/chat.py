"""Conversations as supervised rows: the loss is on what the assistant says, and on nothing else.

Of a turn, that is its content up to the token that ends it: what the model has to produce when it answers there. The
tokens are those of the tokenizer's chat template over the whole conversation. A conversation that the assistant begins
has no loss there, unless the template marks that turn: it answers nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from areal.dataset.rows import RowDict
from areal.utils.errors import DataError
from areal.utils.hf_utils import apply_chat_template, end_of_turn

_MARKED = "{% generation", "{%- generation"  # a template that says itself what the assistant generates


def conversation_row(tokenizer: Any, messages: Any, where: str, tools: Any = None) -> RowDict:
    """One conversation as ``{input_ids, loss_mask}``; any number of turns.

    Args:
        tokenizer: with a chat template.
        messages: dicts with ``role`` and ``content``; the last one is the assistant's.
        where: file and row, for messages.
        tools: passed on to the template, if given.

    Raises:
        DataError: the messages are no such list, or the template renders an earlier part of a conversation differently
            once it goes on, so that an answer cannot be told apart.
    """
    check_messages(messages, where)
    if messages[-1]["role"] != "assistant":
        raise DataError(f"{where}: the last message must be the assistant's")
    options = {} if tools is None else {"tools": tools}
    if any(tag in (tokenizer.chat_template or "") for tag in _MARKED):
        rendered = tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **options
        )
        return {"input_ids": list(rendered["input_ids"]), "loss_mask": list(rendered["assistant_masks"])}
    whole = apply_chat_template(tokenizer, messages, **options)
    mask = [0] * len(whole)
    for index, message in enumerate(messages):
        if message["role"] == "assistant" and index > 0:
            start = _prefix(tokenizer, messages[:index], whole, where, add_generation_prompt=True, **options)
            stop = _end_of_turn(tokenizer, messages, index, whole, start, where, **options)
            mask[start:stop] = [1] * (stop - start)
    return {"input_ids": whole, "loss_mask": mask}


def check_messages(messages: Any, where: str) -> None:
    """DataError unless ``messages`` is a non-empty list of objects with ``role`` and ``content``."""
    fits = isinstance(messages, list) and all(isinstance(m, dict) and {"role", "content"} <= set(m) for m in messages)
    if not fits or not messages:
        raise DataError(f"{where}: messages must be a list of objects with role and content")


def _prefix(tokenizer: Any, messages: Sequence[RowDict], whole: list[int], where: str, **options: Any) -> int:
    """Tokens of a first part of a conversation, which must begin the whole."""
    part = apply_chat_template(tokenizer, messages, **options)
    if whole[: len(part)] != part:
        raise DataError(
            f"{where}: the chat template renders the first {len(messages)} messages differently once the conversation "
            "goes on; use a template with {% generation %} marks, or rows of input_ids and loss_mask"
        )
    return len(part)


def _end_of_turn(  # noqa: PLR0913 - one conversation and a place in it
    tokenizer: Any, messages: list[RowDict], index: int, whole: list[int], start: int, where: str, **options: Any
) -> int:
    """End of answer ``index``: without what the template writes between an end-of-turn token and the next turn."""
    try:
        stop = _prefix(tokenizer, messages[: index + 1], whole, where, **options)
    except DataError:
        # Some templates show reasoning in the last answer only: then the answer ends at its end-of-turn token.
        if tokenizer.eos_token_id not in whole[start:]:
            raise
        return whole.index(tokenizer.eos_token_id, start) + 1
    return max(start, end_of_turn(tokenizer, whole[:stop]))
