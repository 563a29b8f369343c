"""A user's script that defines workflow, reward and filter itself; run by test_user_script.py."""

from __future__ import annotations

import sys
from typing import Any

from areal import PPOTrainer
from areal.api.cli_args import GRPOConfig, load_expr_config
from areal.dataset import get_custom_dataset
from areal.workflow.rlvr import RLVRWorkflow


def length_reward(prompt: str, completion: str, prompt_ids: Any, completion_ids: list[int], **row: Any) -> float:
    """Short answers are good."""
    return 1.0 / (1 + len(completion))


def keep_even(table: dict[str, Any]) -> bool:
    """Every other row."""
    return int(table["row_id"][0]) % 2 == 0


class MyWorkflow(RLVRWorkflow):
    """The built-in one under a name of the script."""


if __name__ == "__main__":
    config, _ = load_expr_config(sys.argv[1:], GRPOConfig)
    with PPOTrainer(config, train_dataset=get_custom_dataset(dataset_config=config.train_dataset)) as trainer:
        trainer.train(
            workflow=MyWorkflow(length_reward, config.gconfig, config.tokenizer_path),
            dynamic_filter_fn=keep_even,
        )
