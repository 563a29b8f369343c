"""GSM8K reward and math answers: right verdicts, wherever they are computed, and nothing left behind."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from areal.api.reward_api import AsyncRewardWrapper
from areal.reward import MathVerifyWorker, get_custom_reward_fn, get_math_verify_worker, resolve_reward_fn
from areal.reward.arithmetic import arithmetic_reward_fn
from areal.reward.gsm8k import gsm8k_reward_fn
from areal.reward.math_answer import extract_answer, last_boxed, run_with_timeout
from areal.utils.errors import ConfigError, UnsupportedFeatureError

VECTORS = json.loads((Path(__file__).parent / "vectors" / "reward_examples.json").read_text())

# Decisions that differ from the vector: none. ("\boxed{50\%}" for "#### 50" is 1, as with math-verify 0.9.0, which we
# depend on, not 0, as with 0.8.0. The geometry3k and clevr examples belong to rewards this version does not offer.)


def score(completion: str, answer: str, prompt: str = "") -> float:
    return gsm8k_reward_fn(prompt, completion, [], [], answer=answer)


@pytest.mark.parametrize("example", VECTORS["examples"]["gsm8k"], ids=lambda e: e["completion"][:30] or "empty")
def test_gsm8k_reward_vector_example_scores_as_given(example):
    assert score(example["completion"], example["answer"]) == example["reward"]


@pytest.mark.parametrize(
    ("answer", "completion", "reward"),
    [
        ("0.5", "\\boxed{\\frac{1}{2}}", 1),
        ("1000", "\\boxed{1,000}", 1),
        ("0.5", "50%", 1),
        ("2", "\\boxed{x=2}", 1),
        ("2\\sqrt{2}", "\\boxed{\\sqrt{8}}", 1),
        ("\\{2,1\\}", "\\boxed{\\{1,2\\}}", 1),
        ("18", "\\boxed{18 \\text{ dollars}}", 1),
        ("18", "18 \\text{ dollars}", 1),
        ("(2,1)", "\\boxed{(1,2)}", 0),
        ("(1,2)", "\\boxed{(1,2)}", 1),
        (".333", "\\boxed{\\frac{1}{3}}", 0),
        ("42", "", 0),
        ("42", "\\boxed{", 0),
        ("42", "\\boxed{}", 0),
        ("42", "\\boxed{42", 0),
        ("0", "\\boxed{\\emptyset}", 0),
        ("1000", "\\boxed{1e3}", 0),
        # Decision: the last box is the answer (math-verify alone reads both boxes as a set and says no).
        ("42", "\\boxed{41} ... \\boxed{42}", 1),
        ("41", "\\boxed{41} ... \\boxed{42}", 0),
        # Decision: an unfinished or empty last box is no answer, whatever stands before it.
        ("42", "\\boxed{42} hence \\boxed{4", 0),
        ("42", "\\boxed{42} hence \\boxed{}", 0),
        # Decision: a box goes before ####, and #### goes before other numbers.
        ("42", "\\boxed{42}\n#### 41", 1),
        ("42", "#### 42\nThat took 3 steps.", 1),
        ("42", "#### 42" + " and so on" * 48, 1),
        ("42", "#### 42\n" + "x" * 480, 1),
        ("42", "#### ", 0),
        ("#### 1/2", "#### 0.5", 1),
        ("#### 12", "#### 12.5", 0),
        ("72", "So it is 72.<|im_end|><|endoftext|>", 1),
        ("72", "\\boxed{72}</s>", 1),
        ("18", "\\boxed{\\$18}", 1),
        ("18", "\\boxed{18.00}", 1),
        ("0.333333", "\\boxed{0.3333334}", 1),
    ],
)
def test_gsm8k_reward_known_pitfall_scores_as_decided(answer, completion, reward):
    assert score(completion, answer) == reward


def test_gsm8k_reward_answer_in_the_prompt_is_never_scored():
    assert score("I do not know.", "42", prompt="Put it in \\boxed{42}") == 0.0


def test_gsm8k_reward_published_answers_score_their_own_solution(test_data):
    with (test_data / "gsm8k" / "test.jsonl").open() as lines:
        rows = [json.loads(next(lines)) for _ in range(200)]
    for row in rows:
        final = row["answer"].rpartition("####")[2].strip()
        assert score(row["answer"], row["answer"]) == 1.0
        assert score(f"The answer is \\boxed{{{final}}}.", row["answer"]) == 1.0
        assert score(f"\\boxed{{{final}1}}", row["answer"]) == 0.0


def test_gsm8k_reward_in_thread_loop_and_process_gives_the_same_verdict():
    symbolic = ("\\boxed{\\frac{84}{2}}", "42")
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(score, *zip(*[symbolic] * 4, strict=True))) == [1.0] * 4

    async def in_loop():
        return score(*symbolic)

    assert asyncio.run(in_loop()) == 1.0
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as processes:
        call = processes.submit(gsm8k_reward_fn, "", symbolic[0], [], [], answer=symbolic[1])
        assert call.result(timeout=300) == 1.0


@pytest.mark.asyncio
async def test_gsm8k_reward_through_the_wrapper_scores():
    wrapper = AsyncRewardWrapper(gsm8k_reward_fn, timeout_seconds=60)
    assert await wrapper("", "\\boxed{\\frac{84}{2}}", [], [], answer="42", messages=[]) == 1.0


def test_math_verify_is_not_imported_for_plain_numbers():
    code = (
        "import sys; from areal.reward.gsm8k import gsm8k_reward_fn as f\n"
        "assert f('', r'\\boxed{42}', [], [], answer='#### 42') == 1.0\n"
        "assert f('', r'\\boxed{43}', [], [], answer='#### 42') == 0.0\n"
        "assert 'sympy' not in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])


@pytest.mark.parametrize(
    "completion",
    [
        "\\boxed{10^{10^{10}}}",
        "\\boxed{9^{9^{9^9}}}",
        "\\boxed{2^{99999999}}",
        "\\boxed{(10^{9999})^{9999}}",
        "\\boxed{100000000!}",
        "\\boxed{" + "9" * 999 + "^2}",
    ],
)
def test_math_verify_astronomical_expression_scores_zero_before_the_limit(completion, caplog):
    assert score(completion, "$x^2+1$") == 0.0
    assert "no verdict within" not in caplog.text


def test_math_verify_slow_expression_times_out_and_leaves_no_thread(caplog):
    get_math_verify_worker().verify("$\\sqrt{2}$", "$x^2$")  # imports done
    before = set(threading.enumerate())
    nested = "(" * 300 + "1" + ")" * 300
    assert MathVerifyWorker(timeout=0.3).verify(f"\\boxed{{{nested}}}", "$x^2+\\sqrt{2}$") == 0.0
    assert "no verdict within 0.3 s" in caplog.text
    assert set(threading.enumerate()) <= before


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_run_with_timeout_first_stop_lost_in_a_destructor_stops_the_thread_all_the_same():
    entered = threading.Event()

    class Slow:
        def __del__(self):
            entered.set()
            until = time.monotonic() + 0.3
            while time.monotonic() < until:
                pass

    def work():
        Slow()
        while True:
            pass

    before = set(threading.enumerate())
    with pytest.raises(TimeoutError):
        run_with_timeout(work, 0.1)
    assert entered.is_set()
    assert set(threading.enumerate()) <= before


def test_math_verify_judge_failure_scores_zero(monkeypatch):
    worker = MathVerifyWorker()
    monkeypatch.setattr(worker, "_verify_symbolic", lambda *_: 1 / 0)
    assert worker.verify("x", "y") == 0.0
    with pytest.raises(ValueError, match="timeout=0"):
        MathVerifyWorker(timeout=0)


def test_run_with_timeout_passes_results_and_errors():
    assert run_with_timeout(lambda: 3, 5) == 3
    with pytest.raises(KeyError, match="boom"):
        run_with_timeout(lambda: {}["boom"], 5)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("a \\boxed{1} b \\boxed{\\frac{1}{2}} c", "\\frac{1}{2}"),
        ("\\boxed {7}", "7"),
        ("\\boxed{\\{1,2\\}}", "\\{1,2\\}"),
        ("\\boxed{1", None),
        ("\\boxed 5", None),
        ("\\boxed{  }", None),
        ("none", None),
    ],
)
def test_last_boxed_balances_braces(text, content):
    assert last_boxed(text) == content


def test_extract_answer_of_long_text_reads_its_end():
    assert extract_answer("1 " * 5000 + "so 42").endswith("so 42")


@pytest.mark.parametrize(
    ("completion", "reward"),
    [("46<eos>", 1), (" 46", 1), ("046", 1), ("46", 1), ("4<eos>", 0), ("46+", 0), ("46 46", 0), ("", 0), ("<eos>", 0)],
)
def test_arithmetic_reward_wants_the_number_and_nothing_else(completion, reward):
    assert arithmetic_reward_fn("12+34=", completion, [], [], answer="46") == reward
    assert arithmetic_reward_fn.areal_inline is True


def test_get_custom_reward_fn_finds_built_in_rewards_by_path():
    assert get_custom_reward_fn("openai/gsm8k") is gsm8k_reward_fn
    assert get_custom_reward_fn("arithmetic") is arithmetic_reward_fn
    assert get_custom_reward_fn("reasoning_gym/basic_arithmetic").__name__ == "reasoning_gym_reward_fn"
    with pytest.raises(UnsupportedFeatureError, match="geometry3k"):
        get_custom_reward_fn("hiyouga/geometry3k")
    with pytest.raises(ValueError, match="no built-in reward for 'nope'"):
        get_custom_reward_fn("nope")


class CallableReward:
    def __call__(self, *args, **columns):
        return 0.25


@pytest.mark.parametrize("given", ["areal.reward.gsm8k.gsm8k_reward_fn", "gsm8k", gsm8k_reward_fn])
def test_resolve_reward_fn_accepts_strings_and_functions(given):
    assert resolve_reward_fn(given) is gsm8k_reward_fn


def test_resolve_reward_fn_accepts_class_and_object():
    assert resolve_reward_fn(CallableReward)() == 0.25
    assert resolve_reward_fn(CallableReward())() == 0.25
    with pytest.raises(ConfigError, match="is not callable"):
        resolve_reward_fn("areal.reward.math_answer.MAX_TEXT")
