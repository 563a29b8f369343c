"""What the built-in workflows share: prompts as token ids, checked engine replies, the trajectory's tensors.

Runs once per episode inside the rollout loop, so everything here is cheap: a row's prompt is rendered once and kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from areal.utils.dynamic_import import import_from_string
from areal.utils.errors import ConfigError, WorkflowError
from areal.utils.hf_utils import apply_chat_template, load_hf_tokenizer

if TYPE_CHECKING:
    from areal.api.cli_args import GenerationHyperparameters
    from areal.api.io_struct import ModelResponse

_CACHE_TOKENS = 1_000_000  # of all prompts a workflow remembers, about 40 MB
RESERVED_COLUMNS = ("prompt", "completions", "prompt_ids", "completion_ids")

GetInputIds = Callable[[Any, Any, bool], Sequence[int]]
ExtractPrompt = Callable[[dict[str, Any]], Any]


def default_get_input_ids_fn(prompt: Any, tokenizer: Any, enable_thinking: bool) -> list[int]:
    """Token ids of a prompt: messages through the chat template with its generation prompt; a string as it is."""
    if isinstance(prompt, str):
        return list(tokenizer.encode(prompt))
    return list(apply_chat_template(tokenizer, prompt, add_generation_prompt=True, enable_thinking=enable_thinking))


def default_data_extract_prompt_fn(data: dict[str, Any]) -> Any:
    """The prompt of a dataset row: its ``messages``."""
    if "messages" not in data:
        raise WorkflowError(
            f"the dataset row has no column messages (it has {', '.join(map(str, data))}); rename its prompt "
            "column, or pass data_extract_prompt_fn"
        )
    return data["messages"]


class PromptEncoder:
    """Dataset row -> ``(token ids, prompt text with special tokens)``, remembered per prompt.

    Args:
        tokenizer: for both directions.
        enable_thinking: handed to the chat template.
        get_input_ids_fn: ``(prompt, tokenizer, enable_thinking) -> ids``; only the default's results are remembered, as
            another function may depend on more than the prompt.
        extract_prompt_fn: row -> prompt.
    """

    def __init__(
        self,
        tokenizer: Any,
        enable_thinking: bool = False,
        get_input_ids_fn: GetInputIds = default_get_input_ids_fn,
        extract_prompt_fn: ExtractPrompt = default_data_extract_prompt_fn,
    ) -> None:
        self._tokenizer = tokenizer
        self._enable_thinking = enable_thinking
        self._get_input_ids = get_input_ids_fn
        self._extract_prompt = extract_prompt_fn
        self._known: dict[Any, tuple[list[int], str]] = {}
        self._known_tokens = 0

    def __call__(self, data: dict[str, Any]) -> tuple[list[int], str]:
        """Ids and text of the row's prompt; the caller must not change the list."""
        prompt = self._extract_prompt(data)
        key = _prompt_key(prompt) if self._get_input_ids is default_get_input_ids_fn else None
        if key is not None and key in self._known:
            return self._known[key]
        ids = [int(i) for i in self._get_input_ids(prompt, self._tokenizer, self._enable_thinking)]
        if not ids:
            raise WorkflowError(f"the prompt has no tokens: {str(prompt)[:200]!r}")
        encoded = (ids, self._tokenizer.decode(ids))
        if key is not None:
            self._known_tokens += len(ids)
            if self._known_tokens > _CACHE_TOKENS:
                self._known.clear()
                self._known_tokens = len(ids)
            self._known[key] = encoded
        return encoded


def _prompt_key(prompt: Any) -> Any:
    """A hashable equal for equal prompts, or None where that cannot be told cheaply (images, tool calls)."""
    if isinstance(prompt, str):
        return prompt
    try:
        if any(len(m) != 2 or not isinstance(m["content"], str) for m in prompt):
            return None
        return tuple((m["role"], m["content"]) for m in prompt)
    except (TypeError, KeyError):
        return None


def import_if_string(value: Any, what: str) -> Any:
    """``value``, or what the import string ``value`` names; it must be callable."""
    resolved = import_from_string(value) if isinstance(value, str) else value
    if not callable(resolved):
        raise ConfigError(f"{what}={value!r} is not callable")
    return resolved


def load_if_string(tokenizer: Any) -> Any:
    """A tokenizer object, loaded if ``tokenizer`` is a path."""
    return load_hf_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer


def episode_gconfig(gconfig: GenerationHyperparameters, tokenizer: Any) -> GenerationHyperparameters:
    """Sampling settings of one request: one sample, ended by pad and eos too (unless ``ignore_eos``)."""
    single = gconfig.new(n_samples=1)
    return single if single.ignore_eos else single.new_with_stop_and_pad_token_ids(tokenizer)


def check_response(response: ModelResponse, input_ids: list[int]) -> None:
    """Raise :class:`WorkflowError` unless the reply continues exactly ``input_ids`` and its columns fit together."""
    if response.stop_reason == "abort":
        raise WorkflowError("the generation was aborted")
    if response.input_tokens != input_ids:
        raise WorkflowError(
            f"the engine continued another prompt: sent {len(input_ids)} tokens, got {len(response.input_tokens)} back"
        )
    n = len(response.output_tokens)
    if len(response.output_logprobs) != n or len(response.output_versions) != n:
        raise WorkflowError(
            f"the engine returned {n} tokens, {len(response.output_logprobs)} log-probs and "
            f"{len(response.output_versions)} versions"
        )


def check_columns(data: dict[str, Any]) -> None:
    """Raise :class:`WorkflowError` if a row's column would clash with the reward function's own arguments."""
    for name in RESERVED_COLUMNS:
        if name in data:
            raise WorkflowError(f"dataset column {name!r} clashes with an argument of the reward function; rename it")


def build_trajectory(
    tokens: list[int], loss_mask: list[int], logprobs: list[float], versions: list[int], reward: float, truncated: bool
) -> dict[str, Any]:
    """One sequence as a trajectory dict: columns ``[1, L]``, ``rewards`` and ``truncated`` ``[1]``."""
    return {
        "input_ids": torch.tensor([tokens], dtype=torch.int32),
        "loss_mask": torch.tensor([loss_mask], dtype=torch.int32),
        "logprobs": torch.tensor([logprobs], dtype=torch.float32),
        "versions": torch.tensor([versions], dtype=torch.int32),
        "attention_mask": torch.ones((1, len(tokens)), dtype=torch.bool),
        "rewards": torch.tensor([reward], dtype=torch.float32),
        "truncated": torch.tensor([truncated], dtype=torch.bool),
    }
