"""A character-level tokenizer of 32 entries for toy arithmetic: one character, one token, nothing inserted.

``build_char_tokenizer()`` returns a fast Hugging Face tokenizer; saved, it is a ``tokenizer.json`` that
``AutoTokenizer`` loads. The quickstart, the tests and small examples use it.

The chat template renders a user's content as it is, an assistant's content followed by ``<eos>``, and adds nothing as
generation prompt: with the user content ``"12+34="`` the model's first token is the first digit of the answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, EOS, BOS, UNK = "<pad>", "<eos>", "<bos>", "<unk>"
SPECIAL_TOKENS = (PAD, EOS, BOS, UNK)  # ids 0, 1, 2, 3
CHARACTERS = "0123456789+-*/=() .,?:\nabcnx"
_BYTE_LEVEL = {" ": "Ġ", "\n": "Ċ"}  # how byte-level tokenizers write these two
VOCAB_SIZE = len(SPECIAL_TOKENS) + len(CHARACTERS)

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- message['content'] -}}"
    "{%- if message['role'] == 'assistant' -%}{{- eos_token -}}{%- endif -%}"
    "{%- endfor -%}"
)


def build_char_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer. Nothing is added on encoding; characters outside its vocabulary are dropped.

    It is a byte-level BPE without merges, so every character is a token of its own. This form, and no simpler one,
    survives ``AutoTokenizer``: beside a Qwen2 ``config.json`` that rebuilds the tokenizer as Qwen2's byte-level BPE
    from the saved vocabulary and merges, whatever ``tokenizer.json`` says about splitting and decoding.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = [_BYTE_LEVEL.get(character, character) for character in CHARACTERS]
    vocab = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *letters))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        bos_token=BOS,
        unk_token=UNK,
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
