"""MultiTurnWorkflow: exact tokens over turns, discounted reward, room for retries."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from areal.api.config.rollout import GenerationHyperparameters
from areal.api.io_struct import ModelResponse
from areal.api.trajectory import check_trajectory
from areal.dataset.char_tokenizer import build_char_tokenizer
from areal.utils import stats_tracker
from areal.utils.errors import WorkflowError
from areal.workflow.multi_turn import MultiTurnWorkflow, tokenize_retry

VECTOR = json.loads((Path(__file__).parent / "vectors" / "reward_discount.json").read_text())
ROW = {"messages": [{"role": "user", "content": "1+1="}], "answer": "2"}
PROMPT, EOS = [5, 14, 5, 18], 1
# A template in the style of ChatML: a line break follows the assistant's eos, and the next turn opens with "a:".
LINES = (
    "{%- for m in messages -%}{{- ('b:' if m['role'] == 'user' else 'a:') + m['content'] + "
    "(eos_token + '\n' if m['role'] == 'assistant' else '\n') -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- 'a:' -}}{%- endif -%}"
)

pytestmark = pytest.mark.asyncio


class ScriptedEngine:
    """Answers with one reply per turn; each turn is drawn by the next version."""

    def __init__(self, *replies, stop_reason="stop"):
        self.replies = list(replies)
        self.requests = []
        self.stop_reason = stop_reason

    async def agenerate(self, req):
        turn = len(self.requests)
        self.requests.append(req)
        tokens = list(self.replies[turn])
        return ModelResponse(
            input_tokens=list(req.input_ids),
            output_tokens=tokens,
            output_logprobs=[-0.1 * (turn + 1)] * len(tokens),
            output_versions=[turn] * len(tokens),
            stop_reason=self.stop_reason,
        )


class AnswerReward:
    """1 when the completion starts with the row's answer; remembers prompts and completions."""

    areal_inline = True

    def __init__(self):
        self.seen = []

    def __call__(self, prompt, completion, prompt_ids, completion_ids, answer, **columns):
        self.seen.append((prompt, completion))
        return float(completion.startswith(answer))


@pytest.fixture
def tokenizer():
    return build_char_tokenizer()


def workflow(tokenizer, max_turns=3, turn_discount=0.9, **kwargs):
    gconfig = kwargs.pop("gconfig", GenerationHyperparameters(max_new_tokens=8))
    kwargs.setdefault("retry_message", "x")
    return MultiTurnWorkflow(AnswerReward(), gconfig, tokenizer, max_turns, turn_discount, **kwargs)


@pytest.mark.parametrize(
    ("failures", "key"),
    [(0, "multi_turn_first_try"), (1, "multi_turn_second_try"), (2, "multi_turn_third_try")],
)
async def test_multi_turn_reward_vector_discounts_each_failed_turn(tokenizer, failures, key):
    stats_tracker.export_all()
    engine = ScriptedEngine(*[[7, EOS]] * failures, [6, EOS])
    result = await workflow(tokenizer, turn_discount=VECTOR["config"]["turn_discount"]).arun_episode(engine, ROW)
    torch.testing.assert_close(result["rewards"], torch.tensor([VECTOR["outputs"][key]]), rtol=0, atol=1e-6)
    stats = stats_tracker.export_all()
    assert stats["rollout/num_turns"] == failures + 1
    assert stats["rollout/reward"] == pytest.approx(VECTOR["outputs"][key])


async def test_multi_turn_sequence_keeps_every_sampled_token_once(tokenizer):
    tokenizer.chat_template = LINES
    engine = ScriptedEngine([7, EOS], [8, 9], [6, EOS])  # the second reply lacks its eos
    flow = workflow(tokenizer)
    result = await flow.arun_episode(engine, ROW)

    check_trajectory(result, batch_size=1)
    text = tokenizer.decode(result["input_ids"][0].tolist())
    assert text == "b:1+1=\na:3<eos>\nb:x\na:45<eos>\nb:x\na:2<eos>"  # no line break lost, no text twice
    sampled = result["loss_mask"][0].bool()
    assert result["input_ids"][0][sampled].tolist() == [7, EOS, 8, 9, 6, EOS]
    assert result["versions"][0][sampled].tolist() == [0, 0, 1, 1, 2, 2]
    torch.testing.assert_close(
        result["logprobs"][0][sampled], torch.tensor([-0.1, -0.1, -0.2, -0.2, -0.3, -0.3]), rtol=0, atol=1e-6
    )
    assert (result["versions"][0][~sampled] == -1).all()
    assert (result["logprobs"][0][~sampled] == 0).all()
    for earlier, later in zip(engine.requests, engine.requests[1:], strict=False):
        assert later.input_ids[: len(earlier.input_ids)] == earlier.input_ids


async def test_multi_turn_scores_the_latest_completion_only(tokenizer):
    flow = workflow(tokenizer)
    await flow.arun_episode(ScriptedEngine([7, EOS], [6, EOS]), ROW)
    assert flow.reward_fn.seen == [("1+1=", "3<eos>"), ("1+1=3<eos>x", "2<eos>")]


async def test_multi_turn_all_turns_failed_gives_zero_and_all_turns(tokenizer):
    engine = ScriptedEngine(*[[7, EOS]] * 3)
    result = await workflow(tokenizer).arun_episode(engine, ROW)
    assert len(engine.requests) == 3
    assert result["rewards"].tolist() == [0.0]
    assert result["input_ids"][0, -1] == EOS  # no retry message after the last turn


async def test_multi_turn_without_room_for_another_turn_stops(tokenizer):
    engine = ScriptedEngine(*[[7, EOS]] * 5, stop_reason="length")
    gconfig = GenerationHyperparameters(max_new_tokens=4, max_tokens=10)
    result = await workflow(tokenizer, max_turns=5, gconfig=gconfig).arun_episode(engine, ROW)
    assert len(engine.requests) == 2
    assert result["input_ids"].shape == (1, 9)
    assert result["truncated"].tolist() == [True]


@pytest.mark.parametrize(
    ("max_turns", "discount", "message"),
    [(0, 0.9, "max_turns=0"), (2, 0.0, "turn_discount"), (2, 1.1, "turn_discount")],
)
async def test_multi_turn_bad_settings_are_refused(tokenizer, max_turns, discount, message):
    with pytest.raises(ValueError, match=message):
        workflow(tokenizer, max_turns, discount)


async def test_multi_turn_engine_that_does_not_echo_the_prompt_is_refused(tokenizer):
    class Forgetful(ScriptedEngine):
        async def agenerate(self, req):
            response = await super().agenerate(req)
            response.input_tokens = response.input_tokens[-2:]
            return response

    with pytest.raises(WorkflowError, match="continued another prompt"):
        await workflow(tokenizer).arun_episode(Forgetful([7, EOS]), ROW)


async def test_tokenize_retry_template_that_rewrites_history_is_refused(tokenizer):
    # Such as templates that strip an earlier assistant's thoughts.
    tokenizer.chat_template = (
        "{%- for m in messages -%}{{- 'c' if m['role'] == 'assistant' and not loop.last else m['content'] -}}"
        "{{- eos_token if m['role'] == 'assistant' else '' -}}{%- endfor -%}"
    )
    with pytest.raises(WorkflowError, match="renders an assistant's turn differently"):
        tokenize_retry(tokenizer, "x")


async def test_tokenize_retry_keeps_what_the_template_puts_after_eos(tokenizer):
    tokenizer.chat_template = LINES
    assert tokenizer.decode(tokenize_retry(tokenizer, "x")) == "\nb:x\na:"
