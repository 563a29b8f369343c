"""Distillation from a server: what a workflow's trajectory gets, over real HTTP, and what is refused by name."""

from __future__ import annotations

import asyncio
import functools
import math
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web

from areal.api.cli_args import GenerationHyperparameters
from areal.api.workflow_api import RolloutWorkflow
from areal.dataset.char_tokenizer import VOCAB_SIZE
from areal.infra import workflow_context
from areal.infra.rollout.groups import concat_tables
from areal.utils.errors import ConfigError, VocabularyError
from areal.workflow import taught
from areal.workflow.rlvr import RLVRWorkflow
from areal.workflow.taught import TaughtWorkflow, TeacherServer, TeacherServerError
from tests.controller.runs import worker_config
from tests.fakes import InstantEngine, char_tokenizer, save_tiny_model, tiny_model
from tests.trainer_runs import WORKFLOW, digit_share, rl_config, run_rl, tiny_policy, workflow_kwargs

ROW = {"messages": [{"role": "user", "content": "12+34="}]}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("teacher"), vocab_size=VOCAB_SIZE)


@functools.cache
def teacher_model() -> Any:
    return tiny_model(vocab_size=VOCAB_SIZE)


def logprobs(ids: list[int]) -> list[float]:
    """Log-prob of every token but the first under the teacher."""
    with torch.no_grad():
        scores = teacher_model()(torch.tensor([ids])).logits[0].log_softmax(-1)
    return scores[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].tolist()


class FakeServer:
    """Answers as vLLM and SGLang do, with a real model's log-probs; ``failures`` first answers are ``status``."""

    def __init__(self, failures: int = 0, status: int = 503) -> None:
        self.failures, self.status = failures, status
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.address = ""
        self.reply: dict[str, Any] | None = None
        self.models: Any = {"data": [{"id": "the-teacher"}]}

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else {}
        self.asked.append((request.path, body))
        if self.failures:
            self.failures -= 1
            return web.Response(status=self.status, text="starting")
        if request.path == "/v1/models":
            return web.json_response(self.models)
        if self.reply is not None:
            return web.json_response(self.reply)
        if request.path == "/generate":
            ids = body["input_ids"]
            shown = [i if i < VOCAB_SIZE - 1 else 0 for i in ids]  # as SGLang does
            entries = [[lp, i, None] for lp, i in zip([None, *logprobs(ids)], shown, strict=True)]
            return web.json_response({"text": "", "meta_info": {"input_token_logprobs": entries}})
        ids = body["prompt"]
        found = [{str(i): {"logprob": lp, "rank": 1}} for lp, i in zip(logprobs(ids), ids[1:], strict=True)]
        return web.json_response({"choices": [{"text": "x", "prompt_logprobs": [None, *found]}]})


@asynccontextmanager
async def serving(server: FakeServer) -> AsyncIterator[FakeServer]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.address = f"127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()


@contextmanager
def serving_beside(server: FakeServer) -> Iterator[FakeServer]:
    """The same from a thread of its own, beside a run."""
    loop, ready = asyncio.new_event_loop(), threading.Event()
    done = asyncio.Event()

    async def serve() -> None:
        async with serving(server):
            ready.set()
            await done.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(10)
        yield server
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join(10)
        loop.close()


def workflow(server: TeacherServer, **settings: Any) -> TaughtWorkflow:
    """RLVR whose samples the server scores."""
    inner = {"reward_fn": digit_share, "gconfig": GenerationHyperparameters(), "tokenizer": char_tokenizer()}
    tokenizer = char_tokenizer()
    return TaughtWorkflow(server, "areal.workflow.rlvr.RLVRWorkflow", inner, tokenizer=tokenizer, **settings)


def run(server: FakeServer, kind: Any, teacher: str, **settings: Any) -> dict[str, Any] | None:
    """One episode with a server of that kind."""

    async def episode() -> dict[str, Any] | None:
        async with serving(server):
            where = TeacherServer(server.address, kind, teacher, attempts=2, token="secret")
            return await workflow(where, **settings).arun_episode(InstantEngine((8, VOCAB_SIZE - 1, 1)), ROW)

    return asyncio.run(episode())


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_trajectory_gets_aligned_logprobs_and_the_settings_of_the_loss(kind: str, teacher: str) -> None:
    table = run(FakeServer(), kind, teacher, rl_loss_weight=0.0, distill_loss_weight=1.0, distill_estimator="k2")

    assert table is not None
    ids = table["input_ids"][0].tolist()
    assert table["teacher_logp"].dtype == torch.float32
    torch.testing.assert_close(table["teacher_logp"][0], torch.tensor([*logprobs(ids), 0.0]), rtol=0, atol=1e-5)
    assert [table[key] for key in ("rl_loss_weight", "distill_loss_weight", "distill_estimator")] == [0.0, 1.0, "k2"]
    assert concat_tables([table, table])["teacher_logp"].shape == (2, len(ids))


def test_evaluation_is_not_scored(teacher: str) -> None:
    server = FakeServer()

    async def episode() -> Any:
        workflow_context.set(workflow_context.WorkflowContext(is_eval=True))
        async with serving(server):
            where = TeacherServer(server.address, "vllm", teacher)
            return await workflow(where).arun_episode(InstantEngine((8, 1)), ROW)

    assert "teacher_logp" not in asyncio.run(episode())
    assert server.asked == []


@pytest.mark.parametrize("status", [408, 429, 503])
def test_server_that_answers_at_the_second_attempt_is_enough(
    status: int, teacher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(taught, "_PAUSE_S", 0.01)
    server = FakeServer(failures=1, status=status)

    table = run(server, "sglang", teacher)

    assert table is not None
    assert len(server.asked) == 2


def test_server_that_fails_or_is_not_there_is_named(teacher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taught, "_PAUSE_S", 0.01)
    nobody = workflow(TeacherServer("127.0.0.1:9", "vllm", teacher, attempts=2))

    with pytest.raises(TeacherServerError, match="did not answer: status 503: starting"):
        run(FakeServer(failures=9), "vllm", teacher)
    with pytest.raises(TeacherServerError, match="127.0.0.1:9/v1/models did not answer: ClientConnectorError"):
        asyncio.run(nobody.arun_episode(InstantEngine((8, 1)), ROW))


@pytest.mark.parametrize(
    ("kind", "reply"),
    [
        ("vllm", {"choices": [{"prompt_logprobs": None}]}),
        ("vllm", {"choices": [{"prompt_logprobs": [None, {"5": {"logprob": -1.0}}]}]}),
        ("vllm", {"choices": [{"prompt_logprobs": [None] + [{"31": {"logprob": -1.0}}] * 8}]}),
        ("vllm", {"choices": [{"prompt_logprobs": [None] + [{str(i): {"logprob": math.nan} for i in range(32)}] * 8}]}),
        ("vllm", {"choices": [{"prompt_logprobs": [None] + [{str(i): {"logprob": None} for i in range(32)}] * 8}]}),
        ("vllm", {"choices": [{"prompt_logprobs": [None] + [[-1.0]] * 8}]}),
        ("vllm", {"text": "x"}),
        ("sglang", {"meta_info": {"input_token_logprobs": [[None, 5, None]]}}),
        ("sglang", {"meta_info": {"input_token_logprobs": [[None, 5, None]] + [[-1.0, 31, None]] * 8}}),
        ("sglang", {"meta_info": {"input_token_logprobs": [[None, 5, None]] + [[-1.0, 0, None]] * 9}}),
        ("sglang", {"meta_info": {"input_token_logprobs": [[None, 5, None]] + [[-math.inf, 0, None]] * 8}}),
        ("sglang", {"meta_info": {"input_token_logprobs": [[None, 5, None]] + [[None, 0, None]] * 8}}),
        ("sglang", {"text": "x"}),
    ],
)
def test_reply_that_is_not_of_the_tokens_is_named(kind: str, reply: dict[str, Any], teacher: str) -> None:
    server = FakeServer()
    server.reply = reply

    with pytest.raises(TeacherServerError, match="not of the tokens that were sent"):
        run(server, kind, teacher)


@pytest.mark.parametrize("models", [{"object": "error"}, {"data": []}, ["x"], None])
def test_list_of_models_that_cannot_be_read_is_named(models: Any, teacher: str) -> None:
    server = FakeServer()
    server.models = models

    with pytest.raises(TeacherServerError, match="its list of models cannot be read.*is it a vllm server"):
        run(server, "vllm", teacher)


class TwoAnswers(RolloutWorkflow):
    """One sample of two sequences of different lengths."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, Any]:
        lengths = torch.tensor([[4], [3]])
        return {"input_ids": torch.full((2, 4), 5), "attention_mask": torch.arange(4) < lengths}


class HalfTeacher(TeacherServer):
    """Fails on the shorter sequence, for a reason, and never answers the other; notes what was given up."""

    given_up = 0

    async def score(self, ids: list[int]) -> list[float]:
        if len(ids) == 3:
            await asyncio.sleep(0)
            raise TeacherServerError("no such model") from ConnectionError("gone")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        raise AssertionError("not cancelled")


def test_sample_with_a_request_that_failed_gives_up_the_others(teacher: str) -> None:
    half = HalfTeacher("nowhere:1", "vllm", teacher)

    async def episode() -> int:
        with pytest.raises(TeacherServerError, match="no such model") as caught:
            await TaughtWorkflow(half, TwoAnswers(), tokenizer=char_tokenizer()).arun_episode(InstantEngine(), ROW)
        assert isinstance(caught.value.__cause__, ConnectionError)
        return half.given_up  # before the loop ends, which cancels what is left

    assert asyncio.run(episode()) == 1


def test_teacher_of_another_vocabulary_is_refused(teacher: str, tmp_path: Path) -> None:
    tokenizer = char_tokenizer()
    tokenizer.add_tokens(["more"])
    inner = {"reward_fn": digit_share, "gconfig": GenerationHyperparameters(), "tokenizer": tokenizer}

    with pytest.raises(VocabularyError, match="'more' is 32 here and absent there"):
        TaughtWorkflow(
            TeacherServer("nowhere:1", "vllm", teacher),
            "areal.workflow.rlvr.RLVRWorkflow",
            inner,
            tokenizer=tokenizer,
        )


def test_settings_out_of_range_are_refused_by_name(teacher: str) -> None:
    server = TeacherServer("nowhere:1", "vllm", teacher)
    warm = {"reward_fn": digit_share, "gconfig": GenerationHyperparameters(temperature=0.7), "tokenizer": None}

    with pytest.raises(ConfigError, match=r"gconfig.temperature=0.7"):
        TaughtWorkflow(server, "areal.workflow.rlvr.RLVRWorkflow", warm, tokenizer=char_tokenizer())
    made = RLVRWorkflow(**{**warm, "tokenizer": char_tokenizer()})
    with pytest.raises(ConfigError, match=r"gconfig.temperature=0.7"):
        TaughtWorkflow(server, made, tokenizer=char_tokenizer())
    with pytest.raises(ConfigError, match="distill_loss_weight"):
        workflow(server, rl_loss_weight=0.0, distill_loss_weight=0.0)
    with pytest.raises(ConfigError, match="kind='native'"):
        TeacherServer("nowhere:1", "native", teacher)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="attempts=0"):
        TeacherServer("nowhere:1", "vllm", teacher, attempts=0)


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize(
    ("kind", "make_config"), [("sglang", rl_config), ("vllm", worker_config)], ids=["inline", "worker processes"]
)
def test_run_with_a_server_equals_one_with_a_teacher_section(
    kind: str, make_config: Any, teacher: str, tmp_path: Path
) -> None:
    policy = tiny_policy(tmp_path / "policy", seed=7)
    numbers = {"rl_loss_weight": 0.5, "distill_loss_weight": 0.5, "distill_estimator": "k2"}
    section = {"path": teacher, **numbers}
    expected = run_rl(rl_config(tmp_path / "section", policy, "total_train_steps=2", f"teacher={section}"))
    config = make_config(tmp_path / "server", policy, "total_train_steps=2")

    with serving_beside(FakeServer()) as server:
        kwargs = {
            "teacher": TeacherServer(server.address, kind, teacher),
            "workflow": WORKFLOW,
            "workflow_kwargs": workflow_kwargs(config),
            "tokenizer": policy,
            **numbers,
        }
        found = run_rl(config, workflow="areal.workflow.taught.TaughtWorkflow", workflow_kwargs=kwargs)

    assert expected[0]["ppo_actor/update/rkl_loss/avg"] > 0.1
    for mine, theirs in zip(expected, found, strict=True):
        for key in ("ppo_actor/task_reward/avg", "ppo_actor/update/rkl_loss/avg", "ppo_actor/update/grad_norm"):
            assert theirs[key] == pytest.approx(mine[key], rel=1e-3, abs=1e-4), key
