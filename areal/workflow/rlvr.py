"""One prompt, one completion, one verifiable reward: the workflow behind plain GRPO.

A dataset row comes in, a trajectory of one sequence goes out; the rollout executor runs it ``group_size`` times per
row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from areal.api.cli_args import GenerationHyperparameters
from areal.api.io_struct import ModelRequest
from areal.api.reward_api import AsyncRewardWrapper
from areal.api.workflow_api import RolloutWorkflow
from areal.infra import workflow_context
from areal.reward import resolve_reward_fn
from areal.utils import stats_tracker
from areal.workflow.episode import (
    ExtractPrompt,
    GetInputIds,
    PromptEncoder,
    build_trajectory,
    check_columns,
    check_response,
    default_data_extract_prompt_fn,
    default_get_input_ids_fn,
    episode_gconfig,
    import_if_string,
    load_if_string,
)

if TYPE_CHECKING:
    from areal.api.engine_api import InferenceEngine

__all__ = ["RLVRWorkflow", "default_data_extract_prompt_fn", "default_get_input_ids_fn"]


class RLVRWorkflow(RolloutWorkflow):
    """Generate once, score once.

    Args:
        reward_fn: ``fn(prompt, completion, prompt_ids, completion_ids, **row) -> float`` as a function, object, class
            or import string; see :mod:`areal.reward`.
        gconfig: sampling settings; pad and eos are added to the stop ids.
        tokenizer: tokenizer or path.
        enable_thinking: handed to the chat template.
        get_input_ids_fn: ``(prompt, tokenizer, enable_thinking) -> token ids``, or its import string.
        data_extract_prompt_fn: ``row -> prompt``, or its import string; default ``row["messages"]``.
    """

    def __init__(  # noqa: PLR0913 - the 1.x signature
        self,
        reward_fn: Any,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        enable_thinking: bool = False,
        get_input_ids_fn: GetInputIds | str = default_get_input_ids_fn,
        data_extract_prompt_fn: ExtractPrompt | str = default_data_extract_prompt_fn,
    ) -> None:
        self.reward_fn = resolve_reward_fn(reward_fn)
        self.tokenizer = load_if_string(tokenizer)
        self.gconfig = episode_gconfig(gconfig, self.tokenizer)
        self.enable_thinking = enable_thinking
        self._score = AsyncRewardWrapper(self.reward_fn)
        self._encode = PromptEncoder(
            self.tokenizer,
            enable_thinking,
            import_if_string(get_input_ids_fn, "get_input_ids_fn"),
            import_if_string(data_extract_prompt_fn, "data_extract_prompt_fn"),
        )

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Any]:
        """Sample one completion of the row's prompt and score it.

        Returns:
            Columns ``[1, L]`` (int32 ids, masks and versions; float32 log-probs), ``rewards`` and ``truncated``
            ``[1]``.

        Raises:
            RewardError: the reward function failed or returned no finite number: the sample is dropped and counted.
            WorkflowError: the row or the engine's reply is malformed.
        """
        check_columns(data)
        prompt_ids, prompt = self._encode(data)
        request = ModelRequest(input_ids=list(prompt_ids), gconfig=self.gconfig, tokenizer=self.tokenizer)
        response = await engine.agenerate(request)
        check_response(response, prompt_ids)
        output = response.output_tokens
        completion = self.tokenizer.decode(output)
        reward = await self._score(prompt, completion, list(prompt_ids), list(output), **data)
        stats_tracker.get(workflow_context.stat_scope()).scalar(reward=reward)
        n = len(prompt_ids)
        return build_trajectory(
            tokens=prompt_ids + output,
            loss_mask=[0] * n + [1] * len(output),
            logprobs=[0.0] * n + response.output_logprobs,
            versions=[-1] * n + response.output_versions,
            reward=reward,
            truncated=response.stop_reason == "length",
        )
