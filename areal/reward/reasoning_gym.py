"""Reward of a reasoning_gym row: the task's own scorer, from 0 to 1. Needs the extra ``areal[reasoning-gym]``."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from areal.reward.completion import without_end_tokens
from areal.reward.math_answer import last_boxed
from areal.utils.optional import import_extra

_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def reasoning_gym_reward_fn(  # noqa: PLR0913 - four fixed arguments and the row's columns
    prompt: str,
    completions: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    task: str,
    entry: dict[str, Any],
    **columns: Any,
) -> float:
    """Score of the completion's answer under the task's scorer; 0.0 without an answer.

    The answer is the last ``<answer>…</answer>``, else the last ``\\boxed{…}``, else the text after the last
    ``</think>``.
    """
    answer = extract_text_answer(completions)
    return 0.0 if answer is None else float(_scorer(task)(answer, entry))


def extract_text_answer(completion: str) -> str | None:
    """The answer part of a completion; None if it is empty, or boxed but unfinished."""
    tagged = _ANSWER_TAG.findall(completion)
    if tagged:
        return tagged[-1].strip() or None
    if "\\boxed" in completion:
        return last_boxed(completion)
    return without_end_tokens(completion.rpartition("</think>")[2]).strip() or None


@lru_cache(maxsize=64)
def _scorer(task: str) -> Callable[[str, dict[str, Any]], float]:
    scorer: Callable[[str, dict[str, Any]], float] = import_extra("reasoning_gym", "reasoning-gym").get_score_answer_fn(
        task
    )
    return scorer
