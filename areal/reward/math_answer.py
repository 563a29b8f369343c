"""Judges a mathematical answer: find the final answer in both texts, compare cheaply, else symbolically (math-verify).

Text in, 1.0 or 0.0 out. Safe in any thread, event loop or process: nothing uses signals. Used by ``gsm8k_reward_fn``
and by reward functions of users.

Which part of a text is its answer:

1. the last ``\\boxed{…}``; if that one is empty or unfinished, there is no answer;
2. else what follows the last ``####``, up to the end of its line;
3. else the whole text, of which math-verify takes the last expression.
"""

from __future__ import annotations

import ctypes
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from typing import Any

from areal.utils import logging
from areal.utils.errors import ConfigError

logger = logging.getLogger("Reward")

MAX_TEXT = 2000  # characters; of a longer text without a marked answer only the end is searched
MAX_ANSWER = 1000  # characters of a marked answer; a longer one is no answer
_GRACE_S = 5.0  # for a thread to notice that it was told to stop
_RAISE_AGAIN_S = 0.05  # it is told again after this long

_BOX = "\\boxed"
_NUMBER = re.compile(r"[+-]?(?:\d+|\d{1,3}(?:,\d{3})+)(?:\.\d+)?")
_LEADING_NUMBER = re.compile(rf"\$?\s*({_NUMBER.pattern})(?![\d./^*%,]*[\d^%])")
_TRAILING_TOKENS = re.compile(r"(?:\s*<[^<>\s]{1,40}>)+\s*$")
_HUGE_EXPONENT = re.compile(r"(?:\^|\*\*)\s*\{?\s*[(+-]?\s*\d{5,}")
_TOWER = re.compile(r"(?:\^|\*\*)[^\s=]{0,12}?(?:\^|\*\*)")
_HUGE_FACTORIAL = re.compile(r"\d{4,}\s*\)?\s*!")
_MANY_DIGITS = re.compile(r"\d{400,}")


def extract_answer(text: str) -> str | None:
    """The part of ``text`` that states its answer (see the module), ready for math-verify; None if there is none."""
    text = _TRAILING_TOKENS.sub("", text).strip()
    if _BOX in text:
        content = last_boxed(text)
        return None if content is None else f"{_BOX}{{{content}}}"
    if "####" in text:
        lines = text.rpartition("####")[2].strip().splitlines()
        if not lines:
            return None
        marked = lines[0].strip()
        number = _LEADING_NUMBER.match(marked)
        return number.group(1) if number else marked[:MAX_ANSWER]
    return text[-MAX_TEXT:] or None


def last_boxed(text: str) -> str | None:
    """Content of the last ``\\boxed{…}``, braces balanced; None if it is missing, unfinished or empty."""
    start = text.rfind(_BOX)
    if start < 0:
        return None
    rest = text[start + len(_BOX) :].lstrip()
    if not rest.startswith("{"):
        return None
    depth, escaped = 0, False
    for i, char in enumerate(rest):
        if escaped:
            escaped = False
        elif char == "\\":
            escaped = True
        elif char == "{":
            depth += 1
        elif char == "}":
            depth -= 1
            if depth == 0:
                content = rest[1:i].strip()
                return content if 0 < len(content) <= MAX_ANSWER else None
    return None


def compare_plain(answer: str, truth: str) -> bool | None:
    """Equality of two extracted answers where text or plain decimals decide; None where only algebra can."""
    answer, truth = _plain(answer), _plain(truth)
    if answer == truth:
        return True
    a, b = _decimal(answer), _decimal(truth)
    if a is None or b is None:
        return None
    if a == b:
        return True
    whole = a == a.to_integral_value() and b == b.to_integral_value()
    return False if whole else None


def _plain(text: str) -> str:
    if text.startswith(f"{_BOX}{{"):
        text = text[len(_BOX) + 1 : -1]
    return text.strip().removeprefix("\\$").removeprefix("$").strip()


def _decimal(text: str) -> Decimal | None:
    if not _NUMBER.fullmatch(text):
        return None
    try:
        return Decimal(text.replace(",", ""))
    except InvalidOperation:
        return None


def _explosive(text: str) -> bool:
    """Whether evaluating ``text`` could take astronomically long inside one C call, which nothing can interrupt."""
    return any(p.search(text) for p in (_HUGE_EXPONENT, _TOWER, _HUGE_FACTORIAL, _MANY_DIGITS))


class MathVerifyWorker:
    """Compares answers with math-verify.

    Args:
        try_extract_without_anchor: accept numbers that no "answer is", box or dollar sign announces.
        precision: decimal places that floats are rounded to.
        timeout: seconds one comparison may take; it scores 0 after that. The thread that ran it is stopped.
    """

    def __init__(self, try_extract_without_anchor: bool = True, precision: int = 6, timeout: float = 5.0) -> None:
        if timeout <= 0:
            raise ConfigError(f"timeout={timeout} must be > 0 seconds")
        self.try_extract_without_anchor = try_extract_without_anchor
        self.precision = precision
        self.timeout = timeout

    def verify(self, response: str, ground_truth: str) -> float:
        """1.0 if the answer of ``response`` equals that of ``ground_truth``, else 0.0. Never raises."""
        try:
            answer, truth = extract_answer(response), extract_answer(ground_truth)
            if answer is None or truth is None:
                return 0.0
            decided = compare_plain(answer, truth)
            if decided is None:
                decided = not _explosive(answer) and bool(
                    run_with_timeout(lambda: self._verify_symbolic(answer, truth), self.timeout)
                )
            return float(decided)
        except TimeoutError:
            logger.warning(f"no verdict within {self.timeout:g} s, scored 0: {response[-80:]!r}")
        except Exception as exc:  # noqa: BLE001 - a sample's text must never end a run
            logger.warning(f"answer could not be judged, scored 0 ({type(exc).__name__}: {exc}): {response[-80:]!r}")
        return 0.0

    def _verify_symbolic(self, answer: str, truth: str) -> bool:
        parse, compare, configs = _math_verify(self.try_extract_without_anchor)

        def read(text: str) -> list[Any]:
            found: list[Any] = parse(text, extraction_config=configs, parsing_timeout=None)
            return found

        # A bare LaTeX truth ("2\sqrt{3}", "(1,2)") is announced by a box: without one only a fragment would be read.
        gold = (
            read(f"{_BOX}{{{truth}}}")
            if "\\" in truth and not re.search(r"\$|\\boxed|\\\[|\\\(", truth)
            else read(truth)
        )
        gold = gold or read(f"{_BOX}{{{truth}}}")
        target = read(answer)
        if not gold or not target:
            return False
        return bool(compare(gold, target, float_rounding=self.precision, timeout_seconds=None))


@lru_cache(maxsize=2)
def _math_verify(without_anchor: bool) -> tuple[Callable[..., Any], Callable[..., Any], tuple[Any, Any]]:
    import logging as std

    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    for name in ("math_verify.parser", "math_verify.grader", "math_verify.utils"):
        # The library's own loggers: they warn that its alarm is off, and report unreadable answers as errors.
        std.getLogger(name).setLevel(std.CRITICAL)  # noqa: TID251
    configs = (ExprExtractionConfig(try_extract_without_anchor=without_anchor), LatexExtractionConfig())
    return parse, verify, configs


class _Stop(BaseException):
    """Injected into a thread that is out of time; not an Exception, so that no handler of a library swallows it."""


def run_with_timeout(work: Callable[[], Any], timeout_s: float) -> Any:
    """Run ``work`` in a thread of its own and return its result; stop the thread if it is out of time.

    The thread is stopped by an exception at its next Python instruction, raised again until it has ended: one that
    arrives inside a destructor or a callback of the garbage collector is dropped by the interpreter. No thread is left
    behind unless one C call never returns.

    Raises:
        TimeoutError: no result within ``timeout_s`` seconds.
        Exception: whatever ``work`` raised.
    """
    outcome: list[Any] = []
    failure: list[BaseException] = []
    guard = threading.Lock()
    stoppable = True

    def run() -> None:
        nonlocal stoppable
        with suppress(_Stop):
            try:
                outcome.append(work())
            except BaseException as exc:  # noqa: BLE001 - handed to the caller
                failure.append(exc)
            with guard:  # the thread ends by itself from here on: nothing may be raised in the middle of that
                stoppable = False

    thread = threading.Thread(target=run, name="reward-judge", daemon=True)
    thread.start()
    thread.join(timeout_s)
    give_up = time.monotonic() + _GRACE_S
    while thread.is_alive() and time.monotonic() < give_up:
        with guard:
            if stoppable:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_Stop))
        thread.join(_RAISE_AGAIN_S)
    if failure and not isinstance(failure[0], _Stop):
        raise failure[0]
    if not outcome:
        raise TimeoutError(f"no result within {timeout_s:g} s")
    return outcome[0]


@lru_cache(maxsize=1)
def get_math_verify_worker() -> MathVerifyWorker:
    """The process-wide worker with default settings."""
    return MathVerifyWorker()
