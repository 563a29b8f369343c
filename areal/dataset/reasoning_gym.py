"""Any task of the ``reasoning_gym`` package: ``path: reasoning_gym/<task>``, for instance ``reasoning_gym/chain_sum``.

``dataset_kwargs``: ``size`` (default 1000), ``seed`` (default: 1 for the split ``train``, 2 otherwise; both give other
problems), ``instruction`` (text after the question), and every setting of the task itself. RL rows hold ``messages``,
``answer``, ``task`` and ``entry``, which is what :func:`areal.reward.reasoning_gym.reasoning_gym_reward_fn` needs to
call the task's own scorer. Needs the extra ``areal[reasoning-gym]``.
"""

from __future__ import annotations

from typing import Any

from areal.dataset.rows import (
    DatasetRequest,
    RowDataset,
    RowDict,
    encode_all,
    finish_rl,
    finish_sft,
    prompt_and_target,
    require_tokenizer,
    require_type,
)
from areal.utils.errors import DataError
from areal.utils.hf_utils import apply_chat_template
from areal.utils.optional import import_extra
from areal.utils.registry import unknown_name_message

NAME = "reasoning_gym"
DEFAULT_INSTRUCTION = "Give your final answer inside \\boxed{}."


def build_reasoning_gym(request: DatasetRequest) -> RowDataset:
    """Problems of one task.

    Raises:
        ConfigError: the package is missing.
        DataError: the task is unknown, or it refuses a setting.
    """
    require_type(request)
    options = dict(request.options)
    _, _, task = request.path.partition(f"{NAME}/")
    task = options.pop("task", None) or task.strip("/")
    gym = import_extra("reasoning_gym", "reasoning-gym")
    known = sorted(gym.factory.DATASETS)
    if task not in known:
        raise DataError(unknown_name_message("reasoning_gym task (path: reasoning_gym/<task>)", task, known))
    instruction = options.pop("instruction", DEFAULT_INSTRUCTION)
    options.setdefault("size", 1000)
    options.setdefault("seed", 1 if request.split == "train" else 2)
    try:
        problems = gym.create_dataset(task, **options)
    except (TypeError, ValueError, AssertionError) as exc:
        raise DataError(f"reasoning_gym task {task!r} refuses dataset_kwargs {options}: {exc}") from exc
    rows = [_row(task, problems[i], instruction) for i in range(len(problems))]
    return finish_rl(rows, request) if request.type == "rl" else finish_sft(_supervised(rows, request), request)


def _row(task: str, entry: dict[str, Any], instruction: str) -> RowDict:
    content = f"{entry['question']}\n{instruction}" if instruction else entry["question"]
    return {
        "messages": [{"role": "user", "content": content}],
        "answer": str(entry["answer"]),
        "task": task,
        "entry": entry,
    }


def _supervised(rows: list[RowDict], request: DatasetRequest) -> list[RowDict]:
    tokenizer = require_tokenizer(request, "type=sft")
    prompts = [apply_chat_template(tokenizer, row["messages"], add_generation_prompt=True) for row in rows]
    targets = encode_all(tokenizer, [f"\\boxed{{{row['answer']}}}" for row in rows], add_special_tokens=False)
    return [prompt_and_target(p, [*t, tokenizer.eos_token_id]) for p, t in zip(prompts, targets, strict=True)]
