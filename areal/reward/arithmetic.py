"""Reward of the procedural arithmetic dataset: the completion, up to its end token, must be the number."""

from __future__ import annotations

import re
from typing import Any

_INTEGER = re.compile(r"\s*([+-]?\d+)\s*(?:<[^<>\s]{1,40}>\s*)*")


def arithmetic_reward_fn(
    prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], answer: str, **columns: Any
) -> float:
    """1.0 if the completion is the integer ``answer`` and nothing else but end tokens, else 0.0."""
    match = _INTEGER.fullmatch(completions)
    return float(match is not None and int(match.group(1)) == int(answer))


# A microsecond of work: scored in the calling process, not in the pool.
arithmetic_reward_fn.areal_inline = True  # type: ignore[attr-defined]
