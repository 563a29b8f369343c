"""Distillation from an inference server: another workflow's episodes, with a teacher's log-probs of what was drawn.

A row comes in; the inner workflow's trajectory goes out with ``teacher_logp`` and the numbers that the loss of
distillation reads, as if a ``teacher:`` section had scored it (``docs/en/algorithms/distillation.md``). The teacher is
a vLLM or SGLang server that somebody else runs; it scores while others are still generated. Evaluation is not scored.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

from areal.api.config.ppo import TeacherConfig
from areal.api.workflow_api import RolloutWorkflow
from areal.infra import workflow_context
from areal.infra.rollout.groups import as_table
from areal.infra.rollout.resolve import resolve_workflow
from areal.utils.errors import ConfigError, WorkflowError
from areal.utils.hf_utils import require_same_vocabulary
from areal.workflow.episode import load_if_string

if TYPE_CHECKING:
    from collections.abc import Mapping

    from areal.api.engine_api import InferenceEngine

_PAUSE_S = 0.5  # before the second attempt; it doubles
_BUSY = (408, 429)  # what a server or proxy says below 500 when the same call may be answered later


class TeacherServerError(WorkflowError):
    """The teacher's server did not score a sequence; the sample is dropped and counted."""


@dataclass
class TeacherServer:
    """Where a teacher's log-probs come from.

    Attributes:
        address: ``host:port`` or URL of the server.
        kind: of the server; both report log-probs of a prompt at temperature 1.
        tokenizer: directory or hub id of the teacher's tokenizer, to compare its vocabulary.
        token: bearer token, if the server wants one.
        timeout_s: limit of one attempt.
        attempts: of a request that the server does not answer.
    """

    address: str
    kind: Literal["vllm", "sglang"]
    tokenizer: str
    token: str | None = field(default=None, repr=False)
    timeout_s: float = 300.0
    attempts: int = 4

    def __post_init__(self) -> None:
        if self.kind not in ("vllm", "sglang"):
            raise ConfigError(f"TeacherServer: kind={self.kind!r} must be vllm or sglang")
        if self.timeout_s <= 0 or self.attempts < 1:
            raise ConfigError(f"TeacherServer: timeout_s={self.timeout_s} must be > 0, attempts={self.attempts} >= 1")
        self._model: str | None = None

    async def score(self, ids: list[int]) -> list[float]:
        """Log-prob (nats) of every token of one sequence given those before it; 0 for the first.

        Raises:
            TeacherServerError: no attempt was answered, or the reply is not of these tokens, or not finite.
        """
        if self.kind == "sglang":
            params = {"max_new_tokens": 0, "temperature": 1.0}
            body = {"input_ids": ids, "sampling_params": params, "return_logprob": True, "logprob_start_len": 0}
            return self._read(ids, await self._call("POST", "/generate", body), _sglang_entries)
        if self._model is None:
            models = await self._call("GET", "/v1/models", None)
            with self._reading("its list of models cannot be read"):
                self._model = str(models["data"][0]["id"])
        body = {"model": self._model, "prompt": ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        return self._read(ids, await self._call("POST", "/v1/completions", body), _vllm_entries)

    def _read(self, ids: list[int], reply: Any, entries: Any) -> list[float]:
        with self._reading("its reply is not of the tokens that were sent"):
            found: list[dict[int, float]] = entries(reply, ids)
            if len(found) != len(ids):
                raise ValueError(f"{len(found)} log-probs for {len(ids)} tokens")
            logprobs = [float(known[token]) for token, known in zip(ids[1:], found[1:], strict=True)]
            if not all(map(math.isfinite, logprobs)):
                raise ValueError("a log-prob is NaN or infinite")
            return [0.0, *logprobs]

    @contextmanager
    def _reading(self, problem: str) -> Iterator[None]:
        """Turn what a reply of another form leads to into a :class:`TeacherServerError`."""
        try:
            yield
        except (AttributeError, KeyError, IndexError, TypeError, ValueError) as exc:
            raise TeacherServerError(
                f"teacher at {self.address}: {problem} ({type(exc).__name__}: {exc}); is it a {self.kind} server?"
            ) from exc

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        import aiohttp

        url = (self.address if "://" in self.address else f"http://{self.address}").rstrip("/") + path
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        limit = aiohttp.ClientTimeout(total=self.timeout_s)
        problem: BaseException | str = ""
        for attempt in range(self.attempts):
            if attempt:
                await asyncio.sleep(_PAUSE_S * 2 ** (attempt - 1))
            session = await workflow_context.get_aiohttp_session()
            try:
                async with session.request(method, url, json=body, headers=headers, timeout=limit) as response:
                    if response.status == 200:
                        return await response.json(content_type=None)
                    problem = f"status {response.status}: {(await response.text())[:200]}"
                    if response.status < 500 and response.status not in _BUSY:
                        break  # the call is wrong, and would be again
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as exc:
                problem = exc
        shown = problem if isinstance(problem, str) else f"{type(problem).__name__}: {problem}"
        raise TeacherServerError(f"teacher at {url} did not answer: {shown}") from (
            None if isinstance(problem, str) else problem
        )


class TaughtWorkflow(RolloutWorkflow):
    """Runs another workflow and has a teacher score its sequences.

    Args:
        teacher: the server.
        workflow: object, class or import string, as ``PPOTrainer.train`` takes it.
        workflow_kwargs: constructor arguments of a class or an import string.
        tokenizer: of the policy; tokenizer or path.
        rl_loss_weight, distill_loss_weight, distill_estimator: as in a ``teacher:`` section.

    Raises:
        VocabularyError: the teacher's token ids mean something else.
        ConfigError: a weight is out of range, or samples are drawn at another temperature than 1.
    """

    def __init__(  # noqa: PLR0913 - a workflow, a teacher, and the three numbers of a teacher section
        self,
        teacher: TeacherServer,
        workflow: Any,
        workflow_kwargs: dict[str, Any] | None = None,
        *,
        tokenizer: Any,
        rl_loss_weight: float = 1.0,
        distill_loss_weight: float = 0.005,
        distill_estimator: Literal["k1", "k2"] = "k1",
    ) -> None:
        self._settings = TeacherConfig(
            rl_loss_weight=rl_loss_weight, distill_loss_weight=distill_loss_weight, distill_estimator=distill_estimator
        ).loss_settings()
        _require_temperature_1((workflow_kwargs or {}).get("gconfig"))
        require_same_vocabulary(load_if_string(tokenizer), teacher.tokenizer, f"teacher at {teacher.address}")
        self.teacher = teacher
        self.workflow = resolve_workflow(workflow, workflow_kwargs)
        _require_temperature_1(getattr(self.workflow, "gconfig", None))

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Any] | None:
        """The inner workflow's trajectory with ``teacher_logp`` ``[n, S]``, float32, aligned, and three scalars.

        Raises:
            TeacherServerError: the server did not score it.
        """
        result = await self.workflow.arun_episode(engine, data)
        if result is None or workflow_context.get().is_eval:
            return result
        table = as_table(result)
        rows = [
            ids[mask.bool()].tolist() for ids, mask in zip(table["input_ids"], table["attention_mask"], strict=True)
        ]
        scores = await self._score(rows)
        aligned = torch.zeros(table["input_ids"].shape, dtype=torch.float32)
        for row, logprobs in zip(aligned, scores, strict=True):
            row[: len(logprobs) - 1] = torch.tensor(logprobs[1:])
        return {**table, "teacher_logp": aligned, **self._settings}

    async def _score(self, rows: list[list[int]]) -> list[list[float]]:
        """Scores of a sample's sequences, asked for at once; the first failure ends the other requests."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self.teacher.score(ids)) for ids in rows]
        except ExceptionGroup as failures:
            first = failures.exceptions[0]
            raise first from first.__cause__
        return [task.result() for task in tasks]


def _require_temperature_1(gconfig: Any) -> None:
    """Refuse samples whose log-probs a server cannot report.

    Raises:
        ConfigError: they are drawn at another temperature.
    """
    if gconfig is not None and not gconfig.greedy and gconfig.temperature != 1:
        raise ConfigError(
            f"gconfig.temperature={gconfig.temperature:g}: a teacher's server reports log-probs at temperature 1 "
            "only; use 1, or a teacher section"
        )


def _sglang_entries(reply: Any, ids: list[int]) -> list[dict[int, float]]:
    """SGLang shows the vocabulary's last id as 0; the log-prob is of the id that was sent all the same."""
    entries = enumerate(reply["meta_info"]["input_token_logprobs"])
    return [{} if logprob is None else {shown or ids[i]: logprob} for i, (logprob, shown, *_) in entries]


def _vllm_entries(reply: Any, ids: list[int]) -> list[dict[int, float]]:
    return [
        {int(token): known["logprob"] for token, known in (entry or {}).items()}
        for entry in reply["choices"][0]["prompt_logprobs"]
    ]
