"""Try, and on failure try again in the same conversation: one growing sequence, trained on its completions only.

The sequence is kept as token ids from the first to the last turn and never re-tokenised, so every trained token is the
one that was sampled. Each failed turn multiplies the final reward by ``turn_discount``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from areal.api.cli_args import GenerationHyperparameters
from areal.api.io_struct import ModelRequest, ModelResponse
from areal.api.reward_api import AsyncRewardWrapper
from areal.api.workflow_api import RolloutWorkflow
from areal.infra import workflow_context
from areal.reward import resolve_reward_fn
from areal.utils import stats_tracker
from areal.utils.errors import ConfigError, WorkflowError
from areal.utils.hf_utils import apply_chat_template
from areal.workflow.episode import (
    PromptEncoder,
    build_trajectory,
    check_columns,
    check_response,
    episode_gconfig,
    load_if_string,
)

if TYPE_CHECKING:
    from areal.api.engine_api import InferenceEngine

DEFAULT_RETRY_MESSAGE = "That answer is not right, or it could not be read. Think again and give a new final answer."


@dataclass
class TokenLog:
    """One growing sequence and its per-token columns."""

    tokens: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def add_given(self, tokens: list[int]) -> None:
        """Append tokens nobody sampled: prompt, end marks, the retry message."""
        n = len(tokens)
        self.tokens += tokens
        self.loss_mask += [0] * n
        self.logprobs += [0.0] * n
        self.versions += [-1] * n

    def add_sampled(self, response: ModelResponse) -> None:
        """Append a completion."""
        self.tokens += response.output_tokens
        self.loss_mask += [1] * len(response.output_tokens)
        self.logprobs += response.output_logprobs
        self.versions += response.output_versions


class MultiTurnWorkflow(RolloutWorkflow):
    """Generate until the reward is not zero, at most ``max_turns`` times.

    Args:
        reward_fn: as for :class:`areal.workflow.rlvr.RLVRWorkflow`; it sees the latest completion only, and as prompt
            everything before it.
        gconfig: sampling settings of each turn; ``max_tokens`` bounds the whole sequence.
        tokenizer: tokenizer (with a chat template) or path.
        max_turns: completions per episode, > 0.
        turn_discount: factor per failed turn, in (0, 1].
        retry_message: what the user says after a failed turn.

    Raises:
        ConfigError: (a ValueError) ``max_turns`` or ``turn_discount`` is out of range.
    """

    def __init__(  # noqa: PLR0913 - the 1.x signature plus the message
        self,
        reward_fn: Any,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        max_turns: int,
        turn_discount: float,
        *,
        retry_message: str = DEFAULT_RETRY_MESSAGE,
    ) -> None:
        if max_turns <= 0:
            raise ConfigError(f"max_turns={max_turns} must be > 0")
        if not 0 < turn_discount <= 1:
            raise ConfigError(f"turn_discount={turn_discount} must be in (0, 1]")
        self.reward_fn = resolve_reward_fn(reward_fn)
        self.tokenizer = load_if_string(tokenizer)
        self.gconfig = episode_gconfig(gconfig, self.tokenizer)
        self.max_turns = max_turns
        self.turn_discount = turn_discount
        self.retry_ids = tokenize_retry(self.tokenizer, retry_message)
        self._score = AsyncRewardWrapper(self.reward_fn)
        self._encode = PromptEncoder(self.tokenizer)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Any]:
        """Play one episode.

        Returns:
            A trajectory of one sequence; its reward is the last turn's, times ``turn_discount`` per failed turn before
            it.

        Raises:
            RewardError: the reward function failed or returned no finite number.
            WorkflowError: the row or an engine's reply is malformed.
        """
        check_columns(data)
        log = TokenLog()
        log.add_given(self._encode(data)[0])
        for turn in range(1, self.max_turns + 1):
            response, reward = await self._play_turn(engine, log, data)
            if reward != 0 or turn == self.max_turns or not self._room_for_retry(log, response):
                break
            self._add_retry(log, response)
        reward *= self.turn_discount ** (turn - 1)
        stats_tracker.get(workflow_context.stat_scope()).scalar(reward=reward, num_turns=turn)
        return build_trajectory(
            log.tokens, log.loss_mask, log.logprobs, log.versions, reward, truncated=response.stop_reason == "length"
        )

    async def _play_turn(
        self, engine: InferenceEngine, log: TokenLog, data: dict[str, Any]
    ) -> tuple[ModelResponse, float]:
        prompt_ids = list(log.tokens)
        request = ModelRequest(input_ids=list(prompt_ids), gconfig=self.gconfig, tokenizer=self.tokenizer)
        response = await engine.agenerate(request)
        check_response(response, prompt_ids)
        log.add_sampled(response)
        prompt, completion = self.tokenizer.decode(prompt_ids), self.tokenizer.decode(response.output_tokens)
        return response, await self._score(prompt, completion, prompt_ids, list(response.output_tokens), **data)

    def _missing_eos(self, response: ModelResponse) -> list[int]:
        eos = self.tokenizer.eos_token_id
        return [] if eos is None or response.output_tokens[-1:] == [eos] else [eos]

    def _room_for_retry(self, log: TokenLog, response: ModelResponse) -> bool:
        needed = len(log.tokens) + len(self._missing_eos(response)) + len(self.retry_ids)
        return needed < self.gconfig.max_tokens

    def _add_retry(self, log: TokenLog, response: ModelResponse) -> None:
        log.add_given(self._missing_eos(response))
        log.add_given(self.retry_ids)


def tokenize_retry(tokenizer: Any, message: str) -> list[int]:
    """Tokens from the end of an assistant's turn (its eos) to the start of the next: separators, ``message``, openings.

    They are the difference between the templated [assistant, user] and [assistant], cut right after the assistant's
    eos, so that a line break which the template puts after eos is not lost between turns.

    Raises:
        WorkflowError: the template renders the assistant's turn differently once a user turn follows.
    """
    assistant = {"role": "assistant", "content": "a"}
    before = apply_chat_template(tokenizer, [assistant])
    after = apply_chat_template(
        tokenizer, [assistant, {"role": "user", "content": message}], add_generation_prompt=True
    )
    end = len(before)
    eos = tokenizer.eos_token_id
    if eos in before:
        after_eos = len(before) - before[::-1].index(eos)
        if not tokenizer.decode(before[after_eos:]).strip():
            end = after_eos
    if after[:end] != before[:end]:
        raise WorkflowError(
            "this chat template renders an assistant's turn differently once a user's turn follows, so turns cannot be "
            "chained token by token; use another template"
        )
    return list(after[end:])
