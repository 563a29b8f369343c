"""RLVRWorkflow: the row, the request, the reward call and the trajectory."""

from __future__ import annotations

import json
import math

import pytest
import torch

from areal.api.config.rollout import GenerationHyperparameters
from areal.api.io_struct import ModelResponse
from areal.api.trajectory import check_trajectory
from areal.dataset.char_tokenizer import build_char_tokenizer
from areal.infra import workflow_context
from areal.reward.arithmetic import arithmetic_reward_fn
from areal.utils import stats_tracker
from areal.utils.errors import ConfigError, RewardError, WorkflowError
from areal.workflow.episode import PromptEncoder
from areal.workflow.rlvr import RLVRWorkflow, default_data_extract_prompt_fn, default_get_input_ids_fn
from tests.fakes import InstantEngine

ROW = {"messages": [{"role": "user", "content": "1+1="}], "answer": "2"}
PROMPT, TWO, EOS = [5, 14, 5, 18], 6, 1  # "1+1=", "2", end

pytestmark = pytest.mark.asyncio


@pytest.fixture
def tokenizer():
    return build_char_tokenizer()


def workflow(tokenizer, reward_fn=arithmetic_reward_fn, gconfig=None, **kwargs):
    return RLVRWorkflow(reward_fn, gconfig or GenerationHyperparameters(max_new_tokens=8), tokenizer, **kwargs)


def inline(function):
    function.areal_inline = True
    return function


class RewardSpy:
    """Remembers its calls."""

    areal_inline = True

    def __init__(self, value=1.0):
        self.value = value
        self.calls = []

    def __call__(self, *args, **columns):
        self.calls.append((args, columns))
        return self.value


async def test_rlvr_episode_has_the_documented_columns(tokenizer):
    result = await workflow(tokenizer).arun_episode(InstantEngine((TWO, EOS), version=3), ROW)

    check_trajectory(result, batch_size=1)
    expected = {
        "input_ids": torch.tensor([[*PROMPT, TWO, EOS]], dtype=torch.int32),
        "loss_mask": torch.tensor([[0, 0, 0, 0, 1, 1]], dtype=torch.int32),
        "logprobs": torch.tensor([[0, 0, 0, 0, -0.5, -0.5]], dtype=torch.float32),
        "versions": torch.tensor([[-1, -1, -1, -1, 3, 3]], dtype=torch.int32),
        "attention_mask": torch.ones(1, 6, dtype=torch.bool),
        "rewards": torch.tensor([1.0]),
        "truncated": torch.tensor([False]),
    }
    assert set(result) == set(expected)
    for key, value in expected.items():
        torch.testing.assert_close(result[key], value, rtol=0, atol=0)


async def test_rlvr_reward_sees_strings_with_special_tokens_ids_and_columns(tokenizer):
    spy = RewardSpy()
    await workflow(tokenizer, spy).arun_episode(InstantEngine((TWO, EOS)), {**ROW, "level": 7})
    assert spy.calls == [(("1+1=", "2<eos>", PROMPT, [TWO, EOS]), {**ROW, "level": 7})]


async def test_rlvr_request_gets_stop_ids_and_one_sample(tokenizer):
    engine = InstantEngine((TWO, EOS))
    gconfig = GenerationHyperparameters(n_samples=8, max_new_tokens=5, stop_token_ids=[9])
    await workflow(tokenizer, gconfig=gconfig).arun_episode(engine, ROW)
    (request,) = engine.requests
    assert request.input_ids == PROMPT
    assert request.gconfig.stop_token_ids == [9, 0, 1]
    assert request.gconfig.n_samples == 1
    assert gconfig.n_samples == 8
    assert gconfig.stop_token_ids == [9]


async def test_rlvr_ignore_eos_adds_no_stop_ids(tokenizer):
    engine = InstantEngine((TWO, EOS))
    await workflow(tokenizer, gconfig=GenerationHyperparameters(ignore_eos=True)).arun_episode(engine, ROW)
    assert engine.requests[0].gconfig.stop_token_ids == []


class CutEngine(InstantEngine):
    def __init__(self, reply, stop_reason):
        super().__init__(reply)
        self.stop_reason = stop_reason

    async def agenerate(self, req):
        response = await super().agenerate(req)
        response.stop_reason = self.stop_reason
        return response


@pytest.mark.parametrize(("reason", "truncated"), [("length", True), ("stop", False)])
async def test_rlvr_truncated_is_what_the_engine_said(tokenizer, reason, truncated):
    # An eos exactly at the limit is a stop; the same tokens cut by the limit are truncated.
    result = await workflow(tokenizer).arun_episode(CutEngine((TWO, EOS), reason), ROW)
    assert result["truncated"].tolist() == [truncated]


async def test_rlvr_token_zero_and_pad_equal_eos_keep_mask_and_logprob(tokenizer):
    tokenizer.pad_token = tokenizer.eos_token
    result = await workflow(tokenizer, RewardSpy()).arun_episode(InstantEngine((7, 0, EOS)), ROW)
    assert result["loss_mask"].tolist() == [[0, 0, 0, 0, 1, 1, 1]]
    assert result["input_ids"].tolist() == [[*PROMPT, 7, 0, EOS]]
    assert result["attention_mask"].all()


@pytest.mark.parametrize("value", [None, math.nan, math.inf, "abc"])
async def test_rlvr_reward_that_is_no_finite_number_raises(tokenizer, value):
    with pytest.raises(RewardError):
        await workflow(tokenizer, RewardSpy(value)).arun_episode(InstantEngine(), ROW)


async def test_rlvr_reward_that_raises_is_chained(tokenizer):
    @inline
    def broken(*args, **columns):
        raise KeyError("no such answer")

    with pytest.raises(RewardError) as caught:
        await workflow(tokenizer, broken).arun_episode(InstantEngine(), ROW)
    assert isinstance(caught.value.__cause__, KeyError)


class OtherPromptEngine(InstantEngine):
    async def agenerate(self, req):
        return ModelResponse(input_tokens=[1], output_tokens=[2], output_logprobs=[0.0], output_versions=[0])


class ShortColumnsEngine(InstantEngine):
    async def agenerate(self, req):
        response = await super().agenerate(req)
        response.output_logprobs.pop()
        return response


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (OtherPromptEngine(), "continued another prompt"),
        (ShortColumnsEngine(), "3 tokens, 2 log-probs"),
        (CutEngine((2,), "abort"), "aborted"),
    ],
)
async def test_rlvr_malformed_reply_is_refused(tokenizer, engine, message):
    with pytest.raises(WorkflowError, match=message):
        await workflow(tokenizer).arun_episode(engine, ROW)


async def test_rlvr_row_without_messages_or_with_reserved_column_is_refused(tokenizer):
    with pytest.raises(WorkflowError, match="no column messages"):
        await workflow(tokenizer).arun_episode(InstantEngine(), {"question": "?"})
    with pytest.raises(WorkflowError, match="column 'prompt' clashes"):
        await workflow(tokenizer).arun_episode(InstantEngine(), {**ROW, "prompt": "?"})


def ids_of_number(prompt, tokenizer, enable_thinking):
    return tokenizer.encode(str(prompt)) + ([31] if enable_thinking else [])


def number_of(row):
    return row["number"]


@pytest.mark.parametrize("as_string", [False, True])
async def test_rlvr_functions_as_object_or_import_string(tokenizer, tmp_path, as_string):
    tokenizer.save_pretrained(tmp_path)
    functions = {"get_input_ids_fn": ids_of_number, "data_extract_prompt_fn": number_of}
    if as_string:
        functions = {key: f"tests.test_workflow_rlvr.{f.__name__}" for key, f in functions.items()}
    flow = RLVRWorkflow(
        "areal.reward.arithmetic.arithmetic_reward_fn",
        GenerationHyperparameters(),
        str(tmp_path),
        enable_thinking=True,
        **functions,
    )
    engine = InstantEngine((TWO, EOS))
    result = await flow.arun_episode(engine, {"number": 42, "answer": "2"})
    assert engine.requests[0].input_ids == [8, 6, 31]
    assert result["rewards"].tolist() == [1.0]


async def test_rlvr_function_that_is_not_callable_is_refused(tokenizer):
    with pytest.raises(ConfigError, match="get_input_ids_fn=3 is not callable"):
        workflow(tokenizer, get_input_ids_fn=3)


async def test_rlvr_prompt_cache_tells_rows_apart_and_survives_changes(tokenizer):
    engine = InstantEngine((TWO, EOS))
    flow = workflow(tokenizer, RewardSpy())
    first = {"messages": [{"role": "user", "content": "1+1="}], "answer": "2"}
    await flow.arun_episode(engine, first)
    engine.requests[0].input_ids.append(31)  # an engine may keep and change its list
    first["messages"][0]["content"] = "2+2="
    await flow.arun_episode(engine, first)
    await flow.arun_episode(engine, ROW)
    assert [r.input_ids for r in engine.requests[1:]] == [tokenizer.encode("2+2="), PROMPT]


async def test_rlvr_enable_thinking_reaches_the_template(tokenizer):
    tokenizer.chat_template = "{{ messages[0]['content'] }}{% if enable_thinking %}abc{% endif %}"
    engine = InstantEngine((TWO, EOS))
    await workflow(tokenizer, RewardSpy(), enable_thinking=True).arun_episode(engine, ROW)
    await workflow(tokenizer, RewardSpy()).arun_episode(engine, ROW)
    assert [tokenizer.decode(r.input_ids) for r in engine.requests] == ["1+1=abc", "1+1="]


async def test_rlvr_reward_stat_goes_to_the_scope_of_the_episode(tokenizer):
    stats_tracker.export_all()
    flow = workflow(tokenizer, RewardSpy(0.25))
    await flow.arun_episode(InstantEngine(), ROW)
    workflow_context.set(workflow_context.WorkflowContext(is_eval=True))
    flow.reward_fn.value = 0.75
    await flow.arun_episode(InstantEngine(), ROW)
    stats = stats_tracker.export_all()
    assert stats["rollout/reward"] == 0.25
    assert stats["eval-rollout/reward"] == 0.75


async def test_rlvr_defaults_take_messages_and_strings(tokenizer):
    assert default_data_extract_prompt_fn(ROW) == ROW["messages"]
    assert default_get_input_ids_fn(ROW["messages"], tokenizer, False) == PROMPT
    assert default_get_input_ids_fn("1+1=", tokenizer, False) == PROMPT
    json.dumps(default_get_input_ids_fn(ROW["messages"], tokenizer, False))


async def test_rlvr_prompt_cache_beyond_its_budget_starts_over(tokenizer, monkeypatch):
    monkeypatch.setattr("areal.workflow.episode._CACHE_TOKENS", 9)
    encode = PromptEncoder(tokenizer)
    for content in ("1+1=", "2+2=", "3+3=", "1+1="):
        ids, text = encode({"messages": [{"role": "user", "content": content}]})
        assert (ids, text) == (tokenizer.encode(content), content)
        assert sum(len(known) for known, _ in encode._known.values()) <= 9
