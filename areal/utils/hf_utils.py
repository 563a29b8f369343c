"""Loading Hugging Face tokenizers and processors, and one chat-template call with one return type.

Everything that turns text into token ids (datasets, workflows, engines' clients) gets its tokenizer here, so pad and
template rules exist once. Remote code is off unless a caller asks for it. Beside it: what a directory of peft is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from areal.utils import logging
from areal.utils.errors import DataError, VocabularyError

logger = logging.getLogger("Tokenizer")

ADAPTER_CONFIG = "adapter_config.json"
"""File that makes a directory an adapter of peft's."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "vocab.json", "tokenizer.model")
_DIFFERING_SHOWN = 3  # tokens in a message
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")


def holds_adapter(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is a directory with an adapter, which is no model."""
    return (Path(path) / ADAPTER_CONFIG).is_file()


def load_hf_tokenizer(
    model_name_or_path: str | os.PathLike[str],
    fast_tokenizer: bool = True,
    padding_side: str | None = None,
    *,
    trust_remote_code: bool = False,
) -> Any:
    """Load a tokenizer; cached, so equal calls return the same object (do not change it).

    Args:
        model_name_or_path: directory or hub id.
        fast_tokenizer: prefer the Rust implementation.
        padding_side: ``"left"`` or ``"right"``; None keeps the tokenizer's.
        trust_remote_code: run Python code that comes with the model.

    Returns:
        The tokenizer; a missing pad token is the eos token.

    Raises:
        DataError: it cannot be loaded.
    """
    path = os.fspath(model_name_or_path)
    stamp = tuple(_mtime(Path(path) / name) for name in _TOKENIZER_FILES) if os.path.isdir(path) else ()
    return _load_tokenizer(path, fast_tokenizer, padding_side, trust_remote_code, stamp)


@lru_cache(maxsize=16)
def _load_tokenizer(path: str, fast: bool, padding_side: str | None, remote_code: bool, stamp: tuple[int, ...]) -> Any:
    from transformers import AutoTokenizer

    options = {} if padding_side is None else {"padding_side": padding_side}
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, use_fast=fast, trust_remote_code=remote_code, **options)
    except (OSError, ValueError, ImportError) as exc:
        raise DataError(
            f"no tokenizer could be loaded from {path!r}: {exc}. Give a hub id, or a directory with tokenizer.json"
        ) from exc
    if tokenizer.pad_token_id is None and tokenizer.eos_token_id is not None:
        tokenizer.pad_token_id = tokenizer.eos_token_id
    return tokenizer


def _mtime(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


def load_hf_processor_and_tokenizer(
    model_name_or_path: str | os.PathLike[str],
    fast_tokenizer: bool = True,
    padding_side: str | None = None,
    *,
    trust_remote_code: bool = False,
) -> tuple[Any | None, Any]:
    """``(processor, tokenizer)``; the processor is None for models without one (plain language models)."""
    tokenizer = load_hf_tokenizer(model_name_or_path, fast_tokenizer, padding_side, trust_remote_code=trust_remote_code)
    path = Path(model_name_or_path)
    if path.is_dir() and not any((path / name).exists() for name in _PROCESSOR_FILES):
        return None, tokenizer
    from transformers import AutoProcessor, ProcessorMixin

    try:
        processor = AutoProcessor.from_pretrained(os.fspath(model_name_or_path), trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError) as exc:
        logger.info(f"{model_name_or_path}: no processor, text only ({exc})")
        return None, tokenizer
    return (processor if isinstance(processor, ProcessorMixin) else None), tokenizer


def apply_chat_template(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    tokenize: bool = True,
    add_generation_prompt: bool = False,
    **template_kwargs: Any,
) -> Any:
    """Render messages with the tokenizer's chat template.

    Args:
        tokenizer: with a chat template.
        messages: dicts with ``role`` and ``content``.
        tokenize: return token ids; otherwise the text.
        add_generation_prompt: end with the opening of the assistant's turn.
        template_kwargs: further template variables, such as ``enable_thinking`` or ``tools``.

    Returns:
        A plain ``list[int]``, or a string when not tokenizing.

    Raises:
        DataError: the tokenizer has no chat template.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise DataError(
            f"tokenizer {getattr(tokenizer, 'name_or_path', '')!r} has no chat template: use an instruction-tuned "
            "model, add chat_template.jinja beside its tokenizer.json, or pass get_input_ids_fn to the workflow"
        )
    options: dict[str, Any] = {"tokenize": tokenize, "add_generation_prompt": add_generation_prompt, **template_kwargs}
    if tokenize:
        options["return_dict"] = False
    rendered = tokenizer.apply_chat_template(list(messages), **options)
    if not tokenize:
        return rendered
    ids = rendered["input_ids"] if isinstance(rendered, Mapping) else rendered
    if ids and not isinstance(ids[0], int):  # some tokenizers return a batch of one
        ids = ids[0]
    return [int(i) for i in ids]


def end_of_turn(tokenizer: Any, ids: list[int]) -> int:
    """Length of ``ids`` without the white space that a template writes after the special token that ends a turn."""
    special = set(tokenizer.all_special_ids)
    last = next((i for i in reversed(range(len(ids))) if ids[i] in special), None)
    if last is None or tokenizer.decode(ids[last + 1 :]).strip():
        return len(ids)
    return last + 1


def require_same_vocabulary(tokenizer: Any, other: str, where: str) -> None:
    """Refuse another model's tokenizer whose token ids mean something else; it may know more tokens.

    Args:
        tokenizer: whose every token must have the same id there.
        other: directory or hub id of the other tokenizer.
        where: names the other model in the message.

    Raises:
        VocabularyError: names the first tokens that differ, or why they cannot be compared.
    """
    try:
        theirs = load_hf_tokenizer(other).get_vocab()
    except DataError as exc:
        raise VocabularyError(
            f"{where}: its vocabulary cannot be compared with the policy's: {exc}. Put tokenizer.json beside it"
        ) from exc
    own = tokenizer.get_vocab()
    if not own.keys() & theirs.keys():  # without its files some kinds of tokenizers load as empty ones
        raise VocabularyError(
            f"{where}: its vocabulary cannot be compared with the policy's: the tokenizer found there has "
            f"{len(theirs)} tokens, none of them the policy's. Put tokenizer.json beside it, or use a model of the "
            "policy's family"
        )
    differing = sorted((index, token) for token, index in own.items() if theirs.get(token) != index)
    if differing:
        examples = ", ".join(
            f"{token!r} is {index} here and {theirs.get(token, 'absent')} there"
            for index, token in differing[:_DIFFERING_SHOWN]
        )
        raise VocabularyError(
            f"{where} has another vocabulary than the policy: {len(differing)} of {len(own)} tokens differ "
            f"({examples}). Only probabilities of the same ids can be compared: use a model of the policy's family"
        )
