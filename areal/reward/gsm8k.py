"""Reward of GSM8K and similar word problems: does the completion end in the right answer?"""

from __future__ import annotations

from typing import Any

from areal.reward.math_answer import get_math_verify_worker


def gsm8k_reward_fn(
    prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], answer: str, **columns: Any
) -> float:
    """1.0 if the final answer of ``completions`` equals that of ``answer``, else 0.0.

    Only the completion is read, never the prompt. Its answer is the last ``\\boxed{…}``, else what follows ``####``,
    else the last expression; the same holds for ``answer``, which may be the whole worked solution (see
    :mod:`areal.reward.math_answer`).
    """
    return get_math_verify_worker().verify(str(completions), str(answer))
