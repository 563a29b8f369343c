"""Text of a completion without the tokens that end it; used by rewards that read text."""

from __future__ import annotations

import re

_TRAILING_TOKENS = re.compile(r"(?:\s*<[^<>\s]{1,40}>)+\s*$")


def without_end_tokens(completion: str) -> str:
    """``completion`` without the special tokens, such as ``<|im_end|>``, and the white space at its end."""
    return _TRAILING_TOKENS.sub("", completion)
